"""Schedules of layers with one mistake each, by kind: steps, conversions, types, operands, roles, forms, and the bias.

A mutant is planted where it computes something else or breaks what the schedule says of itself. What is equal by
definition is left out: axes of one rank split nothing; values that the same conversions make of the same value are
equal; an exchange moves what any other conversion without a sum does, from whichever layout; zeros around all rows may
be held or padded; a collective delivers parts, or a tensor, to a step that reads either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, permutations

from convgen.algebra.conv import Phase
from convgen.algebra.layout import Axes, Layout, Window
from convgen.algebra.redistribute import COLLECTIVES, FORMS, Kind
from convgen.algebra.roles import ORDER, Roles
from convgen.algebra.space import Space
from convgen.operations.layer import ROWS_OF_X
from convgen.program.forms import parts
from convgen.program.nodes import (
    GIVEN,
    PHASES,
    RESULTS,
    TENSOR_OF,
    Compute,
    Convert,
    Schedule,
    Step,
    is_convolution,
    reads,
)

KINDS: tuple[Kind, ...] = ("slice", *COLLECTIVES)
Mutants = Iterator[Schedule]


def with_steps(schedule: Schedule, phase: Phase, i: int, *steps: Step) -> Schedule:
    """With these steps in the place of one."""
    section = schedule.section(phase)
    return replace(schedule, **{phase: (*section[:i], *steps, *section[i + 1 :])})


def placed(schedule: Schedule) -> Iterator[tuple[Phase, int, Step]]:
    """Each step and where it stands."""
    for phase in PHASES:
        for i, step in enumerate(schedule.section(phase)):
            yield phase, i, step


def made_at(schedule: Schedule) -> dict[str, tuple[Phase, int, Step]]:
    """Where each value is made."""
    return {step.result: (phase, i, step) for phase, i, step in placed(schedule)}


def rewired(schedule: Schedule, names: Mapping[str, str]) -> Schedule:
    """With other values read."""

    def other(step: Step) -> Step:
        if isinstance(step, Convert):
            return replace(step, source=names.get(step.source, step.source))
        return replace(step, **{k: tuple(names.get(v, v) for v in getattr(step, k)) for k in ("inputs", "own")})

    return replace(schedule, **{p: tuple(map(other, schedule.section(p))) for p in PHASES})


def split_axes(schedule: Schedule) -> Axes:
    """Axes of several ranks."""
    return tuple(a for a, size in schedule.grid.axes if size > 1)


# ---- steps ----


def steps_gone(schedule: Schedule, space: Space) -> Mutants:
    """A step gone whose value is read, or leaves the module."""
    return (with_steps(schedule, phase, i) for phase, i, _ in placed(schedule))


def steps_late(schedule: Schedule, space: Space) -> Mutants:
    """A step behind its first reader."""
    every = [*placed(schedule)]
    for n, (phase, i, step) in enumerate(every):
        reader = next((r for r in every[n + 1 :] if step.result in reads(r[2])), None)
        if reader is not None:
            without = with_steps(schedule, phase, i)
            at = without.section(reader[0]).index(reader[2])
            yield with_steps(without, reader[0], at, reader[2], step)


def steps_twice(schedule: Schedule, space: Space) -> Mutants:
    """A step twice: the same value made again, or one more that nobody reads."""
    for phase, i, step in placed(schedule):
        yield with_steps(schedule, phase, i, step, step)
        yield with_steps(schedule, phase, i, replace(step, result=f"{step.type.tensor}_again"), step)


def steps_in_other_sections(schedule: Schedule, space: Space) -> Mutants:
    """A computation, or what makes a result, in another phase's section, at its end."""
    for phase, i, step in placed(schedule):
        if isinstance(step, Compute) or step.result in RESULTS:
            without = with_steps(schedule, phase, i)
            for other in PHASES:
                if other != phase:
                    yield replace(without, **{other: (*without.section(other), step)})


def results_swapped(schedule: Schedule, space: Space) -> Mutants:
    """Two results by each other's names."""
    made = made_at(schedule)
    for a, b in permutations([r for r in RESULTS if r in made], 2):
        if a < b:
            other = schedule
            for one, name in ((a, b), (b, a)):
                phase, i, step = made[one]
                other = with_steps(other, phase, i, replace(step, result=name))
            yield other


# ---- conversions ----


