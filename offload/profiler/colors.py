"""What the page and the picture have in common: colours, and which lanes are worth a line.

The colours are those of Okabe and Ito (Color Universal Design, 2008), which people tell apart
whatever their eyesight.
"""

from __future__ import annotations

from offload.profiler.timeline import LANES, Timeline

COLORS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "between": "#bbbbbb",
    "offload": "#e69f00",
    "reload": "#c9b400",
    "spill": "#d55e00",
    "fetch": "#009e73",
    "stall": "#c0143c",
    "backpressure": "#cc79a7",
    "module": "#8a96a3",
    "plain": "#888888",
}


def lanes_shown(timeline: Timeline) -> list[str]:
    """The lanes in which something happened, and ``compute``."""
    return [lane for lane in LANES if lane == "compute" or timeline.tracks[lane]]
