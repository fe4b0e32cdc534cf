"""Relations: which rows of an operand the rows of an index read, along one dimension.

A block `[lo, hi)` of the index reads a *window* of rows: an interval in the relation's own numbering. A window may have
rows outside of the tensor; `hull` gives those that are inside, and the others are padding (or, where an operation says
so, nothing). Rows are anything that is numbered: pixels, channels of groups, flat numbers of a view. Intervals are
half-open, of integers or of arrays with an entry a rank. On integers nothing here needs numpy: generated packages
contain this file.

| relation | row o reads |
|---|---|
| Taps | o*S - P + d*k for k in [0, K): convolution, pooling; with K = 1 an offset (pad, slice, concatenation) |
| ReadBy | the rows that read row o by `Taps`: transposed convolution, the gradient of a convolution |
| Ratio | [o*a // b * u, ceil((o + 1)*a / b) * u): groups of channels, adaptive pooling, views |
| Reverse | n - 1 - o: flip |
| Clamp | the row of the tensor that is nearest to o - P: replicate padding |
| Table | what a table says: interpolation, reflection; anything that ATen's own operator says of unit vectors |
| Through | the rows that another relation reads for the rows that one reads: two rows of a network as one |
| Blocks | block number o of `extent` rows by the block rule; its inverse, BlockOf: the number of the block of row o |

Source: Dumoulin & Visin, arXiv:1603.07285, section 4 (Taps, ReadBy); docs/design.md, Relations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from convgen.algebra.blocks import block, plain
from convgen.late import np

if TYPE_CHECKING:
    from convgen.algebra.blocks import Number


class Relation(ABC):
    """Rows that an index reads."""

    @property
    def word(self) -> str:
        """The relation's name in a signature's text."""
        return type(self).__name__.lower()

    @abstractmethod
    def row(self, o: int) -> Sequence[int]:
        """The definition: the rows that one row of the index reads, in the window's numbering."""

    @abstractmethod
    def window(self, lo: Number, hi: Number) -> tuple[Number, Number]:
        """The rows that rows `[lo, hi)` read: the smallest interval of closed form; empty where `[lo, hi)` is."""

    @property
    @abstractmethod
    def inverse(self) -> Relation:
        """The relation from a row that is read to the rows that read it."""

    @property
    def is_identity(self) -> bool:
        """Whether each row reads the row of its own number."""
        return False

    def hull(self, lo: Number, hi: Number, extent: int) -> tuple[Number, Number]:
        """The interval of a window's rows that lie in a tensor of `extent` rows; what lies outside is padding."""
        first = _least(_most(lo, 0), extent)
        return plain(first), plain(_most(_least(hi, extent), first))

    def inside(self, lo: int, hi: int, held: tuple[int, int], extent: int) -> tuple[int, int]:
        """The longest run in `[lo, hi)` of which each row reads only rows that are held, or padding.

        Example:
            >>> Taps(kernel=3, pad=1).inside(0, 4, (0, 4), 8)
            (0, 3)
        """

        def are_inside(a: int, b: int) -> bool:
            first, last = self.hull(*self.window(a, b), extent)
            return first >= last or (first >= held[0] and last <= held[1])

        while lo < hi and not are_inside(lo, lo + 1):
            lo += 1
        while lo < hi and not are_inside(hi - 1, hi):
            hi -= 1
        if lo == hi or are_inside(lo, hi):
            return lo, hi
        best, start = (lo, lo), lo
        for o in range(lo, hi + 1):  # rows that read padding alone may lie beyond rows that read a neighbour's
            if o == hi or not are_inside(o, o + 1):
                best, start = max(best, (start, o), key=lambda run: run[1] - run[0]), o + 1
        return best


