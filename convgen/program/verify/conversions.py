"""Checks of conversions: typed, over the smallest group, and what one rank sends is what another takes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from convgen.algebra.blocks import Uneven
from convgen.algebra.layout import Axes, Layout
from convgen.program.nodes import Convert, reads
from convgen.program.verify.facts import Counts, Facts, Fault, listed
from convgen.program.verify.typed import collective_over, untyped


def check_no_partial_is_read_whole(f: Facts) -> Iterator[Fault]:
    """Addends are cut, reduced, and nothing else."""
    for _, step in f.steps:
        reduces = isinstance(step, Convert) and step.kind in ("slice", "reduce_scatter", "all_reduce")
        for value in reads(step):
            if f.types[value].partial and not reduces:
                yield step, f"%{value} is {f.types[value]}: one addend a rank"


def check_windows_are_needed(f: Facts) -> Iterator[Fault]:
    """A window has the rows that the other activation's block needs: the most over all ranks, and no more."""
    for _, step in f.steps:
        layout = step.type
        for d, window in enumerate(layout.windows):
            if window is not None and window != (needed := f.space.widest(layout.tensor, d, layout.axes[d])):
                name = f.space.dims(layout.tensor)[d].name
                yield step, f"on {name} {needed} rows are needed, {window} are wanted"


def check_conversion_is_typed(f: Facts) -> Iterator[Fault]:
    """A collective's name says how the type changes, and the type changes just so."""
    for step, src, dst in f.conversions:
        if wrong := untyped(step.kind, src, dst, partial(_missing, f, src, dst)):
            yield step, f"a {step.kind} can't turn {src} into {dst}: {wrong}"


def _missing(f: Facts, src: Layout, dst: Layout) -> Counts:
    return f.size(dst) - np.diag(f.overlap(src, dst))


def check_group_is_exact(f: Facts) -> Iterator[Fault]:
    """A collective runs over the axes along which its ranks differ, and no more: the smallest group."""
    for step, src, dst in f.conversions:
        expected = _group(f, step, src, dst)
        # An exchange may be over more than a few samples need, or than these do where axes share them out unevenly, or
        # rows of which no rank needs any.
        few = f.space.conv.batch < f.space.grid.enough or not f.size(dst).any()
        few = few or any(isinstance(f.space.grid.sizes[a], Uneven) for t in (src, dst) for a in t.axes[0])
        if not (set(step.over) >= set(expected) if few and step.kind == "exchange" else step.over == expected):
            yield step, f"its ranks differ along {listed(expected)}, it is over {listed(step.over)}"
        elif step.kind != "slice" and not step.over:
            yield step, "nothing travels: it is a slice"


def check_every_read_is_local(f: Facts) -> Iterator[Fault]:
    """After a conversion, what each rank needs is what it owned and what it has received from its group."""
    for step, src, dst in f.conversions:
        if step.kind == "reduce_scatter":
            supply = np.diag(np.diag(f.overlap(src, dst)))
        else:
            supply = f.supplied(src, dst) * f.same_group(step.over)
        need, owned = f.size(dst), np.diag(supply)
        received = supply.sum(axis=0) - owned
        for rank in np.flatnonzero(owned + received != need)[:1]:
            text = f"rank {rank} needs {need[rank]} elements, owns {owned[rank]} of them"
            yield step, f"{text} and receives {received[rank]}"


def check_sent_is_received(f: Facts) -> Iterator[Fault]:
    """What a collective sends by its definition is what the other ranks of the group take.

    all_gather: everybody's block to everybody. all_to_all and reduce_scatter: each element to one rank.
    all_reduce: the same elements on every rank. An exchange sends what is needed; that is the check before.
    """
    for step, src, dst in f.conversions:
        size, group = f.size(src), f.same_group(step.over)
        taken = f.overlap(src, dst) * group
        if step.kind == "all_gather":
            wrong = np.argwhere(group & (taken != size[:, None]))
            text = "rank {0} has {2} elements to send to rank {1}, which takes {3}"
        elif step.kind == "all_reduce":
            wrong = np.argwhere(group & ((taken != size[:, None]) | (taken != size[None, :])))
            text = "rank {0} adds {2} elements, of which rank {1} has {3}"
        elif step.kind in ("all_to_all", "reduce_scatter"):
            total = taken.sum(axis=1)
            wrong = np.argwhere((total != size)[:, None])
            text = "rank {0} has {2} elements to send or keep, of which the group takes {4}"
        else:
            continue
        for i, j in [(int(w[0]), int(w[-1])) for w in wrong[:1]]:
            yield step, text.format(i, j, size[i], taken[i, j], taken[i].sum())


def _group(f: Facts, step: Convert, src: Layout, dst: Layout) -> Axes:
    """The axes along which the ranks of a conversion differ."""
    grid = f.space.grid
    if step.kind != "exchange":
        return collective_over(step.kind, src, dst, grid)
    moves = f.supplied(src, dst)
    np.fill_diagonal(moves, 0)
    i, j = np.nonzero(moves)
    return tuple(a for a in grid.names if (grid.coordinates[a][i] != grid.coordinates[a][j]).any())
