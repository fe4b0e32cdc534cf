"""The verifier: small named checks that a schedule is right on every rank, by index sets.

Nothing here asks how a schedule was made. Types say what each rank holds; the checks compare what a step
reads, sends and makes with that, rank by rank. A box is an interval per dimension (`Space.held`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import Box, volume
from convgen.algebra.layout import Axes, Layout, Window
from convgen.algebra.relations import ReadBy
from convgen.algebra.space import Space
from convgen.algebra.windows import edge_padding, fits_one_padding
from convgen.errors import InternalError
from convgen.operations.layer import values
from convgen.schedule.forms import check_forms
from convgen.schedule.nodes import (
    GIVEN,
    TENSOR_OF,
    AddBias,
    Convert,
    Convolve,
    Phase,
    Schedule,
    Step,
    SumBias,
    reads,
)
from convgen.schedule.text import describe

Counts = NDArray[np.int64]  # [ranks] or [ranks, ranks]
Fault = tuple[Step | None, str]
RESULTS: dict[Phase, tuple[str, ...]] = {
    "forward": ("y",),
    "backward_data": ("dx",),
    "backward_filter": ("dw", "db"),
}


class Facts:
    """A schedule, its space, and what the checks ask of them."""

    def __init__(self, schedule: Schedule, space: Space) -> None:
        self.schedule, self.space = schedule, space
        self.stored = dict(schedule.stored)
        self.types = schedule.types()
        self._groups: dict[Axes, NDArray[np.bool_]] = {}

    @cached_property
    def steps(self) -> tuple[tuple[Phase, Step], ...]:
        return tuple(self.schedule.steps())

    @cached_property
    def conversions(self) -> tuple[tuple[Convert, Layout, Layout], ...]:
        return tuple((s, self.types[s.source], s.type) for _, s in self.steps if isinstance(s, Convert))

    @cached_property
    def origins(self) -> dict[str, str]:
        """Which of x, w, bias, dy, y, dx, dw, db each value holds, whatever its layout; "" for one not known."""
        found = {n: n for n in GIVEN if TENSOR_OF[n] in self.stored}
        for _, step in self.steps:
            match step:
                case Convolve():
                    found[step.result] = RESULTS[step.phase][0]
                case AddBias():
                    found[step.result] = "y"
                case SumBias():
                    found[step.result] = "db"
                case Convert():
                    found[step.result] = found.get(step.source, "")
        return found

    @cached_property
    def convolutions(self) -> tuple[tuple[Convolve, dict[str, Layout]], ...]:
        """Each convolution with the types of x, w and y in it."""
        found: list[tuple[Convolve, dict[str, Layout]]] = []
        for _, s in self.steps:
            if isinstance(s, Convolve):
                found.append((s, {t.tensor: t for t in (*(self.types[v] for v in s.inputs), s.type)}))
        return tuple(found)

    def held(self, layout: Layout) -> Box:
        return self.space.held(layout)

    def overlap(self, src: Layout, dst: Layout) -> Counts:
        """How many elements rank i holds as `src` of those that rank j holds as `dst`."""
        own, need = self.held(src), self.held(dst)
        lo = np.maximum(own[:, None, :, 0], need[None, :, :, 0])
        hi = np.minimum(own[:, None, :, 1], need[None, :, :, 1])
        return np.maximum(hi - lo, 0).prod(axis=-1) * self.space.weight(src.tensor)

    def size(self, layout: Layout) -> Counts:
        """Elements that each rank holds, kernel taps included."""
        return volume(self.held(layout)) * self.space.weight(layout.tensor)

    def same_group(self, axes: Axes) -> NDArray[np.bool_]:
        """Whether ranks i and j differ only along `axes`."""
        if axes not in self._groups:
            ids = self.space.grid.group_ids(axes)
            self._groups[axes] = ids[:, None] == ids[None, :]
        return self._groups[axes]

    def supplied(self, src: Layout, dst: Layout) -> Counts:
        """What rank j has from its one owner i, itself included: an owner differs from it in block axes only."""
        blocks = (axes for axes, window in zip(src.axes, src.windows, strict=True) if window is None)
        return self.overlap(src, dst) * self.same_group(tuple(a for axes in blocks for a in axes))

    def rows(self, layout: Layout, i: int) -> tuple[Counts, Counts]:
        box = self.held(layout)
        return box[:, 2 + i, 0], box[:, 2 + i, 1]


def verify(schedule: Schedule, space: Space) -> None:
    """Check a schedule against every rule.

    Raises:
        InternalError: with the rule, the schedule's line, and the ranks and numbers that break it.
    """
    if schedule.grid != space.grid:
        raise InternalError(f"schedule {schedule.name} is on {schedule.grid}, its index space on {space.grid}")
    for facts in (
        Facts(schedule, space),
        Facts(schedule, _with_a_sample_each(space.conv, space.grid, space.virtual_padding)),
    ):
        for check in CHECKS:
            for step, text in check(facts):
                line = f"\n  {describe(step, facts.types)} : {step.type}" if step else ""
                where = f"schedule {schedule.name}, {facts.space.conv.batch} samples: {check.__name__}"
                raise InternalError(f"{where}{line}\n  {text}")


def check_names_are_defined_once(f: Facts) -> Iterator[Fault]:
    """A value is never overwritten, nor is one that is given."""
    seen = {n for n in GIVEN if TENSOR_OF[n] in f.stored}
    for _, step in f.steps:
        if step.result in seen:
            yield None, f"%{step.result} is defined twice"
        seen.add(step.result)


def check_every_read_is_defined(f: Facts) -> Iterator[Fault]:
    """A step reads what an earlier step made; dy is there in backward only."""
    known = {n for n in GIVEN if TENSOR_OF[n] in f.stored}
    for phase, step in f.steps:
        for value in reads(step):
            if value not in known or (value == "dy" and phase == "forward"):
                yield None, f"%{step.result} in {phase} reads %{value}, which no step before it makes"
        known.add(step.result)


def check_every_value_is_read(f: Facts) -> Iterator[Fault]:
    """Nothing is made, let alone sent, in vain."""
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
    """y, dx, dw and db are made in their phases, as x, w, y and bias are stored."""
    made = f.schedule.defined_in()
    for phase, names in RESULTS.items():
        for name in names:
            if TENSOR_OF[name] not in f.stored:
                continue
            if made.get(name) != phase:
                yield None, f"{phase} does not make %{name}"
            elif f.origins[name] != name:
                yield None, f"%{name} is a layout of {f.origins[name]}"
            elif f.types[name] != f.stored[TENSOR_OF[name]]:
                yield None, f"%{name} is {f.types[name]}, {TENSOR_OF[name]} is stored as {f.stored[TENSOR_OF[name]]}"


def check_steps_take_their_operands(f: Facts) -> Iterator[Fault]:
    """A step reads what it is about: x, w and perhaps bias; dy, w; dy, x. A conversion stays with its tensor."""
    for phase, step in f.steps:
        got = tuple(f.origins[v] for v in (step.inputs if isinstance(step, Convolve) else reads(step)))
        match step:
            case Convolve():
                *inputs, _ = values(f.space.conv, step.phase)
                fits = step.phase == phase and step.type.tensor == TENSOR_OF[RESULTS[phase][0]]
                fits = fits and (got == tuple(inputs) or (phase == "forward" and got == (*inputs, "bias")))
                fits = fits and (step.rows == "output" or phase == "backward_filter")
            case Convert():
                fits = step.type.tensor == f.types[step.source].tensor
            case AddBias():
                fits = got == ("y", "bias") and step.type == f.types[step.source] and phase == "forward"
            case SumBias():
                fits = got == ("dy",) and step.type.tensor == "bias" and phase == "backward_filter"
        if not fits:
            yield step, f"it can't take {', '.join(got)} in {phase}"


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
            if window is not None and window != (needed := _window(f.space, layout, d)):
                name = f.space.conv.dims(layout.tensor)[d].name
                yield step, f"on {name} {needed} rows are needed, {window} are wanted"


def check_conversion_is_typed(f: Facts) -> Iterator[Fault]:
    """A collective's name says how the type changes, and the type changes just so."""
    for step, src, dst in f.conversions:
        if wrong := _untyped(f, step, src, dst):
            yield step, f"a {step.kind} can't turn {src} into {dst}: {wrong}"


