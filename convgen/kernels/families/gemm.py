"""1x1 kernels that read every pixel as it lies: plain matrix products, one a sample where channels are not last.

No pixel is decoded and nothing is padded, so that all operands are read 16 bytes at a time where a pixel's channels, or
a sample's pixels, are a multiple of that. [KERNELS: 5.1 D]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod

from convgen.kernels.config import Config, ceil_div, clamp
from convgen.kernels.estimate import data_sheet, estimated_s
from convgen.kernels.families import pointer
from convgen.kernels.index import IndexMap
from convgen.kernels.problem import Problem
from convgen.kernels.words import CHANNEL, Words
from convgen.kernels.work import Work, by_pointers, product_work, rows_made
from convgen.spec.target import Target

NAME = "gemm"
TEMPLATE = "gemm.py.jinja"
NEEDS = ()
HELD = 160  # numbers that a thread of kernels for sm_90 holds without a spill: its sums, and the prologue's
SINGLE_CHANNELS = False


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can."""
    if not problem.is_pointwise:
        return "taps, strides or padding"
    if problem.rim is not None:
        return "a halo"
    return None


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth a try: those of the pointer family, whose tiles are alike."""
    yield default(problem, target)
    for config in pointer.configs(problem, target):
        yield replace(config, family=NAME)


def default(problem: Problem, target: Target) -> Config:
    """The configuration of an untuned problem."""
    config = pointer.default(problem, target)
    if problem.element_bytes == 2 and target.arch == 90:
        device = data_sheet(target, problem.dtype)
        return min(_sizes(problem, target), key=lambda c: estimated_s(problem, c, work(problem, c), target, device))
    if problem.channels_last or problem.phase == "backward_filter":
        config = replace(config, family=NAME)
        # With float32's three products a small tile of pixels takes more registers when more threads share it.
        small = config.tile.get("BF", 0) * config.tile.get("BC", 0) <= 2048 and problem.phase == "backward_filter"
        return replace(config, warps=4) if small else config
    # Tiles end with a sample: as few of a tile's pixels as possible lie beyond it.
    rows = prod(d.y for d in problem.dims)
    pixels = min((64, 128), key=lambda n: (ceil_div(rows, n) * n, -n)) if problem.element_bytes < 8 else 32
    tile = config.tile | {"BP": min(pixels, clamp(rows, 16, 128))}
    few = problem.element_bytes == 2 or tile["BP"] < 128
    return replace(config, family=NAME, tiles=tuple(tile.items()), warps=4 if few else 8)


def _sizes(problem: Problem, target: Target) -> Iterator[Config]:
    """The configurations that a default is chosen from: sizes that don't spill."""
    names = {"forward": ("BP", "BF", "BC"), "backward_data": ("BP", "BC", "BF"), "backward_filter": ("BF", "BC", "BP")}
    extents = {"BP": problem.pixels, "BF": problem.filters, "BC": problem.channels}
    rows, columns, summed = (extents[n] for n in names[problem.phase])
    most = 64 if any(step.operands for step in problem.epilogue) else 128  # a thread's sums: operands need registers
    for m, n, warps, stages in product((64, 128), (16, 32, 64, 128, 256), (4, 8), (3, 4)):
        depth = clamp(summed, 16, 64)
        threads = warps * target.warp
        fits = (m + n) * depth * 2 * stages <= target.shared_bytes and 8 <= m * n // threads <= most
        if problem.before is not None:
            fits = fits and m * n // threads + (1 + problem.before.operands) * m * depth // threads <= HELD
        if fits and m <= clamp(rows, 64, 128) and n <= clamp(columns, 16, 256):
            tiles = tuple(zip(names[problem.phase], (m, n, depth), strict=True))
            few = pointer.splits(problem, target, m, n, depth) if problem.phase == "backward_filter" else [1]
            yield from (Config(NAME, tiles, warps, stages, split) for split in few)


def conditions(problem: Problem) -> list[str]:
    """The conditions on extents: rows of y are those of x."""
    return ["s.x == s.y", "not any(s.below)"]


def words(problem: Problem) -> type[Words]:
    return GemmWords


def work(problem: Problem, config: Config) -> Work:
    """The work of a launch; where channels are not last, tiles end with a sample."""
    pixels = config.tile["BP"]
    if problem.channels_last or problem.phase == "backward_filter":
        tiles = ceil_div(problem.pixels, pixels)
    else:
        tiles = problem.batch * ceil_div(prod(rows_made(problem)), pixels)
    wide = (
        problem.vector(problem.channels, problem.filters)
        if problem.channels_last
        else problem.vector(prod(rows_made(problem)))
    )
    return by_pointers(problem, config, product_work(problem, config, pixels, tiles), found=8, base=40, wide=wide)


class GemmWords(Words):
    """One tap on every pixel: rows are numbered through, a sample has P of them."""

    def gemm_element(self, tensor: str) -> str:
        """The distance from an activation's start to a tile: pixels m of sample n, or of all samples where channels are
        last."""
        v = CHANNEL[tensor]
        parts = [("part", "PARTS")] if self.parts(tensor) > 1 else []
        if self.last:
            order = [*parts, ("at", "N * P"), ("c", self.channels(tensor))]
        else:
            order = [*parts, ("n", "N"), ("c", self.channels(tensor)), ("m", "P")]
        m = IndexMap(tuple(order))
        along = m.text(at="at") if self.last else m.text(n="n", m="m")
        across = m.text(c=f"group * {v.upper()} + {v}" if self.grouped else v)
        part = " + " + m.text(part=f"{tensor}_part") if parts else ""
        return f"{self.along(f'({along})')} + {self.across(across if across.isidentifier() else f'({across})')}{part}"
