"""Rows put elsewhere: pad, slice, flip, roll, concatenate. Each row of the result is one row of x, or a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from convgen.algebra.relations import Clamp, Relation, Reverse, Table, Taps
from convgen.algebra.signature import Made, Operand, Signature
from convgen.late import torch
from convgen.operations.row import At, Interval, Operation, fit, numbered, on_device, own, read_here, unfit


@dataclass(frozen=True)
class Take(Operation):
    """A result y whose row o, along each dimension, is the row of x that a relation says, or `fill` where that is
    outside of x.

    Attributes:
        shape: the extents of x; `out`: those of y.
        relations: of one row each (Taps of one tap, Reverse, Clamp, Table); None: the row itself.
    """

    shape: tuple[int, ...]
    out: tuple[int, ...]
    relations: tuple[Relation | None, ...]
    fill: float = 0.0

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        reads = tuple(Made((i,), r) for i, r in zip(names, self.relations, strict=True))
        x, y = Operand("x", self.shape, reads), Operand("y", self.out, own(*names))
        return (Signature(tuple(zip(names, self.out, strict=True)), (x,), (y,), runs_empty=True),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        (y,) = operands
        for d, relation in enumerate(self.relations):
            match relation:
                case None:
                    pass
                case Reverse():
                    y = y.flip(d)
                case Taps(stride=stride):
                    start, have, want = self._picked(at, d, relation)
                    count = have[1] - have[0]
                    y = y[(slice(None),) * d + (slice(start, start + count * stride, stride),)]
                    inner = [(0, n) for n in y.shape[d + 1 :]]
                    y = fit(y, [have, *inner], [want, *inner], self.fill)
                case Clamp():
                    below, start, count, above = self._clamped(at, d, relation)
                    edges = [y.narrow(d, r, 1).expand(*y.shape[:d], n, *y.shape[d + 1 :]) for r, n in below + above]
                    y = torch.cat([*edges[: len(below)], y.narrow(d, start, count), *edges[len(below) :]], d)
                case _:
                    y = y.index_select(d, self._rows(at, d, relation, y))
        return (y,)

    def _picked(self, at: At, d: int, taps: Taps) -> tuple[int, Interval, Interval]:
        """The number here of the first row that is picked, the interval of y's rows that are rows of x, and that of y's
        rows that are made."""
        (lo, hi), (first, last) = at.blocks[f"d{d}"], at.inside[0][d]
        begin, end = (min(max(-(-(r + taps.pad) // taps.stride), lo), hi) for r in (first, last))
        return begin * taps.stride - taps.pad - first, (begin, end), (lo, hi)

    def _clamped(self, at: At, d: int, clamp: Clamp) -> tuple[list[Interval], int, int, list[Interval]]:
        """The rows made here in three parts: those before x, as the number here of the row that they repeat and how
        many there are, if any; the first and the number of those in x; and those behind x, like those before."""
        (lo, hi), first, n = at.blocks[f"d{d}"], at.inside[0][d][0], clamp.extent
        begin, end = (min(max(r, lo), hi) for r in (clamp.below, clamp.below + n))
        before, behind = (-first, begin - lo), (n - 1 - first, hi - end)
        start = begin - clamp.below - first if end > begin else 0
        return [before] * (begin > lo), start, end - begin, [behind] * (hi > end)

    def _rows(self, at: At, d: int, relation: Relation, like: Any) -> Any:
        """The numbers here of the rows that are picked."""
        rows = [relation.row(o)[0] - at.inside[0][d][0] for o in range(*at.blocks[f"d{d}"])]
        return on_device(tuple(rows), torch.int64, like.device)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (dx,), shape, aten = dys, read_here(at, 0), torch.ops.aten
        for d, relation in reversed([*enumerate(self.relations)]):
            sizes = [*dx.shape[:d], shape[d], *dx.shape[d + 1 :]]
            match relation:
                case None:
                    pass
                case Reverse():
                    dx = dx.flip(d)
                case Taps(stride=stride):
                    start, have, want = self._picked(at, d, relation)
                    count, inner = have[1] - have[0], [(0, n) for n in shape[d + 1 :]]
                    dx = unfit(dx, [have, *inner], [want, *inner])
                    if (start, count) != (0, shape[d]):
                        dx = aten.slice_backward(dx, sizes, d, start, start + count * stride, stride)
                case Clamp():
                    below, start, count, above = self._clamped(at, d, relation)
                    lo, made = sum(n for _, n in below), dx
                    dx = aten.slice_backward(made.narrow(d, lo, count), sizes, d, start, start + count, 1)
                    for begin, edges in ((0, below), (lo + count, above)):
                        for row, n in edges:
                            dx.narrow(d, row, 1).add_(made.narrow(d, begin, n).sum(d, keepdim=True))
                case _:
                    dx = aten.index_select_backward(dx, sizes, d, self._rows(at, d, relation, dx))
        return (dx,)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The result row by row, as the relations are defined, with one row of `fill` behind x."""
        (y,) = operands
        for d, relation in enumerate(self.relations):
            if relation is not None:
                n, (*rest,) = y.shape[d], y.shape
                rest[d] = 1
                rows = [relation.row(o)[0] for o in range(self.out[d])]
                rows = [r if 0 <= r < n else n for r in rows]
                y = torch.cat([y, torch.full(rest, self.fill, dtype=y.dtype)], d)
                y = y.index_select(d, torch.tensor(rows, dtype=torch.int64))
        return (y,)


