"""How kernels by boxes cut up a problem: views, tiles, and the taps and parts that a program makes together."""

from __future__ import annotations

from math import prod

from convgen.kernels.config import Config, ceil_div
from convgen.kernels.problem import LocalDim, Problem

MOST_TAPS = 16  # the most taps of a step: each is a product of its own


def is_paired(d: LocalDim) -> bool:
    """Whether taps read rows of x of several residues modulo the stride."""
    return d.stride > 1 and d.kernel > 1


def view_rank(problem: Problem, tensor: str) -> int:
    """The number of dimensions of an activation's view: samples, rows and their pairs, channels."""
    pairs = tensor == "x" and problem.phase != "backward_data"
    return 2 + len(problem.dims) + sum(pairs and is_paired(d) for d in problem.dims[:-1])


def has_part(problem: Problem, tensor: str) -> bool:
    """Whether the parts of an activation are a dimension of their own; else they follow each other as samples do."""
    return (problem.x_parts if tensor == "x" else problem.y_parts) > 1 and view_rank(problem, tensor) < 5


def tile_pixels(problem: Problem, config: Config) -> int:
    return prod(config.tile[f"T{name}"] for name in ("N", *(d.name for d in problem.dims)))


def is_turned(problem: Problem, config: Config) -> bool:
    """Whether the product's rows are channels rather than pixels, or channels rather than filters in a filter gradient.

    A product's columns are read from shared memory once for 64 rows of it, so rows should be the shorter side; they are
    64 at least. But where columns are written back first (`rewrites`), they should be the shorter side; and TF32's
    have to lie by what is summed, as dy does where its channels are last, and w does not.
    """
    tile = config.tile
    rows, columns = {
        "forward": (tile_pixels(problem, config), tile["BF"]),
        "backward_data": (tile_pixels(problem, config), tile["BC"]),
        "backward_filter": (tile["BF"], tile["BC"]),
    }[problem.phase]
    if taps_together(problem, config) > 1:
        return columns == 64 and rewrites(problem)  # with dy as the columns: it is written back once for all taps
    if columns < 64:
        return False
    if problem.dtype == "tfloat32" and problem.phase == "backward_data":
        return True
    return columns > rows if rewrites(problem) else not 64 <= rows <= columns


def lies_flat(problem: Problem, config: Config) -> bool:
    """Whether weights are copied as boxes of a matrix: filters by taps and channels. Then matrix instructions read them
    where they are copied to. Not where a box would reach beyond a tap's channels, or a part's filters; nor of four
    bytes, which are read and written once more on the way (docs/kernels.md)."""
    if problem.element_bytes != 2:
        return False
    channels = problem.taps * problem.x_parts == 1 or problem.channels % config.tile["BC"] == 0
    return channels and (problem.y_parts == 1 or problem.filters % config.tile["BF"] == 0)


def rewrites(problem: Problem) -> bool:
    """Whether a product's columns are read from shared memory and written back: as the parts of float32, or so that
    what is summed is their fastest index. Matrix instructions have the latter of 16-bit types only."""
    return problem.dtype == "float32" or (problem.dtype == "tfloat32" and problem.phase == "backward_filter")


def pieces(problem: Problem, config: Config) -> int:
    """How many programs share the steps of a tile of y, or of x's gradient; the order of the sum is fixed."""
    whole = problem.rim is not None or problem.phase == "backward_filter"
    by_phase = problem.phase == "backward_data" and any(d.stride > 1 for d in problem.dims)
    return 1 if whole or by_phase else config.split


def taps_together(problem: Problem, config: Config) -> int:
    """How many taps a program of a filter gradient makes together, all or those of the last dimensions, so that dy is
    read once for them where channels are few: as many as a thread can hold the sums of, 16 at most.
    """
    tile, taps = config.tile, problem.taps
    if problem.phase != "backward_filter" or tile["BC"] > 64 or tile["BF"] < 64:
        return 1
    half = problem.element_bytes == 2
    if problem.dtype == "float64" or (problem.dtype == "float32" and config.warps > 4):
        return 1  # eight warps make 20 matrix instructions of float32 where 12 do
    # Sums that a thread can hold beside its part of the operands without a spill.
    most = 128 if half and tile["BC"] <= 16 and problem.rim is None else 96 if half or tile["BC"] == 64 else 72
    # With more warps, or a few pixels of two bytes, issuing takes longer than multiplying.
    all_taps = config.warps == 4 and (not half or tile_pixels(problem, config) >= 128)
    for i, d in enumerate(problem.dims):
        fits = taps <= MOST_TAPS and taps * tile["BF"] * tile["BC"] <= most * 32 * config.warps
        if fits and (all_taps or i == len(problem.dims) - 1):
            return taps
        taps //= d.kernel
    return 1


def parts_together(problem: Problem, config: Config) -> int:
    """How many parts of dy a program of a filter gradient reads at once: parts with few filters together fill the 64
    rows of a matrix instruction. What lies behind the last part is zero."""
    filters, rows = problem.filters, config.tile["BF"]
    if problem.phase != "backward_filter" or problem.y_parts == 1 or problem.element_bytes != 2:
        return 1
    return rows // filters if rows == 64 and filters in (8, 16, 32) and has_part(problem, "y") else 1


def filter_tiles(problem: Problem, config: Config) -> int:
    """The number of tiles of filters, over all parts."""
    if (parts := parts_together(problem, config)) > 1:
        return ceil_div(problem.y_parts, parts)
    return ceil_div(problem.filters, config.tile["BF"]) * problem.y_parts
