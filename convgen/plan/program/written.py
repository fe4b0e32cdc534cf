"""Between a program and the file that says how it is laid out."""

from __future__ import annotations

from collections.abc import Sequence

from convgen.algebra.grid import Grid
from convgen.algebra.notation import entry_text
from convgen.errors import InputError
from convgen.operations.bound import Bound
from convgen.plan.parts import Parts
from convgen.program.again import with_again
from convgen.program.network import Program, Value, label
from convgen.program.rows import PlacedRow, place, place_gradient, serves, stored_by_name
from convgen.spec.aten.seeds import SEED
from convgen.spec.network_plan import PlanFile, RowPlan
from convgen.spec.source import KeyPath
from convgen.spec.text import shown


def plan_of(program: Program, graph: str, machine: str = "", seconds: float = 0.0) -> PlanFile:
    """A program's layout as a file has it.

    Args:
        graph: the graph's file, as seen from the plan's.
    """
    values = {n: v.stored for n, v in program.values.items() if any(v.stored)}
    rows = tuple(
        RowPlan(
            label(row),
            row.way,
            row.roles,
            tuple((row.signature.inputs[k].name, one.way, one.roles) for k, one in row.derived),
        )
        for row in program.rows
    )
    again = tuple(s.path for s in program.again)
    return PlanFile(
        program.name, graph, program.grid, values, rows, machine, seconds * 1e3, program.statistics, again,
        reduce_dtype=program.reduce_dtype, autocast=program.autocast,
    )  # fmt: skip


def program_of(plan: PlanFile, parts: Parts, *, bare: bool = True) -> Program:
    """The program that a file lays out.

    Args:
        bare: without axes of one rank, which split nothing.
    Raises:
        InputError: it is another network's, or a layout can't work.
    """
    name, tensors, rows, updates, outputs, *_ = parts
    if plan.name != name:
        fact = f"the plan is of {shown(plan.name)}, and the network is {name}"
        raise InputError(fact, ("network_plan",), hint="the plan and the graph of one network")
    known = {t.name: t for t in tensors}
    if unknown := [n for n in plan.values if n not in known]:
        raise InputError(f"the network has no value {unknown[0]}", ("values", unknown[0]), hint=f"graph: {plan.graph}")
    if len(plan.rows) != len(rows):
        raise InputError(
            f"the plan has {len(plan.rows)} rows, the network {len(rows)}", ("rows",), hint="plan it again"
        )
    grid = plan.grid.bare if bare else plan.grid
    stored = {n: _on(grid, plan.values.get(n) or ((),) * len(t.shape)) for n, t in known.items()}
    for n, t in known.items():
        if len(stored[n]) != len(t.shape):
            fact = f"{n} has {len(t.shape)} dimensions, its layout {len(stored[n])}"
            raise InputError(fact, ("values", n), hint="an entry a dimension: [a * (b,c) *]")
    if any(stored.get(SEED, ())):
        fact = f"{SEED} is what random draws begin with, and every rank has all of it"
        raise InputError(fact, ("values", SEED), hint="[*]")
    for buffer, value in updates:
        if stored[buffer] != stored[value]:
            fact = f"{buffer} becomes {value}: both want one layout"
            raise InputError(fact, ("values", buffer), hint=f"[{' '.join(map(entry_text, stored[value]))}]")
    placed = [_row(i, r, b, grid, stored) for i, (r, b) in enumerate(zip(plan.rows, rows, strict=True))]
    values = {n: Value(n, t.shape, t.dtype, stored[n], t.kind) for n, t in known.items()}  # type: ignore[arg-type]
    program = Program(
        name=name, grid=plan.grid, values=values, rows=tuple(placed), updates=tuple(updates), outputs=tuple(outputs),
        statistics=plan.statistics,
    )  # fmt: skip
    return with_again(program, plan.again)


def _on(grid: Grid, stored: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(a for a in axes if a in grid.names) for axes in stored)


def _row(i: int, plan: RowPlan, bound: Bound, grid: Grid, stored: dict[str, tuple[tuple[str, ...], ...]]) -> PlacedRow:
    made = next(filter(None, bound.makes), bound.operation.name)
    if plan.makes != made:
        raise InputError(
            f"row {i} makes {made}, the plan says {plan.makes}", ("rows", i, "makes"), hint="plan it again"
        )
    reads = [stored[v] for v in bound.reads]
    results = bound.operation.signatures[0].results
    makes = [stored[v] if v else ((),) * len(r.shape) for v, r in zip(bound.makes, results, strict=True)]
    names = stored_by_name(bound.operation.signatures[0], reads, makes)
    derived: dict[str, PlacedRow] = {}
    for name, way, roles in plan.gradients:
        one = bound.operation.gradients.get(name)
        if one is None:
            raise InputError(f"{made}: {name} has no gradient of its own", ("rows", i, "gradients", name))
        path = ("rows", i, "gradients", name)
        nests = _checked(path, Bound(one.operation, one.reads, (name,)), way, roles, grid)
        derived[name] = place_gradient(bound, name, grid, way, nests, names)
    signature, own_rows = bound.operation.signatures, set(bound.operation.gradients)
    if plan.way < len(signature) and signature[plan.way].reduction != "sum" and set(derived) != own_rows:
        raise InputError(f"{made}: its gradient wants a row of its own", ("rows", i), hint="gradients: {x: {...}}")
    nests = _checked(("rows", i), bound, plan.way, plan.roles, grid)
    return place(bound, grid, plan.way, nests, reads, makes, derived)


def _checked(
    path: KeyPath, bound: Bound, way: int, roles: Sequence[tuple[str, tuple[str, ...]]], grid: Grid
) -> dict[str, tuple[str, ...]]:
    """Roles that an operation's signature has and local code can take."""
    i = path[1]
    signatures = bound.operation.signatures
    if not 0 <= way < len(signatures):
        raise InputError(f"row {i}: {bound.operation.name} has ways 0 to {len(signatures) - 1}", (*path, "way"))
    signature = signatures[way]
    nests = {index: tuple(a for a in axes if a in grid.names) for index, axes in roles}
    if unknown := [index for index in nests if index not in signature.extent]:
        hint = f"indices {', '.join(signature.extent)}: {signature}"
        raise InputError(f"row {i}: {bound.operation.name} has no index {unknown[0]}", (*path, "roles"), hint=hint)
    if signature.reduction == "max" or not serves(signature, nests, grid):
        raise InputError(f"row {i}: {bound.operation.name} can't run with these roles", (*path, "roles"))
    return nests
