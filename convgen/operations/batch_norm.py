"""Batch norm after its moments: three coefficients for each channel, and y = (x - mean) * a + b.

So the gradients of moments, weight and bias are sums of three numbers a channel, in one message. Each part
(averaged.py) has its own coefficients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from convgen.algebra.signature import Operand, Signature
from convgen.late import torch
from convgen.operations.averaged import Averaged
from convgen.operations.moments import batch_normed, by_channel, centred, centred_back, centred_kept, settled
from convgen.operations.row import At, Epilogue, EpilogueStep, Operation, Passes, numbered, own, summed_to


@dataclass(frozen=True)
class Coefficients(Operation):
    """[mean, weight / sqrt(variance + eps), bias] of moments [count, mean, M2].

    Attributes:
        extents: the moments' indices and extents; C is the channels'.
        weight, bias: whether there are such operands, in this order.
    """

    extents: tuple[tuple[str, int], ...]
    eps: float
    weight: bool = True
    bias: bool = True

    @property
    def rides(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        indices, shape = zip(*self.extents, strict=True)
        names = [name for name, there in (("w", self.weight), ("b", self.bias)) if there]
        vectors = [Operand(name, (shape[self._channels],), own("C")) for name in names]
        m, p = (Operand(name, (3, *shape), own(None, *indices)) for name in "mp")
        return (Signature(self.extents, (m, *vectors), (p,)),)

    @property
    def _channels(self) -> int:
        return [i for i, _ in self.extents].index("C")

    def _wide(self, vector: Any, like: Any) -> Any:
        vector = vector.to(like.dtype)
        return (
            vector
            if vector.dim() == like.dim()
            else vector.view([-1 if k == self._channels else 1 for k in range(like.dim())])
        )

    def _inverse(self, m: Any) -> Any:
        """1 / deviation; for a part without elements it is some number that nothing reads."""
        count, _, m2 = m
        if len(self.extents) == 1:
            return torch.rsqrt(m2 / count + self.eps)
        return torch.rsqrt(torch.where(count > 0, m2 / count.clamp(min=1) + self.eps, 1.0))

    def _of(self, m: Any, inverse: Any, vectors: Sequence[Any]) -> Any:
        mean, scale = m[1], inverse
        if self.weight:
            scale = scale * self._wide(vectors[0], scale)
        shift = self._wide(vectors[-1], scale).expand_as(mean) if self.bias else torch.zeros_like(mean)
        return torch.stack([mean, scale, shift])

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        m, *vectors = operands
        return (self._of(m, self._inverse(m), vectors),)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        m, *vectors = operands
        inverse, of_m, of_w = self._inverse(m), wanted[0], self.weight and wanted[1]
        read = m if of_m else None, inverse if of_m or of_w else None, vectors[0] if self.weight and of_m else None
        return (self._of(m, inverse, vectors),), (*read, *(t.dtype for t in vectors))

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (m, inverse, w, *dtypes), (dmean, dscale, dshift) = kept, dys[0]
        found: list[Any] = [None]
        if wanted[0]:
            count, _, m2 = m
            dr = dscale * self._wide(w, dscale) if self.weight else dscale
            dv = -0.5 * dr * inverse.pow(3)
            if len(self.extents) > 1:
                dv, count = torch.where(count > 0, dv, 0), count.clamp(min=1)
            found[0] = torch.stack([-dv * ((m2 / count) / count), dmean, dv / count])
        if self.weight:
            found.append(self._vector(dscale * inverse, dtypes[0]) if wanted[1] else None)
        if self.bias:
            found.append(self._vector(dshift, dtypes[-1]) if wanted[-1] else None)
        return tuple(found)

    def _vector(self, gradient: Any, dtype: Any) -> Any:
        parts = [k for k in range(gradient.dim()) if k != self._channels]
        return (gradient.sum(parts) if parts else gradient).to(dtype)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        m, *vectors = operands
        one = torch.ones_like(m[0])
        weights = self._wide(vectors[0], m[0]) * one if self.weight else one
        biases = self._wide(vectors[-1], m[0]) * one if self.bias else 0 * one
        spread = torch.where(m[0] > 0, m[2] / m[0].clamp(min=1) + self.eps, one)
        return (torch.stack([m[1], weights * spread**-0.5, biases]),)


@dataclass(frozen=True)
class Centred(Operation):
    """(x - mean) * a + b of x[N, C, ...], with coefficients [mean, a, b] for each channel, or each channel of a
    part."""

    of: Averaged

    @property
    def passes(self) -> Passes:
        return "once"

    @property
    def normalises(self) -> bool:
        return True

    @property
    def joins(self) -> bool:
        return not self.of.parts

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.of.shape))
        x, y = (Operand(name, self.of.shape, own(*names)) for name in "xy")
        return (Signature(tuple(zip(names, self.of.shape, strict=True)), (x, self.of.read("p")), (y,)),)

    def as_epilogue(self, k: int) -> EpilogueStep | None:
        if k or self.of.parts:
            return None
        return EpilogueStep("({x} - {0}) * {1} + {2}", (("channel", 3),))

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x, p = operands
        mean, scale, shift = self.of.spread(at, 1, p)
        if by_channel(x, scale):
            return (centred(x, mean.flatten(), scale.flatten(), shift.flatten()),)
        return (((x - mean) * scale + shift).to(x.dtype),)

    gives_anew = True

    @property
    def leaves_results(self) -> bool:
        return True

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        x, p = operands
        mean, scale, shift = self.of.spread(at, 1, p)
        if not by_channel(x, scale):
            return self.local(way, at, x, p), (x if wanted[1] else None, mean, scale)
        kept = given, mean, scale, ones = centred_kept(x, mean.flatten(), scale.flatten())
        y = torch.batch_norm(given, scale, shift.flatten(), mean, ones, False, 0.0, 0.0, False)
        return (y if given.dim() == x.dim() else torch.ops.aten._unsafe_view(y, x.shape),), kept

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (dy,), (x, mean, scale, *ones) = dys, kept
        if ones:
            dx, *others = centred_back(dy, kept, dy.shape, *wanted)
            shape = [-1, *[1] * (dy.dim() - 2)]
            return dx, self.of.unspread(at, 1, [t.view(shape)[None] for t in others]) if wanted[1] else None
        dx = (dy.to(scale.dtype) * scale).to(dy.dtype) if wanted[0] else None
        if not wanted[1]:
            return dx, None
        wide = dy.to(scale.dtype)
        found = (summed_to(t, scale.shape) for t in (-wide * scale, wide * (x - mean), wide))
        return dx, self.of.unspread(at, 1, tuple(found))

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        x, (mean, scale, shift) = operands[0], self.of.at_elements(operands[1])
        return ((x - mean) * scale + shift,)


# ---- Kernels of a GPU ----

IMAGES = (4, 5)  # numbers of dimensions of tensors with channels last on a GPU
NORM_KERNELS: dict[Epilogue, Any] = {}  # a package's modules of norms' kernels, by the steps that they do behind one


def steps_behind(
    value: str, reader: Callable[[str], tuple[Any, Operation, Sequence[str], str] | None]
) -> list[tuple[Any, Operation, int]]:
    """The rows that a norm's kernels do behind it: an activation of the norm's result, or of its sum with another
    tensor, with casts or without. Each comes with its operation and the number of the operand that the row before
    makes.

    Args:
        reader: takes a value and gives the only row that reads it, its operation, and what it reads and makes; None
            where several rows read it, or anything moves.
    """
    found: list[tuple[Any, Operation, int]] = []
    sums = 0
    while sums < 2 and (one := reader(value)) is not None:
        who, operation, reads, makes = one
        k = list(reads).index(value)
        found.append((who, operation, k))
        value = makes
        if operation.casts_to and len(found) > 1 and not found[-2][1].casts_to:  # the cast is a sum's addend
            continue
        step = operation.as_epilogue(k) if list(reads).count(reads[k]) == 1 else None
        if step is not None and len(reads) == 1 and back_behind(operation, sums) is not None:
            return found
        if step is None or step.back != "sum" or step.operands != (("element", 1),):
            return []
        sums += 1
    return []


def back_behind(operation: Operation, sums: int) -> EpilogueStep | None:
    """The step for the gradient of an activation behind a norm and so many sums. It reads the activation's result, or
    the normalised value, which a kernel makes again."""
    return operation.back_of_result() or (None if sums else operation.back_of_input())


def chain_of(found: Sequence[tuple[Any, Operation, int]]) -> Epilogue:
    """The steps of the rows behind a norm; casts are left out."""
    steps = (operation.as_epilogue(k) for _, operation, k in found if not operation.casts_to)
    return tuple([step for step in steps if step is not None])


# ---- A batch norm's rows at once, where nothing but moments and the coefficients' gradient moves between them ----


def statistics_of(x: Any) -> Any:
    """Mean and variance of a rank's x[N, C, ...], in one flat tensor, float32 at least; zeros for an empty x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if not x.numel():
        return x.new_zeros(2 * x.shape[1], dtype=wide)
    x = x.to(wide) if x.is_cpu else x  # a GPU sums in a wide type, whatever x's is
    return torch.cat(torch.batch_norm_update_stats(x, None, None, 0.0))


