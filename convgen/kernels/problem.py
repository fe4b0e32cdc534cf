"""The local problem: one phase of the convolution of one rank, as a kernel sees it (docs/design.md, Local kernels)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Literal

from convgen.kernels.prologues import Before
from convgen.operations.row import Epilogue
from convgen.program.nodes import Phase
from convgen.spec.layer import DTYPE_BYTES

Tiled = Literal["", "batch", "samples"]  # no moments; moments by tiles of all pixels; by tiles of one sample each


@dataclass(frozen=True, slots=True)
class LocalDim:
    """One spatial dimension of a rank's operands.

    `x` and `y` are the rows that the operands hold; `below` is the number of zero rows below x's first row as seen from
    y's first one, negative where x starts with rows that y never reads. The rows above follow: they are zero, too.
    """

    name: str
    x: int
    y: int
    kernel: int
    stride: int
    dilation: int
    below: int


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A local convolution.

    Attributes:
        channels, filters: those of one group.
        x_parts, y_parts: the channels of x (filters of y) come in this many equal parts one behind the other, as an
            all-gather delivers and a reduce-scatter wants them; 1 is an ordinary tensor.
        rim: boxes around the rank's own block of the activation read with a halo (x, or dy in backward_data),
            in buffers of their own; None where the operand is one tensor.
        epilogue: the steps done on each element of the result, in forward and backward_data.
        moments: whether forward also makes moments of y by tiles (kernels/moments.py), and which pixels a tile may
            have.
        before: the steps done on each element of the activation that is read, and then also written
            (kernels/prologues.py).
    """

    phase: Phase
    batch: int
    channels: int
    filters: int
    groups: int = 1
    dims: tuple[LocalDim, ...]
    dtype: str
    memory_format: str
    bias: bool = False
    x_parts: int = 1
    y_parts: int = 1
    rim: int | None = None
    epilogue: Epilogue = ()
    moments: Tiled = ""
    before: Before | None = None

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def taps(self) -> int:
        return prod(d.kernel for d in self.dims)

    @cached_property
    def pixels(self) -> int:
        """Rows of the implicit GEMM's activations: N times y's rows, or x's in backward_data."""
        return self.batch * prod(d.x if self.phase == "backward_data" else d.y for d in self.dims)

    @cached_property
    def flops(self) -> int:
        """The problem's flops, two for each product; products with zero padding count."""
        return 2 * self.batch * prod(d.y for d in self.dims) * self.groups * self.channels * self.filters * self.taps

    @cached_property
    def elements(self) -> dict[str, int]:
        """Elements of x, w, y."""
        return {
            "x": self.batch * self.groups * self.channels * prod(d.x for d in self.dims),
            "w": self.groups * self.filters * self.channels * self.taps,
            "y": self.batch * self.groups * self.filters * prod(d.y for d in self.dims),
        }

    @property
    def bytes(self) -> int:
        """Bytes of each operand once."""
        beside = sum(kind == "element" for step in self.epilogue for kind, _ in step.operands)
        made = self.elements["x" if self.phase == "backward_data" else "y"]
        return (sum(self.elements.values()) + beside * made) * self.element_bytes + self.bytes_before

    @property
    def bytes_before(self) -> int:
        """Bytes that the prologue reads and writes."""
        read = self.elements["y" if self.phase == "backward_data" else "x"]
        return 0 if self.before is None else (self.before.operands + 1) * read * self.element_bytes

    @property
    def channels_last(self) -> bool:
        return self.memory_format == "channels_last"

    def vector(self, *extents: int) -> int:
        """How many elements an access of up to 16 bytes can take, if addresses are multiples of these extents."""
        return gcd(16 // self.element_bytes, *extents)

    @property
    def is_pointwise(self) -> bool:
        """1x1, stride 1, no padding: every row of y is a row of x."""
        return all(d.kernel == d.stride == 1 and d.below == 0 and d.x == d.y for d in self.dims)
