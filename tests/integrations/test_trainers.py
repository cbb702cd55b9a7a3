"""The trainers of transformers and Lightning, Accelerate, and what the documentation shows."""

import contextlib
import re
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import integrations
from offload.integrations.lightning import step_callback
from offload.integrations.transformers import run_in_steps
from tests.integrations.models import (
    BOUNDARY_BYTES,
    LAYERS,
    accelerate,
    lightning,
    llama,
    make,
    tokens,
    transformers,
)
from tests.support import assert_identical


def hf_trainer(directory: Path, model: nn.Module | None = None, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(directory / "out"), use_cpu=True, max_steps=2, report_to=[],
        per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_strategy="no",
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    dataset = [{k: v[0] for k, v in tokens(seed).items()} for seed in range(8)]
    return transformers.Trainer(model or make(llama), arguments, train_dataset=dataset)


def activation_checkpointing(use_reentrant: bool) -> dict[str, Any]:
    fields = transformers.TrainingArguments.__dataclass_fields__
    word = "activation" if "activation_checkpointing" in fields else "gradient"
    kwargs = {"use_reentrant": use_reentrant}
    return {f"{word}_checkpointing": True, f"{word}_checkpointing_kwargs": kwargs}


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_trainer_of_transformers(open_session, tmp_path_factory, use_reentrant) -> None:
    """Two updates of two batches each: four steps, the same parameters and loss."""
    directory = tmp_path_factory.mktemp("trainer")
    options = {} if use_reentrant is None else activation_checkpointing(use_reentrant)
    results = []
    for session in (None, open_session()):
        trainer = hf_trainer(directory, **options)
        with contextlib.nullcontext() if session is None else run_in_steps(trainer, session):
            loss = trainer.train().training_loss
        assert "training_step" not in vars(trainer)
        results.append([torch.tensor(loss), *(p.detach() for p in trainer.model.parameters())])
    assert_identical(*results)
    report = session.report()
    assert report.steps == 4
    assert report.offloaded_bytes > 4 * LAYERS * BOUNDARY_BYTES


def test_error_in_a_trainer_of_transformers(open_session, tmp_path_factory) -> None:
    """It comes through, no step stays open and the trainer is what it was."""
    trainer = hf_trainer(tmp_path_factory.mktemp("trainer"))
    trainer.model.lm_head.register_forward_hook(_fail)
    session = open_session()
    with pytest.raises(LookupError), run_in_steps(trainer, session):
        trainer.train()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert session.report().steps == 1
    session.close()  # it refuses while a step is open
    with pytest.raises(TypeError, match="no training_step"):
        run_in_steps(object(), session).__enter__()


def _fail(*_: Any) -> None:
    raise LookupError


class Module(lightning.LightningModule):
    """Skips one batch, and may fail at one."""

    def __init__(self, failing: int = -1, manual: bool = False) -> None:
        super().__init__()
        self.model = make(llama)
        self.failing = failing
        self.automatic_optimization = not manual

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None  # which ends Lightning's epoch

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        loss = self.model(**batch).loss
        if batch_idx == self.failing:
            raise LookupError
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: lightning.LightningModule, callbacks: list[Any], **options: Any) -> list[Tensor]:
    torch.manual_seed(1)
    loader = torch.utils.data.DataLoader([tokens(i) for i in range(4)], batch_size=None)
    with warnings.catch_warnings():
        for about in (".*does not have many workers.*", ".*isinstance\\(treespec, LeafSpec\\).*",
                      ".*`_?pytree.*", ".*litlogger.*", ".*in eval mode.*"):  # fmt: skip
            warnings.filterwarnings("ignore", about)
        lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks, **options,
        ).fit(module, loader)  # fmt: skip
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("manual", [False, True])
def test_lightning(open_session, manual: bool) -> None:
    """A step for each batch, for the one that is skipped as well; none stays open."""
    options = {} if manual else {"accumulate_grad_batches": 2}
    expected = fit(Module(manual=manual), [], **options)
    session = open_session()
    assert_identical(expected, fit(Module(manual=manual), [step_callback(session)], **options))
    assert session.report().steps == 4
    assert session.report().offloaded_bytes > 3 * LAYERS * BOUNDARY_BYTES
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    with pytest.raises(LookupError):
        fit(Module(failing=1, manual=manual), [step_callback(session)], **options)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    session.close()


# -- what the documentation shows -----------------------------------------------------------------


def snippets() -> dict[str, str]:
    """By its heading, the code in the docstring of ``offload.integrations``."""
    text = integrations.__doc__ or ""
    found = re.findall(r"^([\w ]+)::\n\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    return {name: textwrap.dedent(code).strip() for name, code in found}


def test_code_of_the_documentation(monkeypatch, tmp_path_factory) -> None:
    """It runs as it stands, and the README shows the same."""
    code = snippets()
    assert list(code) == ["Hugging Face", "Lightning", "Accelerate"]
    monkeypatch.setenv("OFFLOAD_DIR", str(tmp_path_factory.mktemp("scratch")))

    hugging = hf_trainer(tmp_path_factory.mktemp("trainer"))
    names = {"offload": offload, "dataset": hugging.train_dataset}
    names |= {"Trainer": transformers.Trainer, "model": make(llama), "args": hugging.args}
    exec(code["Hugging Face"], names)
    assert names["session"].report().steps == 4

    loader = torch.utils.data.DataLoader([tokens(i) for i in range(2)], batch_size=None)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False, "accelerator": "cpu"}  # fmt: skip
    names = {"offload": offload, "loader": loader}
    names |= {"Trainer": lambda **given: lightning.Trainer(**given, **quiet), "module": Module()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(many workers|LeafSpec|litlogger|in eval mode).*")
        exec(code["Lightning"], names)
    assert names["session"].report().steps == 2

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make(llama)
    plain, optimizer = make(llama), torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"offload": offload, "accelerator": accelerator}
    names["model"], names["optimizer"], names["loader"] = accelerator.prepare(
        model, optimizer, loader
    )
    exec(code["Accelerate"], names)
    assert names["session"].report().steps == 2
    for batch in loader:
        (plain(**batch).loss / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_identical(
        [p.detach() for p in plain.parameters()], [p.detach() for p in model.parameters()]
    )

    readme = (Path(__file__).parents[2] / "README.md").read_text()
    if "run_in_steps" in readme:
        for shown in code.values():
            assert textwrap.dedent(shown) in readme
