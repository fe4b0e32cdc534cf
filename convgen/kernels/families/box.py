"""Implicit GEMM by boxes: a tile's pixels are a box of samples and rows, which the copy engine fetches as one, zeros
outside included, where channels are last. [KERNELS: 5.1 A, 5.2, 5.3]

Rows that a stride skips: the view that is copied takes every second row of a dimension with one tap; with more it has
pairs of rows as a dimension of their own, and pairs of the last rows as twice the channels.

A halo: what the block lacks is zero to the copy engine, and so is what a box around it lacks, so that the product of
all rows is the sum of one for each of them; taps that read no row of one are left out of its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil, prod

from convgen.kernels.box_tiles import (
    filter_tiles,
    has_part,
    is_paired,
    is_turned,
    pieces,
    rewrites,
    taps_together,
    tile_pixels,
    view_rank,
)
from convgen.kernels.boxes import BoxWords
from convgen.kernels.config import Config, ceil_div, clamp, power_of_two
from convgen.kernels.estimate import busy_s, data_sheet, estimated_s
from convgen.kernels.problem import Problem
from convgen.kernels.words import Words
from convgen.kernels.work import Work, product_work, summed_by
from convgen.spec.target import Target

NAME = "box"
TEMPLATE = "box.py.jinja"
NEEDS = ("boxes",)
SINGLE_CHANNELS = False
MOST_BOXES = 3  # the most boxes around a block of rows
ALIKE = 1.05  # estimates within this factor of each other say nothing
HELD = 96  # numbers that a thread holds, of float32's sums and of rows in two parts: with more, registers spill


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can."""
    if target.kind != "cuda" or target.arch not in (90, 100, 120):
        return f"{target} has no copy engine for boxes"
    if not problem.channels_last:
        return "channels are not last"
    if problem.groups > 1:
        return "groups"
    if problem.rim is not None and (problem.rim > MOST_BOXES or any(d.stride > 1 for d in problem.dims)):
        return "a stride, or a halo in more than three boxes"
    if problem.rim is not None and problem.x_parts * problem.y_parts > 1:
        return "parts beside a halo"
    if not problem.channels or not problem.filters or problem.dtype == "float64":
        return "no channels, or float64"
    if problem.channels * problem.element_bytes % 16 or problem.filters * problem.element_bytes % 16:
        return f"{problem.channels} channels and {problem.filters} filters are no multiples of 16 bytes"
    if not problem.batch * prod(d.x * d.y for d in problem.dims):
        return "no pixels"
    return _stride_refusal(problem) if problem.phase != "backward_data" else None


def _stride_refusal(problem: Problem) -> str | None:
    """Why x's rows that a stride skips can't be left out by a view."""
    pairs = [d for d in problem.dims if is_paired(d)]
    if any(d.stride & (d.stride - 1) for d in pairs) or any(d.x % d.stride for d in problem.dims):
        # The copy engine wants each stride to be a multiple of the one before (CUDA driver API, cuTensorMapEncode).
        return "rows that are no multiple of a stride, or a stride that is no power of two"
    if pairs and pairs[-1] is problem.dims[-1] and problem.channels % 16:
        return f"{problem.channels} channels beside those of the next row, no multiple of 16"
    if view_rank(problem, "x") > 5:
        return "more than five dimensions to copy"
    if any(d.stride > 1 and d.x <= -d.below % d.stride for d in problem.dims if not is_paired(d)):
        return "no row of x is read"
    return None


def by_sample(problem: Problem) -> bool:
    """Whether a box may have one sample only: behind the last one come those of the next part."""
    parts = {"x": problem.x_parts, "y": problem.y_parts}
    return any(n > 1 and not has_part(problem, t) for t, n in parts.items())


