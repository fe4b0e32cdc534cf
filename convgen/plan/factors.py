"""How P ranks factor into axes.

Axes are products of P's primes. Whatever a grid can do, a grid whose axes are factors of its axes can do too, but takes
longer to search. So only grids with the most axes are tried: MOST_AXES, where P has as many primes.
"""

from __future__ import annotations

from collections.abc import Iterator

MOST_AXES = 3  # of a grid that is searched
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
