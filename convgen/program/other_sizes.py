"""A program's layout at other sizes than those it was planned for: the same rows, roles and storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from convgen.algebra.grid import Grid
from convgen.operations.bound import Bound
from convgen.program.network import Program
from convgen.program.rows import PlacedRow, open_dims, place, place_gradient, stored_by_name
from convgen.program.wide import joined_rows
from convgen.spec.aten.describe import Described
from convgen.spec.aten.sizes import AnySizes


def for_any_extents(program: Program, known: AnySizes) -> Program:
    """The program with conversions for all sizes: blocks that are equal at one size may differ at another."""
    each = [joined_rows(one.rows, program.joined) for one in (known.many, *known.more)]
    rows = tuple(
        placed_again(row, bounds, program.grid)
        for row, bounds in zip(program.rows, zip(*each, strict=True), strict=True)
    )
    return program_like(replace(program, rows=rows), known.here)


def placed_again(row: PlacedRow, bounds: Sequence[Bound], grid: Grid) -> PlacedRow:
    """The same row at other sizes, with the same roles and storage.

    Args:
        bounds: the row at several probes; what differs between them is known at run time only.
    """
    bound, names = bounds[0], stored_by_name(row.signature, row.reads, row.makes)
    derived: dict[str, PlacedRow] = {}
    for k, one in row.derived:
        name = row.signature.inputs[k].name
        derived[name] = place_gradient(bound, name, grid, one.way, dict(one.roles), names, bounds[1:])
    operations = [b.operation.signatures[row.way] for b in bounds]
    again = place(bound, grid, row.way, dict(row.roles), row.reads, row.makes, derived, open_dims(operations))
    return replace(again, holds=row.holds)


def program_like(program: Program, described: Described) -> Program:
    """The same layout of a network of other sizes."""
    bounds = joined_rows(described.rows, program.joined)
    rows = tuple(
        replace(row, bound=bound, derived=tuple((k, _derived(one, bound, k)) for k, one in row.derived))
        for row, bound in zip(program.rows, bounds, strict=True)
    )
    values = {
        n: replace(v, shape=described.tensors[n].shape) if n in described.tensors else v
        for n, v in program.values.items()
    }
    return replace(program, rows=rows, values=values)


def _derived(one: PlacedRow, bound: Bound, k: int) -> PlacedRow:
    name = bound.operation.signatures[0].inputs[k].name
    operation = bound.operation.gradients[name].operation
    return replace(one, bound=replace(one.bound, operation=operation))