def check_group_is_exact(f: Facts) -> Iterator[Fault]:
    """A collective runs over the axes along which its ranks differ, and no more: the smallest group."""
    for step, src, dst in f.conversions:
        expected = _group(f, step, src, dst)
        few = f.space.conv.batch < f.space.grid.ranks  # an exchange may be over more than a few samples need
        if not (set(step.over) >= set(expected) if few and step.kind == "exchange" else step.over == expected):
            yield step, f"its ranks differ along {_list(expected)}, it is over {_list(step.over)}"
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


def check_convolution_operands_match(f: Facts) -> Iterator[Fault]:
    """The two tensors that have an index hold the same part of it on every rank that has something to do."""
    conv = f.space.conv
    per_c, per_f = conv.channels // conv.groups, conv.filters // conv.groups
    for step, t in f.convolutions:
        x, w, y = f.held(t["x"]), f.held(t["w"]), f.held(t["y"])
        busy = volume(_terms(f, step, t)) > 0
        for name, a, b in (("N", x[:, 0], y[:, 0]), ("F", w[:, 0], y[:, 1])):
            for rank in np.flatnonzero(busy & (a != b).any(axis=1))[:1]:
                yield step, f"rank {rank} has {name} {_interval(a[rank])} of one, {_interval(b[rank])} of the other"
        # A rank's filters are of groups [first, last); several groups are whole, one is split alike on both sides.
        first, last = w[:, 0, 0] // per_f, -(-w[:, 0, 1] // per_f)
        lo, hi = first * per_c + w[:, 1, 0], (last - 1) * per_c + w[:, 1, 1]
        partly = (w[:, 0] % per_f != 0).any(axis=1) | (w[:, 1, 0] > 0) | (w[:, 1, 1] < per_c)
        wrong = (x[:, 1, 0] != lo) | (x[:, 1, 1] != hi) | ((last - first > 1) & partly)
        for rank in np.flatnonzero(busy & wrong)[:1]:
            filters, channels = _interval(w[rank, 0]), _interval(w[rank, 1])
            text = f"rank {rank} has C {_interval(x[rank, 1])} of x, but F {filters} and C {channels} of w"
            yield step, f"{text}, of {conv.groups} groups"


