"""Spare rows of an operand: no window reads them, but local code takes them along, as cutting them off would copy the
rest.

A convolution of one tap and stride 2 reads every other row of x; the last row of a block of an even number of rows is
behind its last window. Taken along it changes nothing of the result, and its gradient is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from convgen.operations.row import At, Interval, Operation


def with_spare(at: At, spare: Sequence[Sequence[int]]) -> At:
    """A place at which local code takes so many more rows of each operand and dimension."""
    if not any(map(any, spare)):
        return at

    def more(sides: tuple[tuple[Interval, ...], ...]) -> tuple[tuple[Interval, ...], ...]:
        pairs = zip(sides, spare, strict=True)
        return tuple(
            [
                tuple([(lo, hi + n) for (lo, hi), n in zip(rows, by or [0] * len(rows), strict=True)])
                for rows, by in pairs
            ]
        )

    more_of = {"windows": more(at.windows), "inside": more(at.inside)}
    return replace(at, **more_of, spare=tuple(map(tuple, spare)), known={})


def spare_rows(
    operation: Operation, way: int, at: At, held: Sequence[Sequence[Interval] | None]
) -> tuple[tuple[int, ...], ...]:
    """How many rows local code takes along behind those that it reads, for each operand and dimension, so that nothing
    is cut off.

    Args:
        held: for each operand, the rows that a rank has; None where it takes no more than it reads.
    """
    found: list[tuple[int, ...]] = []
    for most, rows, windows, inside in zip(operation.spare(way), held, at.windows, at.inside, strict=False):
        if rows is None or not any(most):
            found.append(())
            continue
        each = zip(most, rows, windows, inside, strict=True)
        more = [has[1] - read[1] if read[0] < read[1] == wished[1] else 0 for _, has, wished, read in each]
        found.append(tuple([n if 0 < n <= m else 0 for n, m in zip(more, most, strict=True)]))
    return tuple(found) + ((),) * (len(at.inside) - len(found)) if any(map(any, found)) else ()