def tiles(problem: Problem, pixels: int) -> list[dict[str, int]]:
    """The boxes of so many pixels, the least wasteful first."""
    rows = box_rows(problem)
    powers = [1 << i for i in range(pixels.bit_length())]
    found: list[tuple[float, bool, dict[str, int]]] = []
    for shape in product(*([t for t in powers if t <= power_of_two(r)] for r in rows)):
        samples, rest = divmod(pixels, prod(shape))
        if rest or not samples or samples > (1 if by_sample(problem) else power_of_two(problem.batch)):
            continue
        covered = ceil_div(problem.batch, samples) * prod(ceil_div(r, t) * t for r, t in zip(rows, shape, strict=True))
        covered *= _rim_steps(problem, shape)
        names = ("TN", *(f"T{d.name}" for d in problem.dims))
        # A box of one extent is read as it lies: dy by each of the taps that a filter gradient makes together, where
        # another is brought to registers once (Triton 3.6 and 3.7).
        single = problem.phase == "backward_filter" and pixels in (samples, *shape)
        found.append((covered * samples, single, dict(zip(names, (samples, *shape), strict=True))))
    found.sort(key=lambda one: (*one[:2], one[2]["TN"]))  # fewer samples first: taps read their rows again
    return [tile for *_, tile in found]


