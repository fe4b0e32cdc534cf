"""A kernel's work in closed form, as its family states it; the tuner models seconds from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from convgen.kernels.config import Config, ceil_div
from convgen.kernels.problem import Problem
from convgen.kernels.sharing import added, addends, second_sum


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a GPU's launch: programs, steps of a program, and what a step multiplies and reads.

    Attributes:
        programs: the grid's number of programs. steps: how many steps a program loops over.
        tile: rows, columns and summed elements of a step's product.
        split: addends of each result that a second launch sums.
        matrix: whether matrix units multiply. instructions: roughly those of a warp in a step, besides products.
        addends: pieces of a tile that the last of the programs that share it adds; 1 where programs don't share tiles.
        launches, more_bytes: other launches that this one needs, and the bytes that they move. A second launch that
            sums is counted by `split`.
        rewrites: whether a step's columns are read from shared memory and written back, as its matrix instructions
            want them. rounded: TF32 is rounded as it is copied.
        scattered: the factor by which memory is asked for more bytes than a step reads, where cache lines are read in
            part.
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
        """Products that a step makes, idle ones at the tile's edges included."""
        return prod(self.tile)

    def step_bytes(self, element_bytes: int) -> int:
        """Bytes of both operands of a step, as shared memory holds them."""
        rows, columns, summed = self.tile
        return (rows + columns) * summed * element_bytes

    @property
    def added_bytes(self) -> int:
        """Bytes that the last program of a tile reads to add pieces, its group's included."""
        return 4 * self.tile[0] * self.tile[1] * added(self.addends) if self.addends > 1 else 0


@dataclass(frozen=True, slots=True)
class CpuWork:
    """The work of ATen's calls on a CPU.

    Attributes:
        flops: with those of idle lanes. calls: how many go through the dispatcher. copied_bytes: bytes that copies
            around them read and write.
    """

    flops: float
    calls: float
    copied_bytes: float


def summed_pixels(p: Problem, config: Config) -> int:
    """The number of steps of a program of backward-filter, which sums a piece of the pixels."""
    return ceil_div(ceil_div(p.pixels, config.split), config.tile["BP"])


def product_work(p: Problem, config: Config, pixels: int, tiles: int) -> Work:
    """The work of an implicit GEMM with one step a tap: a product of pixels, filters BF and channels BC.

    Args:
        pixels, tiles: pixels of a tile, and how many tiles cover all; not asked for in backward-filter.
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
    """The work where threads copy what they find by pointers.

    Args:
        found: instructions that find a row of an activation; a tile of weights takes a few.
        base: instructions of a step whatever is copied.
        wide: elements that one copy of an activation moves.
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
    """The rows of one sample of the result of a phase other than backward-filter."""
    return [d.x if p.phase == "backward_data" else d.y for d in p.dims]


def whole_bytes(p: Problem) -> int:
    """Bytes of each operand once, with parts and the prologue's."""
    n = p.elements
    whole = n["x"] * p.x_parts + n["w"] * p.x_parts * p.y_parts + n["y"] * p.y_parts
    return whole * p.element_bytes + p.bytes_before


def sum_bytes(p: Problem, w: Work) -> int:
    """Bytes of the addends that a second launch sums."""
    return 4 * p.elements["w"] * p.x_parts * p.y_parts * w.split if w.split > 1 else 0


def whole_flops(p: Problem) -> int:
    """Flops of the whole problem, all parts included."""
    return p.flops * p.x_parts * p.y_parts


def whole_products(p: Problem) -> int:
    """Products that no kernel can do without: rows of the result times taps; in backward-data a stride's share of
    these."""
    rows = prod(rows_made(p)) * p.taps // (prod(d.stride for d in p.dims) if p.phase == "backward_data" else 1)
    return p.batch * p.groups * p.channels * p.filters * p.x_parts * p.y_parts * rows
