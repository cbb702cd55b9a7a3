"""Programs made to break recomputation, by name."""

from tests.recompute.hostile import data, functions, graphs

PROGRAMS = {**data.PROGRAMS, **functions.PROGRAMS, **graphs.PROGRAMS}
