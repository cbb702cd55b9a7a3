"""Planner: a memory budget in, a plan out.

model.py     time and memory of a step, from what its segments need
batch.py     the same for many plans at once
solve.py     the search for a plan, and the bound that none beats
exact.py     the best plan, by an integer program
"""
