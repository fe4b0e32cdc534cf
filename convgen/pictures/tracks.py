"""Where the blocks of a dimension stand on a line: positions in inches, wider gaps between outer blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from convgen.algebra.layout import Axes
from convgen.algebra.space import Space


@dataclass(frozen=True, slots=True)
class Block:
    """Half-open interval `[lo, hi)` of a dimension, and its coordinate on each axis that splits it."""

    lo: int
    hi: int
    at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placed:
    """A block and where it is drawn: from `start` to `end` inches."""

    block: Block
    start: float
    end: float

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2


def blocks_of(space: Space, tensor: str, dim: int, axes: Axes) -> tuple[Block, ...]:
    """The distinct blocks of a stored dimension in order, empty ones left out."""
    lo, hi = space.block(tensor, dim, axes)
    at = [space.grid.coordinates[a] for a in axes]
    found = {(int(lo[r]), int(hi[r]), tuple(int(c[r]) for c in at)) for r in range(space.grid.ranks) if lo[r] < hi[r]}
    return tuple(Block(*key) for key in sorted(found))


def place(blocks: Sequence[Block], start: float, length: float, gap: float) -> tuple[Placed, ...]:
    """Blocks side by side on a line, in proportion to their elements; the gap is wider where an outer axis moves on."""
    gaps = [0.0] + [gap * _gap_level(a.at, b.at) for a, b in pairwise(blocks)]
    room = length - sum(gaps)
    if room < 0.8 * length:  # many blocks: narrower gaps
        gaps = [g * 0.2 * length / sum(gaps) for g in gaps]
        room = length - sum(gaps)
    return _spread(blocks, [float(b.hi - b.lo) for b in blocks], gaps, start, room)


def _gap_level(before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """1 where only the innermost axis moves, more for each axis further out."""
    moved = next((i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b), len(after))
    return max(len(after) - moved, 1)


def stretch(blocks: Sequence[Block], start: float, length: float, least: float) -> tuple[Placed, ...]:
    """Blocks edge to edge, not to scale: widths go by the root of their elements, and none is below `least` inches."""
    weights = np.sqrt([float(max(b.hi - b.lo, 1)) for b in blocks])
    least = min(least, length / len(blocks))
    widths = weights / weights.sum() * length
    while (widths < least - 1e-9).any():
        small = widths <= least + 1e-9
        free = weights * ~small
        widths = np.where(small, least, free / max(free.sum(), 1e-9) * (length - least * small.sum()))
    return _spread(blocks, [float(w) for w in widths], [0.0] * len(blocks), start, length)


def _spread(
    blocks: Sequence[Block], weights: Sequence[float], gaps: Sequence[float], start: float, room: float
) -> tuple[Placed, ...]:
    total = sum(weights) or 1.0
    placed: list[Placed] = []
    for block, weight, gap in zip(blocks, weights, gaps, strict=True):
        start += gap
        placed.append(Placed(block, start, start + room * weight / total))
        start = placed[-1].end
    return tuple(placed)
