"""Local response normalisation across channels, AlexNet's and GoogLeNet's.

    y = x s^-beta    s = k + alpha / size * (sum of x^2 over the window of size channels)

A CPE has pixels of all channels, or of a block of them and of those beside it that windows reach. Memory has a
channel's pixels apart from the next channel's, so DMA is strided ([SW] Principle 3). Backward, s is computed again.
Source: Krizhevsky et al. 2012, 3.3, with Caffe's and PyTorch's alpha / size; an even window has one more below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from convgen.errors import InputError
from convgen.sw26010.gemm.counts import tiles_bytes
from convgen.sw26010.gemm.plan import Dtype, round_up
from convgen.sw26010.machine.core_group import CPES, LANES, SLOT_BYTES
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.kernel_cycles import pieces
from convgen.sw26010.machine.memory import block_bytes
from convgen.sw26010.machine.printing import print_program
from convgen.sw26010.operations.task import HEADER, TASK_LDM_BYTES, Place, busiest, check_extents, itemsize, vectors

LEAST_PIECE = 32  # pixels of a channel that a transfer should have, 256 B of doubles ([SW] Principle 3)


@dataclass(frozen=True, slots=True)
class LocalResponse:
    """Of x [N, C, PIXELS]; backward of x and dy.

    Args:
        size: channels of a window, from c - size // 2 on.
    Raises:
        InputError: an extent below 1, another dtype, numbers that are not finite, or windows that don't fit into LDM.
    """

    n: int
    c: int
    pixels: int
    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    k: float = 1.0
    dtype: Dtype = "float32"
    backward: bool = False

    def __post_init__(self) -> None:
        check_extents("LocalResponse", (self.n, self.c, self.pixels, self.size), self.dtype)
        if not all(map(isfinite, (self.alpha, self.beta, self.k))):
            raise InputError(f"LocalResponse with alpha {self.alpha}, beta {self.beta}, k {self.k}")
        if not self._pixels_beside(self.block):
            fact = f"a window of {self.size} channels, and what its gradient needs, don't fit into LDM"
            raise InputError(fact, hint="a smaller window")

    @property
    def window(self) -> tuple[int, int]:
        """Channels below and above."""
        return self.size // 2, (self.size - 1) // 2

    @property
    def reach(self) -> int:
        """Channels that are read on either side of a block: those that windows reach, backward windows of windows."""
        return self.size - 1 if self.backward else max(self.window)

    @property
    def block(self) -> int:
        """Channels that a CPE makes at once: all, or the most of which LDM holds 32 pixels each; at least one."""
        for blocks in range(1, self.c + 1):
            block = -(-self.c // blocks)
            if self._pixels_beside(block) >= min(LEAST_PIECE, round_up(self.pixels, LANES)):
                return block
        return 1

    @property
    def rows(self) -> int:
        """Channels in LDM: a block and those on either side that are read."""
        return self.rows_of(self.block)

    def rows_of(self, block: int) -> int:
        return self.c if block == self.c else min(self.c, block + 2 * self.reach)

    def _pixels_beside(self, block: int) -> int:
        rows = (3 if self.backward else 1) * self.rows_of(block) + block
        return TASK_LDM_BYTES // (SLOT_BYTES * rows) // LANES * LANES

    @property
    def piece(self) -> int:
        """Pixels that a CPE takes at once: what fits, but fewer where CPEs would have nothing."""
        share = -(-self.n * self.pixels // CPES)
        least = min(LEAST_PIECE, round_up(self.pixels, LANES))
        return min(self._pixels_beside(self.block), round_up(self.pixels, LANES), max(least, round_up(share, LANES)))

    @property
    def reads(self) -> tuple[Place, ...]:
        return tuple(self._place(name) for name in (("x", "dy") if self.backward else ("x",)))

    @property
    def writes(self) -> tuple[Place, ...]:
        return (self._place("dx" if self.backward else "y"),)

    def _place(self, name: str) -> Place:
        return Place(name, (self.n, self.c, self.pixels), self.dtype)

    def program(self) -> str:
        return print_program(
            "response",
            {
                "header": HEADER, "backward": self.backward, "floats": self.dtype == "float32",
                "n": self.n, "c": self.c, "pixels": self.pixels,
                "block": self.block, "rows": self.rows, "piece": self.piece,
                "reach": self.reach, "window": self.window,
                "k": float(self.k), "a": self.alpha / self.size, "b": float(self.beta),
            },
        )  # fmt: skip

    def cost(self) -> Counts:
        counts, size = Counts(), itemsize(self.dtype)
        piece, block, rows, operands = self.piece, self.block, self.rows, len(self.reads)
        for height in self._heights():
            for width, strips in pieces(self.pixels, piece):
                together = block_bytes(height, width, self.pixels, size)
                counts.add_get(together, operands * strips * height * width * size, operands * strips)
        made, ops = tiles_bytes((self.c, block), (self.pixels, piece), size)
        for together, moved in made.items():
            counts.add_put(together, moved, 0)
        counts.put_ops = ops
        within, outside = vectors(rows * piece), vectors(block * piece)
        reach = self.size - 1
        if self.backward:
            counts.vadd = ops * ((reach + 5) * within + (reach + 4) * outside)
            counts.functions = ops * 2 * rows * piece
        else:
            counts.vadd = ops * (reach + 3) * outside
            counts.functions = ops * block * piece
        if self.dtype == "float32":
            counts.convert = ops * (operands * within + outside)
        everything = Counts()
        everything.add(counts, self.n)
        return everything

    def _heights(self) -> Iterator[int]:
        """How many channels each block reads."""
        for c in range(0, self.c, self.block):
            yield min(self.rows, self.c - max(0, c - self.reach))

    @property
    def rounds(self) -> int:
        return 2 * busiest(self.n * -(-self.c // self.block) * -(-self.pixels // self.piece))
