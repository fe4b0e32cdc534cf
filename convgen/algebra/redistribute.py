"""The conversions that turn one layout of a tensor into another: in closed form, not searched.

| from | to | conversion |
|---|---|---|
| copies | split | slice (local) |
| partial | split | reduce_scatter |
| partial | copies | all_reduce |
| split on one dimension | split on another | all_to_all |
| split | copies | all_gather |
| anything else (an outer axis gathered, axes swapped, a window across a block's edge) | | exchange |

They are tried in this order, each on as many axes at once as it fits: axes that undergo the same conversion share
one collective over their product group. Gathers come before windows, so that both backward phases share the gathers.

Source: [CF] 2.3.4 and 2.3.5; the exchange generalises [SP] III-A's halo and III-C's shuffle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from convgen.algebra.index_sets import IndexSets
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.signature import Reduction

Kind = Literal["slice", "reduce_scatter", "all_reduce", "all_to_all", "all_gather", "exchange"]
# whole: a tensor. parts: its channels in equal parts, one behind the other, as an all_gather delivers and a
# reduce_scatter takes them. rim: a window's boxes around the rank's own block, as an exchange delivers them.
Form = Literal["whole", "parts", "rim"]
FORMS: tuple[Form, ...] = ("whole", "parts", "rim")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange")


@dataclass(frozen=True, slots=True)
class Conversion:
    """One step from `src` to `dst` over the ranks that differ along `over` (none for a slice).

    Attributes:
        reduction: how an exchange adds parts that overlap, or how every rank reduces the addends that an all_gather
            brings. Other kinds have none: a reduce_scatter or an all_reduce sums.
        form: the form in which a network's row takes what arrives, or made what is scattered; for layers the schedule
            says this.
    """

    kind: Kind
    over: Axes
    src: Layout
    dst: Layout
    reduction: Reduction | None = None
    form: Form = "whole"


def redistribute(space: IndexSets, src: Layout, dst: Layout) -> tuple[Conversion, ...]:
    """Conversions that turn `src` into `dst`, in order; empty when they are the same type.

    Args:
        src: what is held; may be partial, never has windows.
        dst: what is wanted; may have windows, never partial.
    """
    if src == dst:
        return ()
    steps = _in_blocks(space.grid.names, src, dst)
    here = steps[-1].dst if steps else src
    if here == dst:
        return steps
    over = space.grid.ordered(space.moved_axes(here, dst))
    return (*steps, Conversion("exchange" if over else "slice", over, here, dst))


@lru_cache(maxsize=1 << 15)
def _in_blocks(names: Axes, src: Layout, dst: Layout) -> tuple[Conversion, ...]:
    """The conversions without a last exchange; they don't depend on how many ranks or elements there are.

    Args:
        names: names of the grid's axes, outermost first.
    """
    steps: list[Conversion] = []
    goal = dst.axes
    here = src

    def step(kind: Kind, over: frozenset[str], to: Layout) -> None:
        nonlocal here
        steps.append(Conversion(kind, tuple(a for a in names if a in over), here, to))
        here = to

    while True:
        if (to := _slice(here, dst)) is not None:
            step("slice", frozenset(), to)
        elif here.partial and (to := _scatter(here, goal)) is not None:
            step("reduce_scatter", frozenset(here.partial) - frozenset(to.partial), to)
        elif here.partial:
            step("all_reduce", frozenset(here.partial), replace(here, partial=()))
        elif (to := _transpose(here, dst)) is not None:
            step("all_to_all", _appearing(here, to), to)
        elif (to := _gather(here, goal)) is not None:
            step("all_gather", here.used - to.used, to)
        else:
            return tuple(steps)


def _common(a: Axes, b: Axes) -> int:
    """Length of the common prefix."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def _slice(here: Layout, dst: Layout) -> Layout | None:
    """The layout split by every axis that holds copies and comes next on its dimension; None where no axis does.

    A window is cut out where the dimension is whole on every rank; out of blocks, an exchange makes it.
    """
    busy = here.used | frozenset(here.partial)
    axes, windows = list(here.axes), list(here.windows)
    for d, wanted in enumerate(dst.axes):
        if dst.windows[d] is None:
            while len(axes[d]) < len(wanted) and wanted[: len(axes[d])] == axes[d] and wanted[len(axes[d])] not in busy:
                axes[d] = wanted[: len(axes[d]) + 1]
        elif not axes[d] and windows[d] is None and wanted and not busy & set(wanted):
            axes[d], windows[d] = wanted, dst.windows[d]
    to = replace(here, axes=tuple(axes), windows=tuple(windows))
    return to if to != here else None


def _scatter(here: Layout, goal: tuple[Axes, ...]) -> Layout | None:
    """Reduce-scatter every partial axis that some dimension wants, as the inner axes of that dimension."""
    axes = tuple(
        held + tuple(a for a in wanted if a in here.partial) for held, wanted in zip(here.axes, goal, strict=True)
    )
    if axes == here.axes:
        return None
    taken = {a for d in axes for a in d}
    return replace(here, axes=axes, partial=tuple(a for a in here.partial if a not in taken))


def _transpose(here: Layout, dst: Layout) -> Layout | None:
    """Move inner axes from one dimension to another where both ends are blocks; all such axes at once."""
    place = {a: d for d, axes in enumerate(dst.axes) for a in axes}
    if all(place.get(a, d) == d for d, axes in enumerate(here.axes) for a in axes):
        return None
    base, moving = list(here.axes), set[str]()
    for d, axes in enumerate(here.axes):
        end = len(axes)
        while end > _common(axes, dst.axes[d]) and place.get(axes[end - 1], d) != d:
            end -= 1
        moving |= set(axes[end:])
        base[d] = axes[:end]
    axes = tuple(held + tuple(a for a in wanted if a in moving) for held, wanted in zip(base, dst.axes, strict=True))
    if not moving or any(
        wanted[: len(a)] != a for d, (a, wanted) in enumerate(zip(axes, dst.axes, strict=True)) if a != base[d]
    ):
        return None
    if any(a != base[d] and dst.windows[d] is not None for d, a in enumerate(axes)):
        return None
    return here.with_axes(axes)


def _gather(here: Layout, goal: tuple[Axes, ...]) -> Layout | None:
    """Gather the inner axes that nothing wants, on every dimension that is then as wanted."""
    wanted_axes = {a for axes in goal for a in axes}
    axes = tuple(
        wanted
        if len(wanted) < len(held) and held[: len(wanted)] == wanted and not wanted_axes & set(held[len(wanted) :])
        else held
        for held, wanted in zip(here.axes, goal, strict=True)
    )
    return here.with_axes(axes) if axes != here.axes else None


def _appearing(before: Layout, after: Layout) -> frozenset[str]:
    """Axes that split a dimension in `after` and not in `before`."""
    return frozenset(a for old, new in zip(before.axes, after.axes, strict=True) for a in new if a not in old)
