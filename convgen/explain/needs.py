"""The elements that one rank reads and makes in a phase, beside those that it stores, as index sets for the
pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import numpy as np

from convgen.algebra.layout import Axes, Layout
from convgen.algebra.space import Space
from convgen.operations.layer import ROWS_OF_X, VALUE_MADE, VALUES_READ
from convgen.pictures.tracks import Block
from convgen.program.nodes import PHASES, TENSOR_OF, Compute, Phase, Schedule, is_convolution

Spans = tuple[tuple[int, int], ...]
MOST_SEGMENTS = 9


@dataclass(frozen=True)
class Part:
    """One tensor of a phase as one rank sees it; an interval per dimension, in elements.

    Attributes:
        name: x, w, y, dx, dw or dy; `stored` is its layout.
        own: the elements that the rank stores.
        used: the elements that its convolution reads, or makes.
        frame: `used` with the zero padding around the tensor.
        partial: axes whose ranks hold the other addends of a result.
        others: the ranks that store elements which this rank uses and doesn't own: they send these, or get them.
    """

    name: str
    stored: Layout
    own: Spans
    used: Spans
    frame: Spans
    partial: Axes
    is_result: bool
    others: tuple[int, ...]

    @property
    def foreign_elements(self) -> int:
        """How many elements the rank uses and doesn't own; kernel taps don't count."""
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.own, self.used, strict=True)]
        return _volume(self.used) - _volume(both)


def _volume(spans: Sequence[tuple[int, int]]) -> int:
    return prod(max(hi - lo, 0) for lo, hi in spans)


def _spans(box: np.ndarray) -> Spans:
    return tuple((int(lo), int(hi)) for lo, hi in box)


def parts_of(schedule: Schedule, space: Space, phase: Phase, rank: int) -> tuple[Part, ...]:
    """The two inputs and the result of a phase's convolution."""
    types = schedule.types()
    stored = dict(schedule.stored)
    conv = next(s for s in schedule.section(phase) if is_convolution(s))
    names = (*VALUES_READ[phase], VALUE_MADE[phase])
    layouts = (types[conv.inputs[0]], types[conv.inputs[1]], conv.type)
    by_tensor = {TENSOR_OF[name]: layout for name, layout in zip(names, layouts, strict=True)}
    parts: list[Part] = []
    for name, layout in zip(names, layouts, strict=True):
        tensor = TENSOR_OF[name]
        own = space.held(stored[tensor])
        frame = np.array(space.held(layout)[rank])
        if tensor == _windowed(phase, conv):
            other = by_tensor["y" if tensor == "x" else "x"]
            for d in range(2, len(other.axes)):
                lo, hi = space.needed(tensor, d, other.axes[d])
                frame[d] = int(lo[rank]), int(hi[rank])
        used = np.array(frame)
        for d, dim in enumerate(space.conv.dims(tensor)):
            used[d] = np.clip(frame[d], 0, dim.extent)
        part = Part(
            name,
            stored[tensor],
            _spans(own[rank]),
            _spans(used),
            _spans(frame),
            layout.partial,
            name == names[2],
            others=(),
        )
        parts.append(replace(part, others=_others(space, part, rank)))
    return tuple(parts)


def _windowed(phase: Phase, conv: Compute) -> str:
    """The activation that is read by windows; the other one is read by blocks."""
    if phase == "forward":
        return "x"
    if phase == "backward_data":
        return "y"
    return "y" if conv.way == ROWS_OF_X else "x"


def _same_copy(space: Space, layout: Layout, rank: int) -> np.ndarray:
    """The ranks that would send this rank what it lacks: those with its coordinates along axes of copies."""
    same = np.ones(space.grid.ranks, dtype=bool)
    for a in space.grid.names:
        if a not in layout.used:
            coordinates = space.grid.coordinates[a]
            same &= coordinates == coordinates[rank]
    return same


def _others(space: Space, part: Part, rank: int) -> tuple[int, ...]:
    held, used = space.held(part.stored), np.array(part.used)
    lo, hi = np.maximum(held[:, :, 0], used[:, 0]), np.minimum(held[:, :, 1], used[:, 1])
    meets = (hi > lo).all(axis=1) & _same_copy(space, part.stored, rank)
    return tuple(int(r) for r in np.flatnonzero(meets) if r != rank)


