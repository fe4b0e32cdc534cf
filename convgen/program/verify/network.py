"""The verifier of networks: that a program is right on every rank, by index sets, whoever made it.

| check | says |
|---|---|
| chains | begin where a value is stored or made, end where it is wanted, each step where the one before ended |
| arrives | every rank has, after a step, elements that its one owner among the group had |
| sums | what is partial is summed over just these axes; parts that overlap come from every rank that has one |
| at hand | local code finds the rows that its blocks read |
| once | over the ranks of different roles every term is computed once; ranks without a role compute alike |
| kept | buffers become values of their own layout, and nothing partial is stored |
| flights | what travels meanwhile (program/verify/flights.py) |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets, overlaps, volume
from convgen.algebra.layout import Layout
from convgen.algebra.redistribute import Conversion
from convgen.algebra.tensors import Dim
from convgen.algebra.wants import layout
from convgen.errors import InternalError
from convgen.program.network import Program, label
from convgen.program.rows import Chain, PlacedRow, index_sets
from convgen.program.verify.flights import flight_faults


def verify_network(program: Program) -> None:
    """Raises InternalError with the first thing that is wrong."""
    for fault in faults(program):
        raise InternalError(f"{program.name}: {fault}")


def faults(program: Program) -> Iterator[str]:
    """What is wrong, in order."""
    for row in program.rows:
        stored = [program.values[v].stored for v in row.bound.reads]
        if list(row.reads) != stored:
            yield f"{label(row)}: operands are taken to be stored as {row.reads}, they are as {stored}"
        for value, made in zip(row.bound.makes, row.makes, strict=True):
            if value and program.values[value].stored != made:
                yield f"{label(row)}: {value} is stored as {made}, others read it as {program.values[value].stored}"
        yield from (f"{label(row)}: {fault}" for fault in _row(row, program.grid))
    for buffer, value in program.updates:
        if program.values[buffer].stored != program.values[value].stored:
            yield f"{buffer} becomes {value}, which is stored otherwise"
    yield from flight_faults(program)


def _row(row: PlacedRow, grid: Grid) -> Iterator[str]:
    signature, sets, roles = row.signature, index_sets(row.signature, grid), dict(row.roles)
    for operand, stored, chain, back in zip(signature.inputs, row.reads, row.fetch, row.back, strict=True):
        wants = layout(sets, operand.name, signature.wants(operand, roles))
        yield from _chain(f"{operand.name} fetched", Layout(operand.name, stored), wants, chain, sets)
        if back is not None:
            found = layout(sets, operand.name, signature.gradient(operand, roles))
            yield from _chain(f"d{operand.name}", found, Layout(operand.name, stored), back, sets)
    for result, stored, chain, given in zip(signature.results, row.makes, row.store, row.given, strict=True):
        made = layout(sets, result.name, signature.wants(result, roles))
        yield from _chain(result.name, made, Layout(result.name, stored), chain, sets)
        whole = replace(made, partial=())
        yield from _chain(f"d{result.name} fetched", Layout(result.name, stored), whole, given, sets)
    yield from _at_hand(row, sets)
    yield from _once(row, sets)
    for k, one in row.derived:
        if one.makes != (row.reads[k],):
            yield f"d{signature.inputs[k].name} is stored as {one.makes}, its operand as {row.reads[k]}"
        yield from (f"d{signature.inputs[k].name}: {fault}" for fault in _row(one, grid))


def _chain(name: str, src: Layout, dst: Layout, chain: Chain, sets: IndexSets) -> Iterator[str]:
    here = src
    for c in chain:
        if c.src != here:
            yield f"{name}: {c.kind} takes {c.src}, there is {here}"
        yield from (f"{name}: {fault}" for fault in _step(c, sets))
        here = c.dst
    if here != dst:
        yield f"{name}: ends as {here}, wanted is {dst}"


def _step(c: Conversion, sets: IndexSets) -> Iterator[str]:
    grid = sets.grid
    summed = set(c.src.partial) - set(c.dst.partial)
    over = set(c.over)
    sums = c.kind in ("reduce_scatter", "all_reduce") or c.reduction is not None
    if set(c.dst.partial) - set(c.src.partial):
        yield f"{c.kind} makes addends of what is none"
    if (summed and not sums) or not summed <= over:
        yield f"{c.kind} over {c.over} leaves addends over {sorted(summed)} unsummed"
    held, need = sets.held(c.src), sets.held(c.dst)
    both = overlaps(held, need)
    if c.kind == "exchange" and c.reduction is not None:
        apart = grid.ordered({*c.src.used, *c.src.partial})
        if (both * _same(grid, apart) != both * _same(grid, c.over)).any():
            yield f"parts over {apart} overlap what others store, and are added over {c.over} only"
        return
    # Addends are at hand on every rank that sums them: the block is what has to be had, from any of them alike.
    owners = tuple(a for axes, w in zip(c.src.axes, c.src.windows, strict=True) if w is None for a in axes)
    moving = tuple(a for a in owners if a in over) if c.kind != "slice" else ()
    supplied = (both * _same(grid, moving)).sum(axis=0)
    for rank in np.flatnonzero(supplied < volume(need))[:1]:
        yield f"{c.kind} over {c.over} gives rank {rank} {supplied[rank]} of {volume(need)[rank]} elements of {c.dst}"


def _at_hand(row: PlacedRow, sets: IndexSets) -> Iterator[str]:
    """Every rank's window lies in what it has after its fetch."""
    signature, roles = row.signature, dict(row.roles)
    for operand, chain, stored in zip(signature.inputs, row.fetch, row.reads, strict=True):
        held = sets.held(chain[-1].dst if chain else Layout(operand.name, stored))
        for d, made in enumerate(operand.dims):
            if made.relation is None:
                continue
            index = made.indices[0]
            lo, hi = sets.split(Dim(index, signature.extent[index]), roles.get(index, ()))
            first, last = made.relation.hull(*made.relation.window(lo, hi), operand.shape[d])
            short = (last > first) & ((first < held[:, d, 0]) | (last > held[:, d, 1]))
            for rank in np.flatnonzero(short)[:1]:
                need, own = f"[{first[rank]}, {last[rank]})", f"[{held[rank, d, 0]}, {held[rank, d, 1]})"
                yield f"rank {rank} reads rows {need} of {operand.name}, it has {own}"


def _once(row: PlacedRow, sets: IndexSets) -> Iterator[str]:
    """The blocks of all indices, over the ranks that differ in their roles, are every term once."""
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


def _same(grid: Grid, axes: tuple[str, ...]) -> NDArray[np.bool_]:
    ids = grid.group_ids(axes)
    return ids[:, None] == ids[None, :]
