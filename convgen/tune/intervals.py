"""How sure a comparison is: the interval of the median of paired ratios, by order statistics.

Two calls are timed in turn, round by round; of each round the ratio counts, so that whatever else the machine does in
that moment touches both. Nothing is assumed of how ratios are distributed. Several sittings (other operands, another
process) give the hull of their intervals: what a sitting has to itself, as where its operands lie, no noise shows.

Source: W. J. Conover, Practical Nonparametric Statistics, section 3.2 (confidence intervals of a quantile).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

LEVEL = 0.998  # of an interval: a race looks at it up to seven times, and is wrong about once in a hundred
LEAST = 10  # values that it takes


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and what it lies between."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"

    def hull(self, other: Interval) -> Interval:
        """Of two sittings."""
        middle = math.sqrt(self.median * other.median)
        return Interval(middle, min(self.low, other.low), max(self.high, other.high))


def of_values(values: Sequence[float]) -> Interval:
    """The median of what values were drawn from; all of them, where they are too few for the level."""
    ordered = sorted(values)
    rank = _rank(len(ordered))
    return Interval(statistics.median(ordered), ordered[rank], ordered[-1 - rank])


def of_ratios(over: Sequence[float], under: Sequence[float]) -> Interval:
    """Of times taken in the same rounds, those that both have."""
    return of_values([a / b for a, b in zip(over, under, strict=False)])


@cache
def _rank(count: int) -> int:
    """How many values at either end may lie outside of the interval."""
    outside, rank = 0.0, 0
    while rank < count // 2:
        outside += math.comb(count, rank) * 2.0**-count
        if 2 * outside > 1 - LEVEL:
            break
        rank += 1
    return max(rank - 1, 0)
