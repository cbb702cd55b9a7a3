"""Workloads are reproducible, learn something real, and save what their kind of model saves."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from offload.measure import activation_meter, fingerprint
from offload.workloads import GPTConfig, LlamaConfig, VisionConfig, preset
from offload.workloads.corpus import (
    BYTE_VOCABULARY,
    Vocabulary,
    corpus_tokens,
    stdlib_text,
    token_windows,
)
from offload.workloads.gpt import GPTBlock
from offload.workloads.vision import CLASSES, draw_scene

TINY = ("gpt-tiny", "long-tiny", "vision-tiny")


def gradients(model: torch.nn.Module) -> str:
    return fingerprint(p.grad for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", TINY)
class TestEveryWorkload:
    def test_same_seed_same_bits(self, name: str) -> None:
        workload = preset(name)
        runs = []
        for _ in range(2):
            model = workload.build(seed=3)
            (batch,) = workload.batches(1, seed=4)
            loss = workload.step(model, batch)
            loss.backward()
            runs.append((fingerprint(model.parameters()), loss.item().hex(), gradients(model)))
        assert runs[0] == runs[1]
        assert fingerprint(workload.build(seed=4).parameters()) != runs[0][0]

    def test_building_leaves_the_global_random_state(self, name: str) -> None:
        before = torch.get_rng_state()
        workload = preset(name)
        workload.build(seed=0)
        list(workload.batches(1, seed=0))
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_longer_run_starts_like_a_shorter_one(self, name: str) -> None:
        workload = preset(name)
        short, long = list(workload.batches(1, seed=5)), list(workload.batches(3, seed=5))
        assert fingerprint(short[0]) == fingerprint(long[0]) != fingerprint(long[1])

    def test_recomputing_blocks_keeps_gradients_and_saves_less(self, name: str) -> None:
        workload = preset(name)
        (batch,) = workload.batches(1, seed=0)
        seen = {}
        for recompute in (False, True):
            model = workload.build(seed=0)
            if recompute:
                model.wrap_block = lambda block: partial(checkpoint, block, use_reentrant=False)
            with activation_meter(model, inputs=batch) as meter:
                loss = workload.step(model, batch)
            held = meter.alive_bytes
            loss.backward()
            seen[recompute] = (gradients(model), held)
        assert seen[True][0] == seen[False][0]
        assert seen[True][1] < 0.5 * seen[False][1]

    def test_every_parameter_gets_a_gradient(self, name: str) -> None:
        workload = preset(name)
        model = workload.build(seed=0)
        (batch,) = workload.batches(1, seed=0)
        workload.step(model, batch).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())

    def test_it_learns(self, name: str) -> None:
        workload = preset(name)
        model = workload.build(seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for batch in workload.batches(30, seed=0):
            loss = workload.step(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert sum(losses[-5:]) < 0.85 * sum(losses[:5])


def test_corpus_is_python_and_split_by_module() -> None:
    train, held_out = stdlib_text(), stdlib_text(held_out=True)
    assert "def " in train and "import " in held_out
    assert len(train) > 5 * len(held_out) > 0
    paragraph = held_out[len(held_out) // 2 :][:400]
    assert paragraph not in train


def test_bytes_and_words_spell_the_text() -> None:
    text = stdlib_text(held_out=True)[:20_000]
    for size in (BYTE_VOCABULARY, 8192):
        vocabulary = Vocabulary(stdlib_text(), size)
        ids = vocabulary.encode(text)
        assert vocabulary.decode(ids) == text
        assert max(ids) < size
    assert len(ids) < 0.6 * len(text)  # words are longer than a byte


def test_vocabulary_of_the_benchmark_is_full() -> None:
    assert len(Vocabulary(stdlib_text(), GPTConfig().vocabulary).words) == 8192 - BYTE_VOCABULARY


def test_targets_are_the_tokens_that_follow() -> None:
    tokens = corpus_tokens(BYTE_VOCABULARY)
    inputs, targets = token_windows(tokens, 3, 16, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (3, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_scene_has_every_class_and_honest_labels() -> None:
    image, labels = draw_scene(96, torch.Generator().manual_seed(0))
    assert image.shape == (3, 96, 96) and image.dtype is torch.float32
    assert set(labels.unique().tolist()) == set(range(len(CLASSES)))
    edges = (labels[:, 1:] != labels[:, :-1]).float()
    steps = (image[:, :, 1:] - image[:, :, :-1]).abs().mean(0)
    assert (steps * edges).sum() / edges.sum() > 2 * (steps * (1 - edges)).sum() / (1 - edges).sum()


def test_attention_is_causal() -> None:
    config = GPTConfig(layers=1, width=32, heads=2, length=8, rows=1, vocabulary=256)
    block = GPTBlock(config)
    x = torch.randn(1, 8, 32)
    changed = x.clone()
    changed[0, 5:] += 1
    with torch.no_grad():
        assert torch.equal(block(x)[0, :5], block(changed)[0, :5])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (partial(GPTConfig, width=10, heads=3), "no multiple of 3 heads"),
        (partial(LlamaConfig, heads=8, kv_heads=3), "cannot share 3 kv heads"),
        (partial(LlamaConfig, width=24, heads=8), "no even size"),
        (partial(VisionConfig, size=100, levels=4), "cannot be halved 3 times"),
        (partial(preset, "resnet"), "choose one of gpt, long, vision"),
        (partial(Vocabulary, "", 100), "at least 256 tokens"),
    ],
)
def test_mistakes_are_named(make: partial[object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()
