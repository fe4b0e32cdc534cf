"""Rows put elsewhere: pad, slice, flip, roll. Each row of the result is one row of x, or a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from convgen.algebra.relations import Cyclic, Relation, Reverse, Table, Taps
from convgen.algebra.signature import Made, Operand, Signature
from convgen.late import torch
from convgen.operations.row import At, Operation, fit, numbered, on_device, own


@dataclass(frozen=True)
class Take(Operation):
    """Along each dimension row o of y is the row of x that a relation says; `fill` where that leaves x.

    Attributes:
        shape: of x; `out`: of y.
        relations: of one row each (Taps of one tap, Reverse, Cyclic, Table); None: the row itself.
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
            (lo, hi), (first, last) = at.blocks[f"d{d}"], at.inside[0][d]
            match relation:
                case None | Cyclic():
                    pass
                case Reverse():
                    y = y.flip(d)
                case Taps(stride=stride, pad=pad):
                    begin, end = (min(max(-(-(r + pad) // stride), lo), hi) for r in (first, last))
                    start = begin * stride - pad - first
                    y = y[(slice(None),) * d + (slice(start, start + (end - begin) * stride, stride),)]
                    inner = [(0, n) for n in y.shape[d + 1 :]]
                    y = fit(y, [(begin, end), *inner], [(lo, hi), *inner], self.fill)
                case _:
                    rows = [relation.row(o)[0] - first for o in range(lo, hi)]
                    y = y.index_select(d, on_device(tuple(rows), torch.int64, y.device))
        return (y,)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """Row by row, as the relations are defined, with one row of `fill` behind x."""
        (y,) = operands
        for d, relation in enumerate(self.relations):
            if relation is not None:
                n, (*rest,) = y.shape[d], y.shape
                rest[d] = 1
                rows = [relation.row(o)[0] for o in range(self.out[d])]
                rows = [r % n if isinstance(relation, Cyclic) else r if 0 <= r < n else n for r in rows]
                y = torch.cat([y, torch.full(rest, self.fill, dtype=y.dtype)], d)
                y = y.index_select(d, torch.tensor(rows, dtype=torch.int64))
        return (y,)


PadMode = Literal["constant", "reflect", "replicate", "circular"]


def padded(shape: Sequence[int], sides: Sequence[tuple[int, int]], mode: PadMode, fill: float = 0.0) -> Take:
    """`sides`: rows more below and above, of each dimension; negative cuts."""
    relations: list[Relation | None] = []
    for n, (below, above) in zip(shape, sides, strict=True):
        rows = range(-below, n + above)
        match mode:
            case _ if below == above == 0:
                relations.append(None)
            case "constant":
                relations.append(Taps(pad=below))
            case "circular":
                relations.append(Cyclic(below, n))
            case "replicate":
                relations.append(_table(min(max(r, 0), n - 1) for r in rows))
            case "reflect":
                relations.append(_table(n - 1 - abs(n - 1 - abs(r)) for r in rows))
    out = tuple(n + below + above for n, (below, above) in zip(shape, sides, strict=True))
    return Take(tuple(shape), out, tuple(relations), fill if mode == "constant" else 0.0)


def sliced(shape: Sequence[int], d: int, start: int, stop: int, step: int = 1) -> Take:
    """Rows start, start + step, ... below stop; 0 <= start <= stop <= rows."""
    return _along(shape, d, len(range(start, stop, step)), Taps(stride=step, pad=-start))


def flipped(shape: Sequence[int], d: int) -> Take:
    return _along(shape, d, shape[d], Reverse(shape[d]))


def rolled(shape: Sequence[int], d: int, by: int) -> Take:
    """Row o goes to row o + by, round the end."""
    return _along(shape, d, shape[d], Cyclic(by, shape[d]))


def _along(shape: Sequence[int], d: int, rows: int, relation: Relation) -> Take:
    out, relations = list(shape), list[Relation | None]([None] * len(shape))
    out[d], relations[d] = rows, relation
    return Take(tuple(shape), tuple(out), tuple(relations))


def _table(rows: Any) -> Table:
    return Table(tuple((r, r + 1) for r in rows))


@dataclass(frozen=True)
class Concatenate(Operation):
    """Tensors of these shapes one behind the other along dimension d. An operand without rows here is no addend."""

    shapes: tuple[tuple[int, ...], ...]
    d: int

    @property
    def hands_gradient_on(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names, inputs, start = numbered(len(self.shapes[0])), list[Operand](), 0
        for k, shape in enumerate(self.shapes):
            dims = [Made((i,), Taps(pad=start) if d == self.d else None) for d, i in enumerate(names)]
            inputs.append(Operand(f"x{k}", shape, tuple(dims)))
            start += shape[self.d]
        out = (*self.shapes[0][: self.d], start, *self.shapes[0][self.d + 1 :])
        y = Operand("y", out, own(*names))
        return (Signature(tuple(zip(names, out, strict=True)), tuple(inputs), (y,), runs_empty=True),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return (torch.cat(operands, self.d),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """Row by row."""
        return (torch.stack([row for t in operands for row in t.unbind(self.d)], self.d),)
