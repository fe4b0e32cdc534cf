"""A vector added to every row of a matrix, and the sum of the rows: an inner product's bias and its gradient.

Rows are samples. A CPE has tiles; sums travel along the columns of the mesh.
Source: [SW] Principles 3 and 4; the public code takes products with a matrix of ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from convgen.sw26010.gemm.counts import tiles_bytes
from convgen.sw26010.gemm.plan import Dtype, round_up
from convgen.sw26010.machine.core_group import LANES, MESH, SLOT_BYTES
from convgen.sw26010.machine.counts import Counts
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

MOST_WIDTH = 256  # elements of a row together


@dataclass(frozen=True, slots=True)
class _Matrix:
    """x [ROWS, COLUMNS] by tiles of `height` x `width`. Raises InputError: an extent below 1, or another dtype."""

    rows: int
    columns: int
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        check_extents(type(self).__name__, (self.rows, self.columns), self.dtype)

    @property
    def width(self) -> int:
        """An eighth of the columns, in whole registers, up to 256."""
        return min(MOST_WIDTH, round_up(-(-self.columns // MESH), LANES))

    @property
    def height(self) -> int:
        """An eighth of the rows, or what fits beside a tile of the result and two rows."""
        return min(TASK_LDM_BYTES // SLOT_BYTES // (2 * self.width) - 1, -(-self.rows // MESH))

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles down and across."""
        return -(-self.rows // self.height), -(-self.columns // self.width)

    def matrix(self, name: str) -> Place:
        return Place(name, (self.rows, self.columns), self.dtype)

    def context(self) -> dict[str, object]:
        return {
            "header": HEADER, "rows": self.rows, "columns": self.columns, "height": self.height, "width": self.width,
            "floats": self.dtype == "float32",
        }  # fmt: skip

    def tile_bytes(self) -> tuple[dict[int, int], int]:
        """Bytes by block, and operations, to move all tiles once."""
        return tiles_bytes((self.rows, self.height), (self.columns, self.width), itemsize(self.dtype))

    @property
    def busy(self) -> tuple[int, int]:
        """Tiles of a strip, and strips, of the CPE that has most."""
        down, across = self.tiles
        return busiest(down, MESH), busiest(across, MESH)


@dataclass(frozen=True, slots=True)
class RowSums(_Matrix):
    """sums [COLUMNS] in double, of x [ROWS, COLUMNS]."""

    @property
    def reads(self) -> tuple[Place, ...]:
        return (self.matrix("x"),)

    @property
    def writes(self) -> tuple[Place, ...]:
        return (Place("sums", (self.columns,), "float64", (1, self.columns)),)

    def program(self) -> str:
        return print_program("row_sums", self.context())

    def cost(self) -> Counts:
        counts, strips, registers = Counts(), self.tiles[1], vectors(self.width)
        sizes, ops = self.tile_bytes()
        for block, size in sizes.items():
            counts.add_get(block, size, 0)
        counts.get_ops = ops
        put, counts.put_ops = tiles_bytes((1, 1), (self.columns, self.width), SLOT_BYTES)
        for block, size in put.items():
            counts.add_put(block, size, 0)
        within = vectors(self.height * self.width)
        counts.vadd = ops * within + strips * MESH * MESH * registers
        counts.convert = ops * within if self.dtype == "float32" else 0
        counts.add(broadcasts(columns=strips * MESH * registers))
        return counts

    @property
    def rounds(self) -> int:
        down, strips = self.busy
        return strips * (down + 1)


@dataclass(frozen=True, slots=True)
class RowShift(_Matrix):
    """y [ROWS, COLUMNS] = x + b, of x and b [COLUMNS]."""

    @property
    def reads(self) -> tuple[Place, ...]:
        return self.matrix("x"), Place("b", (self.columns,), self.dtype, (1, self.columns))

    @property
    def writes(self) -> tuple[Place, ...]:
        return (self.matrix("y"),)

    def program(self) -> str:
        return print_program("row_shift", self.context())

    def cost(self) -> Counts:
        counts, strips = Counts(), self.tiles[1]
        sizes, ops = self.tile_bytes()
        for block, size in sizes.items():
            counts.add_get(block, size, 0)
            counts.add_put(block, size, 0)
        vector, once = tiles_bytes((1, 1), (self.columns, self.width), itemsize(self.dtype))
        for block, size in vector.items():
            counts.add_get(block, MESH * size, 0)
        counts.get_ops, counts.put_ops = ops + MESH * once, ops
        within = vectors(self.height * self.width)
        counts.vadd = ops * within
        if self.dtype == "float32":
            counts.convert = 2 * ops * within + MESH * strips * vectors(self.width)
        return counts

    @property
    def rounds(self) -> int:
        down, strips = self.busy
        return strips * (2 * down + 1)
