"""What some rows of a network take when they are all there is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from convgen.cost.machine import Machine
from convgen.cost.timeline import simulate
from convgen.program.network import Program


def alone(program: Program, wanted: Collection[str], machine: Machine, dtype: str) -> float:
    """Seconds of some rows of a program, forward and backward.

    Args:
        wanted: values that want gradients in the program that it is of.
    """
    made = dict.fromkeys(v for row in program.rows for v in row.bound.makes if v)
    reads = dict.fromkeys(v for row in program.rows for v in row.bound.reads)
    given = {
        n: replace(program.values[n], kind="parameter" if n in wanted else "input") for n in reads if n not in made
    }
    outputs = tuple((str(i), v) for i, v in enumerate(made) if v not in reads)
    values = {**{v: program.values[v] for v in made}, **given}
    return simulate(replace(program, values=values, updates=(), outputs=outputs), machine, dtype, alike=True).end_s