PadMode = Literal["constant", "reflect", "replicate"]


def padded(shape: Sequence[int], sides: Sequence[tuple[int, int]], mode: PadMode, fill: float = 0.0) -> Take:
    """Pad x by so many rows below and above each dimension (`sides`); negative numbers cut rows."""
    relations: list[Relation | None] = []
    for n, (below, above) in zip(shape, sides, strict=True):
        rows = range(-below, n + above)
        match mode:
            case _ if below == above == 0:
                relations.append(None)
            case "constant":
                relations.append(Taps(pad=below))
            case "replicate":
                relations.append(Clamp(n, below, above))
            case "reflect":
                relations.append(_table(n - 1 - abs(n - 1 - abs(r)) for r in rows))
    out = tuple(n + below + above for n, (below, above) in zip(shape, sides, strict=True))
    return Take(tuple(shape), out, tuple(relations), fill if mode == "constant" else 0.0)


def sliced(shape: Sequence[int], d: int, start: int, stop: int, step: int = 1) -> Take:
    """Rows start, start + step, ... below stop; 0 <= start <= stop <= rows."""
    return _along(shape, d, len(range(start, stop, step)), Taps(stride=step, pad=-start))


def flipped(shape: Sequence[int], d: int) -> Take:
    return _along(shape, d, shape[d], Reverse(shape[d]))


def _along(shape: Sequence[int], d: int, rows: int, relation: Relation) -> Take:
    out, relations = list(shape), list[Relation | None]([None] * len(shape))
    out[d], relations[d] = rows, relation
    return Take(tuple(shape), tuple(out), tuple(relations))


def _table(rows: Any) -> Table:
    return Table(tuple((r, r + 1) for r in rows))


@dataclass(frozen=True)
class Concatenate(Operation):
    """Tensors of these shapes one behind the other along dimension d. An operand may have no rows on a rank."""

    shapes: tuple[tuple[int, ...], ...]
    d: int

    @property
    def starts(self) -> tuple[int, ...]:
        """The rows of the result at which operands begin, and the one at which the last ends; rows before 0 or behind
        `rows` are left out."""
        return tuple(accumulate((shape[self.d] for shape in self.shapes), initial=0))

    @property
    def rows(self) -> int:
        """How many rows the result has."""
        return self.starts[-1]

    @property
    def hands_gradient_on(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names, inputs = numbered(len(self.shapes[0])), list[Operand]()
        for k, (shape, start) in enumerate(zip(self.shapes, self.starts, strict=False)):
            dims = [Made((i,), Taps(pad=start) if d == self.d else None) for d, i in enumerate(names)]
            inputs.append(Operand(f"x{k}", shape, tuple(dims)))
        out = (*self.shapes[0][: self.d], self.rows, *self.shapes[0][self.d + 1 :])
        y = Operand("y", out, own(*names))
        return (Signature(tuple(zip(names, out, strict=True)), tuple(inputs), (y,), runs_empty=True),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return (torch.cat(operands, self.d),)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        (y,) = self.local(way, at, *operands)
        alike = all(t.dtype == y.dtype for t in operands)
        return (y,), () if alike else tuple(t.dtype for t in operands)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        found, start = list[Any](), 0
        for k, asked in enumerate(wanted):
            rows = at.inside[k][self.d][1] - at.inside[k][self.d][0]
            part = dys[0].narrow(self.d, start, rows)
            found.append(None if not asked else part.to(kept[k]) if kept else part)
            start += rows
        return tuple(found)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """Row by row."""
        every = [row for t in operands for row in t.unbind(self.d)]
        first = -self.starts[0]
        return (torch.stack(every[first : first + self.rows], self.d),)


@dataclass(frozen=True)
class Wrapped(Concatenate):
    """Circular padding: x between its last rows and its first ones. It reads x as three operands, so that what a block
    reads of each is an interval, and of two of them the padding alone.

    Args:
        below, above: how many rows are added, at most as many as x has.
    """

    below: int
    above: int

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple([self.below + k * self.shapes[0][self.d] for k in (-1, 0, 1, 2)])

    @property
    def rows(self) -> int:
        return self.shapes[0][self.d] + self.below + self.above


@dataclass(frozen=True)
class Rolled(Concatenate):
    """Row o of x goes to row o + by, round the end. It reads x as two operands; the first gives the rows that come
    round."""

    by: int

    @property
    def starts(self) -> tuple[int, ...]:
        n = self.shapes[0][self.d]
        return tuple([self.by % n + k * n for k in (-1, 0, 1)]) if n else (0, 0, 0)

    @property
    def rows(self) -> int:
        return self.shapes[0][self.d]
