"""The block rule: which half-open interval of a dimension each rank holds.

Extent n over p ranks: the first n mod p ranks get one element more. Over ranks with shares w a rank gets n*w/sum(w)
elements, rounded down; each element left over goes to one of the ranks that lost most by rounding, of equal losses to
the first. Equal shares give the rule without shares, and a rank with the largest share has a largest part. Over several
axes the outermost axis splits first and the next one splits each block again, so that gathering the inner axis gives
exactly the outer axis's block. A dimension made of groups is split into whole groups as long as some rank holds more
than one; axes after that split inside the group.

Functions take integers, or arrays with one entry a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", int, NDArray[np.int64])


class Uneven(int):
    """The number of ranks of an axis on which some hold more than others, with a share for each rank.

    It equals only the same shares: if it equalled its number of ranks, it would pass for an axis that splits evenly.

    Example:
        >>> size = axis_size((6, 10))
        >>> int(size), size.shares, size == 2
        (2, (3, 5), False)
    """

    shares: tuple[int, ...]

    def __new__(cls, shares: Sequence[int]) -> Uneven:
        size = super().__new__(cls, len(shares))
        size.shares = tuple([n // gcd(*shares) for n in shares])
        return size

    def __reduce__(self) -> tuple[type[Uneven], tuple[tuple[int, ...]]]:
        return Uneven, (self.shares,)

    def __repr__(self) -> str:  # keys of what is kept are made of a grid's repr, so it tells the shares
        return f"Uneven({self.shares})"

    def __str__(self) -> str:
        return str(int(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Uneven) and self.shares == other.shares

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.shares)

    def cuts(self, extent: Number) -> NDArray[np.int64]:
        """Where the parts of an extent end, or of each extent of an array: [..., ranks + 1], from 0."""
        total, shares = sum(self.shares), np.array(self.shares, dtype=np.int64)
        whole = np.asarray(extent, dtype=np.int64)[..., None] * shares
        sizes, lost = whole // total, whole % total
        order = np.argsort(np.argsort(-lost, axis=-1, kind="stable"), axis=-1, kind="stable")
        sizes = sizes + (order < (lost.sum(-1, keepdims=True) // total))
        return np.concatenate([np.zeros_like(sizes[..., :1]), sizes.cumsum(-1)], axis=-1)


def axis_size(ranks: int | Sequence[int]) -> int:
    """The size of an axis of so many ranks, or of ranks with these shares; with equal shares, the number of ranks."""
    if isinstance(ranks, int):
        return ranks
    return Uneven(ranks) if len({*ranks}) > 1 else len(ranks)


def size_text(size: int) -> str:
    """The size in a grid's text: the number of ranks, or the shares with colons between.

    Example:
        >>> size_text(axis_size((6, 10))), size_text(axis_size((1, 1)))
        ('3:5', '2')
    """
    return ":".join(map(str, size.shares)) if isinstance(size, Uneven) else str(int(size))


def plain_size(size: int) -> int | list[int]:
    """The size as files and modules have it: a number of ranks, or a list of shares."""
    return [*size.shares] if isinstance(size, Uneven) else int(size)


def most(extent: int, size: int) -> int:
    """Elements of the largest part of an extent over one axis.

    Example:
        >>> most(7, 3), most(16, axis_size((3, 5)))
        (3, 10)
    """
    return int(np.diff(size.cuts(extent)).max()) if isinstance(size, Uneven) else -(-extent // size)


def most_of(extent: int, sizes: Iterable[int]) -> int:
    """Elements of the largest block over several axes.

    Example:
        >>> most_of(12, (2, 2)), most_of(13, ())
        (3, 13)
    """
    for size in sizes:
        extent = most(extent, size)
    return extent


def enough(size: int) -> int:
    """An extent, in elements, at which every rank holds some, except ranks with a share of 0.

    Example:
        >>> enough(3), enough(axis_size((1, 0, 4)))
        (3, 5)
    """
    return sum(size.shares) if isinstance(size, Uneven) else size


def block(lo: Number, hi: Number, parts: int | Sequence[int], index: Number) -> tuple[Number, Number]:
    """Part `index` of `parts` of the interval `[lo, hi)`.

    Example:
        >>> [block(0, 7, 3, i) for i in range(3)]
        [(0, 3), (3, 5), (5, 7)]
        >>> [block(0, 7, axis_size((1, 3, 2)), i) for i in range(3)]
        [(0, 1), (1, 5), (5, 7)]
    """
    parts = axis_size(parts)
    if isinstance(parts, Uneven):
        cuts, at = parts.cuts(hi - lo), np.asarray(index)[..., None]
        first, last = (np.take_along_axis(cuts, at + k, axis=-1)[..., 0] for k in (0, 1))
        return plain(lo + first), plain(lo + last)
    size = (hi - lo) // parts
    extra = (hi - lo) % parts
    least: Any = min if isinstance(index, int) and isinstance(extra, int) else np.minimum  # numpy is slow on numbers
    start = lo + index * size + least(index, extra)
    return plain(start), plain(start + size + (index < extra))


def plain(value: Any) -> Any:
    """An array as it is, a scalar as Python's int."""
    return value if getattr(value, "ndim", 0) else int(value)


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
    group_lo, group_hi, left = zero, zero + groups, groups
    lo, hi = zero, zero + unit
    for size, i in zip(sizes, index, strict=True):
        if left > 1:
            group_lo, group_hi = block(group_lo, group_hi, size, i)
            left = most(left, size)
        else:
            lo, hi = block(lo, hi, size, i)
    count = group_hi - group_lo
    # `lo` and `hi` cut a group only where no rank has several; elsewhere they are all of a group.
    start = group_lo * unit + lo
    larger: Any = max if isinstance(count, int) else np.maximum
    end = start + larger(count - 1, 0) * unit + (hi - lo) * (count > 0)
    return plain(start), plain(end)


def groups_are_plain(extent: int, groups: int, sizes: tuple[int, ...]) -> bool:
    """Whether a dimension made of groups has the same blocks as a dimension of that extent without groups.

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
