"""transformers, PEFT, Accelerate and Lightning themselves, on models made from a configuration."""

import contextlib
import importlib
import itertools
import os
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
from offload.errors import OffloadWarning
from offload.integrations.lightning import step_callback
from offload.integrations.transformers import run_in_steps
from offload.live import is_parameter_like
from offload.recompute import every
from tests.support import assert_identical, rand

os.environ["HF_HUB_OFFLINE"] = "1"


def library(name: str) -> Any:
    """Skips where it is not installed; what it imports from others, and how, is its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


transformers, peft = library("transformers"), library("peft")
accelerate, lightning = library("accelerate"), library("lightning.pytorch")

LAYERS = 3
TOKENS, WIDTH = 8, 32
BOUNDARY_BYTES = 2 * TOKENS * WIDTH * 4


def llama(layers: int = LAYERS, use_cache: bool = False) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=layers, vocab_size=64,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
            use_cache=use_cache,
        )
    )  # fmt: skip


def gpt2(layers: int = LAYERS, use_cache: bool = False) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=WIDTH, n_layer=layers, n_head=2, vocab_size=64, n_positions=32,
            use_cache=use_cache,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def vit(layers: int = LAYERS) -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=layers, image_size=16,
            num_attention_heads=2, patch_size=8, num_labels=3, hidden_dropout_prob=0.1,
        )
    )  # fmt: skip


def tokens(seed: int = 0, batch: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(64, (batch, TOKENS), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def images(seed: int = 0) -> dict[str, Tensor]:
    return {"pixel_values": rand(2, 3, 16, 16, seed=seed), "labels": torch.tensor([0, 2])}


MODELS = {"llama": (llama, tokens), "gpt2": (gpt2, tokens), "vit": (vit, images)}


def make(build: Any, *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return build(*args).train()


def checkpointed(model: nn.Module, use_reentrant: bool) -> nn.Module:
    """With transformers' own activation checkpointing, under the name that it has."""
    kwargs = {"use_reentrant": use_reentrant}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    return model


