"""Operations whose operands pick rows by number: a dimension indexed by a list, embeddings, samples at points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from convgen.algebra.signature import WHOLE, Made, Operand, Signature
from convgen.late import torch
from convgen.operations.row import At, Operation, numbered, own, read_here


@dataclass(frozen=True)
class IndexRows(Operation):
    """The rows of x along dimension d that `index` numbers; negative numbers count from the end. x is whole along d."""

    shape: tuple[int, ...]
    d: int
    index: tuple[int, ...]  # its shape, which takes the place of dimension d

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        d, names = self.d, numbered(len(self.shape) - 1 + len(self.index))
        picked = own(*names[d : d + len(self.index)])
        before, behind = own(*names[:d]), own(*names[d + len(self.index) :])
        out = (*self.shape[:d], *self.index, *self.shape[d + 1 :])
        x = Operand("x", self.shape, (*before, WHOLE, *behind))
        index = Operand("index", self.index, picked, gradient=False, integer=True)
        y = Operand("y", out, (*before, *picked, *behind))
        return (Signature(tuple(zip(names, out, strict=True)), (x, index), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x, index = operands
        found = x.index_select(self.d, self._rows(index))
        return (found.reshape([*x.shape[: self.d], *index.shape, *x.shape[self.d + 1 :]]),)

    def _rows(self, index: Any) -> Any:
        """The numbers of rows from the first one. Numbers of no row stay, so that ATen refuses them."""
        index = index.reshape(-1)
        return torch.where(index < 0, index + self.shape[self.d], index)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return self.local(way, at, *operands), (operands[1],)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (dy,), shape, index = dys, read_here(at, 0), self._rows(kept[0])
        dy = dy.reshape([*shape[: self.d], index.numel(), *shape[self.d + 1 :]])
        return torch.ops.aten.index_select_backward(dy, shape, self.d, index), None

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """Row by row."""
        x, index = operands
        rows = [x.select(self.d, int(i)) for i in index.reshape(-1)]
        return (torch.stack(rows, self.d).reshape(self.signatures[0].results[0].shape),)


@dataclass(frozen=True)
class Embedding(Operation):
    """The row of weight[rows, features] for each number in `index`.

    Attributes:
        padding: the number of the row that gets no gradient; -1 for none.
    """

    rows: int
    features: int
    index: tuple[int, ...]
    padding: int = -1

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        *names, last = numbered(len(self.index) + 1)
        weight = Operand("weight", (self.rows, self.features), (WHOLE, Made((last,))))
        index = Operand("index", self.index, own(*names), gradient=False, integer=True)
        y = Operand("y", (*self.index, self.features), own(*names, last))
        extents = tuple(zip((*names, last), y.shape, strict=True))
        return (Signature(extents, (weight, index), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        weight, index = operands
        return (torch.embedding(weight, index, self.padding),)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return self.local(way, at, *operands), (operands[1],)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        back = torch.ops.aten.embedding_backward
        return back(dys[0], kept[0], self.rows, self.padding, False, False), None

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The product with a matrix that has a one where a row is meant."""
        weight, index = operands
        meant = torch.nn.functional.one_hot(index, self.rows).to(weight.dtype)
        if self.padding >= 0:
            learnt = torch.arange(self.rows)[:, None] != self.padding
            weight = torch.where(learnt, weight, weight.detach())
        return (meant @ weight,)


@dataclass(frozen=True)
class GridSample(Operation):
    """x[N, C, rows...] at the points of grid[N, rows of y..., 2 or 3]; x's rows are whole.

    Attributes:
        mode, padding: ATen's numbers: bilinear, nearest, bicubic; zeros, border, reflection.
    """

    shape: tuple[int, ...]
    out: tuple[int, ...]
    mode: int = 0
    padding: int = 0
    align_corners: bool = False

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        n, c, *rows = numbered(len(self.shape))
        x = Operand("x", self.shape, (*own(n, c), *(WHOLE for _ in rows)))
        grid = Operand("grid", (self.shape[0], *self.out, len(rows)), own(n, *rows, None))
        y = Operand("y", (*self.shape[:2], *self.out), own(n, c, *rows))
        return (Signature(tuple(zip((n, c, *rows), y.shape, strict=True)), (x, grid), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return (torch.grid_sampler(*operands, self.mode, self.padding, self.align_corners),)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return self.local(way, at, *operands), operands

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        aten, settings = torch.ops.aten, (self.mode, self.padding, self.align_corners, [bool(w) for w in wanted])
        back = aten.grid_sampler_2d_backward if len(self.out) == 2 else aten.grid_sampler_3d_backward
        found = back(dys[0], *kept, *settings)
        return tuple(g if asked else None for g, asked in zip(found, wanted, strict=True))

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """Channel by channel."""
        x, grid = operands
        parts = [torch.grid_sampler(c, grid, self.mode, self.padding, self.align_corners) for c in x.split(1, 1)]
        return (torch.cat(parts, 1),)
