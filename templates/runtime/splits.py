"""Layouts in networks: blocks of tensors, and how rows' operands and results are laid out and converted."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convgen.algebra.layout import Axes

from .conversions import copy_parts, within
from .here import frame_at
from .layout import Box, interval
from .mesh import Place


class Distribution(NamedTuple):
    """How a tensor is laid out.

    Attributes:
        axes: for each dimension, the axes that split it, outermost first.
        reads: the dimensions along which a rank has the rows that its block of an index reads, instead of a block.
    """

    axes: tuple[Axes, ...]
    reads: tuple[int, ...] = ()

    def __str__(self) -> str:
        entries = [f"({','.join(a)})" if len(a) > 1 else "".join(a) or "*" for a in self.axes]
        return f"[{' '.join(e + '+' * (d in self.reads) for d, e in enumerate(entries))}]"


class To(NamedTuple):
    """A conversion of a tensor: its kind, over which axes, how the tensor is laid out then, and the type in which it
    travels, if not in its own."""

    kind: str
    over: Axes
    made: Distribution
    dtype: torch.dtype | None = None


class Side(NamedTuple):
    """An operand of a row, or a result.

    Attributes:
        start: the layout in which an operand is stored, or in which a result is made.
        steps: the conversions that bring an operand to what the row wants, or a result to how it is stored.
        back: the same for its gradient.
    """

    start: Distribution
    steps: tuple[To, ...] = ()
    back: Side | None = None


class Split(NamedTuple):
    """Blocks of a tensor: the axes that split each dimension, outermost first."""

    tensor: str
    extents: tuple[int, ...]
    axes: tuple[Axes, ...]

    def frame(self, layer: Any, at: dict[str, int], batch: int) -> Box:
        """The box that the rank at these coordinates holds."""
        return tuple(interval(n, 1, a, layer.sizes, at) for n, a in zip(self.extents, self.axes, strict=True))

    def held(self, layer: Any, at: dict[str, int], batch: int) -> Box:
        return self.frame(layer, at, batch)


class Plain:
    """Answers what conversions ask of a layer, for pieces that are boxes and lie in memory in their dimensions'
    order."""

    channels_last = False
    copy = staticmethod(copy_parts)

    def size(self, box: Box, tensor: str) -> int:
        return math.prod(hi - lo for lo, hi in box)

    def shape(self, box: Box, tensor: str) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in box)

    def format(self, tensor: str) -> torch.memory_format:
        return torch.contiguous_format


def block_of(value: Tensor, layout: Split, layer: Any, place: Place) -> Tensor:
    """This rank's block of a whole tensor."""
    box = frame_at(layer, layout, place.me, 0)
    return within(value, tuple((0, n) for n in value.shape), box)
