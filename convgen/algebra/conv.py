"""The convolution as an index space: which tensors it has, and which dimensions they have.

x has (N, C, spatial...), w has (F, C/groups), y has (N, F, spatial...); kernel dimensions are never split.
With groups, C is the pair (G, C/g) and F is (G, F/g), which `Dim.groups` records.

There is one sum, of two activations and w: fine[n, c, o*S - P + d*k] * w[f, c, k] * coarse[n, f, o]. A convolution's x
is the fine one, a transposed convolution's x the coarse one: it makes the fine one, y, and its w is (C, F/groups).
Source: Dumoulin & Visin, arXiv:1603.07285, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

from convgen.algebra.relations import ReadBy, Taps
from convgen.algebra.tensors import Dim, Rows, Tensor

TensorName = Literal["x", "w", "y"]
TENSORS: tuple[TensorName, ...] = ("x", "w", "y")
Phase = Literal["forward", "backward_data", "backward_filter"]
PHASES: tuple[Phase, ...] = ("forward", "backward_data", "backward_filter")
# A transposed convolution's phases and tensors, under the names that the convolution of the same sum has for them.
OTHER_PHASE: dict[Phase, Phase] = {
    "forward": "backward_data",
    "backward_data": "forward",
    "backward_filter": "backward_filter",
}
OTHER_TENSOR: dict[str, TensorName] = {"x": "y", "w": "w", "y": "x"}


@dataclass(frozen=True, slots=True)
class Spatial:
    """One spatial dimension: extents in rows, before padding.

    `extent` rows of the fine activation (a convolution's input), `kernel` taps `dilation` rows apart, `stride` fine
    rows per coarse row, zero padding `pad_lo` below and `pad_hi` above (of a transposed convolution: rows cut off),
    `output_padding` fine rows that only a transposed convolution has, above.
    """

    name: str
    extent: int
    kernel: int
    stride: int = 1
    pad_lo: int = 0
    pad_hi: int = 0
    dilation: int = 1
    output_padding: int = 0

    @property
    def taps(self) -> Taps:
        """The fine rows that a coarse row reads."""
        return Taps(self.kernel, self.stride, self.pad_lo, self.dilation)

    @property
    def reach(self) -> int:
        """Rows from a window's first tap to its last: d(K-1)."""
        return self.dilation * (self.kernel - 1)

    def transposed(self, rows: int, output_padding: int = 0) -> Spatial:
        """The same taps with so many coarse rows (a transposed convolution's input):
        fine ones are (n - 1)S - P_lo - P_hi + d(K-1) + output padding + 1, which may be below 1 for a bad layer."""
        extent = (rows - 1) * self.stride - self.pad_lo - self.pad_hi + self.reach + output_padding + 1
        return replace(self, extent=extent, output_padding=output_padding)

    @property
    def out(self) -> int:
        """Coarse rows (a convolution's output): floor((H + P_lo + P_hi - d(K-1) - 1) / S) + 1, without the rows of
        output padding. May be below 1 for a bad layer."""
        rows = self.extent - self.output_padding + self.pad_lo + self.pad_hi
        return (rows - self.reach - 1) // self.stride + 1


@dataclass(frozen=True)
class Conv:
    """The convolution's extents: N samples, C channels of x, F of y (filters), groups, and the spatial dimensions.

    `transposed`: x is the coarse activation, y the fine one.
    """

    batch: int
    channels: int
    filters: int
    spatial: tuple[Spatial, ...]
    groups: int = 1
    bias: bool = False
    transposed: bool = False

    @property
    def fine(self) -> TensorName:
        """The activation that taps read: x, or a transposed convolution's y."""
        return "y" if self.transposed else "x"

    @property
    def coarse(self) -> TensorName:
        """The activation whose rows read by taps: y, or a transposed convolution's x."""
        return OTHER_TENSOR[self.fine]

    @cached_property
    def direct(self) -> Conv:
        """The convolution of the same sum: this one, or, for a transposed convolution, the one that takes y to x."""
        if not self.transposed:
            return self
        return Conv(self.batch, self.filters, self.channels, self.spatial, self.groups)

    def direct_phase(self, phase: Phase) -> Phase:
        """A phase by the name that it has in `direct`."""
        return OTHER_PHASE[phase] if self.transposed else phase

    def direct_tensor(self, tensor: str) -> str:
        """A tensor by the name that it has in `direct`."""
        return OTHER_TENSOR.get(tensor, tensor) if self.transposed else tensor

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        fine, coarse = ([Dim(s.name, n) for s, n in zip(self.spatial, rows, strict=True)] for rows in self._rows)
        x, y = (coarse, fine) if self.transposed else (fine, coarse)
        n, c, f = Dim("N", self.batch), Dim("C", self.channels, self.groups), Dim("F", self.filters, self.groups)
        if self.transposed:
            w = c, Dim("F", self.filters // self.groups)
        else:
            w = f, Dim("C", self.channels // self.groups)
        tensors = Tensor("x", (n, c, *x)), Tensor("w", w, self.taps), Tensor("y", (n, f, *y)), Tensor("bias", (f,))
        return {t.name: t for t in tensors}

    @property
    def _rows(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Extents of the fine activation's rows, and of the coarse one's."""
        return tuple(s.extent for s in self.spatial), tuple(s.out for s in self.spatial)

    @cached_property
    def rows(self) -> dict[tuple[str, int], Rows]:
        """By activation and dimension, the rows of it that blocks of the other activation's rows read."""
        fine, coarse = self.tensors[self.fine].dims, self.tensors[self.coarse].dims
        found: dict[tuple[str, int], Rows] = {}
        for d, s in enumerate(self.spatial, 2):
            found[self.fine, d] = Rows(s.taps, coarse[d])
            found[self.coarse, d] = Rows(ReadBy(s.taps), fine[d])
        return found

    @property
    def name(self) -> str:
        """Torch's name of the operation: conv2d, conv_transpose2d."""
        return f"{'conv_transpose' if self.transposed else 'conv'}{len(self.spatial)}d"

    def shape(self, tensor: TensorName) -> tuple[int, ...]:
        """The whole tensor's shape in elements, as torch has it."""
        taps = tuple(s.kernel for s in self.spatial) if tensor == "w" else ()
        return tuple(d.extent for d in self.dims(tensor)) + taps

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

    def largest_first(self, *tensors: TensorName) -> tuple[TensorName, ...]:
        return tuple(sorted(tensors, key=lambda t: (-self.elements(t), TENSORS.index(t))))


SPATIAL_NAMES = {1: ("W",), 2: ("H", "W"), 3: ("D", "H", "W")}
