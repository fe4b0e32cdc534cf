"""The bias of a convolution: added once to whole sums; its gradient sums dy over samples and rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from convgen.algebra.conv import Conv
from convgen.algebra.signature import Made, Operand, Signature
from convgen.operations.row import At, Derived, Operation, read_here


@dataclass(frozen=True)
class AddBias(Operation):
    """y[N, F, ...] + bias[F]."""

    conv: Conv

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        extents, y, bias = _operands(self.conv)
        return (Signature(extents, (y, bias), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        y, bias = operands
        return (y + bias.view(-1, *[1] * len(self.conv.spatial)),)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (dy,) = dys
        return dy if wanted[0] else None, dy.sum([d for d in range(dy.dim()) if d != 1]) if wanted[1] else None

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        y, bias = operands
        return ((y.movedim(1, -1) + bias).movedim(-1, 1),)

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        return {"bias": Derived(SumBias(self.conv), ("dy",))}


@dataclass(frozen=True)
class SumBias(Operation):
    """db[F], the sum of dy[N, F, ...] over samples and rows."""

    conv: Conv

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        extents, y, bias = _operands(self.conv)
        return (Signature(extents, (y,), (bias,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        (dy,) = operands
        return (dy.sum([d for d in range(dy.dim()) if d != 1]),)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        return (dys[0].view(-1, *[1] * len(self.conv.spatial)).expand(read_here(at, 0)),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        (dy,) = operands
        return (dy.movedim(1, 0).flatten(1).sum(1),)


def _operands(conv: Conv) -> tuple[tuple[tuple[str, int], ...], Operand, Operand]:
    """Indices, y and bias; F is (G, F/g) as in the convolution."""
    f = Made(("G", "F"))
    extents = {"N": conv.batch, "G": conv.groups, "F": conv.filters // conv.groups}
    extents |= dict(zip(conv.letters, conv.shape("y")[2:], strict=True))
    made = (Made(("N",)), f, *(Made((i,)) for i in conv.letters))
    return (
        tuple(extents.items()),
        Operand("y", conv.shape("y"), made),
        Operand("bias", (conv.filters,), (f,)),
    )
