"""Random chains for tests and benchmarks of the planner."""

import math
import random

from offload.planner.model import UNLIMITED, Chain, Option, Segment, Shared


def options(
    forward: float, saved: float, boundary: float, *, tiers: int, selective: bool = False
) -> tuple[Option, ...]:
    """What the product offers for a segment: keep, offload, recompute, and what lies between."""
    made = [
        Option("keep", resident_bytes=saved, present_bytes=saved, holds_output=True),
        Option(
            "host", offload_bytes=saved, present_bytes=saved, host_bytes=saved, frees_input=True
        ),
    ]
    if selective:
        part = 0.55 * saved
        cost = 0.05 * forward
        made += [
            Option(
                "selective+keep",
                resident_bytes=part, present_bytes=part, backward_seconds=cost, frees_input=True,
            ),
            Option(
                "selective+host", offload_bytes=part, present_bytes=part, host_bytes=part,
                backward_seconds=cost, frees_input=True,
            ),
        ]  # fmt: skip
    if tiers == 3:
        made.append(
            Option(
                "disk", offload_bytes=saved, present_bytes=saved, disk_bytes=saved, frees_input=True
            )
        )
    made.append(
        Option(
            "recompute",
            resident_bytes=boundary, present_bytes=boundary, backward_seconds=forward,
            frees_input=True,
        )
    )  # fmt: skip
    made.append(
        Option(
            "recompute+host", offload_bytes=boundary, present_bytes=boundary, host_bytes=boundary,
            backward_seconds=forward, frees_input=True,
        )
    )  # fmt: skip
    if tiers == 3:
        made.append(
            Option(
                "recompute+disk", offload_bytes=boundary, present_bytes=boundary,
                disk_bytes=boundary, backward_seconds=forward, frees_input=True,
            )
        )  # fmt: skip
    return tuple(made)


def random_chain(rng: random.Random, length: int) -> Chain:
    """Segments that are alike or not, with budgets that bind more or less."""
    tiers = rng.choice((2, 2, 3))
    selective = rng.random() < 0.4
    spread = rng.choice((0.1, 0.5, 1.0))
    sharing = rng.choice((0, 0, 1, 3))  # with how many before
    reading = rng.choice((0, 0, 1, 3))  # of how many before

    def around(value: float) -> float:
        return value * rng.uniform(1 - 0.6 * spread, 1 + 0.6 * spread)

    segments = []
    for i in range(length):
        forward, saved = around(1.0), around(2.0)
        backward = forward * rng.uniform(1.5, 2.5)
        boundary = saved * rng.uniform(0.03, 0.3)
        transient = rng.uniform(0.05, 0.4)
        shared = [Shared(back, 0.5 * boundary / back) for back in range(1, min(i, sharing) + 1)]
        segments.append(
            Segment(
                f"layers.{i}", forward, backward, saved,
                options(forward, saved, boundary, tiers=tiers, selective=selective),
                transient, transient + rng.uniform(0.0, 0.3), tuple(shared),
                tuple(Shared(back, boundary / back) for back in range(1, min(i, reading) + 1)),
            )
        )  # fmt: skip
    total = sum(s.saved_bytes for s in segments)
    rate = rng.uniform(0.1, 1.2) * total / sum(s.forward_seconds for s in segments)
    chain = Chain(tuple(segments), 0.0)
    floor, _ = chain.floor()
    return Chain(
        tuple(segments),
        floor + rng.uniform(0.02, 0.7) * max(0.1, total - floor),
        rate,
        rate * rng.uniform(0.8, 1.2),
        host_bytes=rng.uniform(0.15, 0.8) * total if tiers == 3 else math.inf,
        write_rate=rate * rng.uniform(0.1, 0.8) if tiers == 3 else UNLIMITED,
        read_rate=rate * rng.uniform(0.2, 1.0) if tiers == 3 else UNLIMITED,
    )


def transformer_chain(layers: int, fraction: float, bytes_per_s: float = 24e9) -> Chain:
    """Layers of Llama-3-8B with 8192 tokens at 180 TFLOP/s, and a budget of that part of what they
    save above the floor.
    """
    h, heads, kv, m, tokens = 4096, 32, 8, 14336, 8192
    saved = (12 * h + 4 * h * kv // heads + 8 * m + 4 * heads) * tokens
    flops = 2 * (2 * h * h + 2 * h * h * kv / heads + 3 * h * m) + 2 * tokens * h
    forward = flops * tokens / 180e12
    made = options(forward, saved, 2 * h * tokens, tiers=2, selective=True)
    segments = tuple(
        Segment(
            f"layers.{i}", forward, 2 * forward, saved, made, 2.0 * m * tokens, 4.0 * m * tokens
        )
        for i in range(layers)
    )
    floor, _ = Chain(segments, 0.0).floor()
    budget = floor + fraction * (layers * saved - floor)
    return Chain(segments, budget, bytes_per_s, bytes_per_s)
