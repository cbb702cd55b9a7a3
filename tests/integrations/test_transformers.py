"""Models of transformers and PEFT themselves: what is saved leaves, checkpoints and caches work."""

import contextlib
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.errors import OffloadWarning
from offload.recompute import every
from offload.tensors.live import is_parameter_like
from tests.integrations.models import (
    LAYERS,
    MODELS,
    TOKENS,
    WIDTH,
    checkpointed,
    forward_backward,
    gpt2,
    llama,
    make,
    peft,
    tokens,
    trained,
)
from tests.support import assert_identical


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
