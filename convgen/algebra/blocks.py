"""The block rule: which half-open interval of a dimension each rank holds.

Extent n over p ranks: the first n mod p ranks get one element more. Over several axes: by the outermost
axis first and each block again by the next, so that gathering the inner axis gives exactly the outer
axis's block. A dimension made of groups is split into whole groups as long as some rank holds more than
one; axes after that split inside the group.

Works on plain integers and on arrays (one entry a rank) alike.
"""

from __future__ import annotations

from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", int, NDArray[np.int64])


def block(lo: Number, hi: Number, parts: int, index: Number) -> tuple[Number, Number]:
    """Part `index` of `parts` of the interval `[lo, hi)`.

    Example:
        >>> [block(0, 7, 3, i) for i in range(3)]
        [(0, 3), (3, 5), (5, 7)]
    """
    size = (hi - lo) // parts
    extra = (hi - lo) % parts
    least: Any = min if isinstance(index, int) and isinstance(extra, int) else np.minimum  # numpy is slow on numbers
    start = lo + index * size + least(index, extra)
    return plain(start), plain(start + size + (index < extra))


def plain(value: Any) -> Any:
    """Arrays as they are, numpy's scalars as Python's."""
    return value if getattr(value, "ndim", 0) else int(value)


def groups_left(groups: int, sizes: tuple[int, ...]) -> int:
    """The most groups that a rank holds after axes of these sizes have split them."""
    for size in sizes:
        groups = -(-groups // size)
    return groups


def span(
    extent: int, groups: int, sizes: tuple[int, ...], index: tuple[Number, ...], zero: Number
) -> tuple[Number, Number]:
    """Interval of a dimension that the rank with these coordinates holds.

    Args:
        extent: elements of the dimension; `groups` divides it.
        sizes: ranks of the axes that split it, outermost first.
        index: the rank's coordinate on each of those axes.
        zero: 0, or an array of zeros with an entry a rank.
    Returns:
        Half-open interval in elements; empty where the block rule leaves nothing.

    Example:
        >>> span(12, 3, (2, 2), (0, 1), 0)   # 3 groups of 4 over 2, then 2 ranks: groups [0, 2), then group 1
        (4, 8)
    """
    unit = extent // groups
    group_lo, group_hi, most = zero, zero + groups, groups
    lo, hi = zero, zero + unit
    for size, i in zip(sizes, index, strict=True):
        if most > 1:
            group_lo, group_hi = block(group_lo, group_hi, size, i)
            most = -(-most // size)
        else:
            lo, hi = block(lo, hi, size, i)
    count = group_hi - group_lo
    # Inside a group only where a rank has one: then the interval is a part of that group.
    start = group_lo * unit + lo
    most_of: Any = max if isinstance(count, int) else np.maximum
    end = start + most_of(count - 1, 0) * unit + (hi - lo) * (count > 0)
    return plain(start), plain(end)


def groups_are_plain(extent: int, groups: int, sizes: tuple[int, ...]) -> bool:
    """Whether blocks of whole groups, or of parts of one, are the blocks of as many elements that no group is told of.

    Args:
        sizes: ranks of the axes that split the dimension, outermost first.

    Example:
        >>> groups_are_plain(12, 4, (2,)), groups_are_plain(12, 3, (2,)), groups_are_plain(12, 3, (3, 2))
        (True, False, True)
    """
    index = tuple(np.indices(sizes).reshape(len(sizes), prod(sizes)))
    zero = np.zeros(prod(sizes), dtype=np.int64)
    nested, flat = (span(extent, n, sizes, index, zero) for n in (groups, 1))
    return all(np.array_equal(a, b) for a, b in zip(nested, flat, strict=True))
