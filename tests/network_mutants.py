"""Programs of networks with one mistake each, by kind: rows, conversions, values, and what travels meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from convgen.algebra.redistribute import Conversion
from convgen.program.flow import Flow, Start, Wait
from convgen.program.network import Program, Value
from convgen.program.rows import Chain, PlacedRow

KINDS = ("slice", "reduce_scatter", "all_reduce", "all_to_all", "all_gather", "exchange")


def with_row(program: Program, i: int, *rows: PlacedRow) -> Program:
    return replace(program, rows=(*program.rows[:i], *rows, *program.rows[i + 1 :]))


def rows_gone(program: Program) -> Iterator[Program]:
    """A row gone whose value is still read."""
    asked = {v for row in program.rows for v in row.bound.reads}
    asked |= {v for _, v in program.outputs} | {v for _, v in program.updates}
    for i, row in enumerate(program.rows):
        if asked & {*row.bound.makes}:
            yield with_row(program, i)


def rows_late(program: Program) -> Iterator[Program]:
    """A row behind its first reader."""
    rows = program.rows
    for i, row in enumerate(rows):
        made = {v for v in row.bound.makes if v}
        if (reader := next((j for j in range(i + 1, len(rows)) if made & {*rows[j].bound.reads}), None)) is not None:
            yield replace(program, rows=(*rows[:i], *rows[i + 1 : reader + 1], row, *rows[reader + 1 :]))


def rows_twice(program: Program) -> Iterator[Program]:
    """A row twice, which makes a value that is there."""
    return (with_row(program, i, row, row) for i, row in enumerate(program.rows) if any(row.bound.makes))


def other_shapes(program: Program) -> Iterator[Program]:
    """A value that somebody reads or makes as of another size."""
    asked = {v for row in program.rows for v in (*row.bound.reads, *row.bound.makes)}
    for name, value in program.values.items():
        for d in range(len(value.shape) if name in asked else 0):
            shape = tuple(n + (k == d) for k, n in enumerate(value.shape))
            yield replace(program, values={**program.values, name: replace(value, shape=shape)})


def stored_elsewhere(program: Program) -> Iterator[Program]:
    """A value stored in another way than those think who read or make it."""
    asked = {v for row in program.rows for v in (*row.bound.reads, *row.bound.makes)}
    for name, value in program.values.items():
        if name in asked and any(value.stored):
            other: Value = replace(value, stored=((),) * len(value.shape))
            yield replace(program, values={**program.values, name: other})


def chains_of(row: PlacedRow) -> Iterator[tuple[Chain, Callable[[Chain], PlacedRow]]]:
    """Each chain of a row and of its gradients' rows, and how it is put in another's place."""
    for field in ("fetch", "store", "given", "back"):
        chains = getattr(row, field)
        for k, chain in enumerate(chains):
            if chain is not None:

                def put(
                    new: Chain | None, field: str = field, k: int = k, chains: tuple[Chain, ...] = chains
                ) -> PlacedRow:
                    return replace(row, **{field: (*chains[:k], new, *chains[k + 1 :])})

                yield chain, put
    for k, (operand, one) in enumerate(row.derived):
        for chain, inside in chains_of(one):

            def within(
                new: Chain, k: int = k, operand: int = operand, inside: Callable[[Chain], PlacedRow] = inside
            ) -> PlacedRow:
                return replace(row, derived=(*row.derived[:k], (operand, inside(new)), *row.derived[k + 1 :]))

            yield chain, within


def _changed(program: Program, change: Callable[[Conversion], Iterator[Conversion | None]]) -> Iterator[Program]:
    """With each of a program's conversions changed in each of some ways; None: gone."""
    for i, row in enumerate(program.rows):
        for chain, put in chains_of(row):
            for c, conversion in enumerate(chain):
                for new in change(conversion):
                    yield with_row(program, i, put((*chain[:c], *((new,) if new else ()), *chain[c + 1 :])))


def other_kinds(program: Program) -> Iterator[Program]:
    """A conversion of another kind; but none that an exchange is as well, which moves what any other does."""

    def change(c: Conversion) -> Iterator[Conversion | None]:
        for kind in KINDS:
            if kind != c.kind and not (kind == "exchange" and not c.src.partial):
                yield replace(c, kind=kind)

    return _changed(program, change)


