"""Several rows of a program as one, so that one wider or earlier halo stands for those between them.

| chain of rows | as one row | its halo |
|---|---|---|
| conv, relu, conv | operations/fused.py | one of the first one's operand, as wide as both together |
| batch norm's last row, relu, conv | the same | of what is normalised: it may travel while moments do |

A row joins the row behind it where nothing else reads what it makes, and where it computes element by element or reads
rows in order. The joined row takes the roles of its last part; the program loses the values between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convgen.algebra.relations import Clamp, ReadBy, Taps, Through
from convgen.algebra.signature import Made, Operand, Signature
from convgen.operations.bound import Bound
from convgen.operations.chains import MADE
from convgen.operations.fused import Fused, Link
from convgen.program.network import Program, Stretch
from convgen.program.rows import PlacedRow, Stored, place

Group = tuple[int, ...]  # numbers of the network's rows as described, in order
IN_ORDER = (Taps, ReadBy, Clamp, Through)


# ---- what may be one row ----


def chains(program: Program) -> list[Group]:
    """The longest chains of rows that may be one, each of at least two."""
    readers = Counter(v for row in program.rows for v in row.bound.reads)
    kept = {v for _, v in program.outputs} | {v for _, v in program.updates}
    made = {v: i for i, row in enumerate(program.rows) for v in row.bound.makes if v}
    found: list[Group] = []
    inside: set[int] = set()
    for last in reversed(range(len(program.rows))):
        if last in inside or not _joins(program.rows[last]):
            continue
        chain = [last]
        while (before := _before(program, chain[0], made, readers, kept)) is not None:
            chain.insert(0, before)
        if len(chain) > 1:
            found.append(tuple(chain))
            inside |= set(chain)
    return found[::-1]


def _joins(row: PlacedRow) -> bool:
    operation = row.bound.operation
    plain = len(row.bound.makes) == 1 and row.signature.reduction == "sum" and row.chunks is None
    return plain and row.way == 0 and operation.joins and len(row.signature.results[0].shape) > 2


def _before(
    program: Program, i: int, made: Mapping[str, int], readers: Mapping[str, int], kept: set[str]
) -> int | None:
    """The number of the row that makes what row i reads, if it may join row i; None if none may."""
    for k, v in enumerate(program.rows[i].bound.reads):
        m = made.get(v)
        if m is None or readers[v] != 1 or v in kept or not _joins(program.rows[m]):
            continue
        operand = program.rows[i].signature.inputs[k]
        same_block = [s for s in program.again if s.start <= m < s.stop] == [
            s for s in program.again if s.start <= i < s.stop
        ]
        if operand.gradient and len(operand.shape) > 2 and same_block:
            return m
    return None


def faults(operation: Fused, split: Collection[str] | None = None) -> Iterator[str]:
    """Why the rows of a joined operation can't be one, if they can't.

    Args:
        split: where several operands may be read by rows, the indices that axes split: a rank has all rows of others.
    """
    (signature,) = operation.signatures
    for part, made in zip(operation.parts, operation.made, strict=True):
        (result,) = part.signature.results
        nests = [sum(part.signature.extent[i] > 1 for i in own.indices) > 1 for own in result.dims]
        if any(wide.indices and nest for wide, nest in zip(made, nests, strict=True)):
            yield f"blocks of {part.operation.name}'s result cut a nest"
        yield from (f"{part.operation.name}: {fault}" for fault in _window_faults(made, result.shape, signature, split))
    windowed = [o for o in signature.inputs if any(m.relation for m in o.dims)]
    if split is None and len(windowed) != 1:
        yield f"windows of {len(windowed)} operands"
    for operand in windowed:
        yield from (
            f"{operand.name}: {fault}" for fault in _window_faults(operand.dims, operand.shape, signature, split)
        )


def _window_faults(
    made: Sequence[Made], shape: Sequence[int], signature: Signature, split: Collection[str] | None
) -> Iterator[str]:
    """Faults of rows that the last result reads: a rank whose rows read nothing makes zeros, but a bias isn't zero."""
    for one, extent in zip(made, shape, strict=True):
        if one.relation is None or (split is not None and one.indices[0] not in split):
            continue
        if not isinstance(one.relation, IN_ORDER):
            yield "rows are not read in order"
            continue
        rows: Any = np.arange(signature.extent[one.indices[0]], dtype=np.int64)
        first, last = one.relation.hull(*one.relation.window(rows, rows + 1), extent)
        if bool((first >= last).any()):
            yield "some rows of the last result read none"


