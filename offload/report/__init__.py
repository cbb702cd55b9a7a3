"""Figures of a step or of many: counted, added up, compared, printed, exported.

counters.py   what is counted while a step runs
step.py       StepReport: what the counters mean
table.py      for people
export.py     for Prometheus, TensorBoard and their like
compare.py    two reports side by side
advice.py     what the figures say to do
"""

from offload.report.advice import Advice
from offload.report.compare import Comparison
from offload.report.counters import Counters, LaneCounters
from offload.report.step import StepReport, Traffic, Wait

__all__ = [
    "Advice",
    "Comparison",
    "Counters",
    "LaneCounters",
    "StepReport",
    "Traffic",
    "Wait",
]
