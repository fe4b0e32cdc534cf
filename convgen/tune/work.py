"""What a GPU's kernel does, by closed form: programs, steps of a program, and what a step multiplies and reads."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from convgen.kernels.config import Config, ceil_div
from convgen.kernels.problem import Problem


@dataclass(frozen=True, slots=True)
class Work:
    """A launch.

    Attributes:
        programs: of the grid. steps: that a program loops over.
        tile: rows, columns, and what is summed, of a step's product.
        split: addends of each result that a second launch sums.
    """

    programs: int
    steps: int
    tile: tuple[int, int, int]
    split: int = 1

    @property
    def multiplied(self) -> int:
        """Products of a step, idle ones at the tile's edges included."""
        return prod(self.tile)

    def step_bytes(self, element_bytes: int) -> int:
        """Both operands of a step, as shared memory holds them."""
        rows, columns, summed = self.tile
        return (rows + columns) * summed * element_bytes


def work(p: Problem, config: Config) -> Work:
    """Of every family but ATen's."""
    t = config.tile
    groups, parts = p.groups, p.x_parts * p.y_parts
    if config.family == "depthwise":
        across = ceil_div(groups * (1 if p.phase == "backward_data" else p.filters), t["BG"])
        if p.phase == "backward_filter":
            steps = ceil_div(ceil_div(p.pixels, config.split), t["BP"])
            return Work(across * p.taps * config.split, steps, (t["BP"], t["BG"], 1), config.split)
        return Work(ceil_div(p.pixels, t["BP"]) * across, p.taps, (t["BP"], t["BG"], 1))
    if p.phase == "backward_filter":
        steps = ceil_div(ceil_div(p.pixels, config.split), t["BP"])
        rows = ceil_div(p.filters, t["BF"])
        if config.family == "packed":
            programs = rows * ceil_div(p.channels * p.taps, t["BK"])
            return Work(programs * config.split, steps, (t["BF"], t["BK"], t["BP"]), config.split)
        programs = rows * ceil_div(p.channels, t["BC"]) * parts * p.taps * groups
        return Work(programs * config.split, steps, (t["BF"], t["BC"], t["BP"]), config.split)
    pixels, tiles = _pixel_tiles(p, config)
    if p.phase == "forward":
        columns = ceil_div(p.filters, t["BF"]) * p.y_parts * groups
        if config.family == "packed":
            return Work(tiles * columns, ceil_div(p.channels * p.taps, t["BK"]), (pixels, t["BF"], t["BK"]))
        steps = p.taps * p.x_parts * ceil_div(p.channels, t["BC"])
        return Work(tiles * columns, steps, (pixels, t["BF"], t["BC"]))
    columns = ceil_div(p.channels, t["BC"]) * p.x_parts * groups
    taps = ceil_div(p.taps, prod(d.stride for d in p.dims))  # of an output phase, on average
    return Work(tiles * columns, taps * p.y_parts * ceil_div(p.filters, t["BF"]), (pixels, t["BC"], t["BF"]))


def _pixel_tiles(p: Problem, config: Config) -> tuple[int, int]:
    """Pixels of a tile, and how many tiles cover them."""
    t = config.tile
    rows = [d.x if p.phase == "backward_data" else d.y for d in p.dims]
    if config.family == "box":
        extents = [t[f"T{d.name}"] for d in p.dims]
        covered = prod(ceil_div(r, e) for r, e in zip(rows, extents, strict=True))
        return t["TN"] * prod(extents), ceil_div(p.batch, t["TN"]) * covered
    if config.family == "gemm" and not p.channels_last:
        return t["BP"], p.batch * ceil_div(prod(rows), t["BP"])  # tiles end with a sample
    return t["BP"], ceil_div(p.pixels, t["BP"])
