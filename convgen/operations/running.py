"""Batch norm's buffers: how a step renews them, and how evaluation reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from convgen.algebra.signature import WHOLE, Operand, Signature
from convgen.late import torch
from convgen.operations.averaged import Averaged
from convgen.operations.row import At, Operation, own


def _buffers(channels: int, prefix: str = "") -> tuple[Operand, ...]:
    return tuple(Operand(f"{prefix}{n}", (channels,), own("C"), gradient=False) for n in ("mean", "variance"))


@dataclass(frozen=True)
class RunningMoments(Operation):
    """Moments [1, mean, variance] made of buffers, for evaluation; every part has the same.

    Attributes:
        extents: indices of moments and their extents; C is the channels'.
    """

    extents: tuple[tuple[str, int], ...]

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        indices, shape = zip(*self.extents, strict=True)
        m = Operand("m", (3, *shape), own(None, *indices), gradient=False)
        return (Signature(self.extents, _buffers(dict(self.extents)["C"]), (m,)),)

    def _of(self, mean: Any, variance: Any, shape: Sequence[int]) -> tuple[Any, ...]:
        wide = [-1 if i == "C" else 1 for i, _ in self.extents]
        rows = (torch.ones_like(mean), mean, variance)
        return (torch.stack([t.view(wide).expand(shape) for t in rows]),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        mean, variance = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in operands)
        return self._of(mean, variance, [at.extent(i) for i, _ in self.extents])

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        mean, variance = operands
        m = torch.stack([variance * 0 + 1, mean, variance])
        for k, (i, n) in enumerate(self.extents, 1):
            m = m if i == "C" else m.unsqueeze(k).repeat_interleave(n, k)
        return (m,)


@dataclass(frozen=True)
class PartStatistics(Operation):
    """[mean, unbiased variance], the parts' averaged by their numbers of elements, so that copies stay equal.

    The mean is the batch's; the variance lacks the variance of the parts' means.
    """

    of: Averaged

    @property
    def rides(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        indices = (i for i, _ in self.of.extents)
        m = Operand("m", self.of.moments, own(None, *indices), gradient=False)
        s = Operand("s", (2, self.of.shape[1]), own(None, "C"), gradient=False)
        return (Signature(self.of.extents, (m,), (s,)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        self.of.check()
        count, mean, m2 = operands[0].detach()
        share, parts = count / self.of.count, [k for k, d in enumerate(self.of.keep) if d != 1]
        variance = m2 / (count - 1).clamp(min=1)
        return (torch.stack([(share * mean).sum(parts), (share * variance).sum(parts)]),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """Part by part."""
        m = operands[0].movedim(1 + self.of.keep.index(1), 1).flatten(2)
        total = torch.zeros_like(m[:2, :, 0])
        for count, mean, m2 in m.unbind(2):
            unbiased = torch.where(count > 1, m2 / (count - 1), torch.zeros_like(m2))
            total = total + torch.stack([mean, unbiased]) * count / self.of.count
        return (total,)


@dataclass(frozen=True)
class RunningStatistics(Operation):
    """Batch norm's buffers after a step: (1 - momentum) of the old and momentum of the new mean and unbiased variance.

    It updates buffers from what they were and what the step has found, without a gradient.

    Attributes:
        of_parts: whether the step's finding is [mean, unbiased variance] (PartStatistics) instead of moments.
    """

    channels: int
    momentum: float = 0.1
    of_parts: bool = False

    @property
    def rides(self) -> bool:
        return True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        name, count = ("s", 2) if self.of_parts else ("m", 3)
        found = Operand(name, (count, self.channels), (WHOLE, *own("C")), gradient=False)
        extents = (("C", self.channels),)
        return (Signature(extents, (*_buffers(self.channels), found), _buffers(self.channels, "new_")),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        mean, variance, found = (t.detach() for t in operands)
        new = found if self.of_parts else (found[1], found[2] / (found[0] - 1))
        pairs = zip((mean, variance), new, strict=True)  # new values may be of a wider type than buffers
        return tuple(old.to(now.dtype).lerp(now, self.momentum).to(old.dtype) for old, now in pairs)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        mean, variance, m = (t.detach() for t in operands)
        k = self.momentum
        new = m if self.of_parts else (m[1], m[2] / m[0] * (m[0] / (m[0] - 1)))
        return (1 - k) * mean + k * new[0], (1 - k) * variance + k * new[1]
