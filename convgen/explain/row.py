"""A row of a network: each of its steps with the elements that it sends, and their formula."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from convgen.algebra.layout import Layout
from convgen.algebra.relations import ReadBy, Taps
from convgen.algebra.signature import Made, Signature
from convgen.cost.network import element_bytes, records
from convgen.cost.symbolic import Expr, Formula, Sizes, interior_rows, sent_by, symbol, sympy
from convgen.errors import InputError
from convgen.explain.formula import formula_text
from convgen.network_compiler import CompiledNetwork
from convgen.program import flow
from convgen.program.flow import Local, Start
from convgen.program.network import Moved, Program, label
from convgen.program.rows import PlacedRow
from convgen.spec.names import did_you_mean
from convgen.spec.text import aligned

NOTE = (
    "formula: elements that a rank with neighbours on all sides sends, or its flops, where extents divide; |a| is the "
    "ranks of axis a, and Ho are rows of the coarser activation"
)
Line = dict[str, Any]
FIRST = (("whole", 0), ("interior", 0), ("chunk", 1))  # the piece that stands for all of a row's


class RowSizes(Sizes):
    """The extents, in a row's indices, of the layouts of its operands and results."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.operands = {o.name: o for o in (*signature.inputs, *signature.results)}
        self.relations = {
            made.indices[0]: type(made.relation)
            for o in self.operands.values()
            for made in o.dims
            if isinstance(made.relation, Taps | ReadBy)
        }

    def inner(self, tensor: str) -> Expr:
        return sympy().Integer(1)

    def extent(self, tensor: str, dim: int) -> Expr:
        operand = self.operands[tensor]
        return self._dim(operand.dims[dim], operand.shape[dim])

    def _dim(self, made: Made, extent: int) -> Expr:
        if not made.indices or not isinstance(made.relation, Taps | ReadBy | None):
            return sympy().Integer(extent)
        if len(made.indices) > 1 and made.indices[0] == "G":
            return symbol(made.indices[1])  # the channels of all groups
        return prod((self._index(i, made) for i in made.indices), start=sympy().Integer(1))

    def _index(self, index: str, made: Made) -> Expr:
        if index in self.relations:
            by_taps, reads = self.relations[index] is Taps, made.relation is not None
            return symbol(index if by_taps == reads else f"{index}o")
        of_group = index in ("C", "F") and self.signature.extent.get("G", 1) > 1
        return symbol(index) / symbol("G") if of_group else symbol(index)

    def window(self, layout: Layout, dim: int, *, frame: bool = False) -> tuple[Expr, Expr]:
        found, relation = layout.windows[dim], self.operands[layout.tensor].dims[dim].relation
        if found is None:
            return 0, 0
        if not layout.axes[dim] or not isinstance(relation, Taps | ReadBy):
            return found.lo, found.hi
        return interior_rows(relation)

    def product_flops(self, row: PlacedRow) -> Expr:
        """The flops of a rank's part of a product: two for each of its terms."""
        roles = dict(row.roles)
        w = self.operands["w"]
        taps = prod(n for made, n in zip(w.dims, w.shape, strict=True) if not made.indices)
        extents = [i for i, n in self.signature.extents if n > 1]
        rows = {i: symbol(f"{i}o") for i in self.relations}  # a term for each row of the coarse activation
        blocks = ((rows.get(i) or self._index(i, Made((i,)))) / self.ranks(roles.get(i, ())) for i in extents)
        return 2 * taps * prod(blocks, start=sympy().Integer(1))


def row_lines(program: Program, number: int) -> Iterator[Line]:
    """The lines of what ranks do for a row, in order; a step that is done in pieces has one line."""
    passes = {"forward": flow.forward(program), "backward": flow.backward(program, of_inputs=True)}
    for phase, steps in passes.items():
        for step in steps:
            match step:
                case Local() if step.row == number and (step.part, step.chunk) in FIRST:
                    yield _local(phase, step)
                case Moved() if step.row == number:
                    yield _moved(program, phase, step)
                case Start(chunk=0 | 1):
                    yield from (_moved(program, phase, m) for m in step.moved if m.row == number)
                case _:
                    pass


def _local(phase: str, step: Local) -> Line:
    row, zero = step.placed, sympy().Integer(0)
    flops = RowSizes(row.signature).product_flops(row) if row.bound.operation.is_product else zero
    return {
        "phase": phase, "step": step.name, "operation": row.bound.operation.name + " vjp" * bool(step.operands),
        "axes": (), "elements": 0, "bytes": 0, "formula": Formula(zero, flops * max(len(step.operands), 1), zero, None),
    }  # fmt: skip


def _moved(program: Program, phase: str, m: Moved) -> Line:
    c, zero, sizes = m.conversion, sympy().Integer(0), RowSizes(m.placed.signature)
    sent = max((n for r in records(program, [m]) for n in r["bytes_sent_per_rank"]), default=0)
    sides = (c.dst, c.src) if c.kind == "exchange" and c.reduction else (c.src, c.dst)  # a halo's gradient goes back
    return {
        "phase": phase, "step": m.step, "operation": c.kind, "axes": c.over,
        "elements": sent // element_bytes(program.dtype_of(m)), "bytes": sent,
        "formula": Formula(sent_by(c.kind, c.over, *sides, sizes), zero, zero, None),
    }  # fmt: skip


def row_text(compiled: CompiledNetwork, name: str) -> str:
    """The row's steps as a table.

    Raises:
        InputError: there is no such row.
    """
    program = compiled.program
    known = {label(row): i for i, row in enumerate(program.rows)}
    if name not in known:
        hint = did_you_mean(name, list(known), "a row of convgen explain without --row")
        raise InputError(f"{program.name} has no row {name}", hint=hint)
    row = program.rows[known[name]]
    table: list[tuple[str, ...]] = [("", "step", "operation", "elements sent", "bytes sent", "formula")]
    before = ""
    for one in row_lines(program, known[name]):
        operation = one["operation"] + (f" over {','.join(one['axes'])}" if one["axes"] else "")
        text = formula_text(one["formula"], program.grid)
        numbers = (f"{one['elements']:,}", f"{one['bytes']:,}") if one["axes"] else ("", "")
        table.append((one["phase"] * (one["phase"] != before), one["step"], operation, *numbers, text))
        before = one["phase"]
    reads = ", ".join(f"{o.name} = {v}" for o, v in zip(row.signature.inputs, row.bound.reads, strict=True))
    head = f"{name} = {row.bound.operation.name} of {reads}"
    return "\n".join([head, "", *aligned(table, (3, 4), "  "), "", NOTE])