def conversions(schedule: Schedule) -> Iterator[tuple[Phase, int, Convert]]:
    return ((phase, i, step) for phase, i, step in placed(schedule) if isinstance(step, Convert))


def other_kinds(schedule: Schedule, space: Space) -> Mutants:
    """A conversion of another kind; but none that an exchange is as well, which moves what any other does."""
    types = schedule.types()
    for phase, i, step in conversions(schedule):
        for kind in KINDS:
            if kind != step.kind and not (kind == "exchange" and not types[step.source].partial):
                yield with_steps(schedule, phase, i, replace(step, kind=kind))


def other_ranks(schedule: Schedule, space: Space) -> Mutants:
    """A conversion over an axis less, one more, or the same in another order."""
    for phase, i, step in conversions(schedule):
        others = [tuple(a for a in step.over if a != gone) for gone in step.over]
        others += [schedule.grid.ordered({*step.over, a}) for a in split_axes(schedule) if a not in step.over]
        others += [step.over[::-1]] if len(step.over) > 1 else []
        for over in others:
            yield with_steps(schedule, phase, i, replace(step, over=over))


def conversions_gone(schedule: Schedule, space: Space) -> Mutants:
    """A conversion left out: who reads its result reads what it was made of."""
    types = schedule.types()
    for phase, i, step in conversions(schedule):
        after = [s for _, s in schedule.steps() if step.result in reads(s)]
        if after and not all(makes_as_well(s, types[step.source]) for s in after):
            yield rewired(with_steps(schedule, phase, i), {step.result: step.source})


def sums_forgotten(schedule: Schedule, space: Space) -> Mutants:
    """A reduction left out: addends pass for a sum, or are made as if they were one."""
    types, made = schedule.types(), made_at(schedule)
    for phase, i, step in conversions(schedule):
        if step.kind not in ("all_reduce", "reduce_scatter") or not {*step.over} & {*split_axes(schedule)}:
            continue
        kept = types[step.source]
        whole = replace(kept, partial=tuple(a for a in kept.partial if a in step.type.partial))
        yield with_steps(schedule, phase, i, replace(step, kind="slice", over=()))
        yield with_steps(schedule, phase, i, replace(step, kind="slice", over=(), type=kept))
        origin_phase, at, origin = made[step.source]
        said = with_steps(schedule, origin_phase, at, replace(origin, type=whole))
        yield with_steps(said, phase, said.section(phase).index(step), replace(step, kind="slice", over=()))


def sums_added(schedule: Schedule, space: Space) -> Mutants:
    """A reduction where nothing is added: of equal copies, or of blocks that pass for addends."""
    for phase, i, step in placed(schedule):
        first = replace(step, result=f"{TENSOR_OF.get(step.result, step.type.tensor)}_plain")
        for axis in split_axes(schedule):
            if axis in step.type.partial:
                continue
            again = Convert(result=step.result, type=step.type, kind="all_reduce", source=first.result, over=(axis,))
            yield with_steps(schedule, phase, i, first, again)
            if axis not in step.type.used:
                partial = schedule.grid.ordered({*step.type.partial, axis})
                yield with_steps(
                    schedule, phase, i, replace(first, type=replace(step.type, partial=partial)), again
                )  # fmt: skip


# ---- types ----


def other_layouts(schedule: Schedule, layout: Layout) -> Iterator[Layout]:
    """An axis on another dimension or on none, nests in another order, other addends, other windows."""
    names = split_axes(schedule)
    for axis in names:
        bare = tuple(tuple(a for a in axes if a != axis) for axes in layout.axes)
        rest = tuple(a for a in layout.partial if a != axis)
        yield replace(layout, axes=bare, partial=rest)
        yield replace(layout, axes=bare, partial=schedule.grid.ordered({*rest, axis}))
        for d in range(len(bare)):
            yield replace(layout, axes=(*bare[:d], (*bare[d], axis), *bare[d + 1 :]), partial=rest)
    for d, axes in enumerate(layout.axes):
        for order in permutations(axes):
            yield layout.with_axes((*layout.axes[:d], order, *layout.axes[d + 1 :]))
    for d, window in enumerate(layout.windows):
        if d >= 2:
            lo, hi = (window.lo, window.hi) if window else (0, 0)
            for other in (None, Window(lo + 1, hi), Window(lo, hi + 1), Window(lo - 1, hi), Window(hi, lo)):
                if other is not None or window is not None:
                    yield replace(layout, windows=(*layout.windows[:d], other, *layout.windows[d + 1 :]))


