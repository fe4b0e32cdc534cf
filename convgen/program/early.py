"""Which halos may travel while a row's interior is computed.

A piece of a row is a block of its indices like any other. What has to hold is that pieces can be put together: the
halo's rows are blocks of one dimension of the result, no other operand reads them, and each row of the result reads an
interval of the operand that moves along with it (Taps, ReadBy, one Through the other).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.grid import Grid
from convgen.algebra.relations import ReadBy, Taps, Through
from convgen.algebra.tensors import Dim
from convgen.program.rows import PlacedRow, index_sets


def early_faults(row: PlacedRow, k: int) -> Iterator[str]:
    """Why operand k's halo can't be started early, if it can't."""
    signature, operand = row.signature, row.signature.inputs[k]
    if [c.kind for c in row.fetch[k]] != ["exchange"]:
        yield f"{operand.name} is fetched by {[c.kind for c in row.fetch[k]]}, no exchange alone"
        return
    (c,) = row.fetch[k]
    same = all(a == b for a, b, w in zip(c.src.axes, c.dst.axes, c.dst.windows, strict=True) if w is None)
    if c.reduction is not None or not c.dst.has_window or c.src.has_window or c.src.partial or not same:
        yield f"{c.src} to {c.dst} is no halo"
    rows = [made for made in operand.dims if made.relation is not None]
    if not all(isinstance(made.relation, Taps | ReadBy | Through) for made in rows):
        yield f"rows of {operand.name} are not read in order"
    if len(signature.results) != 1 or signature.reduction != "sum" or signature.results[0].integer:
        yield "it has several results, or no sum"
        return
    for made in rows:
        (index,) = made.indices
        own = [m for m in signature.results[0].dims if index in m.indices]
        if [(m.indices, m.relation) for m in own] != [((index,), None)]:
            yield f"rows {index} are no dimension of {signature.results[0].name}"
        if any(index in m.indices for j, o in enumerate(signature.inputs) if j != k for m in o.dims):
            yield f"rows {index} are read of other operands, too"
    back = row.back[k]
    if back is not None:
        adjoint = [(b.kind, b.over, b.reduction, b.src.partial, b.src.windows) for b in back]
        if adjoint != [("exchange", c.over, "sum", (), c.dst.windows)]:
            yield f"the gradient of {operand.name} comes back in another way: {adjoint}"


def may_start_early(row: PlacedRow, grid: Grid) -> int | None:
    """The first operand whose halo may start early, as every rank has an interior; None where there is none."""
    for k, chain in enumerate(row.fetch):
        if chain and not any(early_faults(row, k)) and bool((interior_rows(row, k, grid) > 0).all()):
            return k
    return None


def interior_rows(row: PlacedRow, k: int, grid: Grid) -> NDArray[np.float64]:
    """By rank, the interior's share of its part of the row: what reads nothing but what the rank owns."""
    share = np.ones(grid.ranks)
    for start, end, first, last in _insides(row, k, grid):
        share *= np.where(end > start, (last - first) / np.maximum(end - start, 1), 0.0)
    return share


def boundary_pieces(row: PlacedRow, k: int, grid: Grid) -> NDArray[np.int64]:
    """By rank, in how many pieces the boundary is computed: one at each end that reads other ranks' rows."""
    pieces = np.zeros(grid.ranks, dtype=np.int64)
    for start, end, first, last in _insides(row, k, grid):
        pieces += (first > start).astype(np.int64) + (end > last)
    return pieces


def _insides(row: PlacedRow, k: int, grid: Grid) -> Iterator[NDArray[np.int64]]:
    """For each dimension with windows, by rank: start and end of the rank's part, and of its interior."""
    sets, operand = index_sets(row.signature, grid), row.signature.inputs[k]
    held, roles = sets.held(row.fetch[k][0].src), dict(row.roles)
    for d, made in enumerate(operand.dims):
        if made.relation is None:
            continue
        (index,) = made.indices
        lo, hi = sets.split(Dim(index, row.signature.extent[index]), roles.get(index, ()))
        alike, which = np.unique(np.stack([lo, hi, held[:, d, 0], held[:, d, 1]], axis=1), axis=0, return_inverse=True)
        inside = [made.relation.inside(a, b, (c, e), operand.shape[d]) for a, b, c, e in _quadruples(alike)]
        yield np.concatenate([alike[:, :2], np.array(inside, dtype=np.int64)], axis=1)[which.reshape(-1)].T


def _quadruples(rows: NDArray[np.int64]) -> list[tuple[int, int, int, int]]:
    return [(int(a), int(b), int(c), int(d)) for a, b, c, d in rows]


def started_early(row: PlacedRow, grid: Grid) -> PlacedRow:
    """A row, and its gradients' rows, with every halo started early that may be; rows in chunks stay as they are.

    A halo that is started before an earlier row travels while that one is computed, so its row needs no interior.
    """
    derived = tuple((k, started_early(one, grid)) for k, one in row.derived)
    if row.chunks is not None:
        return replace(row, derived=derived)
    early = may_start_early(row, grid)
    if row.ahead:
        return replace(row, split=early == row.early, derived=derived)
    return replace(row, early=early, split=True, derived=derived)


def in_one(row: PlacedRow) -> PlacedRow:
    """The row, with gradients computed whole, not in pieces, where the row's other gradients hide their halos."""
    others = len(row.derived) > 1 or any(b is not None for b in row.back)
    derived = tuple((k, replace(one, split=not others or one.early is None)) for k, one in row.derived)
    return replace(row, derived=derived)
