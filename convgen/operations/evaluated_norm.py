"""Batch norm in evaluation as one row, by the numbers for each channel that buffers hold, without moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from convgen.algebra.signature import Operand, Signature
from convgen.late import torch
from convgen.operations.batch_norm import normalised
from convgen.operations.element_texts import ElementStep
from convgen.operations.moments import as_normed
from convgen.operations.row import At, EpilogueStep, Operation, Passes, numbered, own


@dataclass(frozen=True)
class EvaluatedNorm(Operation):
    """(x - mean) / sqrt(variance + eps) * weight + bias of x[N, C, ...], with vectors over channels.

    Attributes:
        weight, bias: whether there are such operands, in this order.
    """

    shape: tuple[int, ...]
    eps: float
    weight: bool = True
    bias: bool = True

    gives_anew = True

    @property
    def passes(self) -> Passes:
        return "once"

    @property
    def normalises(self) -> bool:
        return True

    @property
    def joins(self) -> bool:
        return True

    @property
    def leaves_results(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        x, y = (Operand(name, self.shape, own(*names)) for name in "xy")
        there = {"mean": True, "variance": True, "w": self.weight, "b": self.bias}
        vectors = [
            Operand(name, self.shape[1:2], own(names[1]), gradient=name in "wb") for name, one in there.items() if one
        ]
        return (Signature(tuple(zip(names, self.shape, strict=True)), (x, *vectors), (y,)),)

    def element_step(self) -> ElementStep:
        inverse = f"tl.rsqrt({{2}} + {self.eps!r})"
        scale = f"{inverse} * {{3}}" if self.weight else inverse
        text = f"({{0}} - {{1}}) * {scale}" + f" + {{{3 + self.weight}}}" * self.bias
        backs = f"{{dy}} * {scale}", "0.0", "0.0"  # buffers have no gradient
        backs += (f"{{dy}} * ({{0}} - {{1}}) * {inverse}",) * self.weight + ("{dy}",) * self.bias
        return ElementStep(text, backs)

    def as_epilogue(self, k: int) -> EpilogueStep | None:
        if k:
            return None
        vectors = 2 + self.weight + self.bias
        text = self.element_step().text.format("{x}", *(f"{{{n}}}" for n in range(vectors)))
        return EpilogueStep(text, (("channel", 1),) * vectors)

    def _named(self, vectors: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """Mean and variance, in float32 at least, then weight and bias, or None for those that it lacks."""
        mean, variance, *more = vectors
        wide = torch.promote_types(mean.dtype, torch.float32)
        return mean.to(wide), variance.to(wide), more[0] if self.weight else None, more[-1] if self.bias else None

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x, *vectors = operands
        mean, variance, w, b = self._named(vectors)
        return (normalised(x, (mean, variance), w, b, self.eps) if x.numel() else x.clone(),)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        x, *vectors = operands
        mean, variance, w, b = self._named(vectors)
        given = as_normed(x) if any(wanted[3:]) else None
        return self.local(way, at, *operands), (given, mean, variance, w, None if b is None else b.dtype)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (dy,), (x, mean, variance, w, of_b) = dys, kept
        wide = None if w is None else w.to(mean.dtype)
        if x is None or not dy.numel():
            scale = torch.rsqrt(variance + self.eps)
            scale = scale if wide is None else scale * wide
            dx = (dy.to(scale.dtype) * scale.view(-1, *[1] * (dy.dim() - 2))).to(dy.dtype) if wanted[0] else None
            vectors = torch.zeros_like(mean), torch.zeros_like(mean)
        else:
            asked = [wanted[0], any(wanted[3:]) and self.weight, any(wanted[3:]) and self.bias]
            backward = torch.ops.aten.native_batch_norm_backward
            given = dy.to(x.dtype).reshape(x.shape), x, wide, mean, variance
            dx, *vectors = backward(*given, None, None, False, self.eps, asked)
            dx = None if dx is None else dx.reshape(dy.shape).to(dy.dtype)
        kinds = [(vectors[0], w.dtype)] if w is not None else []
        kinds += [(vectors[1], of_b)] if of_b is not None else []
        found = [t.to(kind) if want else None for (t, kind), want in zip(kinds, wanted[3:], strict=True)]
        return dx, None, None, *found

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        x, *vectors = operands
        shape = [-1, *[1] * (x.dim() - 2)]
        mean, variance, *more = (t.view(shape) for t in vectors)
        y = (x - mean) * (variance + self.eps) ** -0.5
        y = y * more[0] if self.weight else y
        return (y + more[-1] if self.bias else y,)
