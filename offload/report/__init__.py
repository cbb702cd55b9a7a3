"""What happens in a step, and how it is told: counted, compared, printed, exported.

trace.py        what happened and when, in a bounded ring
scopes.py       which module of a model runs its forward now
counters.py     what is counted while a step runs
step.py         StepReport: what the counters mean
step_tables.py  the same for people
tables.py       tables as text, of any width
export.py       for Prometheus, TensorBoard and their like
compare.py      two reports side by side
advice.py       what the figures say to do
reporter.py     hands the reports of finished steps to whoever logs them
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
