"""Fewer ranks where more don't pay.

More ranks are modelled slower than fewer where reductions grow and kernels can't shrink, where no extent splits into so
many, where they lie unevenly in nodes, or where a search over few candidates has missed a better layout. Any number of
ranks may work: the first ones. Where that number divides all ranks and the links serve the others as well, these hold
copies and compute the same, along an outermost axis that splits nothing; else they are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from convgen.algebra.grid import Grid
from convgen.errors import InputError

IDLE = "idle"  # the axis of copies
NOISE = 1.1  # rough plans are slower than the best of them by more than this: their thorough ones are too
GAIN = 1.25  # thorough plans are expected to be faster than rough ones by at most this; 1.21 was seen
PAYS = 1.05  # a count pays as long as its rough plan is slower by no more than this
NEAREST = 3  # products of small factors that are looked at
FACTORS = (2, 3, 5, 7)  # small ones: a product of them splits in many ways


@dataclass(frozen=True)
class Patience:
    """When the search over numbers of ranks ends.

    Attributes:
        poor: so many counts in a row that don't pay, by rough plans, end it.
        thorough: so many counts are planned with all candidates.
        low: all counts up to this one are looked at.
    """

    poor: int
    thorough: int
    low: int


LITTLE, MUCH = Patience(2, 3, 0), Patience(64, 12, 8)  # of networks that take long to plan, and of others

Plan = TypeVar("Plan")


def on_fewer(
    ranks: int,
    planned: Callable[[int], Plan],
    seconds: Callable[[Plan], float],
    roughly: Callable[[int], float],
    least: Callable[[int], float],
    patience: Patience,
) -> tuple[int, Plan]:
    """How many ranks do different work in the fastest plan found, and that plan.

    Args:
        planned: the plan for so many ranks; raises InputError where they can't be used or don't have the memory.
        roughly: seconds of a plan found with little effort, infinite where there is none.
        least: seconds that no plan for so many ranks is below; the fewer ranks, the more.
    Raises:
        InputError: no number of ranks has a plan; the error is that of all of them.
    """
    rough: dict[int, float] = {}

    def look(some: Iterable[int]) -> None:
        poor = 0
        for count in some:
            fastest = min(rough.values(), default=float("inf"))
            if poor == patience.poor or least(count) >= fastest < float("inf"):
                break
            rough[count] = rough[count] if count in rough else roughly(count)
            poor = poor + 1 if rough[count] > PAYS * fastest else 0

    look(coarse(ranks))
    middle = min(rough, key=lambda count: (rough[count], -count))
    look(count for count in counts(ranks) if middle / 2 < count < 2 * middle or count <= patience.low)
    best: tuple[int, Plan] | None = None
    most = NOISE * min(rough.values())
    likely = sorted((count for count in rough if rough[count] <= most), key=lambda count: (rough[count], -count))
    for count in likely[: patience.thorough]:
        if best is not None and rough[count] > GAIN * seconds(best[1]):
            break
        with suppress(InputError):
            one = planned(count)
            if best is None or seconds(one) < seconds(best[1]):
                best = count, one
    return (ranks, planned(ranks)) if best is None else best


def coarse(ranks: int) -> list[int]:
    """The counts of ranks that are looked at first, largest first: divisors, and powers of two.

    Example:
        >>> coarse(12)
        [12, 8, 6, 4, 3, 2, 1]
    """
    powers = {1 << k for k in range(ranks.bit_length())}
    return sorted(powers | {n for n in range(1, ranks + 1) if ranks % n == 0}, reverse=True)


def counts(ranks: int) -> list[int]:
    """The counts of ranks that are looked at around the best of these, largest first: five for each doubling, and the
    largest products of small factors.

    Example:
        >>> counts(61)
        [60, 56, 54, 48, 40, 36, 32, 28, 24, 20, 18, 16, 14, 12, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    """
    some = {m << k for k in range(ranks.bit_length()) for m in (1, 4, 5, 6, 7, 9)} | {2, 3}
    near = islice((n for n in range(ranks, 0, -1) if is_smooth(n)), NEAREST)
    return sorted({*(n for n in some if n <= ranks), *near}, reverse=True)


def is_smooth(n: int) -> bool:
    """Whether n is a product of FACTORS alone."""
    for factor in FACTORS:
        while n % factor == 0:
            n //= factor
    return n == 1


def with_idle(grid: Grid, ranks: int) -> Grid:
    """The grid on so many ranks, the rest of them along an outermost axis of copies.

    Example:
        >>> print(with_idle(Grid((("a", 2), ("b", 4))), 32))
        grid(idle=4, a=2, b=4)
    """
    if grid.ranks == ranks:
        return grid
    return Grid(((IDLE, ranks // grid.ranks), *grid.bare.axes))


def without_idle(grid: Grid) -> Grid:
    """The ranks that do different work."""
    return Grid(tuple((a, n) for a, n in grid.axes if a != IDLE)) if IDLE in grid.sizes else grid


def idle_line(grid: Grid, ranks: int) -> str:
    """What a plan says of the ranks that it leaves idle."""
    working = without_idle(grid).ranks
    line = f"{working} of {ranks} do different work: more than {working} don't pay, by this model and search"
    return line if grid.ranks == ranks else f"{line}; start {working}, the first of them: there is no work for the rest"