def as_exchanges(program: Program) -> Iterator[Program]:
    """An exchange in the place of a collective that moves the same: right."""

    def change(c: Conversion) -> Iterator[Conversion | None]:
        if c.kind in ("all_gather", "all_to_all") and c.reduction is None and not c.src.partial:
            yield replace(c, kind="exchange")

    return _changed(program, change)


def other_reductions(program: Program) -> Iterator[Program]:
    """An exchange that no longer adds, moments that are gathered and not merged, a sum where nothing is added."""

    def change(c: Conversion) -> Iterator[Conversion | None]:
        for reduction in (None, "sum", "max", "merge"):
            if reduction != c.reduction:
                yield replace(c, reduction=reduction)

    return _changed(program, change)


def other_forms(program: Program) -> Iterator[Program]:
    """What a conversion makes comes otherwise than as a tensor, where no kernel reads it so."""

    def change(c: Conversion) -> Iterator[Conversion | None]:
        yield replace(c, form="parts")
        if c.kind != "exchange" or c.reduction is not None or not c.dst.has_window:
            yield replace(c, form="rim")

    return _changed(program, change)


def other_ranks(program: Program) -> Iterator[Program]:
    """A conversion over an axis less; a collective over one more."""

    def change(c: Conversion) -> Iterator[Conversion | None]:
        for gone in c.over:
            yield replace(c, over=tuple(a for a in c.over if a != gone))
        if c.kind != "exchange":
            for more in program.grid.names:
                if more not in c.over:
                    yield replace(c, over=program.grid.ordered({*c.over, more}))

    return _changed(program, change)


def conversions_gone(program: Program) -> Iterator[Program]:
    def change(c: Conversion) -> Iterator[Conversion | None]:
        yield None

    return _changed(program, change)


def gradients_forgotten(program: Program) -> Iterator[Program]:
    """A gradient that local code makes and nobody collects, or of which the row is gone."""
    for i, row in enumerate(program.rows):
        for k, chain in enumerate(row.back):
            if chain is not None:
                yield with_row(program, i, replace(row, back=(*row.back[:k], None, *row.back[k + 1 :])))
        for k in range(len(row.derived)):
            yield with_row(program, i, replace(row, derived=(*row.derived[:k], *row.derived[k + 1 :])))


def buffers_elsewhere(program: Program) -> Iterator[Program]:
    """An update of what is no buffer, by a value that isn't there, or of another size."""
    for i, (buffer, value) in enumerate(program.updates):
        others = [n for n, v in program.values.items() if v.kind == "made" and v.shape != program.values[buffer].shape]
        for pair in ((value, buffer), (buffer, "nothing"), (buffer, others[0])):
            yield replace(program, updates=(*program.updates[:i], pair, *program.updates[i + 1 :]))


PROGRAMS = {
    f.__name__: f
    for f in (
        rows_gone, rows_late, rows_twice, other_shapes, stored_elsewhere, other_kinds, other_reductions, other_forms,
        other_ranks,
        conversions_gone, gradients_forgotten, buffers_elsewhere,
    )
}  # fmt: skip


# ---- what travels meanwhile ----


def flights(steps: list[Flow]) -> Iterator[tuple[str, list[Flow]]]:
    """A pass whose starts and waits are not as they should be."""
    for i, step in enumerate(steps):
        if isinstance(step, Wait):
            yield f"{step.name} is not waited for", [*steps[:i], *steps[i + 1 :]]
            yield f"{step.name} is waited for twice", [*steps[: i + 1], step, *steps[i + 1 :]]
            start = next(j for j, s in enumerate(steps) if isinstance(s, Start) and s.name == step.name)
            yield (
                f"{step.name} is waited for before its start",
                [*steps[:start], step, *steps[start:i], *steps[i + 1 :]],
            )
        if isinstance(step, Start):
            yield f"{step.name} is not started", [*steps[:i], *steps[i + 1 :]]
            yield f"{step.name} is started twice", [*steps[: i + 1], step, *steps[i + 1 :]]