def _rim_steps(problem: Problem, shape: Sequence[int]) -> float:
    """The factor by which a rim adds steps; the rim is taken to lie along the first dimension.

    A box of one row reads each tap's row from one block. One of more rows has steps for its own block and, at the edge,
    for the taps that reach a box of the rim.
    """
    if not problem.rim or shape[0] == 1:
        return 1.0
    d = problem.dims[0]
    return 1 + problem.rim * (d.kernel // 2) / d.kernel / ceil_div(box_rows(problem)[0], shape[0])


def box_rows(problem: Problem) -> list[int]:
    """The rows that boxes are cut from: y's, or in backward-data x's rows of one output phase."""
    if problem.phase == "backward_data":
        return [ceil_div(d.x, d.stride) for d in problem.dims]
    return [d.y for d in problem.dims]


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth a try, by closed form; the default first."""
    yield default(problem, target)
    widths = (16, 32, 64, 128, 256)
    for rows, columns, summed, warps, stages in product(widths, widths, widths[:4], (4, 8), (2, 3, 4)):
        shared = (rows + columns) * summed * problem.element_bytes * stages
        spread = 4 <= rows * columns // (warps * target.warp) <= 128
        if not spread or shared > target.shared_bytes or max(rows, columns) < 64:
            continue
        if problem.phase == "backward_filter":
            if rows > clamp(problem.filters, 64, 256) or columns > clamp(problem.channels, 16, deepest(problem)):
                continue
            for tile in tiles(problem, summed)[:2]:
                one = _config(problem, tile, rows, columns, warps, stages)
                if _fits(problem, one, target):
                    yield from (replace(one, split=split) for split in splits(problem, target, one))
        else:
            made, depth = _sides(problem)
            if rows < 64 or columns > clamp(made, 16, 256) or summed > clamp(depth, 16, deepest(problem)):
                continue
            for tile in tiles(problem, rows)[:3]:
                for split in _cuts(problem, target, tile, columns):
                    yield _config(problem, tile, columns, summed, warps, stages, split)


def deepest(problem: Problem) -> int:
    """The most channels of a step: the channels of a row's pair follow in memory, so steps must divide them evenly."""
    if problem.phase != "backward_data" and is_paired(problem.dims[-1]):
        return min(128, problem.channels & -problem.channels)
    return 128


def splits(problem: Problem, target: Target, config: Config) -> list[int]:
    """The numbers of pieces of a filter gradient that give a half, one or two waves of programs; also six waves, where
    a wave has few pieces and is seldom full."""
    programs, most = filter_programs(problem, config), max(1, count_boxes(problem, config.tile) // 4)
    whole = (1, 2, 6) if 8 * programs > target.processors else (1, 2)
    waves = (target.processors // 2, *(n * target.processors for n in whole))
    return sorted({max(1, min(most, wave // programs)) for wave in waves} | {1})


def filter_programs(problem: Problem, config: Config) -> int:
    """Programs of a filter gradient for each piece of its pixels."""
    channels = ceil_div(problem.channels, config.tile["BC"]) * problem.x_parts
    return filter_tiles(problem, config) * channels * problem.taps // taps_together(problem, config)


def _fits(problem: Problem, config: Config, target: Target) -> bool:
    """Whether the boxes of a filter gradient's steps in flight fit in shared memory."""
    tile = config.tile
    together = tile["BF"] + tile["BC"] * taps_together(problem, config)
    return together * tile_pixels(problem, config) * problem.element_bytes * config.stages <= target.shared_bytes


def _cuts(problem: Problem, target: Target, tile: Mapping[str, int], columns: int) -> list[int]:
    """The numbers of programs that may share a tile's steps: more than one where tiles don't fill the device."""
    made, _ = _sides(problem)
    parts = problem.y_parts if problem.phase == "forward" else problem.x_parts
    tiles_there = count_boxes(problem, tile) * ceil_div(made, columns) * parts
    plain = problem.rim is None and (problem.phase == "forward" or all(d.stride == 1 for d in problem.dims))
    return [n for n in (1, 2, 3, 4, 6, 8) if n == 1 or (plain and tiles_there * n <= target.processors)]


def count_boxes(problem: Problem, tile: Mapping[str, int]) -> int:
    """Boxes that cover all pixels, or those of one output phase."""
    extents = [tile[f"T{d.name}"] for d in problem.dims]
    rows = prod(ceil_div(r, e) for r, e in zip(box_rows(problem), extents, strict=True))
    return ceil_div(problem.batch, tile["TN"]) * rows


def default(problem: Problem, target: Target) -> Config:
    """The configuration of an untuned problem: of the sizes that don't spill, the one with the least estimated time."""
    return least(problem, target, sizes(problem, target), work)


def least(problem: Problem, target: Target, found: Iterable[Config], work: Callable[[Problem, Config], Work]) -> Config:
    """The configuration whose steps take least, of those whose estimated time is within ALIKE of the least.

    Among equals, one that leaves a thread registers; then the one with the least estimate.
    """
    device, configs = data_sheet(target, problem.dtype), list(found)
    works = [work(problem, c) for c in configs]
    seconds = [estimated_s(problem, c, w, target, device) for c, w in zip(configs, works, strict=True)]

    def worth(i: int) -> tuple[float, bool, float]:
        c, w = configs[i], works[i]
        heavy = w.tile[0] * w.tile[1] > 96 * c.warps * target.warp
        return busy_s(problem, c, w, target, device), heavy, seconds[i]

    most = ALIKE * min(seconds)
    return configs[min((i for i, s in enumerate(seconds) if s <= most), key=worth)]


def sizes(problem: Problem, target: Target) -> Iterator[Config]:
    """The configurations that a default is chosen from."""
    half, filter_gradient = problem.element_bytes == 2, problem.phase == "backward_filter"
    depth, most = (64, 128) if half else (32, 64 if problem.dtype == "float32" else 128)  # `most`: a thread's sums
    made, summed = (problem.channels, 0) if filter_gradient else _sides(problem)
    if not filter_gradient:
        depth = clamp(summed, 16, min(deepest(problem), depth))
    widest = clamp(made, 16, deepest(problem) if filter_gradient else 256)
    widths = (16, 32, 64, 128, 256)
    for rows, columns, warps, stages in product(widths, widths, (4, 8), (2, 3, 4) if filter_gradient else (3, 4)):
        fits = (rows + columns) * depth * problem.element_bytes * stages <= target.shared_bytes
        spread = 8 <= rows * columns // (warps * target.warp) <= most
        if not fits or not spread or max(rows, columns) < 64 or columns > widest:
            continue
        exact = problem.dtype == "float32" and not filter_gradient
        if exact and rows * (columns + depth) > HELD * warps * target.warp:
            continue
        merged = half and problem.y_parts > 1 and has_part(problem, "y")
        if filter_gradient and rows <= clamp(problem.filters, 64 if widest <= 32 or merged else 16, 256):
            # With few channels a step multiplies little: more pixels share the cost of beginning one.
            for pixels in (depth, 2 * depth) if half and columns <= 32 else (depth,):
                one = _config(problem, _fitting(problem, pixels), rows, columns, warps, stages)
                if _fits(problem, one, target):
                    yield from (replace(one, split=split) for split in splits(problem, target, one))
        elif not filter_gradient and rows >= 64:
            tile = _fitting(problem, rows)
            for split in _cuts(problem, target, tile, columns):
                yield _config(problem, tile, columns, depth, warps, stages, split)


@lru_cache(256)  # a default asks for a few numbers of pixels many times
def _fitting(problem: Problem, pixels: int) -> Mapping[str, int]:
    """The box of so many pixels that wastes least; with fewer pixels, the rest lies outside of the tensor."""
    fitting = tiles(problem, pixels)
    rest = {f"T{d.name}": 1 for d in problem.dims}
    return fitting[0] if fitting else {"TN": 1, **rest, f"T{problem.dims[-1].name}": pixels}


def _sides(problem: Problem) -> tuple[int, int]:
    """The numbers of channels that are made and that are summed."""
    pair = (problem.filters, problem.channels)
    return pair if problem.phase == "forward" else (pair[1], pair[0])


def _config(
    problem: Problem, tile: Mapping[str, int], across: int, depth: int, warps: int, stages: int, split: int = 1
) -> Config:
    names = ("BC", "BF") if problem.phase == "backward_data" else ("BF", "BC")
    return Config(NAME, (*tile.items(), (names[0], across), (names[1], depth)), warps, stages, split)


def conditions(problem: Problem) -> list[str]:
    """The conditions on extents: whole blocks of a stride's rows, of which one is read; no more boxes of a rim."""
    found = [f"len(rim.places) <= {problem.rim}"] if problem.rim is not None else []
    for i, d in enumerate(problem.dims if problem.phase != "backward_data" else ()):
        found += [f"s.x[{i}] % {d.stride} == 0"] if d.stride > 1 else []
        found += [f"s.x[{i}] > -s.below[{i}] % {d.stride}"] if d.stride > 1 and not is_paired(d) else []
    return found


def words(problem: Problem) -> type[Words]:
    return BoxWords


def work(problem: Problem, config: Config) -> Work:
    """The work of a launch: boxes cover samples and rows."""
    tile = config.tile
    pixels, boxes = tile_pixels(problem, config), count_boxes(problem, tile)
    if problem.phase != "backward_filter":
        phases = prod(d.stride for d in problem.dims) if problem.phase == "backward_data" else 1
        w = product_work(problem, config, pixels, boxes * phases)
        if (cut := pieces(problem, config)) > 1:
            w = replace(w, programs=w.programs * cut, steps=ceil_div(w.steps, cut), addends=cut)
    else:
        taps = taps_together(problem, config)
        product = tile["BF"], tile["BC"] * taps, pixels
        programs = filter_programs(problem, config) * config.split
        count = 110 if taps == 1 else 90 + taps * (32 + pixels / 4)
        w = summed_by(problem, config, Work(programs, ceil_div(boxes, config.split), product, instructions=count))
    rows, columns, summed = w.tile
    w = replace(w, tile=(columns, rows, summed)) if is_turned(problem, config) else w
    w = replace(w, rewrites=rewrites(problem), rounded=True)
    steps = _rim_steps(problem, [tile[f"T{d.name}"] for d in problem.dims]) if problem.phase != "backward_filter" else 1
    return replace(w, steps=ceil(w.steps * steps))
