"""Whole models: what trains is what would have trained."""

import contextlib
import functools
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from offload import Session
from tests.support import assert_same, grads, in_threads, ints, net, rand, train_net


def test_frozen_weights_stay(session: Session) -> None:
    """Parameters, frozen or not, are not copied: only activations move."""
    base = nn.Linear(256, 256, bias=False)
    base.weight.requires_grad_(False)
    down, up = nn.Linear(256, 4, bias=False), nn.Linear(4, 256, bias=False)
    x = rand(2, 256).requires_grad_()
    with session.step() as step:
        h = x
        for _ in range(3):
            h = base(h) + up(down(h))
        h.sum().backward()
    assert step.report.offloaded_bytes <= 3 * (2 * 256 + 2 * 4) * 4
    assert step.report.kept_bytes["parameter"] >= 3 * base.weight.nbytes


def test_sharded_weight_is_emptied_and_gathered_again(session: Session) -> None:
    """Sharding libraries free a weight's storage after forward and fill it before backward."""

    def step(context):
        w = nn.Parameter(ints(32, 32, seed=3))
        full = w.detach().clone()
        x = ints(4, 32).requires_grad_()
        with context():
            loss = (nn.functional.linear(nn.functional.linear(x * 2, w), w) ** 2).sum()
        nbytes = w.untyped_storage().nbytes()
        w.untyped_storage().resize_(0)
        w.untyped_storage().resize_(nbytes)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(w):
            w.copy_(full)
        loss.backward()
        return [x.grad, w.grad]

    assert_same(step, session)


def test_weight_whose_data_is_swapped(session: Session) -> None:
    """Libraries that move weights give ``weight.data`` other memory between forward and backward:
    the old goes at once, and backward sees the new.
    """

    def step(context):
        norm, x = nn.LayerNorm(64), rand(4, 64).requires_grad_()
        elsewhere = norm.weight.detach() * 2
        with context():
            loss = norm(x * 2).square().sum()
        old = weakref.ref(norm.weight.untyped_storage())
        norm.weight.data = torch.empty(0)
        assert old() is None
        norm.weight.data = elsewhere
        loss.backward()
        return [x.grad, *grads(norm)]

    assert_same(step, session)


class Block(nn.Module):
    """A transformer block: attention and MLP with dropout."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (
            z.view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for z in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(a.transpose(1, 2).reshape(b, t, d)))
        return x + self.dropout(self.mlp(self.norm2(x)))


@pytest.mark.parametrize("autocast", [False, True])
def test_transformer_trains_alike(session: Session, autocast: bool) -> None:
    """Three optimizer steps give the same weights, also in bfloat16."""
    device = session.config.device.type

    def step(context):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(40, 32), Block(), Block(), nn.Linear(32, 40))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i in range(3):
            tokens = torch.randint(0, 40, (2, 17), generator=torch.Generator().manual_seed(i))
            with context():
                with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
                    logits = model(tokens[:, :-1])
                    loss = nn.functional.cross_entropy(
                        logits.flatten(0, 1), tokens[:, 1:].flatten()
                    )
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return [p.detach() for p in model.parameters()]

    assert_same(step, session)
    report = session.report()
    assert report.offloaded_bytes > 0
    assert "error" not in report.kept_bytes


def test_convolutions_batch_norm_and_pooling(session: Session) -> None:
    """Running statistics move on as they would, with two forwards before each backward."""

    def step(context):
        torch.manual_seed(2)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 4, 2), nn.BatchNorm2d(4), nn.Hardswish(inplace=True), nn.Flatten(),
        ).to(memory_format=torch.channels_last)  # fmt: skip
        for i in range(2):
            with context():
                losses = [model(rand(2, 3, 8, 8, seed=2 * i + j)).square().mean() for j in range(2)]
                losses[1].backward()
                losses[0].backward()
        model.eval()
        with context():
            model(rand(2, 3, 8, 8)).square().mean().backward()
        return [*grads(model), *(b.clone() for b in model.buffers())]

    assert_same(step, session)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_network(session: Session, kind: type[nn.RNNBase], packed: bool) -> None:
    """Long chains of small operations over shared inputs."""

    def step(context):
        torch.manual_seed(3)
        network = kind(8, 16, num_layers=2, bidirectional=True)
        x = rand(12, 3, 8).requires_grad_()
        with context():
            out, _ = network(pack_padded_sequence(x, [12, 7, 2]) if packed else x)
            (out.data if packed else out).square().mean().backward()
        return [x.grad, *grads(network)]

    assert_same(step, session)


def test_threads_train_at_once(session: Session) -> None:
    """Steps of one session in several threads, each with its own model."""
    rounds, workers = 6, 3
    expected, got = {}, {}

    def train(context, results, seed):
        x = rand(8, 16, seed=seed)
        model = models[seed]
        for p in model.parameters():
            p.grad = None
        for i in range(rounds):
            with context():
                model(x * (i + 1)).square().sum().backward()
        results[seed] = grads(model)

    models = [net(seed) for seed in range(workers)]
    for seed in range(workers):
        train(contextlib.nullcontext, expected, seed)
        expected[seed] = [g.clone() for g in expected[seed]]
    in_threads(*(functools.partial(train, session.step, got, seed) for seed in range(workers)))
    for seed in range(workers):
        assert all(torch.equal(a, b) for a, b in zip(expected[seed], got[seed], strict=True))


def test_one_graph_differentiated_by_several_threads(session: Session) -> None:
    """Concurrent backwards over one retained graph read the same blocks at once."""
    x = rand(64, 64).requires_grad_()
    with session.step():
        h = x
        for _ in range(6):
            h = h.sin()
        loss = h.sum()
        del h
    results = []

    def backward():
        results.append(torch.autograd.grad(loss, x, retain_graph=True)[0])

    in_threads(*[backward] * 4)
    assert len(results) == 4
    assert all(torch.equal(r, results[0]) for r in results)


def test_a_thread_that_hogs_the_interpreter(session: Session) -> None:
    """Progress does not depend on getting the interpreter lock soon."""
    stop = threading.Event()

    def hog():
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=hog, daemon=True)
    thread.start()
    try:
        assert_same(train_net, session)
    finally:
        stop.set()
        thread.join()
