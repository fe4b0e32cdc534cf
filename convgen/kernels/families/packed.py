"""Implicit GEMM for few channels: taps and channels are one index of the sum, so that its steps are full.

[KERNELS: 5.1 C] Forward and backward-filter; in backward-data few channels are columns, where a tile of 16 serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from convgen.kernels.config import Config, ceil_div, clamp
from convgen.kernels.problem import Problem
from convgen.kernels.words import Words, times
from convgen.kernels.work import Work, summed_pixels
from convgen.spec.target import Target

NAME = "packed"
TEMPLATE = "packed_{phase}.py.jinja"
NEEDS = ()
SINGLE_CHANNELS = False
MOST_CHANNELS = 15  # from 16 channels on, a step of one tap is full


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can."""
    if problem.phase == "backward_data":
        return "backward_data sums over filters"
    if problem.groups > 1 or problem.x_parts > 1 or problem.y_parts > 1 or problem.rim is not None:
        return "groups, parts and rims"
    if problem.taps == 1 or problem.channels > MOST_CHANNELS:
        return f"{problem.channels} channels and {problem.taps} taps; at most {MOST_CHANNELS} and more than one"
    return None


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth a try, by closed form; the default first."""
    yield default(problem, target)
    summed = problem.channels * problem.taps
    for pixels in (64, 128, 256):
        for filters in (16, 32, 64, 128):
            for depth in (16, 32, 64):
                for warps in (4, 8):
                    if filters > clamp(problem.filters, 16, 128) or depth > clamp(summed, 16, 64):
                        continue
                    if problem.phase == "forward" and pixels * filters <= 128 * warps * target.warp:
                        yield Config(NAME, (("BP", pixels), ("BF", filters), ("BK", depth)), warps, 3)
                    elif problem.phase == "backward_filter" and pixels <= 128:
                        for split in _splits(problem, target, filters, depth, pixels):
                            yield Config(NAME, (("BF", filters), ("BK", depth), ("BP", pixels)), warps, 3, split)


def _splits(problem: Problem, target: Target, filters: int, columns: int, depth: int) -> list[int]:
    programs = ceil_div(problem.filters, filters) * ceil_div(problem.channels * problem.taps, columns)
    most = max(1, ceil_div(problem.pixels, 4 * depth))
    return sorted({max(1, min(most, wave * target.processors // programs)) for wave in (1, 2)} | {1})


def default(problem: Problem, target: Target) -> Config:
    """The configuration of an untuned problem."""
    summed, stages = problem.channels * problem.taps, 3 if target.kind == "cuda" else 2
    if problem.element_bytes == 8:
        filters, depth, pixels = 16, 16, 32
    else:
        filters, depth, pixels = clamp(problem.filters, 16, 64), clamp(summed, 16, 32), 64
    if problem.phase == "forward":
        # For sm_100 Triton 3.7 takes 64 rows or more to units that multiply no float64, and stops.
        pixels = pixels if problem.element_bytes == 8 and target.arch == 100 else 2 * pixels
        return Config(NAME, (("BP", pixels), ("BF", filters), ("BK", depth)), 8, stages)
    columns = clamp(summed, 16, 64 if problem.element_bytes < 8 else 16)
    split = _splits(problem, target, filters, columns, pixels)[-1]
    return Config(NAME, (("BF", filters), ("BK", columns), ("BP", pixels)), 8, stages, split)


def conditions(problem: Problem) -> list[str]:
    """The conditions on extents: none."""
    return []


def words(problem: Problem) -> type[Words]:
    return PackedWords


def work(problem: Problem, config: Config) -> Work:
    """The work of a launch: taps and channels are one index."""
    tile, packed = config.tile, problem.channels * problem.taps
    filters, columns = ceil_div(problem.filters, tile["BF"]), ceil_div(packed, tile["BK"])
    if problem.phase == "backward_filter":
        steps, product = summed_pixels(problem, config), (tile["BF"], tile["BK"], tile["BP"])
        w = Work(filters * columns * config.split, steps, product, config.split)
    else:
        tiles = ceil_div(problem.pixels, tile["BP"])
        w = Work(tiles * filters * problem.y_parts * problem.groups, columns, (tile["BP"], tile["BF"], tile["BK"]))
    elements = w.step_bytes(1) / (config.warps * 32)  # copied one by one
    return replace(w, instructions=60 + 22 * elements, scattered=3.0)


class PackedWords(Words):
    """Taps and channels as one index of the sum."""

    def flat_taps(self, j: str) -> list[str]:
        """Channel and tap of an index that runs over both in w's memory order, and the rows that the tap reads."""
        taps = self.problem.taps
        pair = f"tap, c = {j} // C, {j} % C" if self.last else f"c, tap = {j} // {taps}, {j} % {taps}"
        lines = [pair, self.taps] if self.tapped else [pair]
        for d in self.dims:
            back = f" + {self.across(f'({times(d.k, d.dilation)})')}" if d.taps > 1 else ""
            lines.append(f"{d.x} = {d.x}_first{back}")
        return lines

    @property
    def flat_element(self) -> str:
        """The address of x's element of a pixel and an index over taps and channels."""
        rows = {d.x: d.x for d in self.dims}
        start = self.activation("x").text(n="sample", **rows)
        channel = self.activation("x").text(c="c")
        channel = channel if self.last else channel.replace("c *", "c.to(tl.int64) *", 1)
        return f"{start} + {self.across(f'({channel})')}"
