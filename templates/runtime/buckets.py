# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# (what torch leaves untyped or private)
"""Gradients, and running statistics, that travel as one all-reduce."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .conversions import named
from .lanes import begin, noted
from .layout import ith_part
from .mesh import Place
from .travel import RowHere, flat_as, unflat_as

GRADIENTS = "gradients"
WORDS = 16  # kernels write to addresses that are multiples of so many bytes
EARLY = 32 << 20  # bytes; a larger message gets memory early, beside activations, only for half of it or more
Like = tuple[torch.Size, torch.dtype]


class MessageMemory:
    """Memory of values that travel together.

    From the second message on it is there before the values are: local code may be offered a value's place
    (operations/offered.py), and what is made there is not copied.

    Args:
        last: whether values lie in it with channels last.
    """

    def __init__(self, dtype: torch.dtype, *, last: bool) -> None:
        self.dtype, self.last = dtype, last
        self.like: list[Like | None] = []  # shape and type of each value that came the last time
        self._starts = [0]  # each value's first element, then their total number
        self._memory: Tensor | None = None
        self._taken: dict[int, Tensor] = {}

    def offer(self, k: int, shape: Sequence[int], of: Tensor) -> Tensor | None:
        """Memory for value k in the message, if it will have this shape and the type of `of`; None else. No memory is
        offered twice."""
        like = self.like[k] if self.like else None
        if like != (tuple(shape), of.dtype) or of.dtype != self.dtype or k in self._taken:
            return None
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return None
        starts, n = self._starts, math.prod(shape)
        few = starts[-1] * of.itemsize <= EARLY or 2 * n >= starts[-1]
        if starts[k] * of.itemsize % WORDS or not n or not few:
            return None
        if self._memory is None:
            self._memory = of.new_empty(starts[-1])
        self._taken[k] = unflat_as(self._memory.narrow(0, starts[k], n), shape, self.last)
        return self._taken[k]

    def packed(self, given: Sequence[Tensor | None]) -> Tensor:
        """The values one behind the other, in memory that nothing else uses."""
        memory, taken, known = self._memory, self._taken, self.like
        self._memory, self._taken = None, {}
        self.like = [None if g is None else (g.shape, g.dtype) for g in given]
        if self.like != known:
            self._starts = [0, *accumulate(0 if g is None else g.numel() for g in given)]
        # Local code may have left its place unused, or another pass may have taken it: then all values are packed anew.
        if memory is None or self.like != known or not all(_is_at(given[k], there) for k, there in taken.items()):
            parts = [g for g in given if g is not None]
            return torch.cat([flat_as(g, self.last) for g in parts], out=parts[0].new_empty(0, dtype=self.dtype))
        others = [(self._starts[k], g) for k, g in enumerate(given) if g is not None and k not in taken]
        if others:
            flat = [flat_as(g, self.last) for _, g in others]
            torch._foreach_copy_([memory.narrow(0, at, g.numel()) for at, g in others], flat)
        return memory


class Bucket:
    """A bucket on this rank: it packs values and sends them.

    Args:
        key: the bucket's name, axes and type; read: for each value, whether it comes.
    """

    def __init__(self, key: str, read: Sequence[bool], net: Any, place: Place) -> None:
        self.name, axes, kind = key.split(":")
        self.over, self.here, self.read = tuple(axes.split(",")), RowHere(net, place, 0), read
        self.memory, self.group = MessageMemory(getattr(torch, kind), last=net.last), self.here.group(self.over)

    def start(self, *values: Tensor | None) -> Any:
        """Start the all-reduce of the values that somebody asks for."""
        given = [g if there else None for g, there in zip(values, self.read, strict=True)]
        packed = self.memory.packed(given)
        ranks = len(self.group.ranks)
        splits = [hi - lo for lo, hi in (ith_part(0, packed.numel(), ranks, i) for i in range(ranks))]
        with named(self.name, "all_reduce", self.over, self.here):
            transport = self.here.place.transport
            pending = begin(transport, "all_reduce", packed, splits, self.group, GRADIENTS, owns=True)
        return pending, self.memory.like, lambda: named(self.name, "all_reduce", self.over, self.here)


def come(name: str, sent: Any, last: bool) -> Any:
    """The sums of what `Bucket.start` has sent, as views of one tensor where types allow it."""
    pending, like, context = sent
    with noted("wait", name), context():
        whole = pending.wait()
    parts = iter(whole.split([one[0].numel() for one in like if one is not None]))
    found = [None if one is None else unflat_as(next(parts), one[0], last).to(one[1]) for one in like]
    return found if len(found) > 1 else found[0]


def _is_at(value: Tensor | None, there: Tensor) -> bool:
    return (
        value is not None
        and value.untyped_storage()._cdata == there.untyped_storage()._cdata
        and value.storage_offset() == there.storage_offset()
        and value.stride() == there.stride()
    )
