"""Pipeline schedules: several forwards wait for their backward, in every order there is."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

import offload
from tests.distributed.programs import Run, batch, gradients, opened, transformer
from tests.distributed.ranks import Ranks
from tests.support import assert_identical

STAGES_PER_RANK = {
    ScheduleGPipe: 1,
    Schedule1F1B: 1,
    ScheduleInterleaved1F1B: 2,
    ScheduleLoopedBFS: 2,
    ScheduleInterleavedZeroBubble: 2,
    ScheduleZBVZeroBubble: 2,
}
MICROBATCHES = 4


def numbers_of_stages(schedule: Any, per_rank: int) -> list[int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    if schedule is ScheduleZBVZeroBubble:  # down and up again
        return [rank, 2 * size - 1 - rank]
    return [rank + size * i for i in range(per_rank)]


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def pipelined(run: Run, schedule: Any, steps: int) -> tuple[list[Tensor], list[Any]]:
    per_rank = STAGES_PER_RANK[schedule]
    count = per_rank * dist.get_world_size()
    mine = numbers_of_stages(schedule, per_rank)
    modules = [transformer(layers=2, seed=i) for i in mine]
    stages = [
        PipelineStage(m, i, count, torch.device("cpu")) for m, i in zip(modules, mine, strict=True)
    ]
    pipeline = schedule(
        stages if per_rank > 1 else stages[0], n_microbatches=MICROBATCHES, loss_fn=loss_of
    )
    found, reports = [], []
    for step in range(steps):
        x, target = batch(step, same=True, rows=MICROBATCHES), batch(100 + step, same=True)
        losses: list[Tensor] = []
        args = (x,) if 0 in mine else ()
        last = {"target": target, "losses": losses} if count - 1 in mine else {}
        with run.step() as ours:
            pipeline.step(*args, **last)
        found += [*gradients(*modules), *(loss.detach() for loss in losses)]
        for module in modules:
            module.zero_grad()
        if run.session is not None:
            reports.append(ours.report)
    return found, reports


def compared_pipelines(directory: str, schedule: Any) -> list[offload.StepReport]:
    expected, _ = pipelined(Run(), schedule, 4)
    with opened(directory, window_bytes="8MiB", prefetch_bytes="8MiB") as session:
        got, reports = pipelined(Run(session), schedule, 4)
        assert_identical(expected, got)
        del got
    return reports


@pytest.mark.parametrize("schedule", STAGES_PER_RANK, ids=lambda s: s.__name__)
def test_order_is_learned(two: Ranks, tmp_path: Path, schedule: Any) -> None:
    """The first step also runs the stages to learn their shapes; the second one is the first of
    the schedule alone, and from the third on every request is foreseen.
    """
    for reports in two.run(compared_pipelines, str(tmp_path), schedule):
        for report in reports[2:]:
            assert report.offloaded_blocks > 0
            assert report.hits + report.lates > 0
            assert report.misses == 0