def _without_single(schedule: Schedule, layout: Layout) -> Layout:
    return layout.without(schedule.grid.single)


def other_types(schedule: Schedule, space: Space) -> Mutants:
    """A value made in another layout than it is read in; but none that its readers make the same of."""
    for phase, i, step in placed(schedule):
        after = [s for _, s in schedule.steps() if step.result in reads(s)]
        for layout in dict.fromkeys(other_layouts(schedule, step.type)):
            by_another_way = isinstance(step, Convert) and after and all(makes_as_well(s, layout) for s in after)
            same = _as_held(schedule, space, layout) == _as_held(schedule, space, step.type)
            if not by_another_way and not same:
                yield with_steps(schedule, phase, i, replace(step, type=layout))


def _as_held(schedule: Schedule, space: Space, layout: Layout) -> Layout:
    """Without what changes no rank's elements: axes of one rank, and zeros held around all rows instead of padded."""
    windows = tuple(
        None if window and not layout.axes[d] and window == space.widest(layout.tensor, d, ()) else window
        for d, window in enumerate(layout.windows)
    )
    return _without_single(schedule, replace(layout, windows=windows))


def stored_elsewhere(schedule: Schedule, space: Space) -> Mutants:
    """A tensor stored in another layout than steps take it to be."""
    for n, (tensor, stored) in enumerate(schedule.stored):
        for layout in dict.fromkeys(other_layouts(schedule, stored)):
            if _without_single(schedule, layout) != _without_single(schedule, stored):
                yield replace(schedule, stored=(*schedule.stored[:n], (tensor, layout), *schedule.stored[n + 1 :]))


def other_shapes(schedule: Schedule, space: Space) -> Mutants:
    """A value as of another tensor, whose shape it then has, or of a dimension more or less."""

    def others(layout: Layout) -> Iterator[Layout]:
        for tensor in {*TENSOR_OF.values()} - {layout.tensor}:
            yield replace(layout, tensor=tensor)
        yield replace(layout, axes=(*layout.axes, ()), windows=(*layout.windows, None))
        yield replace(layout, axes=layout.axes[:-1], windows=layout.windows[:-1])

    for phase, i, step in placed(schedule):
        for layout in others(step.type):
            yield with_steps(schedule, phase, i, replace(step, type=layout))
    for n, (tensor, stored) in enumerate(schedule.stored):
        for layout in others(stored):
            yield replace(schedule, stored=(*schedule.stored[:n], (tensor, layout), *schedule.stored[n + 1 :]))
        yield replace(schedule, stored=(*schedule.stored[:n], *schedule.stored[n + 1 :]))
    names, sizes = zip(*schedule.grid.axes, strict=True)
    if sizes != sizes[::-1]:
        yield replace(schedule, grid=replace(schedule.grid, axes=tuple(zip(names, sizes[::-1], strict=True))))


# ---- operands ----


def makes_as_well(step: Step, layout: Layout) -> bool:
    """Whether a step makes the same of another layout of what it reads: an exchange of any, a slice of what has it."""
    if not isinstance(step, Convert) or layout.partial:
        return False
    entries = zip(layout.axes, layout.windows, step.type.axes, strict=True)
    has = all(b[: len(a)] == a if w is None else a == b and min(w.lo, w.hi) >= 0 for a, w, b in entries)
    return step.kind == "exchange" or (step.kind == "slice" and has)


def equals(schedule: Schedule) -> dict[str, tuple[str, Layout]]:
    """What each value is: what was given or computed that conversions have made it of, and its type. Two with the same
    are equal if no addends."""
    root = {name: name for name in GIVEN}
    for _, step in schedule.steps():
        root[step.result] = root[step.source] if isinstance(step, Convert) else step.result
    return {name: (root[name], layout) for name, layout in schedule.types().items()}


def other_operands(schedule: Schedule, space: Space) -> Mutants:
    """A step that reads another value, of the same tensor and no matter which type, that is there before it."""
    same = equals(schedule)
    there = [name for name in GIVEN if name in same]
    for phase, i, step in placed(schedule):
        for k, value in enumerate(reads(step)):
            for other in there:
                is_other = same[other] != same[value] or bool(same[value][1].partial)
                if other == value or same[other][1].tensor != same[value][1].tensor or not is_other:
                    continue
                if same[other][0] == same[value][0] and makes_as_well(step, same[other][1]):
                    continue
                if isinstance(step, Convert):
                    new: Step = replace(step, source=other)
                else:
                    every = (*step.inputs, *step.own)
                    every = (*every[:k], other, *every[k + 1 :])
                    new = replace(step, inputs=every[: len(step.inputs)], own=every[len(step.inputs) :])
                yield with_steps(schedule, phase, i, new)
        there.append(step.result)


