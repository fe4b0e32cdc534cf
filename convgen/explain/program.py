"""A network on a grid in words and numbers: what moves for each row, forward and backward, and what runs whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from convgen.cost.axes import split_shares
from convgen.cost.network import element_bytes, records, volume
from convgen.cost.network_memory import network_memory
from convgen.explain.memory import memory_json, memory_line
from convgen.network_compiler import CompiledNetwork
from convgen.program.network import Moved, Program, label
from convgen.program.rows import PlacedRow
from convgen.spec.aten.describe import Described
from convgen.spec.aten.sizes import described as described_of
from convgen.spec.graph import Graph
from convgen.spec.text import aligned, number_of

SHOWN = ("ranks", "rows", "activations", "parameters")  # what is said of an axis's splits
NOTE = "bytes: what all ranks send"


@dataclass(frozen=True)
class Step:
    """A collective: its row and value, and the bytes that each rank sends."""

    row: int
    value: str
    name: str
    collective: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.ranks)


def steps(program: Program, moved: Iterable[Moved]) -> list[Step]:
    """The collectives that send something, in order."""
    return [
        Step(one.row, one.value, r["step"], r["collective"], tuple(r["axes"]), tuple(r["bytes_sent_per_rank"]))
        for one in moved
        for r in records(program, [one])
    ]


# ---- Cost: a line a step ----


def program_cost_text(compiled: CompiledNetwork) -> str:
    """The text of the bytes of every step, and of all."""
    program = compiled.program
    lines = [_heading(compiled)]
    for part, several in volume(program, of_inputs=compiled.of_inputs).items():
        table = [("step", "collective", "over", "bytes", "busiest rank")]
        for s in several:
            sent: list[int] = s["bytes_sent_per_rank"]
            name = s["step"] + (f" ({number_of(len(s['of']), 'gradient')})" if "of" in s else "")
            table.append((name, s["collective"], ",".join(s["axes"]), f"{sum(sent):,}", f"{max(sent):,}"))
        table.append(("in all", "", "", f"{_total(several):,}", f"{_busiest(several, program):,}"))
        lines += ["", part, *aligned(table, (3, 4), "  ")]
    return "\n".join([*lines, "", f"{NOTE}; the busiest is the rank that sends most"])


def program_cost_json(compiled: CompiledNetwork) -> dict[str, Any]:
    """VOLUME with totals, and what runs whole."""
    program = compiled.program
    said: dict[str, Any] = {
        "network": program.name,
        "grid": program.grid.plain,
        "algorithm": compiled.algorithm,
        "axes": {axis: {n: getattr(one, n) for n in SHOWN} for axis, one in split_shares(program).items()},
        "volume": volume(program, of_inputs=compiled.of_inputs),
    }
    for part, several in volume(program, of_inputs=compiled.of_inputs).items():
        said[f"{part}_bytes"] = _total(several)
        said[f"{part}_bytes_busiest_rank"] = _busiest(several, program)
    return said | {"whole": [one.plain() for one in whole_calls(compiled.graph, compiled.described)]}


def _total(several: Sequence[dict[str, Any]]) -> int:
    return sum(sum(s["bytes_sent_per_rank"]) for s in several)


def _busiest(several: Sequence[dict[str, Any]], program: Program) -> int:
    return max((sum(s["bytes_sent_per_rank"][r] for s in several) for r in range(program.grid.ranks)), default=0)


# ---- Explain: a line a row ----


def program_text(compiled: CompiledNetwork) -> str:
    """How inputs and outputs are stored, a line for each row that something moves for, totals, and what runs whole."""
    program = compiled.program
    lines = [_heading(compiled), "", "stored"]
    shown = {v.name: v.name for v in program.values.values() if v.kind == "input"}
    shown |= dict(program.outputs)
    wide = max(map(len, shown), default=0)
    for name, value in shown.items():
        v = program.values[value]
        dims = ", ".join(f"{n}/{'.'.join(a)}" if a else str(n) for n, a in zip(v.shape, v.stored, strict=True))
        lines.append(f"  {name:<{wide}}  [{dims}]")
    lines += _axes_lines(compiled)
    forward = steps(program, program.forward())
    backward = steps(program, program.backward(of_inputs=compiled.of_inputs))
    table: list[tuple[str, ...]] = [("row", "operation", "roles", "forward", "bytes", "backward", "bytes")]
    silent = 0
    for i, row in enumerate(program.rows):
        there, back = [s for s in forward if s.row == i], [s for s in backward if s.row == i]
        if not there and not back:
            silent += 1
            continue
        moved = [x for one in (there, back) for x in (_short(one), f"{sum(s.total for s in one):,}" if one else "")]
        table.append((label(row), row.bound.operation.name, _roles(row), *moved))
    totals = [f"{sum(s.total for s in one):,}" for one in (forward, backward)]
    table.append(("in all", "", "", "", totals[0], "", totals[1]))
    lines += ["", *aligned(table, (4, 6), "  ")]
    if silent:
        lines.append(f"  ... and {number_of(silent, 'row')} for which nothing moves")
    ending = [f"{NOTE} in a step of training", memory_line(memory_json(network_memory(program)))]
    return "\n".join([*lines, "", *_whole_lines(compiled, forward, backward), *ending])


def _axes_lines(compiled: CompiledNetwork) -> list[str]:
    """The lines of what each axis of the grid splits."""
    several = {axis: one for axis, one in split_shares(compiled.program).items() if one.ranks > 1}
    if not several:
        return []
    rows, idle = number_of(len(compiled.program.rows), "row"), compiled.idle_axes
    table: list[tuple[str, ...]] = []
    for axis, one in several.items():
        parts = (("activations'", one.activations), ("parameters'", one.parameters))
        says = ", ".join(f"{share:.0%} of {kind} bytes" for kind, share in parts)
        said = f"splits nothing: {idle[axis]}" if one.idle else f"{one.rows} of {rows}, {says}"
        table.append((axis, number_of(one.ranks, "rank"), said))
    return ["", "axes", *aligned(table, (), "  ")]


def _heading(compiled: CompiledNetwork) -> str:
    program = compiled.program
    how = f", {compiled.algorithm}" if compiled.algorithm else ""
    return f"{program.name} on {program.grid}{how}: {number_of(len(program.rows), 'row')}, {compiled.types}"


def _roles(row: PlacedRow) -> str:
    return " ".join(f"{index}={'.'.join(axes)}" for index, axes in row.roles)


def _short(several: Sequence[Step]) -> str:
    """The text of what moves, each kind of collective once."""
    kinds = dict.fromkeys(f"{s.collective} over {','.join(s.axes)}" for s in several)
    return ", ".join(kinds)


def _whole_lines(compiled: CompiledNetwork, forward: Sequence[Step], backward: Sequence[Step]) -> list[str]:
    described = compiled.described
    if not described.whole:
        return ["no operator runs whole"]
    rows = {i for i, call in enumerate(compiled.calls) if call in described.whole}
    all_sent = sum(s.total for s in (*forward, *backward))
    own = sum(s.total for s in (*forward, *backward) if s.row in rows)
    share = f", {own / all_sent:.0%} of all" if all_sent else ""
    lines = [f"{number_of(len(described.whole), 'operator')} that no row describes: {own:,} bytes{share}"]
    for i in sorted(rows):
        row = compiled.program.rows[i]
        sent = sum(s.total for s in (*forward, *backward) if s.row == i)
        lines.append(f"  {compiled.graph.calls[compiled.calls[i]].op} in {row.bound.module or 'the module'}: {sent:,}")
    return lines


# ---- What runs whole ----


@dataclass(frozen=True)
class WholeCall:
    """An operator that no row describes: every rank gathers its operands and computes it alike.

    Attributes:
        bytes: those of its operands, which each rank then has whole.
    """

    op: str
    module: str
    bytes: int

    def plain(self) -> Mapping[str, Any]:
        return {"op": self.op, "module": self.module, "operand_bytes": self.bytes}


def whole_calls(graph: Graph, described: Described | None = None) -> list[WholeCall]:
    """The operators that run whole, those with the largest operands first.

    Raises:
        InputError: one draws random numbers, or changes an operand, and no row describes it.
    """
    described = described_of(graph) if described is None else described
    found: list[WholeCall] = []
    for row, number in zip(described.rows, described.calls, strict=True):
        if number in described.whole and row.operation.runs_whole:
            read = (described.tensors[v] for v in dict.fromkeys(row.reads))
            size = sum(prod(t.shape) * element_bytes(t.dtype) for t in read)
            found.append(WholeCall(row.operation.runs_whole, row.module, size))
    return sorted(found, key=lambda one: (-one.bytes, one.op, one.module))


def whole_text(found: Sequence[WholeCall]) -> list[str]:
    """Lines of a listing: what runs whole, and what that costs."""
    if not found:
        return []
    total = sum(one.bytes for one in found)
    lines = [
        f"  {number_of(len(found), 'operator')} that no row describes: every rank gathers the operands, "
        f"{total:,} bytes for each rank in all, and computes alike (--strict refuses)"
    ]
    return lines + [f"  {one.bytes:12,d}  {one.op}  {one.module or 'the module'}" for one in found]
