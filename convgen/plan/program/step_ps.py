"""A step with overlap, counted quickly: sums of parameters' gradients travel behind what is left of backward.

A row's backward computes and moves, and leaves its gradients' sums to buckets, as the pass packs them
(passes/bucket_gradients.py). A bucket travels in a lane of its own as soon as it is full, or has the last sum over its
axes. While the row computes, or waits for a message's latency, the lane has the link alone; while bytes of the row
travel, each has half of it (cost/link.py). What is left of the sums at the end is waited for. Halos and chunks are not
in it: the timeline has those (cost/timeline.py), and times what is found by this.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from convgen.algebra.layout import Axes
from convgen.passes.bucket_gradients import closing

SIZES = (1, 5, 25, 0)  # MiB of a bucket that are tried; 0: one bucket for all


class Sum(NamedTuple):
    """An all-reduce of a parameter's gradient, over some axes: picoseconds without its latency, those, and bytes."""

    over: Axes
    ps: int
    latency: int
    size: int


class Cost(NamedTuple):
    """Picoseconds of a row.

    Attributes:
        forward: computing and moving in forward.
        before: what backward moves before it computes, without latencies.
        alone: backward's computing, and latencies of what it moves: meanwhile sums have the link alone.
        behind: what it moves then, without latencies and sums.
        sums: all-reduces of parameters' gradients.
    """

    forward: int
    before: int
    alone: int
    behind: int
    sums: tuple[Sum, ...] = ()

    @property
    def base(self) -> int:
        """Without what sums take: no step is shorter than its rows' together."""
        return self.forward + self.before + self.alone + self.behind

    @property
    def in_order(self) -> int:
        """One step after the other."""
        return self.base + sum([one.ps + one.latency for one in self.sums])


def step_ps(costs: Sequence[Cost]) -> int:
    """Picoseconds of a step of these rows, in forward's order, with buckets of the best of SIZES.

    Example:
        >>> step_ps([Cost(10, 0, 20, 0, (Sum(("N",), 5, 2, 8),)), Cost(10, 0, 20, 6, (Sum(("N",), 30, 2, 8),))])
        103
    """
    return sum([cost.base for cost in costs]) + longer_ps(costs)


def longer_ps(costs: Sequence[Cost]) -> int:
    """Picoseconds by which a step of these rows is longer than the rows' own, since gradients are summed."""
    backward = costs[::-1]
    return min([_longer(backward, leaving) for leaving in _leaving(tuple([cost.sums for cost in backward]))])


def _longer(backward: Sequence[Cost], leaving: Sequence[int]) -> int:
    """The same, where so much leaves for the lane behind each row."""
    left = slowed = 0
    for (_, before, alone, behind, _), more in zip(backward, leaving, strict=True):
        if left > before:
            slowed += before
            left -= before + alone
            if left > behind:
                slowed += behind
                left -= behind
            elif left > 0:
                slowed, left = slowed + left, 0
            else:
                left = 0
        elif left > 0:
            slowed, left = slowed + left, 0
        left += more
    return slowed + left


@lru_cache(maxsize=1 << 12)
def _leaving(rows: tuple[tuple[Sum, ...], ...]) -> list[list[int]]:
    """Picoseconds of sums that leave for the lane behind each row, in backward's order: for each size of buckets."""
    sums = [(i, one) for i, row in enumerate(rows) for one in row]
    found: list[list[int]] = []
    for size in SIZES:
        leaving = [0] * len(rows)
        for _, members in closing([(one.over, one.size) for _, one in sums], size):
            there = [sums[k][1] for k in members]
            leaving[sums[members[-1]][0]] += sum([one.ps for one in there]) + max([one.latency for one in there])
        if leaving not in found:
            found.append(leaving)
    return found