def _least(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else np.minimum(a, b)


def _most(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b)


def _choice(which: Any, a: Any, b: Any) -> Any:
    """a where `which` is true, else b."""
    return plain((a if which else b) if isinstance(which, bool) else np.where(which, a, b))


def _where(hi: Any, lo: Any, start: Any, end: Any) -> tuple[Any, Any]:
    """An interval, empty where `[lo, hi)` is."""
    return plain(start), _choice(hi > lo, end, start)


@dataclass(frozen=True, slots=True)
class Taps(Relation):
    """Row o reads o*S - P + d*k for k in [0, K).

    Example:
        >>> Taps(kernel=3, pad=1).window(28, 56)
        (27, 57)
    """

    kernel: int = 1
    stride: int = 1
    pad: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Rows from a window's first tap to its last: d(K-1)."""
        return self.dilation * (self.kernel - 1)

    @property
    def inverse(self) -> Relation:
        return ReadBy(self)

    @property
    def is_identity(self) -> bool:
        return self.kernel == self.stride == 1 and self.pad == 0

    def row(self, o: int) -> Sequence[int]:
        return [o * self.stride - self.pad + self.dilation * k for k in range(self.kernel)]

    def window(self, lo: Number, hi: Number) -> tuple[Number, Number]:
        start = lo * self.stride - self.pad
        return _where(hi, lo, start, (hi - 1) * self.stride - self.pad + self.reach + 1)


@dataclass(frozen=True, slots=True)
class ReadBy(Relation):
    """Row o reads the rows that read it: all i with i*S - P + d*k = o for some tap k.

    Where stride or dilation leave gaps, the window also has rows that no row of the block reads.

    Example:
        >>> ReadBy(Taps(kernel=3, stride=2, pad=1)).window(28, 56)
        (14, 29)
    """

    taps: Taps

    @property
    def word(self) -> str:
        return "read_by"

    @property
    def inverse(self) -> Relation:
        return self.taps

    @property
    def is_identity(self) -> bool:
        return self.taps.is_identity

    def row(self, o: int) -> Sequence[int]:
        t = self.taps
        places = (o + t.pad - t.dilation * k for k in range(t.kernel))
        return [p // t.stride for p in places if p % t.stride == 0]

    def window(self, lo: Number, hi: Number) -> tuple[Number, Number]:
        t = self.taps
        start = -((t.reach - lo - t.pad) // t.stride)
        return _where(hi, lo, start, (hi - 1 + t.pad) // t.stride + 1)


@dataclass(frozen=True, slots=True)
class Ratio(Relation):
    """Row o reads [o*a // b * u, ceil((o + 1)*a / b) * u).

    `Ratio(1, f, c)`: filter o of groups of f reads the c channels of its group. `Ratio(n, m)`: adaptive pooling of n
    rows to m. `Ratio(ib, ia)`: rows of ib elements out of rows of ia.

    Example:
        >>> Ratio(1, 4, 3).window(2, 6)  # filters 2 to 5 of groups of 4: all of groups 0 and 1, 3 channels each
        (0, 6)
    """

    a: int
    b: int
    unit: int = 1

    @property
    def inverse(self) -> Relation:
        """The inverse, which has a closed form where `a` or `unit` is 1; else a ValueError."""
        if self.a != 1 != self.unit:
            raise ValueError(f"{self} has no inverse of closed form")
        return Ratio(1, self.unit, self.b) if self.a == 1 else Ratio(self.b, self.a)

    def row(self, o: int) -> Sequence[int]:
        return range(*self.window(o, o + 1))

    def window(self, lo: Number, hi: Number) -> tuple[Number, Number]:
        start = lo * self.a // self.b * self.unit
        return _where(hi, lo, start, -(-hi * self.a // self.b) * self.unit)


@dataclass(frozen=True, slots=True)
class Reverse(Relation):
    """Row o reads row n - 1 - o."""

    extent: int

    @property
    def inverse(self) -> Relation:
        return self

    def row(self, o: int) -> Sequence[int]:
        return [self.extent - 1 - o]

    def window(self, lo: Number, hi: Number) -> tuple[Number, Number]:
        return _where(hi, lo, self.extent - hi, self.extent - lo)


@dataclass(frozen=True, slots=True)
class Clamp(Relation):
    """Row o of extent + below + above rows reads row min(max(o - below, 0), extent - 1); one beyond them reads nothing.

    Example:
        >>> Clamp(extent=8, below=2, above=1).window(0, 4)
        (0, 2)
    """

    extent: int
    below: int
    above: int

    @property
    def count(self) -> int:
        """How many rows read one."""
        return self.extent + self.below + self.above

    @property
    def inverse(self) -> Relation:
        return ClampedBy(self)

    def row(self, o: int) -> Sequence[int]:
        return [min(max(o - self.below, 0), self.extent - 1)] if 0 <= o < self.count else []

    def window(self, lo: Number, hi: Number) -> tuple[Number, Number]:
        lo, hi = _most(lo, 0), _least(hi, self.count)
        start, last = (_least(_most(o - self.below, 0), self.extent - 1) for o in (lo, hi - 1))
        return _where(hi, lo, start, last + 1)


@dataclass(frozen=True, slots=True)
class ClampedBy(Relation):
    """Row o reads the rows that read it by `Clamp`: the first and the last row read those of the padding, too.

    Example:
        >>> ClampedBy(Clamp(extent=8, below=2, above=1)).window(0, 4)
        (0, 6)
    """

    clamp: Clamp

    @property
    def word(self) -> str:
        return "clamped_by"

    @property
    def inverse(self) -> Relation:
        return self.clamp

    def row(self, o: int) -> Sequence[int]:
        return range(*self.window(o, o + 1))

    def window(self, lo: Number, hi: Number) -> tuple[Number, Number]:
        of = self.clamp
        lo, hi = _most(lo, 0), _least(hi, of.extent)
        start = _choice(lo == 0, 0, _most(lo + of.below, 0))
        end = _choice(hi == of.extent, of.count, _least(hi + of.below, of.count))
        return plain(start), _choice((hi > lo) & (end > start), end, start)


@dataclass(frozen=True, slots=True)
class Table(Relation):
    """Row o reads the interval `rows[o]`; with an empty one, or behind the last, nothing."""

    rows: tuple[tuple[int, int], ...]

    @property
    def inverse(self) -> Relation:
        """For each row the interval from the first to the last row that reads it; some between may not read it."""
        found = [(0, 0)] * max((hi for _, hi in self.rows), default=0)
        for o, (lo, hi) in enumerate(self.rows):
            for row in range(lo, hi):
                found[row] = (found[row][0] if found[row][1] else o, o + 1)
        return Table(tuple(found))

    def row(self, o: int) -> Sequence[int]:
        return range(*self.rows[o]) if o < len(self.rows) else range(0)

    def window(self, lo: Number, hi: Number) -> tuple[Number, Number]:
        return _by_integers(self._all, lo, hi)

    def _all(self, lo: int, hi: int) -> tuple[int, int]:
        some = [r for r in self.rows[lo:hi] if r[1] > r[0]]
        return (min(r[0] for r in some), max(r[1] for r in some)) if some else (0, 0)


def _ranks(size: int | tuple[int, ...]) -> int:
    return size if isinstance(size, int) else len(size)


@lru_cache(maxsize=1 << 12)
def _ends(extent: int, size: int | tuple[int, ...]) -> tuple[int, ...]:
    """Where the parts of an extent begin, and where the last one ends."""
    return (*[block(0, extent, size, i)[0] for i in range(_ranks(size))], extent)


@dataclass(frozen=True, slots=True)
class Blocks(Relation):
    """Row o reads block number o of `extent` rows split over axes of these sizes, outermost first (algebra/blocks.py).
    A size is so many ranks, or a share for each.

    Example:
        >>> [Blocks(7, (3,)).window(o, o + 1) for o in range(3)]
        [(0, 3), (3, 5), (5, 7)]
    """

    extent: int
    sizes: tuple[int | tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return prod([_ranks(size) for size in self.sizes])

    @property
    def inverse(self) -> Relation:
        return BlockOf(self)

    def row(self, o: int) -> Sequence[int]:
        return range(*self.block(o)) if 0 <= o < self.count else range(0)

    def block(self, number: int) -> tuple[int, int]:
        """The rows of a block."""
        lo, rows, left = 0, self.extent, self.count
        for size in self.sizes:
            left //= _ranks(size)
            start, end = _ends(rows, size)[(i := number // left % _ranks(size)) : i + 2]
            lo, rows = lo + start, end - start
        return lo, lo + rows

    def number(self, row: int) -> int:
        """The number of the block that holds a row."""
        found, rows = 0, self.extent
        for size in self.sizes:
            ends = _ends(rows, size)
            i = bisect_right(ends, row) - 1
            row, rows, found = row - ends[i], ends[i + 1] - ends[i], found * _ranks(size) + i
        return found

    def window(self, lo: Number, hi: Number) -> tuple[Number, Number]:
        return _by_integers(self._of, lo, hi)

    def _of(self, lo: int, hi: int) -> tuple[int, int]:
        lo, hi = max(lo, 0), min(hi, self.count)
        return (self.block(lo)[0], self.block(hi - 1)[1]) if hi > lo else (0, 0)


@dataclass(frozen=True, slots=True)
class BlockOf(Relation):
    """Row o reads the number of the block that it lies in.

    Example:
        >>> BlockOf(Blocks(7, (3,))).window(2, 5)
        (0, 2)
    """

    blocks: Blocks

    @property
    def inverse(self) -> Relation:
        return self.blocks

    def row(self, o: int) -> Sequence[int]:
        return [self.blocks.number(o)] if 0 <= o < self.blocks.extent else []

    def window(self, lo: Number, hi: Number) -> tuple[Number, Number]:
        return _by_integers(self._of, lo, hi)

    def _of(self, lo: int, hi: int) -> tuple[int, int]:
        lo, hi = max(lo, 0), min(hi, self.blocks.extent)
        return (self.blocks.number(lo), self.blocks.number(hi - 1) + 1) if hi > lo else (0, 0)


@dataclass(frozen=True, slots=True)
class Through(Relation):
    """Row o reads the rows that `then` reads for the rows that `first` reads: two operations in sequence, with a tensor
    of `extent` rows between them. Rows between that lie outside of this tensor read nothing.

    Example:
        >>> Through(Taps(kernel=3, pad=1), 8, Taps(kernel=3, pad=1)).window(0, 4)  # row -1 between reads nothing
        (-1, 6)
    """

    first: Relation
    extent: int
    then: Relation

    @property
    def inverse(self) -> Relation:
        return Through(self.then.inverse, self.extent, self.first.inverse)

    def row(self, o: int) -> Sequence[int]:
        between = {m for m in self.first.row(o) if 0 <= m < self.extent}
        return sorted({row for m in between for row in self.then.row(m)})

    def window(self, lo: Number, hi: Number) -> tuple[Number, Number]:
        return self.then.window(*self.first.hull(*self.first.window(lo, hi), self.extent))


def _by_integers(of: Any, lo: Any, hi: Any) -> tuple[Any, Any]:
    """The window `of(lo, hi)` for integers; for arrays, that of each entry."""
    if isinstance(lo, int) and isinstance(hi, int):
        return of(lo, hi)
    entries = [*zip(np.ravel(lo).tolist(), np.ravel(hi).tolist(), strict=True)]
    known = {entry: of(*entry) for entry in {*entries}}  # thousands of ranks have few blocks
    ends = [known[entry] for entry in entries]
    first, last = (np.array(side, dtype=np.int64).reshape(np.shape(lo)) for side in zip(*ends, strict=True))
    return plain(first), plain(last)
