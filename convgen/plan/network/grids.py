"""The grids to search: how P ranks factor into axes, ranked by an estimate.

Axes are products of P's primes. A grid of more axes can do all that one whose axes are products of its can, at the
cost of a longer search, so only grids of the most axes are tried, MOST_AXES of them where P has as many primes. They
are ranked by the sum over convolutions of the best role assignment's estimated seconds (estimate.py), redistribution
left out; the best few are searched. Where a machine's links have levels, the order of the axes counts too: the last
one's groups are inside nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import prod

from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.plan.network.estimate import estimates
from convgen.plan.network.setting import Setting

MOST_AXES = 3
NAMES = ("a", "b", "c", "d", "e", "f")


def primes(n: int) -> list[int]:
    """The prime factors of n, smallest first, with repeats."""
    found: list[int] = []
    divisor = 2
    while n > 1:
        while n % divisor == 0:
            found.append(divisor)
            n //= divisor
        divisor += 1
        if divisor * divisor > n > 1:
            found.append(n)
            break
    return found


def factorisations(ranks: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Ways to write `ranks` as a product of `axes` factors above 1, largest first.

    Example:
        >>> list(factorisations(16, 2))
        [(8, 2), (4, 4)]
    """

    def below(n: int, axes: int, most: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            if 1 < n <= most:
                yield (n,)
            return
        for first in range(min(most, n), 1, -1):
            if n % first == 0:
                for rest in below(n // first, axes - 1, first):
                    yield (first, *rest)

    yield from below(ranks, axes, ranks)


def grids(ranks: int, convolutions: Sequence[tuple[Conv, int]], setting: Setting, dtype: str) -> list[Grid]:
    """Every grid of the most axes, best estimate first.

    Args:
        convolutions: distinct ones, and how often each comes.
    """
    axes = min(MOST_AXES, len(primes(ranks)))
    if axes == 0:
        return [Grid((("a", 1),))]
    found = [
        Grid(tuple(zip(NAMES, sizes, strict=False)))
        for factors in factorisations(ranks, axes)
        for sizes in (
            sorted(set(permutations(factors)), reverse=True) if len(setting.machine.levels) > 1 else [factors]
        )
    ]

    def estimate(grid: Grid) -> float:
        sizes = tuple(size for _, size in grid.axes)
        return sum(count * estimates(conv, sizes, setting, dtype).seconds[0] for conv, count in convolutions)

    scores = {grid: estimate(grid) for grid in found}
    assert all(prod(grid.sizes.values()) == ranks for grid in found)
    return sorted(found, key=lambda grid: scores[grid])
