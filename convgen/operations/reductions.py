"""Sums and means over dimensions: partial over the axes that split what is summed. Means divide by the global count.

Sums of squares are of float32 at least, and means are made of ranks' means: of numbers that float16 has, sums soon are
none of its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

from convgen.algebra.signature import Operand, Signature
from convgen.late import torch
from convgen.operations.row import At, Operation, numbered, own, read_here


@dataclass(frozen=True)
class Reduce(Operation):
    """The sum, the sum of squares or the mean of x over some dimensions, which are dropped, or kept with extent 1."""

    how: Literal["sum", "squares", "mean"]
    shape: tuple[int, ...]
    over: tuple[int, ...]
    keep: bool = False

    @property
    def name(self) -> str:
        return self.how

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        left = [d for d in range(len(self.shape)) if self.keep or d not in self.over]
        y = Operand(
            "y",
            tuple(1 if d in self.over else self.shape[d] for d in left),
            own(*(None if d in self.over else names[d] for d in left)),
        )
        return (Signature(tuple(zip(names, self.shape, strict=True)), (Operand("x", self.shape, own(*names)),), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        (x,) = operands
        if self.how == "squares":  # one call squares and adds in one pass, and rounds once
            wide = torch.promote_types(x.dtype, torch.float32)
            return (torch.linalg.vector_norm(x, 2, self.over, self.keep, dtype=wide).square(),)
        if self.how == "sum":
            return (x.sum(self.over, keepdim=self.keep),)
        here, whole = (prod(shape[d] for d in self.over) for shape in (x.shape, self.shape))
        y = x.mean(self.over, keepdim=self.keep)
        return (y if here == whole else y * (here / whole),)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return self.local(way, at, *operands), operands if self.how == "squares" else ()

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (dy,), shape = dys, read_here(at, 0)
        if self.how == "mean":
            dy = dy / prod(self.shape[d] for d in self.over)
        dy = dy.reshape([1 if d in self.over else n for d, n in enumerate(shape)])
        return ((2 * dy * kept[0]).to(kept[0].dtype) if self.how == "squares" else dy.expand(shape),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        (y,) = operands
        y = y * y if self.how == "squares" else y
        for d in sorted(self.over, reverse=True):
            y = y.cumsum(d).narrow(d, self.shape[d] - 1, 1)
            y = y / (self.shape[d] if self.how == "mean" else 1)
            y = y if self.keep else y.squeeze(d)
        return (y,)
