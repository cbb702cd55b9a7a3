"""tune: from a step to the options of a session, or the advice to do without one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import attrs
import torch
from torch import nn

from offload.config import Config
from offload.errors import StepError
from offload.measure import expect_step
from offload.optionfile import write_options
from offload.probe import MachineProfile, machine_profile
from offload.report.scopes import expect_model
from offload.tuner.decide import Decision, decide, pareto
from offload.tuner.record import StepRecord
from offload.tuner.replay import ReplayedStep, plain_peak_bytes, scaled
from offload.tuner.replay_disk import DiskReplay
from offload.tuner.replay_link import LinkReplay
from offload.tuner.search import Calibration, Candidate, Limits, Trial, calibrated, search
from offload.tuner.setting import Setting, grid
from offload.tuner.stopwatch import Stopwatch, stopwatch_for
from offload.tuner.trial import Runner, TimedSteps
from offload.units import format_bytes, parse_bytes

__all__ = ["Tuning", "replayed", "tune"]

JSON_FORMAT = 1
LEAST_BLOCK_BYTES = 16 << 10  # to move less than this costs more than it frees


@dataclass(frozen=True)
class Tuning:
    """What tuning found.

    Attributes:
        decision: whether to offload, and why.
        config: the options it began with.
        limits: what was sought.
        plain: plain steps.
        recomputed: steps with torch's checkpoint; None if the model has no repeated blocks.
        trials: what was tried, in order.
        curve: settings on the predicted trade-off, with the ratio to plain's time and bytes alive.
        settings: how many were predicted.
    """

    decision: Decision
    config: Config
    limits: Limits
    plain: TimedSteps
    recomputed: TimedSteps | None
    trials: tuple[Trial, ...]
    curve: tuple[tuple[Setting, float, int], ...]
    settings: int

    @property
    def options(self) -> dict[str, Any] | None:
        """Of the session to use, by name; None if it is better to do without."""
        trial = self.decision.trial
        if trial is None:
            return None
        options: dict[str, Any] = trial.setting.options()
        for name in ("engine", "disk_budget", "host_budget"):
            if getattr(self.config, name) is not None:
                options[name] = getattr(self.config, name)
        return options

    def tuned(self) -> Config:
        """The config to use.

        Raises:
            ValueError: it is better to do without a session; the message says why.
        """
        if self.decision.trial is None:
            raise ValueError(f"no setting is recommended: {self.decision.why}")
        return attrs.evolve(self.config, **self.decision.trial.setting.options())

    def save(self, path: str | os.PathLike[str], *, title: str = "") -> None:
        """Write an option file for ``Session.from_file``. The directory of the scratch file and the
        device are not part of it: they belong to a machine.

        Raises:
            ValueError: as ``tuned``.
            OSError: it cannot be written.
        """
        options, trial = self.options, self.decision.trial
        if options is None or trial is None:
            raise ValueError(f"no setting is recommended: {self.decision.why}")
        notes: dict[str, int | float | bool | str] = {
            "ratio_to_plain": round(trial.measured.ratio, 4),
            "peak_live_bytes": trial.measured.peak_live_bytes,
            "plain_peak_live_bytes": self.plain.peak_live_bytes,
            "torch": str(torch.__version__),
        }
        write_options(path, options, title=title or "Written by offload tune.", notes=notes)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, with the number of the format."""
        trials = [
            {
                "setting": t.setting.options(), "predicted_ratio": t.predicted_ratio,
                "predicted_live_bytes": t.predicted_live_bytes, "moved_bytes": t.moved_bytes,
                **_values(t.measured),
            }
            for t in self.trials
        ]  # fmt: skip
        return {
            "format": JSON_FORMAT,
            "choice": self.decision.choice.value,
            "why": self.decision.why,
            "options": self.options,
            "limits": asdict(self.limits),
            "plain": _values(self.plain),
            "recomputed": None if self.recomputed is None else _values(self.recomputed),
            "trials": trials,
            "curve": [
                {"setting": s.options(), "predicted_ratio": ratio, "predicted_live_bytes": live}
                for s, ratio, live in self.curve
            ],
            "settings_predicted": self.settings,
        }


