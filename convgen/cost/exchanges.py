"""What an exchange moves, in work and memory that grow with the ranks, not with their pairs.

What rank i sends rank j is the product over dimensions of how many rows i owns and j needs (Space.flows). An axis
splits one dimension before and one after, so the sum over receivers is a product of sums, one a dimension; likewise
over senders. What a rank needs of its own is then taken off.
"""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.index_sets import IndexSets
from convgen.algebra.layout import Layout

Counts = NDArray[np.int64]


def exchange_traffic(sets: IndexSets, src: Layout, dst: Layout, *, adds: bool = False) -> tuple[int, int, int]:
    """(most elements that a rank sends, most that one sends or receives, most messages of a rank).

    Args:
        adds: what ranks hold overlaps, and is added where it is stored: each sends what it has of each other's block.
    """
    grid = sets.grid
    dims = range(len(src.axes))
    changed = [d for d in dims if (src.axes[d], src.windows[d]) != (dst.axes[d], dst.windows[d])]
    moving = {a for d in changed if adds or src.windows[d] is None for a in src.axes[d]} | {*src.partial}
    arriving = {a for d in changed for a in dst.axes[d]}
    copies, addends = prod(grid.sizes[a] for a in moving - arriving), prod(grid.sizes[a] for a in src.partial)
    weight = sets.weight(src.tensor)
    # Of each rank [elements, messages], and what it needs of its own.
    sent = np.array([[copies * weight], [copies]], dtype=np.int64)
    received = np.array([[addends * weight], [addends]], dtype=np.int64)
    kept = np.array([weight], dtype=np.int64)
    for d in dims:
        if d not in changed:
            lo, hi = sets.by_place(src, d)
            rows = np.maximum(hi - lo, 0)
            some, place = np.stack([rows, rows > 0]), grid.places(src.axes[d])
            sent, received = sent * some.take(place, axis=1), received * some.take(place, axis=1)
            kept = kept * rows.take(place)
            continue
        # Numbers of the places that a rank takes on this dimension: where it owns, where it needs, and of the latter
        # what all receivers of its group share.
        sources = src.axes[d] if adds or src.windows[d] is None else ()
        shared = tuple(a for a in dst.axes[d] if a not in moving)
        own, need = sets.by_place(src, d), sets.by_place(dst, d)
        if not sources:
            own = own[0][:1], own[1][:1]
        filled = own[1] > own[0]  # few of thousands of places may be: of the others, which overlap nothing, one counts
        row = np.where(filled, np.cumsum(filled) - 1, filled.sum())[grid.places(sources)]
        own = np.append(own[0][filled], 0), np.append(own[1][filled], 0)
        overlap = np.minimum.outer(own[1], need[1]) - np.maximum.outer(own[0], need[0])
        overlap = np.maximum(overlap, 0)
        both = np.stack([overlap, overlap > 0])
        shape = (2, len(overlap), *(grid.sizes[a] for a in dst.axes[d]))
        over = tuple(i + 2 for i, a in enumerate(dst.axes[d]) if a in moving)
        to = both.reshape(shape).sum(axis=over).reshape(2, len(overlap), -1)
        sent = sent * to[:, row, grid.places(shared)]
        received = received * both.sum(axis=1).take(grid.places(dst.axes[d]), axis=1)
        kept = kept * overlap[row, grid.places(dst.axes[d])]
    own_too = np.stack([kept, kept > 0])
    sent, received = sent - own_too, received - own_too
    most, messages = (int(n) for n in sent.max(axis=1))
    other, others = (int(n) for n in received.max(axis=1))
    return most, max(most, other), max(messages, others)
