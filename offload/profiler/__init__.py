"""Profiling a step: what offloading costs, how much of it is hidden, what waits and why.

run.py        plain and offloaded steps in turn, and a closer look at one more
verdict.py    what their times allow to say
timeline.py   a trace as tracks of slices
result.py     Profile: all of it
chrome.py     as a trace for Perfetto
page.py       as one HTML page, with its drawing.py
picture.py    as a PNG
figures.py    how matplotlib is asked for that, here and by the commands
colors.py     what page and picture have in common
"""

from offload.profiler.result import MemoryCurve, Profile
from offload.profiler.run import profile
from offload.profiler.timeline import Slice, Timeline
from offload.profiler.verdict import Verdict

__all__ = ["MemoryCurve", "Profile", "Slice", "Timeline", "Verdict", "profile"]
