"""The verifier of networks: that a program is right on every rank, by index sets, whoever made it.

| check | says |
|---|---|
| values | made once, before they are read, of the shape that their readers want (program/verify/values.py) |
| chains | begin where a value is stored or made, end where it is wanted, each step where the one before ended |
| typed | a conversion changes a type as its name says, over the ranks that differ (program/verify/typed.py) |
| reductions | stand where addends or overlapping parts become one value, by the row's reduction, and nowhere else |
| gradients | of each operand that has one are collected in one way: from local code's vjp, or from a row of their own |
| arrives | after a conversion every rank has just what its owner in the group had; what is sent is taken |
| sums | what is partial is summed over just these axes; overlapping parts come from every rank that has one |
| at hand | local code finds the rows that its blocks read, and blocks of operands are those of its indices |
| once | over ranks of different roles every term is computed once; ranks that differ in no role compute alike |
| forms | what is no tensor is read only by rows that know how (program/forms.py) |
| kept | buffers become values of their own layout, and nothing partial is stored |
| flights | what travels meanwhile (program/verify/flights.py) |
| steps | the list that ranks run has each slot made once, read behind it, by steps of what it holds (verify/steps.py) |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets
from convgen.algebra.layout import Layout, Window
from convgen.algebra.redistribute import Conversion
from convgen.algebra.signature import Reduction
from convgen.algebra.tensors import Dim
from convgen.algebra.wants import layout
from convgen.errors import InternalError
from convgen.program.forms import form_faults
from convgen.program.network import Program, label
from convgen.program.rows import Chain, Dims, PlacedRow, index_sets, nameless, stored_by_name
from convgen.program.verify.flights import flight_faults
from convgen.program.verify.steps import lowered_faults
from convgen.program.verify.typed import Counts, Travel, same_group, unread_rows, untyped
from convgen.program.verify.values import value_faults

ANY = Window(0, 0)


def verify_network(program: Program) -> None:
    """Raises InternalError with the first thing that is wrong."""
    for fault in faults(program):
        raise InternalError(f"{program.name}: {fault}")


def faults(program: Program) -> Iterator[str]:
    """What is wrong, in order. Faults after the first may follow from it, or be missed because of it."""
    is_right = True
    for fault in _of_program(program):
        is_right = False
        yield fault
    if is_right:  # else it can't be lowered
        yield from lowered_faults(program)


def _of_program(program: Program) -> Iterator[str]:
    yield from value_faults(program)
    for row in program.rows:
        yield from (f"{label(row)}: {fault}" for fault in _row(nameless(row), program.grid))
    yield from flight_faults(program)


@lru_cache(maxsize=1 << 12)
def _row(row: PlacedRow, grid: Grid) -> tuple[str, ...]:
    """Faults of a row, whatever its values are called."""
    return tuple(_faults(row, grid))


def _faults(row: PlacedRow, grid: Grid, *, of_gradient: bool = False) -> Iterator[str]:
    signature, sets, roles = row.signature, index_sets(row.signature, grid, _open_dims(row, grid)), dict(row.roles)
    derived = dict(row.derived)
    for k, (operand, stored, fetch, back) in enumerate(
        zip(signature.inputs, row.reads, row.fetch, row.back, strict=True)
    ):
        name, here = operand.name, Layout(operand.name, stored)
        wants = layout(sets, name, signature.wants(operand, roles))
        yield from _chain(f"{name} fetched", here, wants, fetch, sets)
        if back is not None:
            found = layout(sets, name, signature.gradient(operand, roles))
            yield from _chain(f"d{name}", found, here, back, sets, "sum" if found.has_window else None)
        ways, wanted = (back is not None) + (k in derived), operand.gradient and not of_gradient
        if ways != wanted:
            yield f"d{name} is collected in {ways} ways, wanted is {'one' if wanted else 'none'}"
    for result, stored, store, given in zip(signature.results, row.makes, row.store, row.given, strict=True):
        name, here = result.name, Layout(result.name, stored)
        made = layout(sets, name, signature.wants(result, roles))
        by = signature.reduction if made.partial and signature.reduction != "sum" else None
        yield from _chain(name, made, here, store, sets, by)
        yield from _chain(f"d{name} fetched", here, replace(made, partial=()), given, sets)
    yield from form_faults(row, grid)
    yield from _at_hand(row, sets)
    yield from _once(row, sets)
    for k, one in row.derived:
        name = signature.inputs[k].name
        if one.makes != (row.reads[k],):
            yield f"d{name} is stored as {one.makes}, its operand as {row.reads[k]}"
        there = stored_by_name(signature, row.reads, row.makes)
        if list(one.reads) != (stored := [there[read] for read in one.bound.reads]):
            yield f"d{name}: operands are taken to be stored as {one.reads}, they are as {stored}"
        yield from (f"d{name}: {fault}" for fault in _faults(one, grid, of_gradient=True))


def _open_dims(row: PlacedRow, grid: Grid) -> Dims:
    """Dimensions that come as windows though blocks would do at this size: at other sizes they don't."""
    sets, roles, found = index_sets(row.signature, grid), dict(row.roles), set[tuple[str, int]]()
    for operand, fetch, back in zip(row.signature.inputs, row.fetch, row.back, strict=True):
        wants = layout(sets, operand.name, row.signature.wants(operand, roles))
        for there in [*(c.dst for c in fetch[-1:]), *(c.src for c in (back or ())[:1])]:
            pairs = enumerate(zip(there.windows, wants.windows, strict=True))
            found |= {(operand.name, d) for d, (window, own) in pairs if window is not None and own is None}
    return frozenset(found)


