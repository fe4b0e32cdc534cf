"""A step with what travels meanwhile, counted quickly: sums of parameters' gradients behind what is left of backward.

A row's backward computes and moves, and leaves a sum to a lane beside: while something is computed the lane has the
link alone; while something else moves both have half of it (cost/link.py). What is left of the sums at the end is
waited for, and one latency, as of a bucket. Halos, chunks and sizes of buckets are not in it: those are the timeline's
(cost/timeline.py), which what is found by this is timed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Cost(NamedTuple):
    """Picoseconds of a row.

    Attributes:
        forward: what it computes and moves.
        computing, moving: backward, but for sums.
        sums: all-reduces of parameters' gradients, without their latency.
    """

    forward: int
    computing: int
    moving: int
    sums: int
    latency: int = 0


def step_ps(costs: Sequence[Cost]) -> int:
    """Picoseconds of a step of these rows, in forward's order.

    Example:
        >>> step_ps([Cost(10, 20, 0, 5, 2), Cost(10, 20, 6, 30, 2)])
        83
    """
    taken, left = 0, 0
    for forward, computing, moving, sums, _ in reversed(costs):
        together = min(max(left - computing, 0), moving)
        taken += forward + computing + moving + together
        left = max(left - computing, 0) - together + sums
    return taken + left + max((one.latency for one in costs), default=0)


def at_least_ps(old: Cost, new: Cost) -> int:
    """Picoseconds that a step takes more, at least, where a row costs something else. One less of computing may uncover
    one of sums, and one less of moving saves two at most, as sums had half of the link meanwhile.

    Example:
        >>> at_least_ps(Cost(10, 20, 6, 30), Cost(12, 25, 5, 20))
        -10
    """
    forward, computing, moving, sums, latency = (b - a for a, b in zip(old, new, strict=True))
    return forward + min(computing, 0) + min(moving, 2 * moving) + min(sums, 0) + min(latency, 0)
