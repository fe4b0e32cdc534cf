"""Softmax and its logarithm: a rank needs all of the index that is summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from convgen.algebra.signature import Operand, Signature
from convgen.late import torch
from convgen.operations.row import At, Operation, numbered, own


@dataclass(frozen=True)
class Softmax(Operation):
    """Softmax of x along dimension d, or its logarithm."""

    shape: tuple[int, ...]
    d: int
    log: bool = False

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        dims = own(*(None if d == self.d else i for d, i in enumerate(names)))
        extents = tuple((i, n) for d, (i, n) in enumerate(zip(names, self.shape, strict=True)) if d != self.d)
        return (Signature(extents, (Operand("x", self.shape, dims),), (Operand("y", self.shape, dims),)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return ((torch.log_softmax if self.log else torch.softmax)(operands[0], self.d),)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        made = self.local(way, at, *operands)
        return made, made

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (dy,), (y,), aten = dys, kept, torch.ops.aten
        back = aten._log_softmax_backward_data if self.log else aten._softmax_backward_data
        return (back(dy, y, self.d, y.dtype),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        y = operands[0] - operands[0].amax(self.d, keepdim=True).detach()
        total = y.exp().sum(self.d, keepdim=True)
        return (y - total.log() if self.log else y.exp() / total,)
