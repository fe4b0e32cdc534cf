"""Implicit GEMM by pointers: every problem, whatever its alignment, strides, halos and parts.

[KERNELS: 5.1 B] Offsets of padding are clamped to 0 and said to be aligned, so that 16-byte copies remain possible.
"""

from __future__ import annotations

from collections.abc import Iterator

from convgen.kernels.config import Config, ceil_div, clamp
from convgen.kernels.problem import Problem
from convgen.kernels.target import Target

NAME = "pointer"
MOST_BOXES = 8


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can."""
    if problem.rim is not None and problem.rim > MOST_BOXES:
        return f"a halo in {problem.rim} boxes; unpacked, it can"
    return None


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth a try, by closed form."""
    wide = problem.element_bytes
    for pixels in (64, 128, 256):
        for others in (16, 32, 64, 128, 256):
            for depth in (16, 32, 64, 128):
                for warps in (4, 8):
                    for stages in (2, 3, 4):
                        made = clamp(problem.filters if problem.phase != "backward_data" else problem.channels, 16, 256)
                        small = pixels * others < 64 * 64 or wide == 8
                        shared = (pixels + others) * depth * wide * stages
                        if others <= made and shared <= target.shared_bytes and not (small and warps == 8):
                            yield from _legal(problem, target, pixels, others, depth, warps, stages)


def _legal(
    problem: Problem, target: Target, pixels: int, others: int, depth: int, warps: int, stages: int
) -> Iterator[Config]:
    if pixels * others // (warps * target.warp) > 128:  # accumulators of a thread
        return
    match problem.phase:
        case "forward":
            if depth <= clamp(problem.channels, 16, 128):
                yield Config(NAME, (("BP", pixels), ("BF", others), ("BC", depth)), warps, stages)
        case "backward_data":
            if depth <= clamp(problem.filters, 16, 128):
                yield Config(NAME, (("BP", pixels), ("BC", others), ("BF", depth)), warps, stages)
        case "backward_filter":
            if pixels <= clamp(problem.channels, 16, 256):
                for split in splits(problem, target, others, pixels, depth):
                    yield Config(NAME, (("BF", others), ("BC", pixels), ("BP", depth)), warps, stages, split)


def splits(problem: Problem, target: Target, filters: int, channels: int, depth: int) -> list[int]:
    """Counts of pieces that give one or two waves of programs; powers of two have no privilege."""
    programs = (
        ceil_div(problem.filters, filters) * problem.y_parts * ceil_div(problem.channels, channels) * problem.x_parts
    ) * problem.taps * problem.groups
    most = max(1, ceil_div(problem.pixels, 4 * depth))
    waves = (target.processors // 2, target.processors, 2 * target.processors)
    return sorted({max(1, min(most, wave // programs)) for wave in waves} | {1})


def default(problem: Problem, target: Target) -> Config:
    """What an untuned problem gets: enough programs to fill the device, no more registers than there are."""
    half = problem.element_bytes == 2
    depth = 64 if half and problem.channels_last else 32
    if problem.element_bytes == 8:
        return _default(problem, target, pixels=32, most=32, depth=16, warps=4)
    narrow = target.kind == "hip" or (target.arch != 90 and not half)
    most = 64 if narrow or not half or not problem.channels_last else 128
    made = problem.channels if problem.phase == "backward_data" else problem.filters
    across = clamp(made, 16, most)
    pixels = 128 if ceil_div(problem.pixels, 128) * ceil_div(made, across) >= target.processors else 64
    return _default(problem, target, pixels=pixels, most=most, depth=depth, warps=8 if pixels * across >= 8192 else 4)


def _default(problem: Problem, target: Target, *, pixels: int, most: int, depth: int, warps: int) -> Config:
    stages = 3 if target.kind == "cuda" else 2
    if problem.phase == "backward_filter":
        filters, channels = clamp(problem.filters, 16, most), clamp(problem.channels, 16, min(most, 64))
        split = splits(problem, target, filters, channels, depth)[-1]
        warps = 8 if filters * channels >= 4096 else 4
        return Config(NAME, (("BF", filters), ("BC", channels), ("BP", depth)), warps, stages, split)
    if problem.phase == "forward":
        made, summed, names = problem.filters, problem.channels, ("BF", "BC")
    else:
        made, summed, names = problem.channels, problem.filters, ("BC", "BF")
    across, depth = clamp(made, 16, most), clamp(summed, 16, depth)
    return Config(NAME, (("BP", pixels), (names[0], across), (names[1], depth)), warps, stages)