def interior_rank(schedule: Schedule, space: Space) -> int:
    """The rank whose inputs come from the most other ranks; of these the one with the most elements, and the lowest of
    equals."""

    def received(rank: int) -> tuple[int, int]:
        parts = [p for phase in PHASES for p in parts_of(schedule, space, phase, rank) if not p.is_result]
        return sum(len(p.others) for p in parts), sum(p.foreign_elements for p in parts)

    return max(range(space.grid.ranks), key=lambda r: (*received(r), -r))


def owner(space: Space, part: Part, rank: int, point: Sequence[int]) -> int | None:
    """The rank that stores an element, from this rank's point of view; itself where it holds a copy."""
    held = space.held(part.stored)
    at = np.asarray(point)
    holds = ((held[:, :, 0] <= at) & (at < held[:, :, 1])).all(axis=1) & _same_copy(space, part.stored, rank)
    found = np.flatnonzero(holds)
    return int(found[0]) if len(found) else None


def reference(part: Part) -> tuple[int, ...]:
    """The element at which a panel holds the dimensions that it doesn't show: one that is both owned and used."""
    point: list[int] = []
    for (a, b), (c, d) in zip(part.own, part.used, strict=True):
        lo, hi = max(a, c), min(b, d)
        point.append(lo if lo < hi else c if c < d else a)
    return tuple(point)


def segments(space: Space, part: Part, dim: int) -> tuple[Block, ...]:
    """A dimension cut wherever ownership or use changes; far-away blocks are merged into one.

    A merged block has `at == (1,)`.
    """
    extent = space.conv.dims(part.stored.tensor)[dim].extent
    lo, hi = space.block(part.stored.tensor, dim, part.stored.axes[dim])
    bounds = {int(v) for v in (*lo, *hi)}
    cuts = bounds | {0, extent} | {*part.own[dim], *part.used[dim]}
    if part.used[dim][0] < part.used[dim][1]:
        cuts |= set(part.frame[dim])
    ordered = sorted(cuts)
    blocks = [Block(a, b) for a, b in pairwise(ordered)]
    if len(blocks) <= MOST_SEGMENTS:
        return tuple(blocks)
    inner = (*part.own[dim], *part.used[dim], *part.frame[dim])
    near_lo, near_hi = min(inner), max(inner)
    merged: list[Block] = []
    below = [b for b in blocks if b.hi <= near_lo]
    above = [b for b in blocks if b.lo >= near_hi]
    if len(below) > 2:
        merged.append(Block(below[0].lo, below[-2].hi, (1,)))
        below = below[-1:]
    tail: list[Block] = []
    if len(above) > 2:
        tail = [Block(above[1].lo, above[-1].hi, (1,))]
        above = above[:1]
    middle = [b for b in blocks if near_lo <= b.lo and b.hi <= near_hi]
    return (*merged, *below, *middle, *above, *tail)


def panels(space: Space, part: Part, spatial: bool) -> tuple[tuple[int, int], ...]:
    """Pairs of dimensions (rows, columns) to draw; row -1 is no dimension.

    Samples x channels unless only spatial dimensions are split; of three spatial ones, those that are split.
    """
    if part.stored.tensor == "w" or not spatial:
        return ((0, 1),)
    first = ((0, 1),) if _is_split(space, part, 0) or _is_split(space, part, 1) else ()
    count = len(space.conv.spatial)
    if count == 1:
        return (*first, (-1, 2))
    if count == 2:
        return (*first, (2, 3))
    split = [d for d in (2, 3, 4) if _is_split(space, part, d)]
    if len(split) == 3:
        return (*first, (2, 3), (3, 4))
    if len(split) == 2:
        return (*first, (split[0], split[1]))
    return (*first, (2, 3) if split == [2] else (3, 4))


def _is_split(space: Space, part: Part, dim: int) -> bool:
    whole = (0, space.conv.dims(part.stored.tensor)[dim].extent)
    return bool(part.stored.axes[dim]) or part.own[dim] != whole or part.used[dim] != whole