def check_rows_are_at_hand(f: Facts) -> Iterator[Fault]:
    """A block of rows of one activation finds every row that it needs of the other."""
    for step, t in f.convolutions:
        busy = volume(_terms(f, step, t)) > 0
        blocks, other = _sides(step)
        for i, s in enumerate(f.space.conv.spatial):
            rule = s.taps if blocks == "y" else ReadBy(s.taps)
            lo, hi = rule.window(*f.rows(t[blocks], i))
            extent = f.space.conv.dims(other)[2 + i].extent
            lo, hi = np.clip(lo, 0, extent), np.clip(hi, 0, extent)
            own_lo, own_hi = f.rows(t[other], i)
            for rank in np.flatnonzero(busy & (hi > lo) & ((lo < own_lo) | (hi > own_hi)))[:1]:
                needed, own = f"[{lo[rank]}, {hi[rank]})", f"[{own_lo[rank]}, {own_hi[rank]})"
                yield step, f"rank {rank} needs rows {needed} on {s.name}, it has {own}"


def check_one_padding_fits(f: Facts) -> Iterator[Fault]:
    """On every rank the local convolution pads both sides alike and has exactly the rows wanted.

    Kernels that pad virtually take any padding.
    """
    if f.space.virtual_padding:
        return
    for step, t in f.convolutions:
        x, y = f.space.frame(t["x"]), f.space.frame(t["y"])
        busy = (volume(x) > 0) & (volume(y) > 0)
        for i, s in enumerate(f.space.conv.spatial):
            below, above = edge_padding(s.taps, x[:, 2 + i, 0], x[:, 2 + i, 1], y[:, 2 + i, 0], y[:, 2 + i, 1])
            for rank in np.flatnonzero(busy & ~np.asarray(fits_one_padding(s.taps, below, above)))[:1]:
                yield step, f"rank {rank} wants padding ({below[rank]}, {above[rank]}) on {s.name}"


