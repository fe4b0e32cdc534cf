"""Batch norm after its moments: coefficients a channel, and y = (x - mean) * a + b.

So the gradients of moments, weight and bias are sums of three numbers a channel, in one message.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from convgen.algebra.signature import WHOLE, Operand, Signature
from convgen.late import torch
from convgen.operations.moments import centred
from convgen.operations.row import At, Operation, numbered, own


@dataclass(frozen=True)
class RunningMoments(Operation):
    """Moments [1, mean, variance] of buffers, for evaluation."""

    channels: int

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        (c,) = own("C")
        buffers = tuple(Operand(name, (self.channels,), (c,), gradient=False) for name in ("mean", "variance"))
        m = Operand("m", (3, self.channels), (WHOLE, c), gradient=False)
        return (Signature((("C", self.channels),), buffers, (m,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        mean, variance = operands
        return (torch.stack([torch.ones_like(mean), mean, variance]),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        mean, variance = operands
        return (torch.stack([variance * 0 + 1, mean, variance]),)


@dataclass(frozen=True)
class Coefficients(Operation):
    """[mean, weight / sqrt(variance + eps), bias] of moments [count, mean, M2].

    Attributes:
        weight, bias: whether there are such operands, in this order.
    """

    channels: int
    eps: float
    weight: bool = True
    bias: bool = True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        (c,) = own("C")
        names = [name for name, there in (("w", self.weight), ("b", self.bias)) if there]
        vectors = [Operand(name, (self.channels,), (c,)) for name in names]
        m, p = (Operand(name, (3, self.channels), (WHOLE, c)) for name in "mp")
        return (Signature((("C", self.channels),), (m, *vectors), (p,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        m, *vectors = operands
        count, mean, m2 = m
        scale = torch.rsqrt(m2 / count + self.eps)
        if self.weight:
            scale = scale * vectors[0].to(scale.dtype)
        shift = vectors[-1].to(scale.dtype) if self.bias else torch.zeros_like(mean)
        return (torch.stack([mean, scale, shift]),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """Channel by channel."""
        m, *vectors = operands
        weights = vectors[0] if self.weight else torch.ones_like(m[0])
        biases = vectors[-1] if self.bias else torch.zeros_like(m[0])
        rows = [
            torch.stack([mean, w / (m2 / count + self.eps).sqrt(), b])
            for (count, mean, m2), w, b in zip(m.unbind(1), weights, biases, strict=True)
        ]
        return (torch.stack(rows, 1),)


@dataclass(frozen=True)
class Centred(Operation):
    """(x - mean) * a + b of x[N, C, ...] and coefficients [mean, a, b] a channel."""

    shape: tuple[int, ...]

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        x, y = (Operand(name, self.shape, own(*names)) for name in "xy")
        p = Operand("p", (3, self.shape[1]), own(None, "d1"))
        return (Signature(tuple(zip(names, self.shape, strict=True)), (x, p), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x, (mean, scale, shift) = operands
        return (centred(x, mean, scale, shift),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        x, p = operands
        mean, scale, shift = (t.view(-1, *[1] * (x.dim() - 2)) for t in p)
        return ((x - mean) * scale + shift,)