def trained(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def forward_backward(model: nn.Module, batch: dict[str, Tensor], context: Any) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    with context:
        loss = model(**batch).loss
        loss.backward()
    return [loss.detach(), *trained(model)]


@contextlib.contextmanager
def counting(found: dict[int, int]):
    """The bytes of storages that a plain pair of hooks is given, without parameters."""

    def pack(tensor: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() == -1 and not is_parameter_like(tensor):
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
            kept.append(storage)
        return tensor.detach()

    kept: list[torch.UntypedStorage] = []  # an address is used again otherwise
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield


def padded() -> dict[str, Tensor]:
    """With a mask, which does not fit keys that are there twice."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, -3:] = 0
    return {**tokens(), "attention_mask": mask}


CACHED = {"llama": (llama, "model.layers.*"), "gpt2": (gpt2, "transformer.h.*")}


@pytest.mark.parametrize(
    ("name", "action"),
    # With a cache for some of its layers GPT-2's attention has other bits, without a session too.
    [*itertools.product(CACHED, ["recompute+disk", "selective", "auto"]), ("llama", "every other")],
)
def test_no_cache_is_filled_twice(open_session, name: str, action: str) -> None:
    """``use_cache`` is what configurations say by default."""
    build, layers = CACHED[name]
    expected = forward_backward(make(build), padded(), contextlib.nullcontext())
    model = make(build, LAYERS, True)
    session = open_session(device_budget="1MiB" if action == "auto" else None)
    rules: Any = {layers: action}
    if action == "every other":
        rules = {every(2, layers): "recompute+disk"}
    with session.apply(model, "auto" if action == "auto" else rules):
        with pytest.warns(OffloadWarning, match="use_cache = False") as warned:
            for _ in range(4):
                step = session.step()
                assert_identical(expected, forward_backward(model, padded(), step))
        assert len(warned) == 1
        offloaded_bytes = step.report.offloaded_bytes
        with torch.no_grad():
            kept = cache_of(model(**tokens()))
        assert [kept.get_seq_length(i) for i in range(LAYERS)] == [TOKENS] * LAYERS
    if action == "recompute+disk":
        plain = make(build)
        with session.apply(plain, rules):
            forward_backward(plain, padded(), step := session.step())
        assert offloaded_bytes == step.report.offloaded_bytes


def cache_of(output: Any) -> Any:
    """Under the name that it has."""
    return output.cache if "cache" in output else output.past_key_values


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("name", CACHED)
def test_a_cache_that_holds_something_is_used(open_session, name: str, retain_graph: bool) -> None:
    """What follows a prefix: it is read in the forward, and in every recomputation."""
    build, layers = CACHED[name]

    def run(model: nn.Module, step: Any) -> list[Tensor]:
        torch.manual_seed(1)
        with torch.no_grad():
            prefix = model(**tokens(1))
        name = "cache" if "cache" in prefix else "past_key_values"
        with step:
            output = model(**tokens(2), **{name: cache_of(prefix)})
            if retain_graph:
                output.loss.backward(retain_graph=True)
            output.loss.backward()
        assert cache_of(output).get_seq_length() == 2 * TOKENS
        return [output.loss.detach(), *trained(model)]

    expected = run(make(build, LAYERS, True), contextlib.nullcontext())
    model = make(build, LAYERS, True)
    session = open_session()
    with session.apply(model, {layers: "recompute+disk"}):
        assert_identical(expected, run(model, session.step()))


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("name", MODELS)
def test_exactly_what_is_saved_leaves(open_session, name: str, use_reentrant: bool | None) -> None:
    """Losses and gradients have the same bits; all that is saved and no parameter is offloaded."""
    build, batch = MODELS[name]
    model = make(build)
    expected = forward_backward(model, batch(), contextlib.nullcontext())
    if use_reentrant is not None:
        checkpointed(model, use_reentrant)
    found: dict[int, int] = {}
    assert_identical(expected, forward_backward(model, batch(), counting(found)))
    session = open_session()
    step = session.step()
    assert_identical(expected, forward_backward(model, batch(), step))
    report = step.report
    assert report.offloaded_bytes == sum(found.values())
    assert report.offloaded_blocks == len(found)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_one_boundary_to_a_layer(open_session, name: str, use_reentrant: bool) -> None:
    """Each further layer offloads its input and nothing else."""
    build, batch = MODELS[name]
    reports = []
    for layers in (2, 5):
        model = checkpointed(make(build, layers), use_reentrant)
        step = open_session().step()
        forward_backward(model, batch(), step)
        reports.append(step.report)
    few, many = reports
    rows = 5 if name == "vit" else TOKENS  # four patches and the class
    assert many.offloaded_blocks - few.offloaded_blocks == 3
    assert many.offloaded_bytes - few.offloaded_bytes == 3 * 2 * rows * WIDTH * 4


def test_rules_on_a_model_of_transformers(open_session) -> None:
    """In place of its own checkpointing; nothing drifts."""
    model = make(llama)
    expected = forward_backward(model, tokens(), contextlib.nullcontext())
    session = open_session(verify_recompute=True)
    rules = {"model.layers.*": "recompute+disk", "model.layers.*.self_attn": "selective"}
    with session.apply(model, rules):
        assert_identical(expected, forward_backward(model, tokens(), session.step()))
    report = session.recompute_report()
    assert report.regions >= 2 * LAYERS
    assert not report.drifted, str(report)
    assert "LlamaForCausalLM.model.layers.2.mlp.up_proj" in {m.module for m in report.modules}


def test_no_drift_from_a_cache_under_a_rule(open_session) -> None:
    session = open_session(verify_recompute=True)
    model = make(llama, LAYERS, True)
    with (
        pytest.warns(OffloadWarning, match="cache of keys") as warned,
        session.apply(model, {"model.layers.*": "recompute"}),
    ):
        forward_backward(model, padded(), session.step())
    assert len(warned) == 1
    assert not session.recompute_report().drifted


def test_lora_on_a_frozen_model(open_session) -> None:
    """Its weights stay where they are, and what its layers need not save is not saved."""
    frozen = make(llama)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gradient_checkpointing.*is deprecated.*")
        model = peft.get_peft_model(
            frozen, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()  # which begins at zero
    base = [p for p in model.parameters() if not p.requires_grad]
    before = [(p.data_ptr(), p.detach().clone()) for p in base]
    expected = forward_backward(model, tokens(), contextlib.nullcontext())
    assert len(expected) == 1 + 4 * LAYERS
    found: dict[int, int] = {}
    assert_identical(expected, forward_backward(model, tokens(), counting(found)))
    session = open_session()
    with session.step() as step:
        assert_identical(expected, forward_backward(model, tokens(), contextlib.nullcontext()))
    assert step.report.offloaded_bytes == sum(found.values())
    assert step.report.kept_bytes["parameter"] > 0
    for p, (address, value) in zip(base, before, strict=True):
        assert (p.data_ptr(), p.grad) == (address, None)
        assert torch.equal(p, value)
    model.enable_input_require_grads()
    checkpointed(model, use_reentrant=True)
    again = forward_backward(model, tokens(), session.step())
    assert_identical(expected, again)


# -- Trainers -------------------------------------------------------------------------------------


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
