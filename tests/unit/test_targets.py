"""What a command may be pointed at."""

import sys
import textwrap
from pathlib import Path

import pytest
import torch

from offload.cli.targets import load_target

PROGRAM = """
import torch
from beside_it import WIDTH

def pair():
    model = torch.nn.Linear(WIDTH, 1)
    return model, lambda: model(torch.ones(2, WIDTH)).sum().backward()

def step_only():
    return pair()[1]

def raises():
    raise RuntimeError("its own mistake")

def none(): pass
def model_only(): return torch.nn.Linear(1, 1)
def triple(): return 1, 2, 3
answer = 42
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_it.py").write_text("WIDTH = 4\n")
    path = tmp_path / "train_it.py"
    path.write_text(textwrap.dedent(PROGRAM))
    yield path
    for name in ("beside_it", "train_it", "offload_target_train_it"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("form", ["script", "module"])
def test_a_function_gives_a_step_and_perhaps_a_model(script: Path, form: str) -> None:
    where = str(script) if form == "script" else "train_it"
    target = load_target(f"{where}:pair")
    target.step()
    assert torch.equal(target.model.weight.grad, torch.full((1, 4), 2.0))
    target = load_target(f"{where}:step_only")
    target.step()
    assert (target.name, target.model) == (f"{where}:step_only", None)


def test_a_workload_repeats_its_step_to_the_bit() -> None:
    one, other = load_target("gpt-tiny"), load_target("gpt-tiny")
    assert torch.equal(one.step(), other.step()) and torch.equal(one.step(), other.step())
    gradients = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in gradients)
    assert not torch.equal(one.step(), load_target("gpt-tiny", seed=1).step())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpt-tin", "did you mean 'gpt-tiny'"),
        ("nonsense", r"give module:function, script.py:function, .*\(gpt, long"),
        (":f", "is no target"),
        ("train_it:", "is no target"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("train_it.inner:f", "there is no module 'train_it.inner'"),
        ("..up:f", "is no name of a module"),
        ("no/such.py:f", "there is no file 'no/such.py'"),
        ("train_it:pear", "no function 'pear'; did you mean 'pair'"),
        ("train_it:answer", "'answer' of 'train_it' is an int, no function"),
        ("train_it:none", "returned None; return a step"),
        ("train_it:model_only", "returned a Linear"),
        ("train_it:triple", "returned a tuple of int, int, int"),
    ],
)
def test_mistakes_are_explained(script: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_target(text)


def test_what_the_target_raises_is_its_own(script: Path) -> None:
    with pytest.raises(RuntimeError, match="its own mistake"):
        load_target("train_it:raises")
    script.with_name("needs_more.py").write_text("import not_installed_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
        load_target("needs_more:f")