def _values(measured: TimedSteps) -> dict[str, Any]:
    return {
        "seconds": measured.seconds,
        "plain_seconds": measured.plain_seconds,
        "ratio": measured.ratio,
        "peak_live_bytes": measured.peak_live_bytes,
        "report": None if measured.report is None else measured.report.to_dict(),
    }


def replayed(
    record: StepRecord, setting: Setting, profile: MachineProfile, config: Config
) -> ReplayedStep:
    """What a step comes to under ``config`` with ``setting``."""
    if config.device.type != "cpu":
        return LinkReplay(record, setting, profile).run()
    arena_bytes = attrs.evolve(config, **setting.options()).arena_bytes
    return DiskReplay(record, setting, profile, arena_bytes).run()


def tune(
    step: Callable[[], object],
    model: nn.Module | None = None,
    *,
    max_live_bytes: int | str | None = None,
    max_overhead: float | None = None,
    budget_seconds: float = 300.0,
    max_trials: int = 8,
    repeats: int = 2,
    config: Config | None = None,
    settings: list[Setting] | None = None,
    profile: MachineProfile | None = None,
    advance: Callable[[str], None] = lambda what: None,
    _stopwatch: Stopwatch | None = None,
    **options: Any,
) -> Tuning:
    """Find the options with which a session keeps to a limit at the least cost.

    One step is recorded, replayed under hundreds of settings with the measured rates of this
    machine, and only the most promising are tried; each trial corrects the replay. On an
    accelerator this resets the allocator's peak again and again.

    Args:
        step: runs one forward and backward, in no session; it is called a few dozen times.
        model: what it trains; lets recomputation of its repeated blocks compete.
        max_live_bytes: most bytes of activations alive at one time, as an int or a text like
            ``"200MiB"``: saved storages, on the CPU with the memory they pass through; on an
            accelerator everything that a step allocates. The fastest setting below is sought.
        max_overhead: most time over a plain step's, as a share (0.05 for 5 %, the default if
            neither is given). Without ``max_live_bytes``, the fewest bytes alive are sought.
        budget_seconds: no trial begins after so much time.
        max_trials: settings that are tried at most.
        repeats: timed steps of each trial; as many plain ones alternate with them.
        config: the options to begin with; what is not tuned stays as it is.
        settings: to choose from, instead of a grid in proportion to the step.
        profile: rates of the machine, instead of those that are remembered or measured.
        advance: called with its name before each thing that takes time.
        **options: of a config, in its place.

    Returns:
        A ``Tuning``; its ``decision`` may be that plain training or recomputation is better.

    Raises:
        TypeError, ValueError: a limit or an option that cannot work.
        StepError: a ValueError too: the step has no backward, or nothing to move.

    Example:
        >>> import offload, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
        >>> x = torch.randn(512, 256)
        >>> step = lambda: model(x).square().sum().backward()
        >>> rates = offload.probe.MachineProfile(
        ...     disk_write_bytes_per_s=2e9, disk_read_bytes_per_s=2e9, copy_bytes_per_s=1e10)
        >>> tuning = offload.tune(step, model, max_live_bytes="1GiB", profile=rates, device="cpu")
        >>> tuning.decision.choice.value, tuning.options
        ('plain', None)
    """
    expect_step(step)
    if model is not None:
        expect_model(model)
    limits = _limits(max_live_bytes, max_overhead)
    _check_numbers(budget_seconds, max_trials, repeats)
    config = Config.given(config, options)
    stopwatch = _stopwatch if _stopwatch is not None else stopwatch_for(config.device)
    runner = Runner(step, model, config, stopwatch, repeats)
    advance("plain steps")
    plain = runner.plain()
    advance("recording a step")
    record = scaled(runner.record(), plain.best_seconds)
    _check(record, config.device)
    if limits.max_live_bytes is not None and plain.peak_live_bytes <= limits.max_live_bytes:
        return Tuning(decide(plain, None, (), limits), config, limits, plain, None, (), (), 0)
    advance("rates of this machine")
    profile = profile if profile is not None else machine_profile(config)
    _check_rates(profile, config)
    if settings is None:
        settings = grid(record, config, profile)
    candidates = _candidates(record, settings, profile, config)
    beyond_bytes = plain.peak_live_bytes - plain_peak_bytes(record)
    base = Calibration(plain.best_seconds, live_bytes=beyond_bytes)
    advance("recomputing")
    recomputed = runner.recomputed()

    def measure(setting: Setting) -> TimedSteps:
        advance(f"offloading, {format_bytes(setting.keep_last_bytes)} kept")
        return runner.offloaded(setting)

    trials = search(
        candidates, limits, base, measure, max_trials=max_trials, budget_seconds=budget_seconds
    )
    by_setting = {c.setting: c.predicted for c in candidates}
    now = calibrated(base, [(by_setting[t.setting], t.measured) for t in trials])
    curve = tuple((c.setting, ratio, live) for c, ratio, live in pareto(candidates, now))
    decision = decide(plain, recomputed, trials, limits)
    return Tuning(
        decision, config, limits, plain, recomputed, tuple(trials), curve, len(candidates)
    )


