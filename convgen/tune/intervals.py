"""How sure a comparison is: a confidence interval of the median of paired ratios, by order statistics.

Two calls are timed in turn, round by round. Each round gives a ratio, so that whatever else the machine does then
affects both calls. No distribution of the ratios is assumed. Several sittings (other operands, another process) give
the hull of their intervals: noise within a sitting doesn't show what differs between sittings, such as where operands
lie.

Source: W. J. Conover, Practical Nonparametric Statistics, section 3.2 (confidence intervals of a quantile).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

LEVEL = 0.998  # an interval's confidence: a race looks at it up to seven times, so one in a hundred races is wrong
LEAST = 10  # the least number of values that give an interval of this level


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and the ends of its confidence interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"

    def hull(self, other: Interval) -> Interval:
        """The interval of two sittings: the least that holds both intervals."""
        middle = math.sqrt(self.median * other.median)
        return Interval(middle, min(self.low, other.low), max(self.high, other.high))


def of_values(values: Sequence[float]) -> Interval:
    """The interval of the median from which values were drawn; if they are too few for the level, from the least to the
    largest value."""
    ordered = sorted(values)
    rank = _rank(len(ordered))
    return Interval(statistics.median(ordered), ordered[rank], ordered[-1 - rank])


def of_ratios(over: Sequence[float], under: Sequence[float]) -> Interval:
    """The interval of ratios of times taken in the same rounds, as far as both have them."""
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