def operands_gone(schedule: Schedule, space: Space) -> Mutants:
    """A computation without one of its operands, with one more, or with two in each other's place."""
    for phase, i, step in placed(schedule):
        if isinstance(step, Compute):
            values = step.inputs
            for k in range(len(values)):
                yield with_steps(schedule, phase, i, replace(step, inputs=(*values[:k], *values[k + 1 :])))
            for k in range(len(values) - 1):
                swapped = (*values[:k], values[k + 1], values[k], *values[k + 2 :])
                yield with_steps(schedule, phase, i, replace(step, inputs=swapped))
            for more in (values[-1], *(["bias"] if "bias" in dict(schedule.stored) else [])):
                yield with_steps(schedule, phase, i, replace(step, inputs=(*values, more)))


def other_operations(schedule: Schedule, space: Space) -> Mutants:
    """Another operation, or another of its signatures."""
    names = ["add_bias", "sum_bias", *(f"{kind}_{p}" for kind in ("conv", "conv_transpose") for p in PHASES)]
    for phase, i, step in placed(schedule):
        if isinstance(step, Compute):
            for name in names:
                if name != step.operation:
                    yield with_steps(schedule, phase, i, replace(step, operation=name))
            yield with_steps(schedule, phase, i, replace(step, way="" if step.way else ROWS_OF_X))


def backward_reads_others(schedule: Schedule, space: Space) -> Mutants:
    """Backward reads of x, or of what forward made of it, another part than its conversion makes; or, held as it is
    stored, what forward has gathered."""
    of_x = [s for s in schedule.forward if isinstance(s, Convert) and s.type.tensor == "x"]
    same = equals(schedule)
    for phase, i, step in placed(schedule):
        if phase == "forward" or not isinstance(step, Compute):
            continue
        for k, value in enumerate(step.inputs):
            if same[value][0] == "x":
                for held in ("x", *(s.result for s in of_x)):
                    if same[held] != same[value]:
                        inputs = (*step.inputs[:k], held, *step.inputs[k + 1 :])
                        yield with_steps(schedule, phase, i, replace(step, inputs=inputs))
    if any(s.result in schedule.held() for s in of_x):
        yield replace(schedule, hold_x="stored")


# ---- results ----


def gradients_forgotten(schedule: Schedule, space: Space) -> Mutants:
    """A gradient with all steps that only it needs, or the last of them, whose source is taken for it."""
    for phase, i, step in placed(schedule):
        if step.result in RESULTS:
            gone = with_steps(schedule, phase, i)
            while True:
                read = {v for _, s in gone.steps() for v in reads(s)} | {*RESULTS}
                kept = {p: tuple(s for s in gone.section(p) if s.result in read) for p in PHASES}
                if kept == {p: gone.section(p) for p in PHASES}:
                    break
                gone = replace(gone, **kept)
            yield gone
            if isinstance(step, Convert):
                made = made_at(schedule)
                if step.source in made:
                    p, n, source = made[step.source]
                    named = with_steps(schedule, p, n, replace(source, result=step.result))
                    yield with_steps(named, phase, i)


def bias_forgotten(schedule: Schedule, space: Space) -> Mutants:
    """A bias that nobody adds, stores or sums, or that is added twice, or in another place."""
    if "bias" not in dict(schedule.stored):
        return
    stored = tuple((tensor, layout) for tensor, layout in schedule.stored if tensor != "bias")
    bare = replace(schedule, stored=stored)
    for phase, i, step in placed(schedule):
        if isinstance(step, Compute) and "bias" in step.inputs:
            alone = tuple(v for v in step.inputs if v != "bias")
            if step.operation == "add_bias":
                made = made_at(schedule)[alone[0]]
                dropped = with_steps(schedule, phase, i)
                dropped = with_steps(dropped, made[0], made[1], replace(made[2], result="y"))
            else:
                dropped = with_steps(schedule, phase, i, replace(step, inputs=alone))
            yield dropped
            unsummed = tuple(s for s in dropped.backward_filter if s.type.tensor != "bias")
            yield replace(dropped, stored=stored, backward_filter=unsummed)
            first = replace(step, result="y_once")
            twice = Compute(result=step.result, type=step.type, operation="add_bias", inputs=("y_once", "bias"))
            yield with_steps(schedule, phase, i, first, twice)
    yield bare