def _limits(max_live_bytes: int | str | None, max_overhead: float | None) -> Limits:
    if max_live_bytes is not None:
        max_live_bytes = parse_bytes(max_live_bytes, "max_live_bytes")
    if max_overhead is not None:
        if isinstance(max_overhead, bool) or not isinstance(max_overhead, int | float):
            raise TypeError(f"max_overhead is {max_overhead!r}; give a share like 0.05")
        if not 0 <= max_overhead <= 10:
            raise ValueError(f"max_overhead is {max_overhead}; give a share like 0.05 for 5 %")
    return Limits.given(max_live_bytes, max_overhead)


def _check_numbers(budget_seconds: float, max_trials: int, repeats: int) -> None:
    if not budget_seconds > 0:
        raise ValueError(f"budget_seconds is {budget_seconds}; give more than 0")
    for name, number in (("max_trials", max_trials), ("repeats", repeats)):
        if number < 1:
            raise ValueError(f"{name} is {number}; give at least 1")


def _check(record: StepRecord, device: torch.device) -> None:
    if not record.blocks:
        raise StepError(
            "the step saved nothing for a backward: does it run a forward with gradients enabled, "
            "on parameters that require them?"
        )
    if not any(t.is_use for t in record.touches):
        raise StepError(
            "the step asked for nothing that it saved: does it call backward()? A step runs one "
            "forward and its backward"
        )
    movable = [b.nbytes for b in record.blocks if b.movable and not b.held]
    if not movable and device.type != "cpu":
        raise StepError(
            f"the step saved nothing on {str(device)!r}: move its model and data there, or give "
            "device='cpu' for a step that computes on the CPU"
        )
    if max(movable, default=0) < LEAST_BLOCK_BYTES:
        largest = format_bytes(max(movable, default=0))
        raise StepError(
            f"the step has nothing to move: its largest storage that could leave has {largest}; "
            f"to move less than {format_bytes(LEAST_BLOCK_BYTES)} costs more than it frees"
        )


def _candidates(
    record: StepRecord, settings: list[Setting], profile: MachineProfile, config: Config
) -> list[Candidate]:
    """The settings that the config allows, with their predictions; on an accelerator those that
    host memory suffices for, as the replay knows no disk behind it.
    """
    allowed = settings
    if config.host_budget is not None:  # of which this process has a share
        allowed = [s for s in settings if s.window_bytes <= config.arena_bytes]
    found = [Candidate(s, replayed(record, s, profile, config)) for s in allowed]
    if config.device.type == "cpu":
        return found
    room_bytes = config.arena_bytes
    fitting = [c for c in found if c.predicted.moved_bytes <= room_bytes]
    if not fitting:
        least = format_bytes(min((c.predicted.moved_bytes for c in found), default=0))
        raise ValueError(
            f"host memory of {format_bytes(room_bytes)} cannot hold what leaves the device, at "
            f"least {least}: raise host_budget"
        )
    return fitting


def _check_rates(profile: MachineProfile, config: Config) -> None:
    on_cpu = config.device.type == "cpu"
    rates = (
        (profile.disk_write_bytes_per_s, profile.disk_read_bytes_per_s)
        if on_cpu
        else (profile.link_out_bytes_per_s, profile.link_in_bytes_per_s)
    )
    if not all(rates):
        what = f"the disk of {config.disk_dir!r}" if on_cpu else f"the link to {config.device}"
        raise ValueError(f"{what} could not be measured; see what 'offload probe' says")
