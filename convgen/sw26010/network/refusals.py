"""What networks for an SW26010 can't have, said when they are compiled."""

from __future__ import annotations

from convgen.algebra.grid import Grid
from convgen.errors import InputError
from convgen.program.network import Program, label
from convgen.spec.graph import FLOATS
from convgen.sw26010.network.nodes import nodes_of

TARGET = ("target",)


def check_mesh(program: Program) -> None:
    """Raises InputError: types that the mesh doesn't compute, or ranks that are no core groups of nodes."""
    name, types = program.name, {v.dtype for v in program.values.values()} & {*FLOATS}
    if program.autocast:
        fact = f"{name}: the mesh computes in double, whatever memory holds, so there is nothing to cast"
        raise InputError(fact, TARGET, hint="without autocast, or target cpu or cuda")
    if not types <= {"float32", "float64"}:
        fact = f"{name}: the mesh computes float32 and float64, not {', '.join(sorted(types))}"
        raise InputError(fact, TARGET, hint="--dtype float32, or target cpu or cuda")
    if len(types) > 1:
        fact = f"{name} has values of {' and '.join(sorted(types))}: a core group computes one type"
        raise InputError(fact, TARGET, hint="--dtype float32 or float64")
    if program.reduce_dtype and program.reduce_dtype not in types:
        fact = f"{name}: gradients travel in their own type on the mesh, not in {program.reduce_dtype}"
        raise InputError(fact, TARGET, hint="without reduce_dtype")
    _check_grid(program.grid, name)


def _check_grid(grid: Grid, name: str) -> None:
    try:
        nodes_of(dict(grid.axes))
    except InputError as error:
        raise InputError(f"{name}: {error.fact}", ("grid",), hint=error.hint) from None


def check_whole(program: Program) -> None:
    """Raises InputError: a pass cuts rows in pieces, or starts something beside others."""
    for row in program.rows:
        for one in (row, *(one for _, one in row.derived)):
            if one.early is not None or one.chunks is not None:
                fact = f"{program.name}: {label(row)} is computed in pieces, and a core group computes a row at once"
                raise InputError(fact, TARGET, hint="--pass bucket-gradients{mebibytes=0} alone, or none")
