"""What an exchange moves, found in time and memory that grow with the ranks, not with pairs of ranks.

What rank i sends rank j is a product over dimensions: how many of i's rows j needs (Space.flows). An axis splits one
dimension before and one after, so the sum over receivers is a product of sums, one for each dimension, and so is the
sum over senders. What a rank needs of its own is then taken off.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.index_sets import IndexSets
from convgen.algebra.layout import Layout

Counts = NDArray[np.int64]


def exchange_traffic(sets: IndexSets, src: Layout, dst: Layout, *, adds: bool = False) -> tuple[int, int, int]:
    """(most elements that a rank sends, most that one sends or receives, most messages of a rank).

    Args:
        adds: whether ranks hold overlapping parts, which are added where they are stored: each rank sends what it has
            of others' blocks.
    """
    grid = sets.grid
    dims = range(len(src.axes))
    changed = [d for d in dims if (src.axes[d], src.windows[d]) != (dst.axes[d], dst.windows[d])]
    moving = {a for d in changed if adds or src.windows[d] is None for a in src.axes[d]} | {*src.partial}
    arriving = {a for d in changed for a in dst.axes[d]}
    copies, addends = prod(grid.sizes[a] for a in moving - arriving), prod(grid.sizes[a] for a in src.partial)
    weight = sets.weight(src.tensor)
    # For each rank elements and messages, and what it needs of its own.
    sent: list[Any] = [copies * weight, copies]
    received: list[Any] = [addends * weight, addends]
    kept: Any = weight
    for d in dims:
        if d not in changed:
            lo, hi = sets.by_place(src, d)
            place = grid.places(src.axes[d])
            rows = np.maximum(hi - lo, 0)[place]
            for k, some in enumerate((rows, rows > 0)):
                sent[k], received[k] = sent[k] * some, received[k] * some
            kept = kept * rows
            continue
        # Numbers of a rank's places on this dimension: where it owns, where it needs, and of these last the part that
        # all receivers of its group share.
        sources = src.axes[d] if adds or src.windows[d] is None else ()
        shared = tuple(a for a in dst.axes[d] if a not in moving)
        own, need = sets.by_place(src, d), sets.by_place(dst, d)
        if not sources:
            own = own[0][:1], own[1][:1]
        filled = own[1] > own[0]  # of thousands of places few may be filled; the empty ones, all alike, count as one
        row = np.where(filled, np.cumsum(filled) - 1, filled.sum())[grid.places(sources)]
        own = np.append(own[0][filled], 0), np.append(own[1][filled], 0)
        overlap = np.minimum.outer(own[1], need[1]) - np.maximum.outer(own[0], need[0])
        overlap = np.maximum(overlap, 0)
        shape = (len(overlap), *(grid.sizes[a] for a in dst.axes[d]))
        over = tuple(i + 1 for i, a in enumerate(dst.axes[d]) if a in moving)
        group, place = grid.places(shared), grid.places(dst.axes[d])
        for k, both in enumerate((overlap, overlap > 0)):
            to = both.reshape(shape).sum(axis=over).reshape(len(overlap), -1)
            sent[k], received[k] = sent[k] * to[row, group], received[k] * both.sum(axis=0)[place]
        kept = kept * overlap[row, place]
    most, messages = (int(np.max(n - own)) for n, own in zip(sent, (kept, kept > 0), strict=True))
    other, others = (int(np.max(n - own)) for n, own in zip(received, (kept, kept > 0), strict=True))
    return most, max(most, other), max(messages, others)