def _chain(
    name: str, src: Layout, dst: Layout, chain: Chain, sets: IndexSets, reduction: Reduction | None = None
) -> Iterator[str]:
    """Faults of a chain of conversions from one type to another.

    Args:
        reduction: of the chain's first conversion, which makes one value of addends or overlapping parts; else None.
    """
    here = src
    for i, c in enumerate(chain):
        if _unsized(c.src) != _unsized(here):
            yield f"{name}: {c.kind} takes {c.src}, there is {here}"
        if c.reduction != (by := None if i else reduction):
            yield f"{name}: {c.kind} reduces by {c.reduction or 'nothing'}, not by {by or 'nothing'}"
        yield from (f"{name}: {fault}" for fault in _step(c, sets))
        here = c.dst
    if _unsized(here) != _unsized(dst):
        yield f"{name}: ends as {here}, wanted is {dst}"


def _unsized(there: Layout) -> Layout:
    """A type without the widths of its windows, which follow from relations and differ by size."""
    return replace(there, windows=tuple([None if w is None else ANY for w in there.windows]))


def _step(c: Conversion, sets: IndexSets) -> Iterator[str]:
    t, grid = Travel(c, sets), sets.grid
    if wrong := untyped(t):
        yield f"a {c.kind} can't turn {c.src} into {c.dst}: {wrong}"
        return
    if c.kind != "exchange" and c.over != t.ranks:
        yield f"{c.kind} is over {c.over}, its ranks differ along {t.ranks}"
    if c.kind == "exchange" and c.reduction is not None:
        apart = grid.ordered({*c.src.used, *c.src.partial})
        if (t.both * same_group(grid, apart) != t.both * same_group(grid, c.over)).any():
            yield f"parts over {apart} overlap what others store, and are added over {c.over} only"
        return
    yield from (f"{c.kind} over {c.over} to {c.dst}: {text}" for text in (*t.unserved(), *t.unsent()))


def _at_hand(row: PlacedRow, sets: IndexSets) -> Iterator[str]:
    """Every rank's window lies in the rows that it has after its fetch; elsewhere it has the block of its indices."""
    signature, roles = row.signature, dict(row.roles)
    blocks = {i: sets.split(Dim(i, n), roles.get(i, ())) for i, n in signature.extents}
    busy = np.logical_and.reduce([hi > lo for lo, hi in blocks.values()])
    fetched = zip(signature.inputs, row.fetch, row.reads, strict=True)
    there = [(o, chain[-1].dst if chain else Layout(o.name, stored)) for o, chain, stored in fetched]
    made = [(o, layout(sets, o.name, signature.wants(o, roles))) for o in signature.results]
    for operand, own in (*there, *made):
        held = sets.held(own)
        for d, (one, extent) in enumerate(zip(operand.dims, operand.shape, strict=True)):
            if one.relation is None:
                nest = [(signature.extent[i], *blocks[i]) for i in one.indices] or [(extent, 0, extent)]
                block = _of_nest(nest, sets.grid.ranks)
                for rank in np.flatnonzero(busy & (held[:, d] != block).any(axis=1))[:1]:
                    (lo, hi), (first, last) = block[rank], held[rank, d]
                    of = f"of dimension {d} of {operand.name}"
                    yield f"rank {rank} computes with [{lo}, {hi}) {of}, it has [{first}, {last})"
            elif (operand, own) in there:
                yield from unread_rows(one.relation, blocks[one.indices[0]], held[:, d], extent, f"of {operand.name}")


def _of_nest(indices: Sequence[tuple[int, Counts | int, Counts | int]], ranks: int) -> Counts:
    """By rank, the block of a dimension that blocks of its indices make, outermost first; [-1, -1) where they cut it.

    Args:
        indices: of each its extent, and where its block begins and ends.
    """
    lo, hi = np.zeros(ranks, dtype=np.int64), np.ones(ranks, dtype=np.int64)
    for extent, first, last in indices:
        is_one, is_whole = hi - lo == 1, np.equal(first, 0) & np.equal(last, extent)
        lo, hi = lo * extent + np.where(is_one, first, 0), hi * extent - np.where(is_one, extent - last, 0)
        lo, hi = (np.where(is_one | is_whole, end, -1) for end in (lo, hi))
    return np.stack([lo, hi], axis=-1)


def _once(row: PlacedRow, sets: IndexSets) -> Iterator[str]:
    """Blocks of all indices, over the ranks that differ in their roles, hold every term once."""
    signature, grid = row.signature, sets.grid
    axes = [a for _, nest in row.roles for a in nest]
    if len(set(axes)) != len(axes):
        yield f"an axis has two roles: {row.roles}"
    roles = dict(row.roles)
    terms = np.ones(grid.ranks, dtype=np.int64)
    for index, extent in signature.extents:
        lo, hi = sets.split(Dim(index, extent), roles.get(index, ()))
        terms *= hi - lo
    others = [a for a in grid.names if a not in axes]
    first = np.flatnonzero(sum((grid.coordinates[a] for a in others), np.zeros(grid.ranks, dtype=np.int64)) == 0)
    total = prod(n for _, n in signature.extents)
    if (found := int(terms[first].sum())) != total:
        yield f"{found} terms are computed, there are {total}"
