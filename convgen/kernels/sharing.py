"""Programs that share a tile of a result: each sums a piece of it, and the last to arrive adds the pieces.

It adds them always in the same order, so that two runs give the same bits, and leaves the tile's counter zero for the
launch behind. Many pieces are added by bunches: the last of a bunch adds its pieces, and the last of these the bunches'
sums. A program reads what it adds alone, at what a processor gets from L2: of more, a second launch makes less, which
all processors share.
"""

from __future__ import annotations

from math import isqrt

from convgen.kernels.box_tiles import pieces, taps_together
from convgen.kernels.config import Config, ceil_div
from convgen.kernels.problem import Problem

MOST_ADDENDS = 8  # of one bunch, where there are no more
MOST_BYTES = 192 * 1024  # that the last program reads, the sums of its bunch's pieces and of bunches
FAMILIES = ("box", "tiled", "converted", "widened", "gemm", "pointer")  # whose filter gradients can


def bunches(count: int) -> tuple[int, int]:
    """Pieces of a bunch, and bunches; the last may be smaller."""
    each = count if count <= MOST_ADDENDS else isqrt(count - 1) + 1
    return each, ceil_div(count, each)


def added(count: int) -> int:
    """Sums that the last program reads: of its bunch's pieces, and of bunches where there are several."""
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
    """Pieces of a filter gradient that a second launch adds; 1 where there is none."""
    return 1 if problem.phase != "backward_filter" or adds_last(problem, config) else config.split


def addends(problem: Problem, config: Config) -> int:
    """Pieces of a tile that the last of its programs adds; 1 where none do."""
    if problem.phase == "backward_filter":
        return config.split if adds_last(problem, config) else 1
    return pieces(problem, config) if "TN" in config.tile else 1
