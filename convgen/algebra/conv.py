"""The convolution as an index space: which tensors it has, and which dimensions they have.

x has (N, C, spatial...), w has (F, C/groups), y has (N, F, spatial...); kernel dimensions are never split.
With groups, C is the pair (G, C/g) and F is (G, F/g), which `Dim.groups` records.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

Tensor = Literal["x", "w", "y"]
TENSORS: tuple[Tensor, ...] = ("x", "w", "y")
PHASES: tuple[str, ...] = ("forward", "backward_data", "backward_filter")


@dataclass(frozen=True, slots=True)
class Spatial:
    """One spatial dimension: extents in rows, before padding.

    `extent` input rows, `kernel` taps `dilation` rows apart, `stride` input rows per output row, zero
    padding `pad_lo` below and `pad_hi` above.
    """

    name: str
    extent: int
    kernel: int
    stride: int = 1
    pad_lo: int = 0
    pad_hi: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Rows from a window's first tap to its last: d(K-1)."""
        return self.dilation * (self.kernel - 1)

    @property
    def out(self) -> int:
        """Output rows: floor((H + P_lo + P_hi - d(K-1) - 1) / S) + 1, which may be below 1 for a bad layer."""
        return (self.extent + self.pad_lo + self.pad_hi - self.reach - 1) // self.stride + 1


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a tensor: its name, extent in elements, and how many groups it is made of."""

    name: str
    extent: int
    groups: int = 1
    spatial: int | None = None  # index into Conv.spatial


@dataclass(frozen=True)
class Conv:
    """The convolution's extents: N samples, C channels, F filters, groups, and the spatial dimensions."""

    batch: int
    channels: int
    filters: int
    spatial: tuple[Spatial, ...]
    groups: int = 1
    bias: bool = False

    @cached_property
    def dims_of(self) -> dict[str, tuple[Dim, ...]]:
        x_rows = tuple(Dim(s.name, s.extent, spatial=i) for i, s in enumerate(self.spatial))
        y_rows = tuple(Dim(s.name, s.out, spatial=i) for i, s in enumerate(self.spatial))
        return {
            "x": (Dim("N", self.batch), Dim("C", self.channels, self.groups), *x_rows),
            "w": (Dim("F", self.filters, self.groups), Dim("C", self.channels // self.groups)),
            "y": (Dim("N", self.batch), Dim("F", self.filters, self.groups), *y_rows),
            "bias": (Dim("F", self.filters, self.groups),),
        }

    def dims(self, tensor: str) -> tuple[Dim, ...]:
        return self.dims_of[tensor]

    @cached_property
    def taps(self) -> int:
        """Kernel elements per filter and channel: K^2 in the papers."""
        return prod(s.kernel for s in self.spatial)

    @cached_property
    def letters(self) -> tuple[str, ...]:
        """Names of the spatial dimensions, outermost first: W; H W; or D H W."""
        return tuple(s.name for s in self.spatial)

    def elements(self, tensor: str) -> int:
        """Elements of the whole tensor, kernel included."""
        return prod(d.extent for d in self.dims(tensor)) * (self.taps if tensor == "w" else 1)

    def largest_first(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(sorted(tensors, key=lambda t: (-self.elements(t), TENSORS.index(t))))


SPATIAL_NAMES = {1: ("W",), 2: ("H", "W"), 3: ("D", "H", "W")}