# ---- what the schedule says ----


def other_roles(schedule: Schedule, space: Space) -> Mutants:
    """A phase's roles other than its convolution has: an axis with another, without one, in another order."""
    conv = space.conv
    known = [r for r in ORDER if r in ("N", "C", "F", *conv.letters) or (r == "G" and conv.groups > 1)]
    for n, (phase, roles) in enumerate(schedule.roles):
        found: list[Roles] = []
        for axis in split_axes(schedule):
            bare = [(role, tuple(a for a in axes if a != axis)) for role, axes in roles.nests]
            found.append(Roles(tuple((r, axes) for r, axes in bare if axes), roles.rows))
            for role in known:
                nests = dict(bare) | {role: (*dict(bare).get(role, ()), axis)}
                found.append(Roles(tuple((r, nests[r]) for r in ORDER if nests.get(r)), roles.rows))
        for k, (role, axes) in enumerate(roles.nests):
            orders = [
                Roles((*roles.nests[:k], (role, o), *roles.nests[k + 1 :]), roles.rows) for o in permutations(axes)
            ]
            found += orders
        found.append(replace(roles, rows="output" if roles.rows == "input" else "input"))
        for other in dict.fromkeys(found):
            if _alike(schedule, other) != _alike(schedule, roles):
                yield replace(schedule, roles=(*schedule.roles[:n], (phase, other), *schedule.roles[n + 1 :]))
        yield replace(schedule, roles=(*schedule.roles[:n], *schedule.roles[n + 1 :]))
    for a, b in pairwise(range(len(schedule.roles))):
        every = list(schedule.roles)
        (p, mine), (q, its) = every[a], every[b]
        if _alike(schedule, mine) != _alike(schedule, its):
            every[a], every[b] = (p, its), (q, mine)
            yield replace(schedule, roles=tuple(every))


def _alike(schedule: Schedule, roles: Roles) -> tuple[object, ...]:
    names = split_axes(schedule)
    nests = tuple((r, tuple(a for a in axes if a in names)) for r, axes in roles.nests)
    return tuple(sorted((r, axes) for r, axes in nests if axes)), roles.rows


def other_forms(schedule: Schedule, space: Space) -> Mutants:
    """A value in another form than it is made in or read in, and other blocks for rims to surround."""
    types = schedule.types()
    readers: dict[str, list[Step]] = {}
    for _, step in schedule.steps():
        for value in reads(step):
            readers.setdefault(value, []).append(step)
    for phase, i, step in placed(schedule):
        for form in FORMS:
            if form != step.form and not _either(step, form, readers.get(step.result, []), types, space):
                yield with_steps(schedule, phase, i, replace(step, form=form))
        if isinstance(step, Compute):
            for own in dict.fromkeys(((), (step.inputs[0],), ("x",), ("dy",), (*step.own, *step.own))):
                if own != step.own:
                    yield with_steps(schedule, phase, i, replace(step, own=own))


def _either(step: Step, form: str, after: list[Step], types: Mapping[str, Layout], space: Space) -> bool:
    """Whether a value may as well come as this: whole or parts, for steps of a GPU that read both."""
    if not space.virtual_padding or "rim" in (form, step.form) or not after:
        return False
    if is_convolution(step):
        (reader, *others) = after
        fits = isinstance(reader, Convert) and reader.kind == "reduce_scatter" and not others
        return fits and isinstance(reader, Convert) and parts(space, step.type, reader.type, reader.over) > 0
    fits = isinstance(step, Convert) and step.kind == "all_gather" and all(map(is_convolution, after))
    return fits and isinstance(step, Convert) and parts(space, step.type, types[step.source], step.over) > 0


SCHEDULES: dict[str, Callable[[Schedule, Space], Mutants]] = {
    f.__name__: f
    for f in (
        steps_gone, steps_late, steps_twice, steps_in_other_sections, results_swapped,
        other_kinds, other_ranks, conversions_gone, sums_forgotten, sums_added,
        other_types, stored_elsewhere, other_shapes,
        other_operands, operands_gone, other_operations, backward_reads_others,
        gradients_forgotten, bias_forgotten, other_roles, other_forms,
    )
}  # fmt: skip
