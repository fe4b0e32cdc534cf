"""Blocks of tensors as networks have them, and their text."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convgen.algebra.layout import Axes

from .conversions import copy_parts, within
from .here import frame_at
from .layout import Box, interval
from .mesh import Place

ENTRY = re.compile(r"(\*|\w+|\([\w,]+\))(\+?)")


def axes_of(text: str) -> tuple[tuple[Axes, ...], tuple[bool, ...]]:
    """Of `[N * H+ (F,C)]` the axes that split each dimension, and whether it is the rows that a block reads."""
    entries = [e for word in text[1:-1].split(" ") if (e := ENTRY.fullmatch(word))]
    axes = tuple(() if e[1] == "*" else tuple(e[1].strip("()").split(",")) for e in entries)
    return axes, tuple(bool(e[2]) for e in entries)


class Split(NamedTuple):
    """Blocks of a tensor: the axes that split each dimension, outermost first."""

    tensor: str
    extents: tuple[int, ...]
    axes: tuple[Axes, ...]

    def frame(self, layer: Any, at: dict[str, int], batch: int) -> Box:
        """What the rank at these coordinates holds."""
        return tuple(interval(n, 1, a, layer.grid, at) for n, a in zip(self.extents, self.axes, strict=True))

    def held(self, layer: Any, at: dict[str, int], batch: int) -> Box:
        return self.frame(layer, at, batch)


class Plain:
    """What conversions ask of a layer, where pieces are boxes and lie in memory in their dimensions' order."""

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
