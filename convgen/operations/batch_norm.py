"""Batch norm after its moments: coefficients a channel, and y = (x - mean) * a + b.

So the gradients of moments, weight and bias are sums of three numbers a channel, in one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from convgen.algebra.signature import WHOLE, Operand, Signature
from convgen.late import torch
from convgen.operations.moments import batch_normed, centred, centred_back, centred_kept, settled
from convgen.operations.row import At, EpilogueStep, Operation, Passes, numbered, own, read_here


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
        mean, variance = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in operands)
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

    @property
    def rides(self) -> bool:
        return True

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

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        m, *vectors = operands
        count, mean, m2 = m
        inverse = scale = torch.rsqrt(m2 / count + self.eps)
        if self.weight:
            scale = scale * vectors[0].to(scale.dtype)
        shift = vectors[-1].to(scale.dtype) if self.bias else torch.zeros_like(mean)
        of_m, of_w = wanted[0], self.weight and wanted[1]
        read = m if of_m else None, inverse if of_m or of_w else None, vectors[0] if self.weight and of_m else None
        return (torch.stack([mean, scale, shift]),), (*read, *(t.dtype for t in vectors))

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (m, inverse, w, *dtypes), (dmean, dscale, dshift) = kept, dys[0]
        found: list[Any] = [None]
        if wanted[0]:
            count, _, m2 = m
            dr = dscale * w.to(dscale.dtype) if self.weight else dscale
            dv = -0.5 * dr * inverse.pow(3)
            found[0] = torch.stack([-dv * ((m2 / count) / count), dmean, dv / count])
        if self.weight:
            found.append((dscale * inverse).to(dtypes[0]) if wanted[1] else None)
        if self.bias:
            found.append(dshift.to(dtypes[-1]) if wanted[-1] else None)
        return tuple(found)

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

    @property
    def passes(self) -> Passes:
        return "once"

    @property
    def normalises(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        x, y = (Operand(name, self.shape, own(*names)) for name in "xy")
        p = Operand("p", (3, self.shape[1]), own(None, "d1"))
        return (Signature(tuple(zip(names, self.shape, strict=True)), (x, p), (y,)),)

    def as_epilogue(self, k: int) -> EpilogueStep | None:
        return EpilogueStep("({x} - {0}) * {1} + {2}", (("channel", 3),)) if k == 0 else None

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x, (mean, scale, shift) = operands
        return (centred(x, mean, scale, shift),)

    gives_anew = True

    @property
    def leaves_results(self) -> bool:
        return True

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        x, (mean, scale, shift) = operands
        kept = given, mean, scale, ones = centred_kept(x, mean, scale)
        y = torch.batch_norm(given, scale, shift, mean, ones, False, 0.0, 0.0, False)
        return (y if given.dim() == x.dim() else torch.ops.aten._unsafe_view(y, x.shape),), kept

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        dx, *others = centred_back(dys[0], kept, read_here(at, 0), *wanted)
        return dx, torch.stack(others) if wanted[1] else None

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        x, p = operands
        mean, scale, shift = (t.view(-1, *[1] * (x.dim() - 2)) for t in p)
        return ((x - mean) * scale + shift,)


# ---- A batch norm's rows at once, where nothing but moments and the coefficients' gradient moves between them ----


def statistics_of(x: Any) -> Any:
    """(mean, variance) of a rank's x[N, C, ...], flat, of float32 at least; zeros where there is nothing."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if not x.numel():
        return x.new_zeros(2 * x.shape[1])
    return torch.cat(torch.batch_norm_update_stats(x, None, None, 0.0))


def merged_statistics(parts: Any, shares: Any) -> tuple[Any, Any]:
    """Mean and variance of the union of parts[ranks, 2 C], of which each has this share of all elements."""
    channels = parts.shape[1] // 2
    mean, variance = (shares @ parts).view(2, channels)
    apart = parts[:, :channels] - mean
    return mean, variance.add_(shares @ apart.square_())


def normalised(x: Any, statistics: tuple[Any, Any], w: Any, b: Any, eps: float) -> Any:
    """y of x[N, C, ...], its statistics, and weight and bias or None."""
    mean, variance = statistics
    w, b = (None if t is None else t.to(mean.dtype) for t in (w, b))
    return batch_normed(x, w, b, mean, variance, False, 0.0, eps)


def normalised_sums(dy: Any, x: Any, statistics: tuple[Any, Any], a: Any, eps: float) -> Any:
    """A rank's addends of the gradients of [mean, weight, bias], flat: of y as it depends on the mean directly.

    Args:
        a: weight / sqrt(variance + eps).
    """
    mean, variance = statistics
    if not x.numel():
        return torch.cat([torch.zeros_like(mean)] * 3)
    backward = torch.ops.aten.native_batch_norm_backward
    _, dw, db = backward(dy, settled(x), a, mean, variance, None, None, False, eps, [False, True, True])
    return torch.cat([-a * db, dw, db])


def normalised_dx(dy: Any, x: Any, statistics: tuple[Any, Any], a: Any, per_element: Any, eps: float) -> Any:
    """dx, through y and through the statistics, in two passes over memory.

    Args:
        per_element: the gradients of weight and bias, [2, C], over the number of elements of all ranks.
    """
    mean, variance = statistics
    dw, db = per_element * -a
    dx = torch.batch_norm(x, dw, db, mean, variance, False, 0.0, eps, False)
    return dx.addcmul_(dy, a.view(-1, *[1] * (x.dim() - 2)))
