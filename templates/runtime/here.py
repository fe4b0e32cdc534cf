"""This rank in this call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .layout import Box, Layout, padding_below
from .mesh import Place, coordinates, members
from .transport import Group

if TYPE_CHECKING:
    from .layer import Layer


MOST = 1 << 13  # boxes that a layer remembers at most; calls at many sizes work them out again
Remembered = TypeVar("Remembered")


def _remembered(found: Callable[[Any, Any, int, int], Remembered]) -> Callable[[Any, Any, int, int], Remembered]:
    """The same function with its results kept by the layer that they are of, as long as the layer lives."""

    def asked(layer: Any, layout: Any, position: int, batch: int) -> Remembered:
        known: dict[Any, Remembered] = layer.__dict__.setdefault("boxes_at", {})
        key = found, layout, position, batch
        box = known.get(key)
        if box is None:
            if len(known) >= MOST:
                known.clear()
            box = known[key] = found(layer, layout, position, batch)
        return box

    return asked


@_remembered
def frame_at(layer: Layer, layout: Layout, position: int, batch: int) -> Box:
    return layout.frame(layer, coordinates(layer, position), batch)


@_remembered
def held_at(layer: Layer, layout: Layout, position: int, batch: int) -> Box:
    return layout.held(layer, coordinates(layer, position), batch)


@_remembered
def shape_at(layer: Layer, layout: Layout, position: int, batch: int) -> tuple[int, ...]:
    return layer.shape(frame_at(layer, layout, position, batch), layout.tensor)


class Here(NamedTuple):
    """A layer, this rank's place on the mesh and the global number of samples."""

    layer: Layer
    place: Place
    batch: int

    def frame(self, layout: Layout) -> Box:
        """The box where this rank's piece sits, rows of padding included."""
        return frame_at(self.layer, layout, self.place.me, self.batch)

    def held(self, layout: Layout) -> Box:
        """The box of the tensor's elements in this rank's piece: all but rows of padding."""
        return held_at(self.layer, layout, self.place.me, self.batch)

    def shape(self, layout: Layout) -> tuple[int, ...]:
        """Shape of this rank's piece, kernel dimensions included."""
        return shape_at(self.layer, layout, self.place.me, self.batch)

    def below(self, i: int, fine: Layout, coarse: Layout) -> int:
        """Zero rows below this rank's fine rows, along spatial dimension i, for its coarse rows."""
        return padding_below(self.layer.spatial[i], self.frame(fine)[2 + i][0], self.frame(coarse)[2 + i][0])

    def empty(self, layout: Layout, like: Tensor, padded: bool = False) -> Tensor:
        """Memory for this rank's piece, zeros where it has rows of padding."""
        memory = self.layer.format(layout.tensor)
        out = torch.empty(self.shape(layout), dtype=self.layer.dtype, device=like.device, memory_format=memory)
        return out.zero_() if padded else out

    @property
    def at(self) -> dict[str, int]:
        """This rank's coordinates."""
        return coordinates(self.layer, self.place.me)

    def members(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Positions of the ranks that differ from this one only along `axes`, itself among them."""
        return members(self.layer, self.place.me, axes)

    def group(self, axes: tuple[str, ...]) -> Group:
        ranks = tuple(self.place.ranks[p] for p in self.members(axes))
        return Group(ranks, self.layer.sums, self.layer.add)
