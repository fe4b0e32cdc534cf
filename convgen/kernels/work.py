"""What a kernel does, by closed form: what a family says of its own, from which the tuner models seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from convgen.kernels.config import Config, ceil_div
from convgen.kernels.problem import Problem
from convgen.kernels.sharing import added, addends, second_sum


@dataclass(frozen=True, slots=True)
class Work:
    """A GPU's launch: programs, steps of a program, and what a step multiplies and reads.

    Attributes:
        programs: of the grid. steps: that a program loops over.
        tile: rows, columns, and what is summed, of a step's product.
        split: addends of each result that a second launch sums.
        matrix: whether matrix units multiply. instructions: of a step and warp besides its products, roughly.
        addends: pieces of a tile that the last of the programs which share it adds; 1 where none do.
        launches, more_bytes: besides this one, so that it can be, and what they move. A second launch that sums is
            counted by `split`.
        rewrites: whether a step's columns are read from shared memory and written back, as its matrix instructions
            want them. rounded: TF32 is rounded as it is copied.
        scattered: times the bytes of a step that memory is asked for, where lines are read in part.
    """

    programs: int
    steps: int
    tile: tuple[int, int, int]
    split: int = 1
    matrix: bool = True
    instructions: float = 100.0
    rewrites: bool = False
    rounded: bool = False
    scattered: float = 1.0
    launches: int = 0
    more_bytes: int = 0
    addends: int = 1

    @property
    def multiplied(self) -> int:
        """Products of a step, idle ones at the tile's edges included."""
        return prod(self.tile)

    def step_bytes(self, element_bytes: int) -> int:
        """Both operands of a step, as shared memory holds them."""
        rows, columns, summed = self.tile
        return (rows + columns) * summed * element_bytes

    @property
    def added_bytes(self) -> int:
        """That the last program of a tile reads to add them, and its group's."""
        return 4 * self.tile[0] * self.tile[1] * added(self.addends) if self.addends > 1 else 0


@dataclass(frozen=True, slots=True)
class CpuWork:
    """Calls of ATen on a CPU.

    Attributes:
        flops: idle lanes included. calls: through the dispatcher. copied_bytes: read and written around them.
    """

    flops: float
    calls: float
    copied_bytes: float


def summed_pixels(p: Problem, config: Config) -> int:
    """Steps of a program of backward-filter, which sums a piece of the pixels."""
    return ceil_div(ceil_div(p.pixels, config.split), config.tile["BP"])


def product_work(p: Problem, config: Config, pixels: int, tiles: int) -> Work:
    """Of an implicit GEMM with a step a tap: a product of pixels, filters BF and channels BC.

    Args:
        pixels: of a tile, and how many tiles cover them all; not asked in backward-filter.
    """
    t, groups, parts = config.tile, p.groups, p.x_parts * p.y_parts
    if p.phase == "backward_filter":
        programs = ceil_div(p.filters, t["BF"]) * ceil_div(p.channels, t["BC"]) * parts * p.taps * groups
        w = Work(programs * config.split, summed_pixels(p, config), (t["BF"], t["BC"], t["BP"]))
        return summed_by(p, config, w)
    if p.phase == "forward":
        columns = ceil_div(p.filters, t["BF"]) * p.y_parts * groups
        steps = p.taps * p.x_parts * ceil_div(p.channels, t["BC"])
        return Work(tiles * columns, steps, (pixels, t["BF"], t["BC"]))
    columns = ceil_div(p.channels, t["BC"]) * p.x_parts * groups
    phases = prod(d.stride for d in p.dims)
    busy = prod(min(d.kernel, d.stride) for d in p.dims)  # output phases that have a tap; others write zeros
    programs = ceil_div(tiles * columns * busy, phases)
    return Work(programs, ceil_div(p.taps, busy) * p.y_parts * ceil_div(p.filters, t["BF"]), (pixels, t["BC"], t["BF"]))


def summed_by(p: Problem, config: Config, w: Work) -> Work:
    """A filter gradient's work with its pieces: added by the last program of a tile, or by a second launch."""
    return replace(w, split=second_sum(p, config), addends=addends(p, config))


def by_pointers(p: Problem, config: Config, w: Work, *, found: float, base: float, wide: int) -> Work:
    """The same where threads copy what they find by pointers.

    Args:
        found: instructions that find a row of an activation; what of a tile is weights takes a few.
        base: of a step, whatever is copied.
        wide: elements that a copy of an activation has.
    """
    rows, columns, summed = w.tile
    threads = config.warps * 32
    copies = [n * summed / wide / threads for n in (rows, columns)]
    both = p.phase == "backward_filter"
    count = base + found * (sum(copies) if both else copies[0]) + (0 if both else 8 * copies[1])
    rewrites = p.element_bytes == 4
    return replace(
        w, instructions=count, rewrites=rewrites, scattered=1.0 if p.channels_last or p.is_pointwise else 3.0
    )


def rows_made(p: Problem) -> list[int]:
    """Rows of one sample of what a phase other than backward-filter makes."""
    return [d.x if p.phase == "backward_data" else d.y for d in p.dims]


def whole_bytes(p: Problem) -> int:
    """Each operand once, parts and what stands before included."""
    n = p.elements
    whole = n["x"] * p.x_parts + n["w"] * p.x_parts * p.y_parts + n["y"] * p.y_parts
    return whole * p.element_bytes + p.bytes_before


def sum_bytes(p: Problem, w: Work) -> int:
    """Of the addends that a second launch sums."""
    return 4 * p.elements["w"] * p.x_parts * p.y_parts * w.split if w.split > 1 else 0


def whole_flops(p: Problem) -> int:
    """Parts included."""
    return p.flops * p.x_parts * p.y_parts


def whole_products(p: Problem) -> int:
    """Products that a kernel can't do without: rows of what it makes times taps, of backward-data a stride's share."""
    rows = prod(rows_made(p)) * p.taps // (prod(d.stride for d in p.dims) if p.phase == "backward_data" else 1)
    return p.batch * p.groups * p.channels * p.filters * p.x_parts * p.y_parts * rows
