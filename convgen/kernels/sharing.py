"""Programs that share a tile of a result: each sums a piece of it, and the last to arrive adds the pieces.

It adds them always in the same order, so that two runs give the same bits, and leaves the tile's counter zero for the
launch behind. Many pieces are added by bunches: the last of a bunch adds its pieces, and the last of these the bunches'
sums. One program reads all that it adds, at one processor's share of L2: if that is much, a second launch is quicker,
as all processors share the reading.
"""

from __future__ import annotations

from math import isqrt

from convgen.kernels.box_tiles import pieces, taps_together
from convgen.kernels.config import Config, ceil_div
from convgen.kernels.problem import Problem

MOST_ADDENDS = 8  # pieces that one bunch holds; with more there are several bunches
MOST_BYTES = 192 * 1024  # the most bytes that the last program reads, its bunch's pieces and the bunches' sums
FAMILIES = ("box", "tiled", "converted", "widened", "gemm", "pointer")  # their filter gradients can share tiles


def bunches(count: int) -> tuple[int, int]:
    """The number of pieces in a bunch, and of bunches; the last bunch may be smaller."""
    each = count if count <= MOST_ADDENDS else isqrt(count - 1) + 1
    return each, ceil_div(count, each)


def added(count: int) -> int:
    """How many sums the last program reads: its bunch's pieces, and the bunches' sums where there are several."""
    each, many = bunches(count)
    return each + many if many > 1 else each


def adds_last(problem: Problem, config: Config) -> bool:
    """Whether the last program of a tile of a filter gradient adds its pieces; else a second launch does."""
    if problem.phase != "backward_filter" or config.family not in FAMILIES or config.split == 1:
        return False
    tile = config.tile
    taps = taps_together(problem, config) if "TN" in tile else 1
    numbers = tile["BF"] * tile["BC"] * taps
    return added(config.split) * numbers * max(4, problem.element_bytes) <= MOST_BYTES


def second_sum(problem: Problem, config: Config) -> int:
    """How many pieces of a filter gradient a second launch adds; 1 where there is no such launch."""
    return 1 if problem.phase != "backward_filter" or adds_last(problem, config) else config.split


def addends(problem: Problem, config: Config) -> int:
    """How many pieces of a tile the last of its programs adds; 1 where programs don't share tiles."""
    if problem.phase == "backward_filter":
        return config.split if adds_last(problem, config) else 1
    return pieces(problem, config) if "TN" in config.tile else 1
