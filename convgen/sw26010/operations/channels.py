"""Sums over every channel of [N, C, PIXELS], and what a channel's numbers make of its elements.

    moments         count, mean and sum of squared deviations of x, merged without cancellation
    products        the sums of dy and of dy (x - mean)
    total           the sum of dy: a bias's gradient

    normalise       y = a (x - mean) + h
    combine         dx = a dy + p (x - mean) + q
    shift           y = x + b: a bias

Channels are dealt out to the rows of the mesh, planes to the CPEs of a row, whose sums are registers that go round the
row. So channels fewer than 64, and a batch of one, leave fewer CPEs without work than whole channels a CPE would.
Source: [SW] Principles 3 and 4; the paper has no program of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from convgen.sw26010.gemm.counts import tiles_bytes
from convgen.sw26010.gemm.plan import Dtype, round_up
from convgen.sw26010.machine.core_group import LANES, MESH, SLOT_BYTES
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.layer_vectors import MERGE_FUNCTIONS, MERGE_VADD
from convgen.sw26010.machine.printing import print_program
from convgen.sw26010.operations.task import (
    HEADER,
    TASK_LDM_BYTES,
    Place,
    broadcasts,
    busiest,
    check_extents,
    itemsize,
    vectors,
)

Sums = Literal["moments", "products", "total"]
Makes = Literal["normalise", "combine", "shift"]


@dataclass(frozen=True, slots=True)
class _Planes:
    """x [N, C, PIXELS], of which each CPE of a row of the mesh takes pieces of planes.

    Raises:
        InputError: an extent below 1, or another dtype.
    """

    n: int
    c: int
    pixels: int
    dtype: Dtype

    def __post_init__(self) -> None:
        check_extents(type(self).__name__, (self.n, self.c, self.pixels), self.dtype)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.n, self.c, self.pixels

    def piece_beside(self, buffers: int) -> int:
        """Pixels in LDM at once: a plane, or what fits; less where planes are fewer than the CPEs of a row."""
        most = (TASK_LDM_BYTES // SLOT_BYTES - 2 * LANES) // buffers // LANES * LANES
        return min(most, round_up(-(-self.pixels // -(-MESH // self.n)), LANES))

    def add_moves(self, counts: Counts, piece: int, gets: int, puts: int = 0) -> int:
        """Add the transfers of all planes, `gets` in and `puts` out, to counts. Returns the pieces of all planes."""
        sizes, pieces = tiles_bytes((1, 1), (self.pixels, piece), itemsize(self.dtype))
        planes = self.n * self.c
        for block, size in sizes.items():
            counts.add_get(block, gets * planes * size, 0)
            counts.add_put(block, puts * planes * size, 0)
        counts.get_ops += gets * planes * pieces
        counts.put_ops += puts * planes * pieces
        if self.dtype == "float32":
            counts.convert += (gets + puts) * planes * pieces * piece // LANES
        return planes * pieces

    def rounds_of(self, piece: int, waits: int, more: int) -> int:
        """Rounds of the CPE that has most: `waits` for each of its pieces and `more` for each of its channels."""
        return busiest(self.c, MESH) * (waits * busiest(self.n * -(-self.pixels // piece), MESH) + more)


# By kind: its title, what it reads, how many numbers it makes a channel, its instruction and that one's additions.
_SUMS: dict[Sums, tuple[str, tuple[str, ...], int, str, int]] = {
    "moments": (
        "Count, mean and squared deviations", ("X",), 3, "add_moments(sums, x, min(PIECE, PIXELS - at))", 3,
    ),
    "products": (
        "Sums of dy and of dy (x - mean)", ("DY", "X"), 2,
        "add_products(sums, dy, x, mean, min(PIECE, PIXELS - at))", 3,
    ),
    "total": ("Sum of dy", ("DY",), 1, "add_total(sums, dy, min(PIECE, PIXELS - at))", 1),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChannelSums(_Planes):
    """Sums over every channel, in double.

    `moments` are sums [C, 3] of x; `products` sums [C, 2] of dy, x and means [C, 1]; `total` is sums [C, 1] of dy.
    """

    kind: Sums = "moments"

    @property
    def piece(self) -> int:
        return self.piece_beside(len(_SUMS[self.kind][1]))

    @property
    def reads(self) -> tuple[Place, ...]:
        planes = tuple(Place(name.lower(), self.shape, self.dtype) for name in _SUMS[self.kind][1])
        return (*planes, Place("means", (self.c, 1), "float64")) if self.kind == "products" else planes

    @property
    def writes(self) -> tuple[Place, ...]:
        return (Place("sums", (self.c, _SUMS[self.kind][2]), "float64"),)

    def program(self) -> str:
        title, operands, width, instruction, _ = _SUMS[self.kind]
        return print_program(
            "channel_sums",
            {
                "header": HEADER, "title": title, "operands": operands, "width": width, "instruction": instruction,
                "n": self.n, "c": self.c, "pixels": self.pixels, "piece": self.piece,
                "floats": self.dtype == "float32", "products": self.kind == "products",
                "merged": self.kind == "moments",
            },
        )  # fmt: skip

    def cost(self) -> Counts:
        _, operands, width, _, additions = _SUMS[self.kind]
        counts = Counts()
        pieces = self.add_moves(counts, self.piece, len(operands))
        counts.add_put(width * SLOT_BYTES, self.c * width * SLOT_BYTES, self.c)
        if self.kind == "products":
            counts.add_get(SLOT_BYTES, MESH * self.c * SLOT_BYTES, MESH * self.c)
        counts.add(broadcasts(rows=MESH * self.c))
        whole, rest = divmod(self.pixels, self.piece)
        counts.vadd += additions * self.n * self.c * (whole * (self.piece // LANES) + vectors(rest))
        registers = MESH * MESH * self.c
        if self.kind == "moments":
            counts.vadd += MERGE_VADD * (pieces + registers)
            counts.functions += pieces + MERGE_FUNCTIONS * (pieces + registers)
        else:
            counts.vadd += registers
        return counts

    @property
    def rounds(self) -> int:
        return self.rounds_of(self.piece, 1, 1 + (self.kind == "products"))


# By kind: its title, what it reads and makes, how many factors a channel has, its instruction and that one's additions.
_MAKES: dict[Makes, tuple[str, tuple[str, ...], str, int, str, int]] = {
    "normalise": ("y = a (x - mean) + h", ("X",), "Y", 3, "normalised(y, x, factors)", 2),
    "combine": ("dx = a dy + p (x - mean) + q", ("X", "DY"), "DX", 4, "combined(dx, x, dy, factors)", 3),
    "shift": ("y = x + b", ("X",), "Y", 1, "shifted(y, x, factors)", 1),
}


@dataclass(frozen=True, slots=True)
class ChannelMap(_Planes):
    """Elements of x, or of x and dy, and of factors of every channel in double.

    `normalise` makes y, by factors [C, 3]: a, mean, h; `combine` dx, by factors [C, 4]: a, p, mean, q; `shift` y, by
    factors [C, 1]: b.
    """

    kind: Makes = "normalise"

    @property
    def piece(self) -> int:
        return self.piece_beside(len(_MAKES[self.kind][1]) + 1)

    @property
    def reads(self) -> tuple[Place, ...]:
        _, operands, _, width, _, _ = _MAKES[self.kind]
        planes = (Place(name.lower(), self.shape, self.dtype) for name in operands)
        return (*planes, Place("factors", (self.c, width), "float64"))

    @property
    def writes(self) -> tuple[Place, ...]:
        return (Place(_MAKES[self.kind][2].lower(), self.shape, self.dtype),)

    def program(self) -> str:
        title, operands, result, width, instruction, _ = _MAKES[self.kind]
        return print_program(
            "channel_scale",
            {
                "header": HEADER, "title": title, "operands": operands, "result": result, "width": width,
                "instruction": instruction, "n": self.n, "c": self.c, "pixels": self.pixels, "piece": self.piece,
                "floats": self.dtype == "float32",
            },
        )  # fmt: skip

    def cost(self) -> Counts:
        _, operands, _, width, _, additions = _MAKES[self.kind]
        counts = Counts()
        pieces = self.add_moves(counts, self.piece, len(operands), 1)
        counts.add_get(width * SLOT_BYTES, MESH * self.c * width * SLOT_BYTES, MESH * self.c)
        counts.vadd += additions * pieces * self.piece // LANES
        return counts

    @property
    def rounds(self) -> int:
        return self.rounds_of(self.piece, 2, 1)
