"""The seven ordering rules: leave one out, and it is noticed.

Each rule is one method of the lane; a mutant has that method do nothing. Three witnesses: the
runtime's own checker (``OFFLOAD_CHECK=1``), the race detector of the simulated device, and wrong
values under some random order.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import simdev
import torch
from offloading import SimPinner, open_engine, session_on_sim
from torch import Tensor

from offload.blocks.placement import Placement
from offload.engines import Engine
from offload.errors import OrderError
from offload.lanes.accelerator import AcceleratorLane
from offload.lanes.base import Fence
from offload.lanes.order import CheckedOrder, Order

NBYTES = 16 << 10
RULES = {
    1: "_after_producer",
    2: "_return_after",
    3: "_after_copy_out",
    4: "_after_allocation",
    5: "_before_use",
    6: "_hold",
    7: "_before_host_reads",
}
SEEDS = range(60)


def nothing(*_: Any) -> None:
    """Instead of a rule."""


def mutant(rule: int | None) -> type[AcceleratorLane]:
    """The lane without one of its rules."""
    return type("Mutant", (AcceleratorLane,), {RULES[rule]: nothing} if rule is not None else {})


class Bench:
    """A lane with an arena of two slots, and memory on the device that is used again at once."""

    def __init__(self, rule: int | None, order: Order, directory: str) -> None:
        self.engine: Engine = open_engine(directory)
        self.lane = mutant(rule)(self.engine, order)
        self.arena = self.engine.arena(2 * NBYTES)
        self.slot = self.arena.allocate(NBYTES)
        assert self.slot is not None
        SimPinner().pin(self.slot.address, self.arena.capacity_bytes)
        self._address = self.slot.address
        self.device = torch.device("sim", 0)

    def compute(self, value: int) -> Tensor:
        """A tensor whose bytes the device is still about to compute."""
        return torch.full((NBYTES,), value - 1, dtype=torch.uint8, device=self.device).add_(1)

    def copy_out(self, source: Tensor) -> tuple[Fence, int | None]:
        """Save ``source`` and start copying it out at once."""
        storage = source.untyped_storage()
        return self.lane.copy_out(self.slot, storage, self.lane.produced(storage), checksum=False)

    def close(self) -> None:
        torch.accelerator.synchronize()
        del self.slot
        self.lane.poll()
        SimPinner().unpin(self._address)
        self.engine.close()


def out_and_back(bench: Bench) -> list[Tensor]:
    """Rules 1, 2, 4 and 5: a tensor leaves, others take its memory, and it comes back."""
    source = bench.compute(11)
    fence, _ = bench.copy_out(source)
    bench.lane.let_go(source.untyped_storage(), fence)
    del source
    usurper = bench.compute(99)  # the source's memory
    sums = usurper.sum(dtype=torch.int64)
    del usurper  # ... which is the target's next, while the sum has not been taken
    storage, arrived = bench.lane.copy_in(bench.slot, fence, bench.device)
    bench.lane.before_use(storage, arrived)
    back = torch.empty(0, dtype=torch.uint8, device=bench.device).set_(storage)
    return [sums, back.clone()]


def back_on_another_stream(bench: Bench) -> list[Tensor]:
    """Rule 3: whoever calls the bytes back has not itself waited for the copy out."""
    source = bench.compute(11)
    fence, _ = bench.copy_out(source)
    other = torch.Stream(device=bench.device)
    with other:
        storage, arrived = bench.lane.copy_in(bench.slot, fence, bench.device)
        bench.lane.before_use(storage, arrived)
        back = torch.empty(0, dtype=torch.uint8, device=bench.device).set_(storage).clone()
    torch.accelerator.current_stream().wait_stream(other)
    bench.lane.let_go(source.untyped_storage(), fence)
    back.record_stream(torch.accelerator.current_stream())
    return [back]


def slot_used_again(bench: Bench) -> list[Tensor]:
    """Rule 6: the slot of a block that died goes to the next one."""
    first, second = bench.compute(11), bench.compute(22)
    fence, _ = bench.copy_out(first)
    storage, arrived = bench.lane.copy_in(bench.slot, fence, bench.device)
    bench.slot = None
    bench.slot = bench.arena.allocate(NBYTES)  # the same memory if nobody holds it
    later, _ = bench.copy_out(second)
    bench.lane.before_use(storage, arrived)
    back = torch.empty(0, dtype=torch.uint8, device=bench.device).set_(storage).clone()
    for tensor, copied in ((first, fence), (second, later)):
        bench.lane.let_go(tensor.untyped_storage(), copied)
    return [back]


def read_by_the_host(bench: Bench) -> list[Tensor]:
    """Rule 7: what the disk is given."""
    source = bench.compute(11)
    fence, _ = bench.copy_out(source)
    bench.lane.let_go(source.untyped_storage(), fence)
    bench.lane.host_reads(bench.slot, fence)
    simdev.host_access(bench.slot.address, NBYTES, is_write=False)
    written = ctypes.string_at(bench.slot.address, NBYTES)
    return [torch.frombuffer(bytearray(written), dtype=torch.uint8)]


Program = Callable[[Bench], list[Tensor]]
PROGRAMS: dict[int, Program] = {
    1: out_and_back,
    2: out_and_back,
    3: back_on_another_stream,
    4: out_and_back,
    5: out_and_back,
    6: slot_used_again,
    7: read_by_the_host,
}
EXPECTED: dict[Program, list[int]] = {
    out_and_back: [99 * NBYTES, 11],
    back_on_another_stream: [11],
    slot_used_again: [11],
    read_by_the_host: [11],
}


def is_right(program: Program, rule: int | None, order: Order, directory: str) -> bool:
    """Whether the program gives the right values, on whatever the device is configured to."""
    bench = Bench(rule, order, directory)
    try:
        found = [t.cpu() for t in program(bench)]
    finally:
        bench.close()
    return all(bool((t == v).all()) for t, v in zip(found, EXPECTED[program], strict=True))


@pytest.mark.parametrize("program", EXPECTED, ids=lambda p: p.__name__)
def test_with_all_rules(scheduler, program: Program, tmp_path) -> None:
    assert is_right(program, None, CheckedOrder(), str(tmp_path))
    assert simdev.races() == []


@pytest.mark.parametrize("program", EXPECTED, ids=lambda p: p.__name__)
def test_with_all_rules_in_random_orders(program: Program, tmp_path) -> None:
    for seed in SEEDS:
        simdev.configure(scheduler=simdev.Scheduler.RANDOM, seed=seed)
        assert is_right(program, None, Order(), str(tmp_path)), f"seed {seed}"
    assert simdev.races() == []


# What rules 2, 5, 6 and 7 wait for is a copy that has not completed: nothing is wrong without them
# where everything completes at once.
LATE = simdev.Scheduler.LAZY
AT_ONCE = simdev.Scheduler.EAGER
WITNESSED = [(LATE, rule) for rule in RULES] + [(AT_ONCE, rule) for rule in (1, 3, 4)]


@pytest.mark.parametrize(("when", "rule"), WITNESSED)
def test_own_checker_notices(when: simdev.Scheduler, rule: int, tmp_path) -> None:
    simdev.configure(scheduler=when)
    with pytest.raises(OrderError, match="is not ordered after"):
        is_right(PROGRAMS[rule], rule, CheckedOrder(), str(tmp_path))
    simdev.races()  # looked at


@pytest.mark.parametrize(("when", "rule"), WITNESSED)
def test_race_detector_notices(when: simdev.Scheduler, rule: int, tmp_path) -> None:
    simdev.configure(scheduler=when)
    is_right(PROGRAMS[rule], rule, Order(), str(tmp_path))
    assert simdev.races() != []


@pytest.mark.parametrize("rule", RULES)
def test_some_order_gives_wrong_values_without(rule: int, tmp_path) -> None:
    wrong = 0
    for seed in SEEDS:
        simdev.configure(scheduler=simdev.Scheduler.RANDOM, seed=seed)
        wrong += not is_right(PROGRAMS[rule], rule, Order(), str(tmp_path))
        simdev.races()
    assert wrong > 0


def train(directory: str, rule: int | None, order: Order, **options: Any) -> list[Tensor]:
    """Gradients of two steps of a small network under a session without one of the rules."""
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).to("sim")
    x = torch.randn(32, 64).to("sim")
    lane = lambda engine: mutant(rule)(engine, order)  # noqa: E731
    with session_on_sim(directory, _lane=lane, **options) as session:
        for _ in range(2):
            with session.step():
                model(x).square().mean().backward()
    return [p.grad.cpu() for p in model.parameters()]


IN_TRAINING = [
    (1, {}),
    (2, {"window_bytes": 8 << 10}),
    (4, {}),
    (5, {}),
    (6, {"host_budget": 48 << 10}),
    (7, {"policy": lambda tensor: Placement.DISK, "host_budget": 48 << 10}),
]


@pytest.mark.parametrize(("rule", "options"), IN_TRAINING)
def test_a_session_without_the_rule(rule: int, options: dict[str, Any], tmp_path) -> None:
    """The whole runtime relies on each rule (on rule 3 where backward has a stream of its own)."""
    # Copies far slower than the computation, on a device that says so when asked.
    simdev.configure(timed_queries=True, d2h_bytes_per_s=1e8, h2d_bytes_per_s=1e8)
    train(str(tmp_path), None, CheckedOrder(), **options)
    assert simdev.races() == []
    train(str(tmp_path), rule, Order(), **options)
    assert simdev.races() != []


def test_foreign_memory_waits_for_its_readers_too(tmp_path) -> None:
    """A batch of a loader's stream goes back to that stream while the packing stream has yet to
    read it: the copy alone being done is not enough.
    """
    simdev.configure(scheduler=LATE)
    bench = Bench(None, Order(), str(tmp_path))
    main, loader = torch.accelerator.current_stream(), torch.Stream(device=bench.device)
    with loader:
        batch = bench.compute(11)
    address = batch.data_ptr()
    main.wait_stream(loader)
    fence, _ = bench.copy_out(batch)
    sums = batch.sum(dtype=torch.int64)  # queued, not run
    bench.lane.let_go(batch.untyped_storage(), fence, foreign=True)
    del batch
    bench.lane._side(bench.device).out.synchronize()
    with loader:
        following = [bench.compute(99) for _ in range(3)]
    assert address not in [tensor.data_ptr() for tensor in following]
    assert sums.item() == 11 * NBYTES
    bench.close()