def check_every_term_is_summed_once(f: Facts) -> Iterator[Fault]:
    """Over the ranks that hold different parts or addends of the output, each product is there once.

    A product is a sample, a filter, a channel of its group, and rows of the activation that is in blocks.
    """
    grid, conv = f.space.grid, f.space.conv
    for step, t in f.convolutions:
        terms = _terms(f, step, t)
        size = volume(terms)
        apart = step.type.used | set(step.type.partial)
        copies = tuple(a for a in grid.names if a not in apart)
        chosen = np.flatnonzero(sum((grid.coordinates[a] for a in copies), np.zeros(grid.ranks, dtype=np.int64)) == 0)
        blocks = _sides(step)[0]
        rows = (d.extent for d in conv.dims(blocks)[2:])
        total = conv.batch * conv.filters * (conv.channels // conv.groups) * prod(rows)
        if (found := int(size[chosen].sum())) != total:
            yield step, f"{found} products are summed over {_list(grid.ordered(apart))}, there are {total}"
        lo = np.maximum(terms[:, None, :, 0], terms[None, :, :, 0])
        hi = np.minimum(terms[:, None, :, 1], terms[None, :, :, 1])
        both = np.maximum(hi - lo, 0).prod(axis=-1)
        same = f.same_group(copies)
        for i, j in np.argwhere((~same & (both > 0))[np.ix_(chosen, chosen)])[:1]:
            a, b = chosen[i], chosen[j]
            yield step, f"ranks {a} and {b} both sum {both[a, b]} products, and are no copies"
        for i, j in np.argwhere(same & (both != size[:, None]))[:1]:
            yield step, f"ranks {i} and {j} hold copies of the result, but not of {size[i] - both[i, j]} products"


def check_bias_is_added_once(f: Facts) -> Iterator[Fault]:
    """Between the convolution and y the bias is added once, to whole sums, and each rank has its part."""
    made = {step.result: step for step in f.schedule.forward}
    value, added = "y", 0
    while value in made:
        step = made[value]
        value = reads(step)[0]
        if isinstance(step, AddBias) or (isinstance(step, Convolve) and "bias" in step.inputs):
            added += 1
            if step.type.partial:
                yield step, "the bias would be in every addend"
            if (f.held(step.type)[:, 1] != f.held(f.stored["bias"])[:, 0]).any():
                yield step, f"{f.stored['bias']} is not the part of {step.type}"
        if isinstance(step, Convolve):
            break
    if added != int("bias" in f.stored):
        yield None, f"the bias is added {added} times"


def check_bias_gradient_is_whole(f: Facts) -> Iterator[Fault]:
    """db sums dy over every axis that splits samples and rows, and over no copies."""
    for _, step in f.steps:
        if isinstance(step, SumBias):
            dy = f.types[step.source]
            summed = f.space.grid.ordered(a for d, axes in enumerate(dy.axes) if d != 1 for a in axes)
            if dy.has_window or step.type.axes != (dy.axes[1],) or step.type.partial != summed:
                yield step, f"{dy} has addends of {Layout('bias', (dy.axes[1],), partial=summed)}"


def check_forms_are_read_as_such(f: Facts) -> Iterator[Fault]:
    """Parts and rims are what they say, and only steps read them that know how."""
    yield from check_forms(f.schedule, f.space)


CHECKS: tuple[Callable[[Facts], Iterator[Fault]], ...] = (
    check_names_are_defined_once,
    check_every_read_is_defined,
    check_every_value_is_read,
    check_types_are_layouts,
    check_results_are_stored,
    check_steps_take_their_operands,
    check_no_partial_is_read_whole,
    check_windows_are_needed,
    check_conversion_is_typed,
    check_group_is_exact,
    check_every_read_is_local,
    check_sent_is_received,
    check_convolution_operands_match,
    check_rows_are_at_hand,
    check_one_padding_fits,
    check_every_term_is_summed_once,
    check_bias_is_added_once,
    check_bias_gradient_is_whole,
    check_forms_are_read_as_such,
)


@lru_cache(maxsize=4)
def _with_a_sample_each(conv: Conv, grid: Grid, virtual_padding: bool) -> Space:
    """The same layer with as many samples as ranks: a module runs with any number, so a schedule holds for all."""
    return Space(replace(conv, batch=grid.ranks), grid, virtual_padding=virtual_padding)


def _sides(step: Convolve) -> tuple[str, str]:
    """Which activation's rows are in blocks that divide the work, and which brings the rows that they need."""
    if step.phase == "forward" or (step.phase == "backward_filter" and step.rows == "output"):
        return "y", "x"
    return "x", "y"


def _terms(f: Facts, step: Convolve, t: dict[str, Layout]) -> Box:
    """Per rank the products that it sums: samples, filters, channels of a group, rows of the blocks."""
    blocks = f.held(t[_sides(step)[0]])
    return np.concatenate([blocks[:, :1], f.held(t["w"]), blocks[:, 2:]], axis=1)


def _window(space: Space, layout: Layout, d: int) -> Window:
    """Rows wanted below and above the own block by the block of the other activation, the most over all ranks."""
    s, axes = space.conv.spatial[d - 2], layout.axes[d]
    own_lo, own_hi = space.block(layout.tensor, d, axes)
    if layout.tensor == "x":
        lo, hi = s.taps.window(*space.block("y", d, axes))
    else:
        lo, hi = ReadBy(s.taps).window(*space.block("x", d, axes))
    some = hi > lo
    if not some.any():
        return Window(0, 0)
    return Window(int((own_lo - lo)[some].max()), int((hi - own_hi)[some].max()))


def _untyped(f: Facts, step: Convert, src: Layout, dst: Layout) -> str:
    """What is wrong with a conversion of this kind between these types; nothing if it is typed."""
    match step.kind:
        case "slice":
            if src.partial != dst.partial:
                return "addends stay addends"
            missing = f.size(dst) - np.diag(f.overlap(src, dst))
            return f"rank {missing.argmax()} misses {missing.max()} elements" if missing.any() else ""
        case "all_gather":
            if src.windows != dst.windows:
                return "windows stay"
            shorter = all(a[: len(b)] == b for a, b in zip(src.axes, dst.axes, strict=True))
            return "" if shorter and src.axes != dst.axes else "dimensions lose inner axes"
        case "reduce_scatter":
            added = _longer(src.axes, dst.axes)
            fits = src.windows == dst.windows and set(dst.partial) | added == set(src.partial) != set(dst.partial)
            return "" if fits else "axes of the sum become inner axes"
        case "all_reduce":
            fits = (src.axes, src.windows) == (dst.axes, dst.windows) and set(dst.partial) < set(src.partial)
            return "" if fits else "only the sum is made"
        case "all_to_all":
            ends = ((set(a[n:]), set(b[n:])) for a, b, n in _common(src.axes, dst.axes))
            fits = src.windows == dst.windows and src.used == dst.used and not any(old & new for old, new in ends)
            return "" if fits and src.axes != dst.axes else "inner axes change their dimension"
        case "exchange":
            return "sums can't be exchanged" if dst.partial else ""


def _group(f: Facts, step: Convert, src: Layout, dst: Layout) -> Axes:
    """The axes along which the ranks of a conversion differ."""
    grid = f.space.grid
    match step.kind:
        case "slice":
            return ()
        case "all_gather":
            return grid.ordered(src.used - dst.used)
        case "reduce_scatter" | "all_reduce":
            return grid.ordered(set(src.partial) - set(dst.partial))
        case "all_to_all":
            return grid.ordered(a for old, new in zip(src.axes, dst.axes, strict=True) for a in new if a not in old)
        case "exchange":
            moves = f.supplied(src, dst)
            np.fill_diagonal(moves, 0)
            i, j = np.nonzero(moves)
            return tuple(a for a in grid.names if (grid.coordinates[a][i] != grid.coordinates[a][j]).any())


def _common(old: tuple[Axes, ...], new: tuple[Axes, ...]) -> Iterator[tuple[Axes, Axes, int]]:
    """Axes of each dimension before and after, and how many outer ones are the same."""
    for a, b in zip(old, new, strict=True):
        yield a, b, next((n for n, (p, q) in enumerate(zip(a, b, strict=False)) if p != q), min(len(a), len(b)))


def _longer(short: tuple[Axes, ...], long: tuple[Axes, ...]) -> set[str]:
    """Axes that `long` has inside of those of `short`; all of them where it does not continue those."""
    added: set[str] = set()
    for a, b in zip(short, long, strict=True):
        added |= set(b[len(a) :] if b[: len(a)] == a else a + b)
    return added


def _interval(pair: Counts) -> str:
    return f"[{pair[0]}, {pair[1]})"


def _list(axes: Axes) -> str:
    return ",".join(axes) or "no axis"
