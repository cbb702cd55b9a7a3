"""Ranks of a node: shares of its budgets, and their reports side by side."""

import dataclasses
from pathlib import Path

import torch.distributed as dist

import offload
from offload.distributed import RankReports, gather
from tests.distributed.programs import Run, opened, trained, transformer
from tests.distributed.ranks import Ranks


def in_shares(directory: str, scope: str) -> tuple[int, offload.StepReport]:
    options = {"host_budget": "256KiB", "window_bytes": "64KiB", "prefetch_bytes": "1MiB"}
    with opened(directory, **options, disk_budget="512KiB", budget_scope=scope) as session:
        trained(transformer(), Run(session))
        return session.config.io_threads, session.report()


def test_budgets_are_shared(two: Ranks, tmp_path: Path) -> None:
    for threads, report in two.run(in_shares, str(tmp_path), "node"):
        assert threads == 1
        assert 64 << 10 < report.peak_arena_bytes <= 128 << 10
        assert 128 << 10 < report.peak_disk_bytes <= 256 << 10
        assert report.kept_bytes["budget"] > 0, "the share of the disk is full"


def test_budgets_of_a_rank(two: Ranks, tmp_path: Path) -> None:
    for _, report in two.run(in_shares, str(tmp_path), "rank"):
        assert 256 << 10 < report.peak_disk_bytes <= 512 << 10


def gathered(directory: str) -> tuple[RankReports, offload.StepReport]:
    with opened(directory) as session:
        trained(transformer(), Run(session))
        report = session.report()
    waited = 10.0 * dist.get_rank()
    told = dataclasses.replace(report, seconds=20.0, stall_seconds=waited, backpressure_seconds=0.0)
    return gather(told), told


def test_reports_of_all_ranks_on_every_rank(two: Ranks, tmp_path: Path) -> None:
    results = two.run(gathered, str(tmp_path))
    own = tuple(report for _, report in results)
    for ranks, _ in results:
        assert ranks.reports == own
        assert ranks.figures["stall_seconds"].median == 5.0
        assert ranks.straggler is not None
        assert ranks.straggler.rank == 1
