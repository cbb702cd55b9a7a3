"""Tuner: finds a session's options for a step, by replaying it and by trying what looks best.

    stopwatch.py      where the computation is, and what memory it has
    record.py         what one plain step saves and asks for, and when
    setting.py        the options that are tuned, and those worth looking at
    replay.py         what the step would take under a setting: the walk that both kinds share
    replay_link.py    on an accelerator
    replay_disk.py    on the CPU
    trial.py          steps that are really run and measured
    search.py         which setting to try next, and when to stop
    decide.py         whether to offload at all, and the curve of time and memory
    tuning.py         all of it in one call

Record, replay, search and decision are values; only stopwatches and trials run anything.
"""

from offload.tuner.decide import Choice, Decision
from offload.tuner.search import Limits, Trial
from offload.tuner.setting import Setting
from offload.tuner.trial import TimedSteps
from offload.tuner.tuning import Tuning, replayed, tune

__all__ = [
    "Choice",
    "Decision",
    "Limits",
    "Setting",
    "TimedSteps",
    "Trial",
    "Tuning",
    "replayed",
    "tune",
]
