"""A step with overlap, counted quickly: sums of parameters' gradients travel behind what is left of backward.

A row's backward computes and moves, and leaves its gradients' sum to a lane of its own. While the row computes, or
waits for a message's latency, the lane has the link alone; while bytes of the row travel, each has half of it
(cost/link.py). What is left of the sums at the end is waited for, with one latency, as of a bucket. Halos, chunks and
when a bucket is full are not in it: the timeline has those (cost/timeline.py), and times what is found by this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Cost(NamedTuple):
    """Picoseconds of a row.

    Attributes:
        forward: computing and moving in forward.
        alone: backward's computing, and latencies of what it moves: meanwhile sums have the link alone.
        moving: what backward moves, without latencies and sums.
        sums: all-reduces of parameters' gradients, with as much of their latency as they fill of a bucket.
        latency: the rest of these latencies.
    """

    forward: int
    alone: int
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
    for forward, alone, moving, sums, _ in reversed(costs):
        together = min(max(left - alone, 0), moving)
        taken += forward + alone + moving + together
        left = max(left - alone, 0) - together + sums
    return taken + left + max((one.latency for one in costs), default=0)


def at_least_ps(old: Cost, new: Cost) -> int:
    """Picoseconds by which a step grows, at least, where a row's cost changes. One picosecond less alone may uncover
    one of sums; one less of moving saves two at most, as sums had half of the link meanwhile.

    Example:
        >>> at_least_ps(Cost(10, 20, 6, 30), Cost(12, 25, 5, 20))
        -10
    """
    forward, alone, moving, sums, latency = (b - a for a, b in zip(old, new, strict=True))
    return forward + min(alone, 0) + min(moving, 2 * moving) + min(sums, 0) + min(latency, 0)
