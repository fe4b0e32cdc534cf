"""The convolution as an index space: which tensors it has, and which dimensions they have.

x has (N, C, spatial...), w has (F, C/groups), y has (N, F, spatial...); kernel dimensions are never split.
With groups, C is the pair (G, C/g) and F is (G, F/g), which `Dim.groups` records.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from convgen.algebra.relations import ReadBy, Taps
from convgen.algebra.tensors import Dim, Rows, Tensor

Operand = Literal["x", "w", "y"]
TENSORS: tuple[Operand, ...] = ("x", "w", "y")
Phase = Literal["forward", "backward_data", "backward_filter"]
PHASES: tuple[Phase, ...] = ("forward", "backward_data", "backward_filter")


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
    def taps(self) -> Taps:
        """The input rows that an output row reads."""
        return Taps(self.kernel, self.stride, self.pad_lo, self.dilation)

    @property
    def reach(self) -> int:
        """Rows from a window's first tap to its last: d(K-1)."""
        return self.dilation * (self.kernel - 1)

    @property
    def out(self) -> int:
        """Output rows: floor((H + P_lo + P_hi - d(K-1) - 1) / S) + 1, which may be below 1 for a bad layer."""
        return (self.extent + self.pad_lo + self.pad_hi - self.reach - 1) // self.stride + 1


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
    def tensors(self) -> dict[str, Tensor]:
        rows = {"x": [Dim(s.name, s.extent) for s in self.spatial], "y": [Dim(s.name, s.out) for s in self.spatial]}
        n, f = Dim("N", self.batch), Dim("F", self.filters, self.groups)
        return {
            "x": Tensor("x", (n, Dim("C", self.channels, self.groups), *rows["x"])),
            "w": Tensor("w", (f, Dim("C", self.channels // self.groups)), self.taps),
            "y": Tensor("y", (n, f, *rows["y"])),
            "bias": Tensor("bias", (f,)),
        }

    @cached_property
    def rows(self) -> dict[tuple[str, int], Rows]:
        """By activation and dimension the rows that are read of it for blocks of the other activation's rows."""
        x, y = self.tensors["x"].dims, self.tensors["y"].dims
        found: dict[tuple[str, int], Rows] = {}
        for d, s in enumerate(self.spatial, 2):
            found["x", d], found["y", d] = Rows(s.taps, y[d]), Rows(ReadBy(s.taps), x[d])
        return found

    def has_rows(self, tensor: str, dim: int) -> bool:
        """Whether a dimension is a spatial one."""
        return (tensor, dim) in self.rows

    def dims(self, tensor: str) -> tuple[Dim, ...]:
        return self.tensors[tensor].dims

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
        return self.tensors[tensor].elements

    def largest_first(self, *tensors: Operand) -> tuple[Operand, ...]:
        return tuple(sorted(tensors, key=lambda t: (-self.elements(t), TENSORS.index(t))))


SPATIAL_NAMES = {1: ("W",), 2: ("H", "W"), 3: ("D", "H", "W")}
