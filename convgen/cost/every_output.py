"""Memory as the papers' frameworks take it: the output of every layer stays, each with an error signal of its size.

A layer is a module of the source. The fullest rank also has parameters, their gradients and the optimizer's states,
buffers, inputs, and operands that products gather and hold for backward. Buffers in flight are not counted.

Source: [SP] I and VI (activations are kept until backward has used them), [CF] 4 (a gathered x is held).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from convgen.algebra.blocks import most_of
from convgen.cost.network import element_bytes
from convgen.operations.bound import Bound
from convgen.program.network import Program, Value, asked
from convgen.program.rows import PlacedRow, index_sets

PARAMETERS, HELD, OUTPUT = "parameters", "gathered, held for backward", "outputs and error signals"


class Kept(NamedTuple):
    """Bytes of a row on the fullest rank; `row` is None for inputs and buffers, which no row makes."""

    row: int | None
    what: str
    bytes: int


def outputs_of_layers(rows: Sequence[Bound], outputs: Sequence[tuple[str, str]]) -> frozenset[str]:
    """Values that the caller reads, or a module other than the one that makes them."""
    of = {v: bound.module for bound in rows for v in bound.makes if v}
    read = {v for bound in rows for v in bound.reads if v in of and of[v] != bound.module}
    return frozenset(read | {v for _, v in outputs if v in of})


def every_output(program: Program, parameter_bytes: Callable[[str], int]) -> Iterator[Kept]:
    """What stays in memory in a step of training.

    Args:
        parameter_bytes: by dtype, bytes for an element of a parameter, with its gradient and the optimizer's states.
    """
    shown = outputs_of_layers([row.bound for row in program.rows], program.outputs)
    wanted = program.differentiable(of_inputs=False)
    maker = {v: i for i, row in enumerate(program.rows) for v in row.bound.makes if v}
    first = {v: i for i, row in reversed([*enumerate(program.rows)]) for v in row.bound.reads}
    for name, value in program.values.items():
        size = _elements(program, value)
        if value.kind == "parameter":
            yield Kept(first.get(name), PARAMETERS, size * parameter_bytes(value.dtype))
        elif name in shown:
            yield Kept(maker[name], OUTPUT, 2 * size * element_bytes(program.types[name]))
        elif name not in maker:
            yield Kept(None, value.kind, size * element_bytes(value.dtype))
    for i, row in enumerate(program.rows):
        if row.bound.operation.is_product and (held := _held(program, i, row, asked(row.bound, wanted))):
            yield Kept(i, HELD, held)


def _held(program: Program, i: int, row: PlacedRow, wanted: Sequence[bool]) -> int:
    """Bytes of activations that were moved for a row and that its vjp reads."""
    learnt = [program.values[v].kind == "parameter" for v in row.bound.reads]
    derived = {k for k, _ in row.derived}
    of_parameters = [k for k, is_one in enumerate(learnt) if is_one and wanted[k]]
    if not any(wanted) or (of_parameters and derived.issuperset(of_parameters)):
        return 0
    sets, total, types = index_sets(row.signature, program.grid), 0, program.row_types[i].fetch
    for k, chain in enumerate(row.fetch):
        if not learnt[k] and row.signature.inputs[k].gradient and any(c.kind != "slice" for c in chain):
            total += int(sets.elements(chain[-1].dst).max()) * element_bytes(types[k])
    return total


def _elements(program: Program, value: Value) -> int:
    """Elements of a value's largest block."""
    sizes = program.grid.sizes
    return prod(most_of(n, [sizes[a] for a in axes]) for n, axes in zip(value.shape, value.stored, strict=True))
