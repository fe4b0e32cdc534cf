"""Batch norm by parts of the batch: a part is what ranks would normalise together, and has moments of its own.

Parts are blocks of dimensions by the block rule, numbered by an index of their own: of samples ([SP] III-B's spatial
statistics: all rows of a rank's samples), or of samples and rows (its local ones). How many there are is a number of
the operation, so what is computed is the same on whatever grid; where the grid's blocks are the parts nothing moves but
what merges a part. x[N, C, ...]; moments [3, parts of N, C, parts of rows, ...]: a dimension where there are parts.

Running statistics are those of the parts' mean and unbiased variance, averaged by how many elements a part has: copies
stay equal. The mean is that of the batch; the variance lacks what parts' means differ by.

Source: [SP] III-B; docs/design.md, Networks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from convgen.algebra.relations import Blocks
from convgen.algebra.signature import WHOLE, Made, Operand, Signature
from convgen.late import torch
from convgen.operations.moments import (
    averaged_buffers,
    centred,
    centred_back,
    centred_kept,
    moments_by_channel,
    moments_of,
    updated_buffers,
)
from convgen.operations.row import At, Derived, Operation, Passes, numbered, on_device, own, read_here, summed_to


@dataclass(frozen=True)
class Parted:
    """What parts are of.

    Attributes:
        shape: of x.
        dims: dimensions that have parts, in order; never 1, the channels.
        parts: of each of them, its blocks.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    parts: tuple[Blocks, ...]

    @cached_property
    def of(self) -> dict[int, Blocks]:
        """Blocks by dimension."""
        return dict(zip(self.dims, self.parts, strict=True))

    @property
    def kept(self) -> tuple[int, ...]:
        """Dimensions that moments have, in order."""
        return tuple(sorted((*self.dims, 1)))

    @property
    def moments(self) -> tuple[int, ...]:
        """Shape of the moments."""
        return (3, *(self.of[d].count if d in self.of else self.shape[d] for d in self.kept))

    def made(self, name: str, *, gradient: bool = True) -> Operand:
        """Moments as blocks of parts (indices p0, ...) and channels."""
        return Operand(name, self.moments, own(None, *(f"p{d}" if d in self.of else "d1" for d in self.kept)), gradient)

    def read(self, name: str) -> Operand:
        """Moments as blocks of x read them."""
        dims = (Made((f"d{d}",), self.of[d].inverse if d in self.of else None) for d in self.kept)
        return Operand(name, self.moments, (WHOLE, *dims))

    @property
    def extents(self) -> tuple[tuple[str, int], ...]:
        """Indices of moments, and their extents."""
        return tuple((f"p{d}" if d in self.of else "d1", n) for d, n in zip(self.kept, self.moments[1:], strict=True))

    @property
    def count(self) -> int:
        """Values a channel."""
        return prod(self.shape) // self.shape[1]

    @property
    def least(self) -> int:
        """Values a channel of the smallest part that has any."""
        rows = ([len(b.row(o)) for o in range(b.count)] for b in self.parts)
        rest = prod(n for d, n in enumerate(self.shape) if d != 1 and d not in self.of)
        return rest * prod(min(filter(None, of), default=0) for of in rows)

    def check(self) -> None:
        """Raises ValueError, on all ranks alike: the variance of one value has no unbiased form."""
        if self.least == 1:
            raise ValueError(
                f"batch norm by parts of {list(self.shape)}: a part has 1 value a channel; more than 1 are expected "
                "when training"
            )

    def spread(self, at: At, operand: int, moments: Any) -> Any:
        """Moments as read, for each of x's elements here: [3, ...], extents 1 where one part is all there is."""
        for k, d in enumerate(self.kept, 1):
            if d in self.of and moments.shape[k] > 1:
                moments = moments.index_select(k, self._part_of_each(at, operand, k, d, moments))
        shape = [3] + [1] * len(self.shape)
        for k, d in enumerate(self.kept, 1):
            shape[1 + d] = moments.shape[k]
        return moments.reshape(shape)

    def _part_of_each(self, at: At, operand: int, k: int, d: int, like: Any) -> Any:
        """Of each row here the number of its part among those that moments are read of."""
        first = at.inside[operand][k][0]
        rows = [self.of[d].number(r) - first for r in range(*at.blocks[f"d{d}"])]
        return on_device(tuple(rows), torch.int64, like.device)

    def unspread(self, at: At, operand: int, found: Sequence[Any]) -> Any:
        """The gradient of moments as read, of three that `spread` has made."""
        given, shape = torch.stack(list(found)), read_here(at, operand)
        given = given.reshape([3, *(given.shape[1 + d] for d in self.kept)])
        for k, d in enumerate(self.kept, 1):
            if d in self.of and shape[k] > 1:
                rows = self._part_of_each(at, operand, k, d, given)
                sizes = [shape[j] if j == k else n for j, n in enumerate(given.shape)]
                given = given.new_zeros(sizes).index_add_(k, rows, given)
        return given


