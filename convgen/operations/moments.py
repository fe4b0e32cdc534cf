"""Norms: moments of the elements that share them, merged over ranks, and elements normalised by them.

Moments are (count, mean, sum of squared deviations M2): disjoint parts merge without cancellation, where a sum of
squares loses the variance once the mean is large. A merge is no sum: dx has a row of its own, pointwise in the merged
moments, dx = dmean / n + 2 (x - mean) dM2.

Source: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979,
Eqs. 2.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, cast

from convgen.algebra.relations import Blocks, Ratio
from convgen.algebra.signature import WHOLE, Made, Operand, Signature
from convgen.late import torch
from convgen.operations.averaged import Averaged
from convgen.operations.row import At, Derived, Operation, numbered, numbers, on_device, own, read_here, summed_to


@dataclass(frozen=True)
class Moments(Operation):
    """The moments (count, mean, M2) of x, in float32 at least. Groups of channels are split in two ways: by whole
    groups, or by channels, cut anywhere.
    """

    of: Averaged

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        of, names = self.of, numbered(len(self.of.shape))
        kept = [of.index(d) for d in of.keep]
        if of.size == 1:
            indices = [f"p{d}" if d in of.blocks else name for d, name in enumerate(names)]
            extents = (of.blocks[d].count if d in of.blocks else n for d, n in enumerate(of.shape))
            reads = tuple(Made((i,), of.blocks.get(d)) for d, i in enumerate(indices))
            return (self._signature(zip(indices, extents, strict=True), reads, own(*kept)),)
        groups = (n // of.size if d == 1 else n for d, n in enumerate(of.shape))
        reads = tuple(Made((i,), Ratio(1, 1, of.size) if d == 1 else None) for d, i in enumerate(names))
        summed = (None if d == 1 else names[d] for d in of.keep)
        return (
            self._signature(zip(names, groups, strict=True), reads, own(*kept)),
            self._signature(zip(names, of.shape, strict=True), own(*names), own(*summed)),
        )

    def _signature(self, extents: Iterable[tuple[str, int]], x: tuple[Made, ...], m: tuple[Made, ...]) -> Signature:
        return Signature(
            tuple(extents),
            (Operand("x", self.of.shape, x),),
            (Operand("m", self.of.moments, (WHOLE, *m)),),
            reduction="merge",
        )

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        (x,), of = operands, self.of
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if of.parts:
            return (self._of_parts(at, x),)
        averaged = [d for d in range(len(of.shape)) if d not in of.keep]
        differentiated = torch.is_grad_enabled() and x.requires_grad  # on one rank; else dx is a row of its own
        if of.keep == (1,) and of.size == 1 and not differentiated:
            return (moments_by_channel(x),)
        k = 1 + of.keep.index(1) if of.size > 1 else 0
        if way == 0 and k:
            x, averaged = x.unflatten(1, (-1, of.size)), [2, *(d + 1 for d in averaged)]
        if averaged and not differentiated and (rows := of.leading(x)) is not None and (way == 0 or not k):
            return (moments_by_channel(rows).view(3, *x.shape[: len(of.keep)]),)
        if way == 0 or not k:
            return (moments_of(x, averaged),)
        group = numbers(at.blocks["d1"], x) // of.size
        return (_merged(moments_of(x, averaged), k, group, of.moments[k]),)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        (m,) = self.local(way, at, *operands)
        return (m,), (m, operands[0]) if self.of.count > 1 or self.of.parts else (operands[0].dtype,)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        """The vjp of the rank's own moments: dmean / n + 2 (x - mean) dM2."""
        (dm,) = dys
        if len(kept) == 1:
            return (dm[1].reshape(read_here(at, 0)).to(kept[0]),)
        m, x = kept
        (count, mean, _), (_, dmean, dm2) = self._at_elements(way, at, m), self._at_elements(way, at, dm)
        return ((dmean / count + 2 * (x - mean) * dm2).to(x.dtype),)

    def _at_elements(self, way: int, at: At, moments: Any) -> Any:
        """The rank's own moments for each of x's elements: [3, ...], with extents of 1 where x is averaged."""
        of, shape = self.of, read_here(at, 0)
        if of.size > 1:
            lo, hi = at.inside[0][1]
            groups = numbers((lo, hi), moments) // of.size - (at.blocks["d1"][0] if way == 0 else 0)
            moments = moments.index_select(1 + of.keep.index(1), groups)
        for d, blocks in of.parts:
            first = at.blocks[f"p{d}"][0]
            which = tuple(blocks.number(r) - first for r in range(*at.inside[0][d]))
            moments = moments.index_select(1 + of.keep.index(d), on_device(which, torch.int64, moments.device))
        return moments.reshape(3, *(n if d in of.keep else 1 for d, n in enumerate(shape)))

    def _of_parts(self, at: At, x: Any) -> Any:
        found = [_of_part(x[box]) for box in self._boxes(at)]
        counts = [at.extent(f"p{d}") for d, _ in self.of.parts]
        m = torch.stack(found, -1).unflatten(-1, counts)  # [3, C, parts...]
        there = tuple(1 + self.of.keep.index(d) for d, _ in self.of.parts)
        return m.movedim(tuple(range(2, 2 + len(counts))), there)

    def _boxes(self, at: At) -> Iterator[tuple[slice, ...]]:
        """The boxes of the parts of x that are here, part after part, the last dimension's fastest."""
        of = self.of
        for at_parts in product(*(range(*at.blocks[f"p{d}"]) for d, _ in of.parts)):
            box = [slice(None)] * len(of.shape)
            for (d, blocks), o in zip(of.parts, at_parts, strict=True):
                (lo, hi), (first, last) = blocks.block(o), at.inside[0][d]
                box[d] = slice(max(lo, first) - first, max(min(hi, last), lo, first) - first)
            yield tuple(box)

    def counts(self, way: int, at: At) -> Any:
        """The counts of a rank's part. They follow from its blocks, so they needn't travel."""
        of = self.of
        rest = prod(at.extent(f"d{d}") for d in range(len(of.shape)) if d not in of.keep)
        shape = [at.extent(of.index(d)) for d in of.keep]
        found = torch.full([1] * len(shape), rest * (of.size if way == 0 else 1))
        for k, d in enumerate(of.keep):
            if d in of.blocks:
                (first, last), blocks = at.inside[0][d], (of.blocks[d].block(o) for o in range(*at.blocks[f"p{d}"]))
                rows = torch.tensor([max(min(hi, last) - max(lo, first), 0) for lo, hi in blocks], dtype=found.dtype)
            elif d == 1 and way == 1:
                rows = torch.bincount(numbers(at.blocks["d1"], torch.empty(0)) // of.size, minlength=of.moments[1 + k])
                shape[k] = len(rows)
            else:
                continue
            found = found * rows.view([-1 if j == k else 1 for j in range(len(shape))])
        return found.expand(shape)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """Moments from the sum and the sum of squares, which is exact enough in float64."""
        (x,), of = operands, self.of
        if of.parts:
            return (self._reference_of_parts(x),)
        x, count = of.groups(x), of.count
        total, squares = x.sum(-1), x.square().sum(-1)
        return (torch.stack([torch.full_like(total, count), total / count, squares - total**2 / count]),)

    def _reference_of_parts(self, x: Any) -> Any:
        """Moments from sums of each part's elements, by the number of the part of every element."""
        of = self.of
        sums = torch.stack([torch.ones_like(x), x, x.square()])
        for d in (d for d in range(len(of.shape)) if d != 1):
            blocks = of.blocks.get(d, Blocks(of.shape[d], (1,)))
            which = torch.tensor([[float(r in blocks.row(o)) for r in range(of.shape[d])] for o in range(blocks.count)])
            sums = (sums.movedim(1 + d, -1) @ which.to(x.dtype).T).movedim(-1, 1 + d)
        count, total, squares = sums.reshape(of.moments)
        mean = total / count.clamp(min=1)
        return torch.stack([count, mean, squares - count * mean**2])

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        return {"x": Derived(MomentsGradient(self.of), ("dm", "m", "x"))}


def _of_part(x: Any) -> Any:
    """The moments [3, C] of x[N, C, ...]."""
    dims = [0, *range(2, x.dim())]
    if not x.numel():
        return x.new_zeros(3, x.shape[1]) + x.sum()
    differentiated = torch.is_grad_enabled() and x.requires_grad  # on one rank; else dx is a row of its own
    return moments_of(x, dims) if differentiated else moments_by_channel(x)


def moments_of(x: Any, dims: list[int]) -> Any:
    """The moments of a tensor over all of `dims` at once, in two passes."""
    if not dims:
        return torch.stack([torch.ones_like(x), x, torch.zeros_like(x)])
    variance, mean = torch.var_mean(x, dims, correction=0)
    count = prod(x.shape[d] for d in dims)
    return torch.stack([torch.full_like(mean, count), mean, variance * count])


def moments_by_channel(x: Any) -> Any:
    """The moments [3, C] of x[N, C, ...], without a gradient: several times faster than torch.var_mean.

    For one sample on a CPU a group norm makes them, another four times faster (torch 2.13.0), though it also writes the
    normalised values, and as exact as a group norm is. It gives 1 / deviation, which is infinite where the deviation is
    0.
    """
    by_rows = x.shape[0] == 1 and x.is_cpu and x.dtype in (torch.float32, torch.float64)
    if by_rows and x.is_contiguous():
        rows = x.shape[1]
        _, mean, inverse = torch.native_group_norm(x.detach(), None, None, rows, 1, x.numel() // rows, 1, 0.0)
        mean, variance = mean.flatten(), inverse.flatten().reciprocal().square()
    else:
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    count = x.numel() // x.shape[1]
    return torch.stack([torch.full_like(mean, count), mean, variance * count])


def settled(x: Any) -> Any:
    """x[N, C, ...] as ATen's batch norm takes it.

    On a CPU (torch 2.13.0) its gradients are wrong without a word for one sample with channels last whose first
    stride is that of a view, beside dy with channels first.
    """
    odd = x.dim() > 3 and x.shape[0] == 1 and x.stride(0) != x.numel()
    return x.contiguous() if odd else x


def by_channel(x: Any, t: Any) -> bool:
    """Whether t, which broadcasts over x[N, C, ...], has one number for each channel."""
    return t.numel() == t.shape[1] == x.shape[1]


def centred(x: Any, mean: Any, scale: Any, shift: Any) -> Any:
    """(x - mean) * scale + shift by channel, by ATen's fused batch norm.

    ATen gives its statistics no gradient. The mean's comes by the shift: `scale * (mean - fixed)` is zero, and its
    gradient is the mean's.
    """
    fixed, scale = mean.detach().contiguous(), scale.contiguous()
    shift = shift - scale * (mean - fixed)
    return batch_normed(x, scale, shift, fixed, torch.ones_like(fixed), False, 0.0, 0.0)


def centred_kept(x: Any, mean: Any, scale: Any) -> tuple[Any, ...]:
    """The tensors that `centred_back` reads: x as ATen takes it, and vectors over channels."""
    mean = mean.contiguous()
    return as_normed(x), mean, scale.contiguous(), torch.ones_like(mean)


def centred_back(
    dy: Any, kept: Sequence[Any], shape: Sequence[int], of_x: bool, of_others: bool
) -> tuple[Any, Any, Any, Any]:
    """The gradients of x, in its shape, and of mean, scale and shift."""
    x, mean, scale, ones = kept
    backward, asked = torch.ops.aten.native_batch_norm_backward, [of_x, of_others, of_others]
    dx, dscale, dshift = backward(
        dy.reshape(x.shape), x, scale, mean, ones, *[x.new_empty(0, dtype=mean.dtype)] * 2, False, 0.0, asked
    )
    dx = dx.reshape(shape) if of_x else None
    return (dx, -dshift * scale, dscale, dshift) if of_others else (dx, None, None, None)


def batch_normed(x: Any, w: Any, b: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float) -> Any:
    """ATen's batch norm with the right gradients. On a CPU ATen's backward takes rows of statistics as contiguous, and
    with one sample or one channel and several spatial dimensions it mixes up a contiguous operand and one with channels
    last."""
    given = as_normed(x)
    y = torch.batch_norm(given, w, b, mean, variance, training, momentum, eps, False)
    if given.dim() == x.dim():
        return y
    return torch.ops.aten._unsafe_view(y, x.shape)  # not a view to autograd, so it may be changed in place


def as_normed(x: Any) -> Any:
    """x as `batch_normed` hands it to ATen."""
    x = settled(x)
    return x.flatten(2) if x.dim() > 3 and 1 in x.shape[:2] else x


def _merged(m: Any, k: int, group: Any, groups: int) -> Any:
    """Moments along dimension k merged into those of their groups; a group without parts has zeros."""
    shape = list(m.shape)
    shape[k] = groups

    def total(t: Any) -> Any:
        return t.new_zeros(shape[1:]).index_add(k - 1, group, t)

    count = total(m[0])
    mean = total(m[0] * m[1]) / count.clamp(min=1)
    apart = m[1] - mean.index_select(k - 1, group)
    return torch.stack([count, mean, total(m[2] + m[0] * apart.square())])


@dataclass(frozen=True)
class MomentsGradient(Operation):
    """The gradient dx, from the gradient of the merged moments, the moments, and x."""

    of: Averaged

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.of.shape))
        x, dx = (Operand(name, self.of.shape, own(*names)) for name in ("x", "dx"))
        extents = tuple(zip(names, self.of.shape, strict=True))
        return (Signature(extents, (self.of.read("dm"), self.of.read("m"), x), (dx,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        _, dmean, dm2 = self.of.spread(at, 0, operands[0])
        count, mean, _ = self.of.spread(at, 1, operands[1])
        if by_channel(operands[2], dm2):  # ATen does (x - mean) * a + b at once
            return (centred(operands[2], mean.flatten(), 2 * dm2.flatten(), (dmean / count).flatten()),)
        if (rows := self.of.leading(operands[2], mean, dm2, dmean)) is not None:
            scale, shift = 2 * dm2, dmean / count
            return (centred(rows, mean.flatten(), scale.flatten(), shift.flatten()).view(operands[2].shape),)
        return ((dmean / count + 2 * (operands[2] - mean) * dm2).to(operands[2].dtype),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """Autograd's gradient of the moments, where m is the moments of x."""
        x, dm, m = operands[2], self.of.at_elements(operands[0]), self.of.at_elements(operands[1])
        return (dm[1] / m[0] + 2 * x * dm[2] - 2 * m[1] * dm[2],)


@dataclass(frozen=True)
class Normalise(Operation):
    """(x - mean) / sqrt(M2 / count + eps); `rms`: x / sqrt(mean^2 + M2 / count + eps)."""

    of: Averaged
    eps: float = 1e-5
    rms: bool = False

    @property
    def normalises(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.of.shape))
        x, y = (Operand(name, self.of.shape, own(*names)) for name in "xy")
        return (Signature(tuple(zip(names, self.of.shape, strict=True)), (x, self.of.read("m")), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        (x, _), (count, mean, m2) = operands, self.of.spread(at, 1, operands[1])
        variance = m2 / count + (mean * mean if self.rms else 0)
        if not self.rms and (rows := self.of.leading(x, mean)) is not None:
            scale = torch.rsqrt(variance + self.eps).flatten()
            return (centred(rows, mean.flatten(), scale, torch.zeros_like(scale)).view(x.shape),)
        return (((x if self.rms else x - mean) * torch.rsqrt(variance + self.eps)).to(x.dtype),)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        x, m = operands
        at_once = not self.rms and self.of.leading(x, self.of.spread(at, 1, m)[1]) is not None
        return self.local(way, at, x, m), (x if wanted[1] or at_once else None, m)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (dy,), (x, m), dr, dmean = dys, kept, cast(Any, None), cast(Any, None)
        count, mean, m2 = self.of.spread(at, 1, m)
        variance = m2 / count + (mean * mean if self.rms else 0)
        r = torch.rsqrt(variance + self.eps)
        if x is not None and not self.rms and (rows := self.of.leading(x, mean)) is not None:
            scale = r.flatten()
            dx, dmean, dr, _ = centred_back(dy, centred_kept(rows, mean.flatten(), scale), x.shape, *wanted)
        else:
            dy = dy.to(r.dtype)
            apart = dy * r
            dx = apart.to(dys[0].dtype) if wanted[0] else None
            if wanted[1]:
                dr = summed_to(dy * (x if self.rms else x - mean), r.shape)
                dmean = dmean if self.rms else summed_to(-apart, r.shape)
        if not wanted[1]:
            return dx, None
        dv = -0.5 * dr.reshape(r.shape) * r.pow(3)
        dmean = 2 * (dv * mean) if self.rms else dmean.reshape(r.shape)
        return dx, self.of.unspread(at, 1, (-dv * ((m2 / count) / count), dmean, dv / count))

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        x, (count, mean, m2) = operands[0], self.of.at_elements(operands[1])
        variance = m2 / count + (mean**2 if self.rms else 0)
        return ((x if self.rms else x - mean) / (variance + self.eps).sqrt(),)


@dataclass(frozen=True)
class Deviation(Operation):
    """The variance M2 / (count - correction) of the elements that share moments, or its square root, and their mean.

    Attributes:
        keep: whether averaged dimensions stay, with extent 1.
    """

    of: Averaged
    correction: float = 1.0
    root: bool = False
    keep: bool = False

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        of, names = self.of, numbered(len(self.of.shape))
        m = Operand("m", of.moments, (WHOLE, *own(*(names[d] for d in of.keep))))
        if self.keep:
            shape = tuple(n if d in of.keep else 1 for d, n in enumerate(of.shape))
            dims = own(*(names[d] if d in of.keep else None for d in range(len(of.shape))))
        else:
            shape, dims = of.moments[1:], m.dims[1:]
        extents = tuple((names[d], of.shape[d]) for d in of.keep)
        return (Signature(extents, (m,), (Operand("spread", shape, dims), Operand("mean", shape, dims))),)

    def _shaped(self, t: Any) -> Any:
        if not self.keep:
            return t
        extents = iter(t.shape)
        return t.reshape([next(extents) if d in self.of.keep else 1 for d in range(len(self.of.shape))])

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        count, mean, m2 = operands[0]
        variance = m2 / (count - self.correction)
        return self._shaped(variance.sqrt() if self.root else variance), self._shaped(mean)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        made = self.local(way, at, *operands)
        return made, (operands[0], *([made[0]] if self.root else []))

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (count, _, m2), none = kept[0], torch.zeros_like(kept[0][0])
        dv, dmean = (none if dy is None else dy.reshape(none.shape) for dy in dys)
        if self.root:
            dv = dv / (2 * kept[1].reshape(none.shape))
        there = count - self.correction
        return (torch.stack([-dv * ((m2 / there) / there), dmean, dv / there]),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        count, mean, m2 = (self._shaped(t) for t in operands[0])
        return (m2 / (count - self.correction)) ** (0.5 if self.root else 1.0), mean * 1.0
