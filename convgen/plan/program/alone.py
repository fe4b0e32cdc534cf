"""Seconds of a few rows of a network, as if they were the whole network."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache

from convgen.algebra.grid import Grid
from convgen.cost.machine import Machine
from convgen.cost.timeline import simulate
from convgen.program.network import Program, Value
from convgen.program.rows import PlacedRow


def alone(program: Program, wanted: Collection[str], machine: Machine, dtype: str) -> float:
    """Seconds of these rows as a program, forward and backward. Rows that differ by names alone are timed once.

    Args:
        wanted: values that want gradients in the program that the rows are from.
    """
    made = dict.fromkeys(v for row in program.rows for v in row.bound.makes if v)
    reads = dict.fromkeys(v for row in program.rows for v in row.bound.reads)
    names = {"": ""} | {v: f"v{i}" for i, v in enumerate(dict.fromkeys((*reads, *made)))}
    given = {n: replace(program.values[n], kind="parameter" if n in wanted else "input") for n in reads}
    given |= {v: program.values[v] for v in made}
    values = tuple(replace(v, name=names[n]) for n, v in given.items())
    rows = tuple(_named(row, names) for row in program.rows)
    outputs = tuple(names[v] for v in made if v not in reads)
    return _seconds(program.grid, program.autocast, rows, values, outputs, machine, dtype)


def _named(row: PlacedRow, names: dict[str, str]) -> PlacedRow:
    reads, makes = (tuple(names[v] for v in some) for some in (row.bound.reads, row.bound.makes))
    return replace(row, bound=replace(row.bound, reads=reads, makes=makes, module=""))


@lru_cache(maxsize=1 << 12)
def _seconds(
    grid: Grid,
    autocast: str,
    rows: tuple[PlacedRow, ...],
    values: tuple[Value, ...],
    outputs: tuple[str, ...],
    machine: Machine,
    dtype: str,
) -> float:
    program = Program(
        name="",
        grid=grid,
        autocast=autocast,
        values={v.name: v for v in values},
        rows=rows,
        updates=(),
        outputs=tuple((v, v) for v in outputs),
    )
    return simulate(program, machine, dtype, alike=True).end_s
