"""Implicit GEMM by pointers: every problem, whatever its alignment, strides, halos and parts.

[KERNELS: 5.1 B] Offsets of padding are clamped to 0 and said to be aligned, so that 16-byte copies remain possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from convgen.kernels.config import Config, ceil_div, clamp
from convgen.kernels.phases import PhaseWords
from convgen.kernels.problem import Problem
from convgen.kernels.words import Words
from convgen.kernels.work import Work, by_pointers, product_work
from convgen.spec.target import Target

NAME = "pointer"
TEMPLATE = "{phase}.py.jinja"
NEEDS = ()
SINGLE_CHANNELS = False
MOST_BOXES = 8


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can."""
    if problem.rim is not None and problem.rim > MOST_BOXES:
        return f"a halo in {problem.rim} boxes; unpacked, it can"
    return None


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth a try, by closed form; the default first."""
    yield default(problem, target)
    if problem.phase == "backward_filter":
        rows, columns, names = problem.filters, problem.channels, ("BF", "BC", "BP")
        summed = problem.pixels
    elif problem.phase == "forward":
        rows, columns, names, summed = problem.pixels, problem.filters, ("BP", "BF", "BC"), problem.channels
    else:
        rows, columns, names, summed = problem.pixels, problem.channels, ("BP", "BC", "BF"), problem.filters
    powers = (16, 32, 64, 128, 256)
    for m, n, k, warps, stages in product(powers, powers, powers[:4], (4, 8), (2, 3, 4)):
        fits = m <= clamp(rows, 16, 256) and n <= clamp(columns, 16, 256) and k <= clamp(summed, 16, 128)
        shared = (m + n) * k * problem.element_bytes * stages
        spread = 16 <= m * n // (warps * target.warp) <= 128 // (problem.element_bytes // 4 or 1)
        if not fits or shared > target.shared_bytes or (m * n > 256 and not spread):
            continue
        tiles = tuple(zip(names, (m, n, k), strict=True))
        for split in splits(problem, target, m, n, k) if problem.phase == "backward_filter" else [1]:
            yield Config(NAME, tiles, warps, stages, split)


def splits(problem: Problem, target: Target, filters: int, channels: int, depth: int) -> list[int]:
    """The numbers of pieces that give one or two waves of programs; they needn't be powers of two."""
    programs = (
        (ceil_div(problem.filters, filters) * problem.y_parts * ceil_div(problem.channels, channels) * problem.x_parts)
        * problem.taps
        * problem.groups
    )
    most = max(1, ceil_div(problem.pixels, 4 * depth))
    waves = (target.processors // 2, target.processors, 2 * target.processors)
    return sorted({max(1, min(most, wave // programs)) for wave in waves} | {1})


def default(problem: Problem, target: Target) -> Config:
    """The configuration of an untuned problem: enough programs to fill the device, no more registers than there are."""
    half = problem.element_bytes == 2
    depth = 64 if half and (problem.channels_last or problem.phase == "backward_filter") else 32
    if problem.element_bytes == 8:
        return _default(problem, target, pixels=32, most=32, depth=16, warps=4)
    narrow = target.kind == "hip" or (target.arch != 90 and not half)
    most = 64 if narrow or not half or not problem.channels_last else 128
    made = problem.channels if problem.phase == "backward_data" else problem.filters
    across = clamp(made, 16, most)
    pixels = 128 if ceil_div(problem.pixels, 128) * ceil_div(made, across) >= target.processors else 64
    return _default(
        problem,
        target,
        pixels=pixels,
        most=most,
        depth=depth,
        warps=8 if pixels * across >= (8192 if half and problem.channels_last else 2048) else 4,
    )


def _default(problem: Problem, target: Target, *, pixels: int, most: int, depth: int, warps: int) -> Config:
    stages = 3 if target.kind == "cuda" else 2
    if problem.phase == "backward_filter":
        filters, channels = clamp(problem.filters, 16, most), clamp(problem.channels, 16, min(most, 64))
        split = splits(problem, target, filters, channels, depth)[-1]
        warps = 8 if filters * channels >= (4096 if problem.element_bytes == 2 else 2048) else 4
        return Config(NAME, (("BF", filters), ("BC", channels), ("BP", depth)), warps, stages, split)
    if problem.phase == "forward":
        made, summed, names = problem.filters, problem.channels, ("BF", "BC")
    else:
        made, summed, names = problem.channels, problem.filters, ("BC", "BF")
    across, depth = clamp(made, 16, most), clamp(summed, 16, depth)
    return Config(NAME, (("BP", pixels), (names[0], across), (names[1], depth)), warps, stages)


def conditions(problem: Problem) -> list[str]:
    """The conditions on extents: none."""
    return []


def words(problem: Problem) -> type[Words]:
    """Backward-data with a stride goes by output phase."""
    strided = problem.phase == "backward_data" and any(d.stride > 1 for d in problem.dims)
    return PhaseWords if strided else Words


def work(problem: Problem, config: Config) -> Work:
    """The work of a launch."""
    pixels = config.tile["BP"]
    w = product_work(problem, config, pixels, ceil_div(problem.pixels, pixels))
    channels, filters = problem.channels, problem.filters
    read = {"forward": (channels,), "backward_data": (filters,), "backward_filter": (channels, filters)}[problem.phase]
    wide = problem.vector(*read) if problem.channels_last else 2
    return by_pointers(problem, config, w, found=25 if problem.rim is None else 45, base=60, wide=wide)
