"""Fewer ranks where more don't pay: an axis that nothing is split over, whose ranks hold copies and compute the same.

More ranks are modelled slower than fewer where reductions grow and kernels can't shrink, or where a search over few
candidates has missed a better layout. Either way the layout on a divisor of the ranks can be had on all of them: the
axis of copies is the outermost, so that the others' groups lie in nodes as they would without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from convgen.algebra.grid import Grid
from convgen.errors import InputError

IDLE = "idle"
NOISE = 1.1  # rough plans are slower than the best of them by more than this: their thorough ones are too
GAIN = 1.25  # thorough plans are expected to be faster than rough ones by at most this; 1.21 was seen
PATIENCE = 2  # counts that don't pay, by rough plans, before the search goes no further down
PAYS = 1.05  # a count pays as long as its rough plan is slower by no more than this
THOROUGH = 3  # counts that are planned with all candidates

Plan = TypeVar("Plan")


def on_fewer(
    ranks: int,
    planned: Callable[[int], Plan],
    seconds: Callable[[Plan], float],
    roughly: Callable[[int], float],
    least: Callable[[int], float],
) -> tuple[int, Plan]:
    """How many ranks do different work in the fastest plan found, and that plan.

    Args:
        planned: for so many ranks; raises InputError where they can't be used or don't have the memory.
        roughly: seconds of a plan found with little effort, infinite where there is none.
        least: seconds that no plan for so many ranks is below, more for fewer ranks.
    Raises:
        InputError: all ranks have no plan.
    """
    rough, poor = {ranks: roughly(ranks)}, 0
    for fewer in divisors(ranks):
        fastest = min(rough.values())
        if poor == PATIENCE or least(fewer) >= fastest:
            break
        rough[fewer] = roughly(fewer)
        poor = poor + 1 if rough[fewer] > PAYS * fastest else 0
    best: tuple[int, Plan] | None = None
    most = NOISE * min(rough.values())
    likely = sorted((count for count in rough if rough[count] <= most), key=lambda count: rough[count])
    for count in likely[:THOROUGH]:
        if best is not None and rough[count] > GAIN * seconds(best[1]):
            break
        with suppress(InputError):
            one = planned(count)
            if best is None or seconds(one) < seconds(best[1]):
                best = count, one
    return (ranks, planned(ranks)) if best is None else best


def divisors(ranks: int) -> list[int]:
    """Those below it, largest first.

    Example:
        >>> divisors(12)
        [6, 4, 3, 2, 1]
    """
    return [n for n in range(ranks // 2, 0, -1) if ranks % n == 0]


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


def idle_line(grid: Grid) -> str:
    """What a plan says of the ranks that it leaves idle."""
    working = grid.ranks // grid.sizes[IDLE]
    return f"{working} of {grid.ranks} do different work: more than {working} don't pay, by this model and search"
