"""What one layer of a network's plan takes, step by step: what is moved, what is computed, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

from convgen.algebra.notation import roles_text
from convgen.cost.machine import Machine
from convgen.cost.moving import PICOSECONDS
from convgen.cost.rows import Price, price_on
from convgen.errors import InputError
from convgen.program.network import Moved, Program, asked, label
from convgen.program.rows import PlacedRow
from convgen.spec.names import did_you_mean


def check_name(program: Program, name: str) -> None:
    """Raises InputError: no value and no module of the source is called so."""
    names = dict.fromkeys(n for row in program.rows for n in (label(row), row.bound.module) if n)
    if name not in names:
        hint = did_you_mean(name, names, "a name of the table's first column, or a module of the source")
        raise InputError(f"{program.name} has no {name}", hint=hint)


def explained_rows(program: Program, name: str, machine: Machine, dtype: str) -> str:
    """Every step of the rows that make a value, or are of a module, and their sum.

    Raises:
        InputError: there is none.
    """
    check_name(program, name)
    price, wanted = price_on(program.grid, machine, dtype), program.differentiable(of_inputs=False)
    moves = [*program.forward(), *program.backward()]
    lines: list[str] = []
    total = 0
    for i, row in enumerate(program.rows):
        if name not in (label(row), row.bound.module):
            continue
        lines.append(f"{label(row)}: {row.bound.operation.name}, roles {roles_text(row.roles) or 'none'}")
        for what, ps in _steps(row, i, price, moves, asked(row.bound, wanted)):
            lines.append(f"  {ps / PICOSECONDS * 1e3:10.4f} ms  {what}")
            total += ps
    return "\n".join([*lines, f"  {total / PICOSECONDS * 1e3:10.4f} ms  in all, forward and backward"])


def _steps(
    row: PlacedRow, number: int, price: Price, moves: list[Moved], wanted: list[bool]
) -> Iterator[tuple[str, int]]:
    """(what, picoseconds): as `row_cost` adds them up."""
    local = price.local(row.bound.operation, row.way, dict(row.roles))
    names = row.signature.inputs
    mine = [m for m in moves if m.row == number]

    def moved(sides: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        for m in mine:
            if m.chain[0].split()[-1] in sides and m.placed is row:
                yield _said(m), price.chain(row, (m.conversion,))

    yield from moved(("fetch",))
    yield f"{row.bound.operation.name} computes", local
    yield from moved(("store",))
    for k, one in row.derived:
        if wanted[k]:
            for m in mine:
                if m.placed is one:
                    yield _said(m), price.chain(one, (m.conversion,))
            ps = price.local(one.bound.operation, one.way, dict(one.roles))
            yield f"d{names[k].name}: {one.bound.operation.name} computes, roles {roles_text(one.roles) or 'none'}", ps
    yield from moved(("given",))
    if back := [k for k, chain in enumerate(row.back) if chain is not None and wanted[k]]:
        which = ", ".join(f"d{names[k].name}" for k in back)
        yield f"{which}: by the vjp", price.local(row.bound.operation, row.way, dict(row.roles), back)
    yield from moved(("back",))


def _said(m: Moved) -> str:
    c = m.conversion
    over = f" over {','.join(c.over)}" if c.over else ""
    return f"{m.step}: {c.kind}{over}, {c.src} -> {c.dst}"