# ---- as one ----


def joined(bounds: Sequence[Bound]) -> Bound:
    """One row in the place of several in order, each of which reads what the one before makes."""
    reads: list[str] = []
    parts: list[Link] = []
    autocast: list[str] = []
    for before, bound in zip([None, *bounds[:-1]], bounds, strict=True):
        sources: list[int] = []
        for v in bound.reads:
            if before is not None and v == before.makes[0]:
                sources.append(MADE)
            else:
                sources.append(len(reads))
                reads.append(v)
        kinds = bound.autocast or ("",) * len(bound.reads)
        parts.append(Link(bound.operation, tuple(sources), kinds[sources.index(MADE)] if MADE in sources else ""))
        autocast += [kind for kind, source in zip(kinds, sources, strict=True) if source != MADE]
    kinds = tuple(autocast) if any(autocast) else ()
    return Bound(Fused(tuple(parts)), tuple(reads), bounds[-1].makes, bounds[-1].module, bounds[0].norm, kinds)


def joined_rows(bounds: Sequence[Bound], groups: Sequence[Group]) -> tuple[Bound, ...]:
    """A network's rows with each of these groups as one row, in the place of its last."""
    of = {group[-1]: group for group in groups}
    return tuple(joined([bounds[k] for k in of[i]]) if i in of else bounds[i] for i in numbers(len(bounds), groups))


def numbers(count: int, groups: Sequence[Group]) -> list[int]:
    """By row of a program with these groups, the number of the described row that it is, or ends with.

    Args:
        count: number of rows as described.
    """
    gone = {i for group in groups for i in group[:-1]}
    return [i for i in range(count) if i not in gone]


def among(stretches: Sequence[Stretch], rows: Sequence[int]) -> tuple[Stretch, ...]:
    """The same stretches where of all rows only these are left."""
    places = ([n for n, i in enumerate(rows) if s.start <= i < s.stop] for s in stretches)
    return tuple(replace(s, start=min(at), stop=max(at) + 1) for s, at in zip(stretches, places, strict=True))


def widened(
    program: Program, groups: Sequence[Group], made: Callable[[Program, Group], PlacedRow | None] | None = None
) -> Program:
    """A program with each group of its rows as one, where signatures and roles allow it.

    Args:
        groups: of numbers of the program's rows, none of which is joined already.
        made: makes the row that stands for a group; by default a row with a halo instead of what moved between.
    """
    rows, taken = dict(enumerate(program.rows)), list[Group]()
    for group in groups:
        one = (made or as_one)(program, group)
        if one is None:
            continue
        taken.append(group)
        for i in group[:-1]:
            del rows[i]
        rows[group[-1]] = one
    if not taken:
        return program
    inner = {program.rows[i].bound.makes[0] for group in taken for i in group[:-1]}
    described = numbers(len(program.rows) + sum(len(g) - 1 for g in program.joined), program.joined)
    return replace(
        program,
        rows=tuple(rows.values()),
        values={n: v for n, v in program.values.items() if n not in inner},
        again=among(program.again, [*rows]),
        joined=tuple(sorted((*program.joined, *(tuple(described[i] for i in g) for g in taken)))),
    )


def as_one(program: Program, group: Group, *, several: bool = False) -> PlacedRow | None:
    """The row that stands for a group, for which halos of operands travel and nothing else; None where it can't be.

    Args:
        several: whether it may read several operands by rows.
    """
    last = program.rows[group[-1]]
    bound = joined([program.rows[i].bound for i in group])
    operation = bound.operation
    assert isinstance(operation, Fused)
    (signature,) = operation.signatures
    roles = dict(last.roles)
    reads = [program.values[v].stored for v in bound.reads]

    def travels(value: str, operand: Operand, stored: Stored) -> bool:
        """Whether more than a halo travels: equal blocks of samples at one batch size may differ at another."""
        is_activation = program.values[value].kind in ("made", "input")
        return is_activation and stored != tuple(piece.axes for piece in signature.wants(operand, roles).pieces)

    values, operands = (*bound.reads, *bound.makes), (*signature.inputs, *signature.results)
    if any(map(travels, values, operands, (*reads, *last.makes))):
        return None
    if not set(roles) <= set(signature.extent) or any(
        faults(operation, {i for i, axes in roles.items() if axes} if several else None)
    ):
        return None
    return place(bound, program.grid, 0, roles, reads, last.makes)