@dataclass(frozen=True)
class PartMoments(Operation):
    """(count, mean, M2) of every part of x, of float32 at least; of a part without elements zeros."""

    of: Parted

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        of, names = self.of, numbered(len(self.of.shape))
        reads = tuple(Made((f"p{d}",), of.of[d]) if d in of.of else Made((name,)) for d, name in enumerate(names))
        rows = ((names[d], n) for d, n in enumerate(of.shape) if d not in of.of)
        extents = dict((*of.extents, *rows))
        x = Operand("x", of.shape, reads)
        return (Signature(tuple(extents.items()), (x,), (of.made("m"),), reduction="merge"),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x, of = operands[0].to(torch.promote_types(operands[0].dtype, torch.float32)), self.of
        found = [_of_part(x[box]) for box in self._boxes(at)]
        counts = [at.extent(f"p{d}") for d in of.dims]
        m = torch.stack(found, -1).unflatten(-1, counts)  # [3, C, parts...]
        return (m.movedim(tuple(range(2, 2 + len(counts))), tuple(1 + of.kept.index(d) for d in of.dims)),)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        (m,) = self.local(way, at, *operands)
        return (m,), (m, operands[0])

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        """Of each part's own moments here: dmean / n + 2 (x - mean) dM2."""
        (m, x), (dm,), of = kept, dys, self.of
        order = [0, 1 + of.kept.index(1), *(1 + of.kept.index(d) for d in of.dims)]
        parts, dparts = (t.permute(order).flatten(2).unbind(2) for t in (m, dm))
        dx, wide = torch.empty_like(x), [-1, *[1] * (x.dim() - 2)]
        for box, part, dpart in zip(self._boxes(at), parts, dparts, strict=True):
            (count, mean, _), (_, dmean, dm2) = part.view(3, *wide), dpart.reshape(3, *wide)
            dx[box] = dmean / count + 2 * (x[box] - mean) * dm2
        return (dx,)

    def counts(self, way: int, at: At) -> Any:
        """Of a rank's part, which its blocks say: they need not travel."""
        of = self.of
        rest = prod(at.extent(f"d{d}") for d in range(len(of.shape)) if d != 1 and d not in of.of)
        found = torch.full([1] * len(of.kept), rest)
        for k, d in enumerate(of.kept):
            if d in of.of:
                inside, blocks = at.inside[0][d], (of.of[d].block(o) for o in range(*at.blocks[f"p{d}"]))
                rows = [max(min(hi, inside[1]) - max(lo, inside[0]), 0) for lo, hi in blocks]
                found = found * torch.tensor(rows, dtype=found.dtype).view(
                    [-1 if j == k else 1 for j in range(found.dim())]
                )
        return found.expand([at.extent(i) for i, _ in of.extents])

    def _boxes(self, at: At) -> Iterator[tuple[slice, ...]]:
        """Of what is here of x, part after part, the last dimension's fastest."""
        of = self.of
        for numbers in product(*(range(*at.blocks[f"p{d}"]) for d in of.dims)):
            box = [slice(None)] * len(of.shape)
            for d, o in zip(of.dims, numbers, strict=True):
                (lo, hi), (first, last) = of.of[d].block(o), at.inside[0][d]
                box[d] = slice(max(lo, first) - first, max(min(hi, last), lo, first) - first)
            yield tuple(box)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """From sums of those elements that are of a part, by the numbers of the parts of all."""
        (x,), of = operands, self.of
        sums = torch.stack([torch.ones_like(x), x, x.square()])
        for d in (d for d in range(len(of.shape)) if d != 1):
            blocks = of.of.get(d, Blocks(of.shape[d], (1,)))
            which = torch.tensor([[float(r in blocks.row(o)) for r in range(of.shape[d])] for o in range(blocks.count)])
            sums = (sums.movedim(1 + d, -1) @ which.to(x.dtype).T).movedim(-1, 1 + d)
        count, total, squares = sums.reshape(of.moments)
        mean = total / count.clamp(min=1)
        return (torch.stack([count, mean, squares - count * mean**2]),)

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        return {"x": Derived(PartMomentsGradient(self.of), ("dm", "m", "x"))}


def _of_part(x: Any) -> Any:
    """[3, C] of x[N, C, ...]."""
    dims = [0, *range(2, x.dim())]
    if not x.numel():
        return x.new_zeros(3, x.shape[1]) + x.sum()
    differentiated = torch.is_grad_enabled() and x.requires_grad  # of one rank's; else a row of its own does it
    return moments_of(x, dims) if differentiated else moments_by_channel(x)


@dataclass(frozen=True)
class PartMomentsGradient(Operation):
    """dx from the gradient of the parts' moments, these, and x."""

    of: Parted

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.of.shape))
        x, dx = (Operand(name, self.of.shape, own(*names)) for name in ("x", "dx"))
        extents = tuple(zip(names, self.of.shape, strict=True))
        return (Signature(extents, (self.of.read("dm"), self.of.read("m"), x), (dx,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x = operands[2]
        _, dmean, dm2 = self.of.spread(at, 0, operands[0])
        count, mean, _ = self.of.spread(at, 1, operands[1])
        if dm2.numel() == x.shape[1]:  # of one part: (x - mean) * a + b, which ATen does at once
            return (centred(x, mean.flatten(), 2 * dm2.flatten(), (dmean / count).flatten()),)
        return ((dmean / count + 2 * (x - mean) * dm2).to(x.dtype),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        dm, m, x = operands
        dm, m = at_elements(self.of, dm), at_elements(self.of, m)
        return (dm[1] / m[0] + 2 * x * dm[2] - 2 * m[1] * dm[2],)


def at_elements(of: Parted, m: Any) -> Any:
    """Moments for every element of x, part by part."""
    wide = m.new_zeros(3, *of.shape)
    for numbers in product(*(range(b.count) for b in of.parts)):
        box, at = [slice(None)] * len(of.shape), [slice(None)] * len(of.kept)
        for d, o in zip(of.dims, numbers, strict=True):
            box[d], at[of.kept.index(d)] = slice(*of.of[d].block(o)), slice(o, o + 1)
        one = m[(slice(None), *at)].reshape(3, 1, of.shape[1], *[1] * (len(of.shape) - 2))
        wide[(slice(None), *box)] = one.expand(wide[(slice(None), *box)].shape)
    return wide


@dataclass(frozen=True)
class PartCoefficients(Operation):
    """[mean, weight / sqrt(variance + eps), bias] of moments of parts.

    Attributes:
        weight, bias: whether there are such operands, in this order.
    """

    of: Parted
    eps: float
    weight: bool = True
    bias: bool = True

    @property
    def rides(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = [name for name, there in (("w", self.weight), ("b", self.bias)) if there]
        vectors = [Operand(name, (self.of.shape[1],), own("d1")) for name in names]
        return (Signature(self.of.extents, (self.of.made("m"), *vectors), (self.of.made("p"),)),)

    def _wide(self, vector: Any, like: Any) -> Any:
        shape = [1] * len(self.of.kept)
        shape[self.of.kept.index(1)] = -1
        return vector.to(like.dtype).reshape(shape)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        m, *vectors = operands
        count, mean, m2 = m
        there = count > 0  # of a part without elements nothing is read; its gradient must be a number
        scale = torch.rsqrt(torch.where(there, m2 / count.clamp(min=1) + self.eps, 1.0))
        if self.weight:
            scale = scale * self._wide(vectors[0], scale)
        shift = self._wide(vectors[-1], scale).expand_as(mean) if self.bias else torch.zeros_like(mean)
        return (torch.stack([mean, scale, shift]),)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        m, *vectors = operands
        of_m, of_w = wanted[0], self.weight and wanted[1]
        read = m if of_m or of_w else None, vectors[0] if self.weight and of_m else None
        return self.local(way, at, *operands), (*read, *(t.dtype for t in vectors))

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (m, w, *dtypes), (dmean, dscale, dshift) = kept, dys[0]
        found: list[Any] = [None]
        count, _, m2 = (dmean,) * 3 if m is None else m  # nobody reads it then
        there, least = count > 0, count.clamp(min=1)
        inverse = torch.rsqrt(torch.where(there, m2 / least + self.eps, 1.0))
        if wanted[0]:
            dr = dscale * self._wide(w, dscale) if self.weight else dscale
            dv = torch.where(there, -0.5 * dr * inverse.pow(3), 0)
            dcount = torch.where(count >= 1, -dv * ((m2 / least) / least), 0)
            found[0] = torch.stack([dcount, dmean, dv / least])
        parts = [k for k, d in enumerate(self.of.kept) if d != 1]
        if self.weight:
            found.append((dscale * inverse).sum(parts).to(dtypes[0]) if wanted[1] else None)
        if self.bias:
            found.append(dshift.sum(parts).to(dtypes[-1]) if wanted[-1] else None)
        return tuple(found)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        m, *vectors = operands
        one = torch.ones_like(m[0])
        weights = self._wide(vectors[0], m) * one if self.weight else one
        biases = self._wide(vectors[-1], m) * one if self.bias else 0 * one
        spread = torch.where(m[0] > 0, m[2] / m[0].clamp(min=1) + self.eps, one)
        return (torch.stack([m[1], weights * spread**-0.5, biases]),)


@dataclass(frozen=True)
class PartCentred(Operation):
    """(x - mean) * a + b of x[N, C, ...] and the coefficients [mean, a, b] of its parts."""

    of: Parted

    @property
    def passes(self) -> Passes:
        return "once"

    @property
    def normalises(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.of.shape))
        x, y = (Operand(name, self.of.shape, own(*names)) for name in "xy")
        return (Signature(tuple(zip(names, self.of.shape, strict=True)), (x, self.of.read("p")), (y,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x, p = operands
        mean, scale, shift = self.of.spread(at, 1, p)
        if scale.numel() == x.shape[1]:
            return (centred(x, mean.flatten(), scale.flatten(), shift.flatten()),)
        return (((x - mean) * scale + shift).to(x.dtype),)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        x, p = operands
        at_once = self.of.spread(at, 1, p)[1].numel() == x.shape[1]
        return self.local(way, at, x, p), (x if wanted[1] or at_once else None, p)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        (x, p), (dy,) = kept, dys
        mean, scale, _ = self.of.spread(at, 1, p)
        if scale.numel() == dy.shape[1]:
            dx, *others = centred_back(dy, centred_kept(x, mean.flatten(), scale.flatten()), x.shape, *wanted)
        else:
            dy = dy.to(scale.dtype)
            apart = dy * scale
            dx = apart.to(dys[0].dtype) if wanted[0] else None
            others = (-apart, dy * (x - mean), dy) if wanted[1] else ()
        if not wanted[1]:
            return dx, None
        return dx, self.of.unspread(
            at, 1, [summed_to(t.reshape(scale.shape if t.dim() == 1 else t.shape), scale.shape) for t in others]
        )

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        x, p = operands
        mean, scale, shift = at_elements(self.of, p)
        return ((x - mean) * scale + shift,)


@dataclass(frozen=True)
class PartStatistics(Operation):
    """[mean, unbiased variance] of the parts, averaged by how many elements each has."""

    of: Parted

    @property
    def rides(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        s = Operand("s", (2, self.of.shape[1]), own(None, "d1"), gradient=False)
        return (Signature(self.of.extents, (self.of.made("m", gradient=False),), (s,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        self.of.check()
        count, mean, m2 = operands[0].detach()
        share, parts = count / self.of.count, [k for k, d in enumerate(self.of.kept) if d != 1]
        variance = m2 / (count - 1).clamp(min=1)
        return (torch.stack([(share * mean).sum(parts), (share * variance).sum(parts)]),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """Part by part."""
        m = operands[0].movedim(1 + self.of.kept.index(1), 1).flatten(2)
        total = torch.zeros_like(m[:2, :, 0])
        for count, mean, m2 in m.unbind(2):
            unbiased = torch.where(count > 1, m2 / (count - 1), torch.zeros_like(m2))
            total = total + torch.stack([mean, unbiased]) * count / self.of.count
        return (total,)


@dataclass(frozen=True)
class PartUpdate(Operation):
    """Batch norm's buffers after a step: (1 - momentum) of the old and momentum of the new ones."""

    channels: int
    momentum: float = 0.1

    @property
    def rides(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        return (updated_buffers("s", 2, self.channels),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        mean, variance, s = (t.detach() for t in operands)
        return averaged_buffers((mean, variance), s, self.momentum)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        mean, variance, s = (t.detach() for t in operands)
        k = self.momentum
        return (1 - k) * mean + k * s[0], (1 - k) * variance + k * s[1]


@dataclass(frozen=True)
class PartRunning(Operation):
    """Moments [1, mean, variance] of buffers for every part, for evaluation."""

    of: Parted

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        buffers = tuple(Operand(name, (self.of.shape[1],), own("d1"), gradient=False) for name in ("mean", "variance"))
        return (Signature(self.of.extents, buffers, (self.of.made("m", gradient=False),)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        mean, variance = operands
        shape, k = [at.extent(i) for i, _ in self.of.extents], self.of.kept.index(1)
        wide = [-1 if j == k else 1 for j in range(len(shape))]
        rows = (torch.ones_like(mean), mean, variance)
        return (torch.stack([t.reshape(wide).expand(shape) for t in rows]),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        mean, variance = operands
        m = torch.stack([variance * 0 + 1, mean, variance])
        for k, d in enumerate(self.of.kept, 1):
            m = m if d == 1 else m.unsqueeze(k).repeat_interleave(self.of.of[d].count, k)
        return (m,)
