"""Checks of conversions: typed, over the smallest group, and what one rank sends is what another takes."""

from __future__ import annotations

from collections.abc import Iterator

from convgen.algebra.blocks import Uneven
from convgen.program.nodes import Convert, reads
from convgen.program.verify.facts import Facts, Fault, listed
from convgen.program.verify.typed import untyped


def check_no_partial_is_read_whole(f: Facts) -> Iterator[Fault]:
    """A partial value is only sliced or reduced."""
    for _, step in f.steps:
        reduces = isinstance(step, Convert) and step.kind in ("slice", "reduce_scatter", "all_reduce")
        for value in reads(step):
            if f.types[value].partial and not reduces:
                yield step, f"%{value} is {f.types[value]}: one addend a rank"


def check_windows_are_needed(f: Facts) -> Iterator[Fault]:
    """A window has the rows that the other activation's block needs: the most that any rank needs, and no more."""
    for _, step in f.steps:
        layout = step.type
        for d, window in enumerate(layout.windows):
            if window is not None and window != (needed := f.space.widest(layout.tensor, d, layout.axes[d])):
                name = f.space.dims(layout.tensor)[d].name
                yield step, f"on {name} {needed} rows are needed, {window} are wanted"


def check_conversion_is_typed(f: Facts) -> Iterator[Fault]:
    """A collective's name says how the type changes, and the type changes just so."""
    for step, t in f.conversions:
        if wrong := untyped(t):
            yield step, f"a {t.c.kind} can't turn {t.c.src} into {t.c.dst}: {wrong}"


def check_group_is_exact(f: Facts) -> Iterator[Fault]:
    """A collective runs over the axes along which its ranks differ, and no more: the smallest group."""
    for step, t in f.conversions:
        # An exchange may be over more axes than are needed by few samples, by samples that axes share out unevenly, or
        # by rows that no rank needs.
        few = f.space.conv.batch < f.space.grid.enough or not t.need.any()
        few = few or any(isinstance(f.space.grid.sizes[a], Uneven) for one in (t.c.src, t.c.dst) for a in one.axes[0])
        if not (set(step.over) >= set(t.ranks) if few and step.kind == "exchange" else step.over == t.ranks):
            yield step, f"its ranks differ along {listed(t.ranks)}, it is over {listed(step.over)}"
        elif step.kind != "slice" and not step.over:
            yield step, "nothing travels: it is a slice"


def check_every_read_is_local(f: Facts) -> Iterator[Fault]:
    """After a conversion, what each rank needs is what it owned and what it has received from its group."""
    yield from ((step, text) for step, t in f.conversions for text in t.unserved())


def check_sent_is_received(f: Facts) -> Iterator[Fault]:
    """What a collective sends by its definition is what the group's other ranks take."""
    yield from ((step, text) for step, t in f.conversions for text in t.unsent())
