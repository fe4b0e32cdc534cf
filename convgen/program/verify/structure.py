"""Checks of a program's names, types and results: what reads what, and that all of it is there."""

from __future__ import annotations

from collections.abc import Iterator

from convgen.algebra.layout import Layout
from convgen.program.nodes import GIVEN, TENSOR_OF, Compute, Convert, Step, reads
from convgen.program.verify.facts import Facts, Fault


def check_names_are_defined_once(f: Facts) -> Iterator[Fault]:
    """No step overwrites a value, whether made or given."""
    seen = {n for n in GIVEN if TENSOR_OF[n] in f.stored}
    for _, step in f.steps:
        if step.result in seen:
            yield None, f"%{step.result} is defined twice"
        seen.add(step.result)


def check_every_read_is_defined(f: Facts) -> Iterator[Fault]:
    """A step reads what an earlier step made; dy exists in backward only."""
    known = {n for n in GIVEN if TENSOR_OF[n] in f.stored}
    for phase, step in f.steps:
        for value in reads(step):
            if value not in known or (value == "dy" and phase == "forward"):
                yield None, f"%{step.result} in {phase} reads %{value}, which no step before it makes"
        known.add(step.result)


def check_every_value_is_read(f: Facts) -> Iterator[Fault]:
    """Some step reads each value, so that nothing is made or sent in vain."""
    read = {v for _, step in f.steps for v in reads(step)} | {"y", "dx", "dw", "db"}
    for _, step in f.steps:
        if step.result not in read:
            yield step, f"no step reads %{step.result}"


def check_types_are_layouts(f: Facts) -> Iterator[Fault]:
    """An entry per dimension, every axis of the grid at most once, windows on rows only."""
    typed: list[tuple[Step | None, Layout]] = [(None, layout) for layout in f.stored.values()]
    for step, layout in typed + [(step, step.type) for _, step in f.steps]:
        named = [a for axes in layout.axes for a in axes] + list(layout.partial)
        dims = f.space.conv.dims(layout.tensor)
        if len(layout.axes) != len(dims) or len(layout.windows) != len(dims):
            yield None, f"{layout} has {len(layout.axes)} entries, {layout.tensor} {len(dims)} dimensions"
        for a in named:
            if a not in f.schedule.grid.sizes:
                yield None, f"{layout}: {a} is no axis of {f.schedule.grid}"
            if named.count(a) > 1:
                yield None, f"{layout}: {a} stands {named.count(a)} times"
        for d, (dim, window) in enumerate(zip(dims, layout.windows, strict=True)):
            if window is not None and (layout.tensor, d) not in f.space.rows:
                yield step, f"{layout}: a window on {dim.name}, which has no rows"
        if step is None and (layout.partial or layout.has_window):
            yield step, f"{layout} can't be stored"
    if "bias" in f.stored and f.stored["bias"].axes != (f.stored["y"].axes[1],):
        yield None, f"{f.stored['bias']} has other axes on F than {f.stored['y']}"


def check_results_are_stored(f: Facts) -> Iterator[Fault]:
    """y, dx, dw and db are made in their phases, with the layouts in which x, w, y and bias are stored."""
    made = f.schedule.defined_in()
    for name, phase in f.results.items():
        if made.get(name) != phase:
            yield None, f"{phase} does not make %{name}"
        elif f.origins[name] != name:
            yield None, f"%{name} is a layout of {f.origins[name]}"
        elif f.types[name] != f.stored[TENSOR_OF[name]]:
            yield None, f"%{name} is {f.types[name]}, {TENSOR_OF[name]} is stored as {f.stored[TENSOR_OF[name]]}"


def check_steps_take_their_operands(f: Facts) -> Iterator[Fault]:
    """A step reads its operation's operands, in its section, and makes its result; a conversion keeps its tensor."""
    for phase, step in f.steps:
        match step:
            case Compute():
                row = f.rows.get(step.operation)
                got = tuple(f.origins[v] for v in step.inputs)
                if row is None:
                    yield step, f"{f.space.conv.name} has no {step.operation}"
                    continue
                fits = row.section == phase and step.type.tensor == TENSOR_OF[row.makes] and step.way in row.ways
                fits = fits and (got == row.reads or (step.operation == "conv_forward" and got == (*row.reads, "bias")))
            case Convert():
                got = (f.origins[step.source],)
                fits = step.type.tensor == f.types[step.source].tensor
        if not fits:
            yield step, f"it can't take {', '.join(got)} in {phase}"


def check_computations_make_blocks(f: Facts) -> Iterator[Fault]:
    """An operation makes blocks: only conversions fetch rows around them."""
    for _, step in f.steps:
        if isinstance(step, Compute) and step.type.has_window:
            yield step, f"{step.operation} makes no window, as in {step.type}"
