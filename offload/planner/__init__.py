"""Planner: a memory budget in, a plan out.

What a step of a model does is written down:

    segments.py         which modules of a model a plan decides about
    control.py          runs them by an assignment, and tells what they did
    observer.py         what they save, and how much memory that takes meanwhile
    record.py           the notes of one forward and its backward
    segment_profile.py  what all passes have told of one segment
    profile.py          the same of the whole model
    owners.py           which segment a storage counts for, where several save it
    rates.py            bytes a second between the tiers, measured or remembered

From that a plan is made, values in and values out:

    options.py          what may become of a segment, and what each way takes
    model.py            time and memory of a step, from what its segments need
    predict.py          the time and the memory of one plan
    batch.py            the same for many plans at once
    solve.py            the search for a plan, and the bound that none beats
    exact.py            the best plan, by an integer program
    needs.py            the room that a plan wants the tiers to make
    plan.py             the plan, for people and as JSON

And put in force:

    auto.py             measures, plans, and plans again when things change
    joint.py            what several ranks have measured, as one
    applied.py          a plan, or ``auto``, on a model and a session
"""
