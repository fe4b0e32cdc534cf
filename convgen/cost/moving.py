"""What conversions cost on a machine: the time of the busiest rank, for any tensors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import Box, IndexSets, overlaps
from convgen.algebra.redistribute import Conversion
from convgen.cost.links import Links, collective_seconds
from convgen.cost.machine import Machine
from convgen.cost.traffic import elements_received, elements_sent

PICOSECONDS = 10**12
Counts = NDArray[np.int64]


def overlapping(held: Box, kept: Box, grid: Grid, over: tuple[str, ...]) -> Counts:
    """Of parts that are added where they overlap, what rank i holds of rank j's block: [ranks, ranks]."""
    ids = grid.group_ids(over)
    both = overlaps(held, kept) * (ids[:, None] == ids[None, :])
    np.fill_diagonal(both, 0)
    return both


def sent_elements(sets: IndexSets, c: Conversion) -> Counts:
    """Elements that leave each rank."""
    if c.kind == "exchange" and c.reduction is not None:
        return overlapping(sets.held(c.src), sets.held(c.dst), sets.grid, c.over).sum(axis=1)
    sent = elements_sent(sets, c.kind, c.over, c.src, c.dst)
    return sent // 3 * 2 if c.reduction == "merge" else sent  # of (count, mean, M2) ranks know the counts


def moving_ps(sets: IndexSets, c: Conversion, machine: Machine, links: Links, element_bytes: int) -> int:
    """Picoseconds of a conversion; a slice takes none."""
    if c.kind == "slice":
        return 0
    if c.kind == "exchange":
        if c.reduction is None:
            members, flows = sets.flows(c.src, c.dst)
        else:
            members = np.arange(sets.grid.ranks)[None]
            flows = overlapping(sets.held(c.src), sets.held(c.dst), sets.grid, c.over)[None]
        group, sender, receiver = np.nonzero(flows)
        sizes = flows[group, sender, receiver] * element_bytes
        return round(links.exchange(members[group, sender], members[group, receiver], sizes) * PICOSECONDS)
    what = (sets, c.kind, c.over, c.src, c.dst)
    busiest = int(np.maximum(elements_sent(*what), elements_received(*what)).max())
    busiest = busiest // 3 * 2 if c.reduction == "merge" else busiest
    time_s, _ = collective_seconds(
        sets.grid,
        machine.levels,
        c.kind,
        c.over,
        busiest * element_bytes,
        machine.add_s_per_byte,
        machine.collectives.of(c.kind),
    )
    return round(time_s * PICOSECONDS)