def merged_statistics(parts: Any, shares: Any) -> tuple[Any, Any]:
    """Mean and variance of the union of parts[ranks, 2 C]; `shares` is each part's share of all elements."""
    channels = parts.shape[1] // 2
    mean, variance = (shares @ parts).view(2, channels)
    apart = parts[:, :channels] - mean
    return mean, variance.add_(shares @ apart.square_())


def normalised(x: Any, statistics: tuple[Any, Any], w: Any, b: Any, eps: float) -> Any:
    """The norm's y, from x[N, C, ...], its statistics, and weight and bias or None."""
    mean, variance = statistics
    w, b = (None if t is None else t.to(mean.dtype) for t in (w, b))
    return batch_normed(x, w, b, mean, variance, False, 0.0, eps)


def normalised_sums(dy: Any, x: Any, statistics: tuple[Any, Any], a: Any, eps: float) -> Any:
    """A rank's addends of the gradients of [mean, weight, bias], flat; the mean's is the part that comes through y
    directly.

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
    """The gradient dx, through y and through the statistics, in two passes over memory.

    Args:
        per_element: the gradients of weight and bias, [2, C], divided by the number of elements of all ranks.
    """
    mean, variance = statistics
    if not x.numel():
        return torch.empty_like(x)
    dw, db = per_element * -a
    dx = torch.batch_norm(x, dw, db, mean, variance, False, 0.0, eps, False)
    return dx.addcmul_(dy, a.view(-1, *[1] * (x.dim() - 2)))
