"""Redistribution: every pair of layouts, executed by the definitions of the collectives on arrays held per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from generate import random_conv, random_grid, random_layout
from oracle import Oracle
from test_algebra_space import windowed

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.redistribute import COLLECTIVES, Conversion, redistribute
from convgen.algebra.space import Space


def random_pair(rng: Random) -> tuple[Space, Layout, Layout]:
    """Any two layouts of a tensor; the first may hold addends, the second windows."""
    conv, grid = random_conv(rng), random_grid(rng, 12)
    space, tensor = Space(conv, grid), rng.choice(("x", "x", "y", "y", "w", "bias"))
    src, dst = (random_layout(rng, conv, grid, tensor) for _ in range(2))
    if rng.random() < 0.4:  # dst a small change of src: nested axes added, dropped, swapped
        axes = [list(a) for a in src.axes]
        for nest in axes:
            if rng.random() < 0.4:
                rng.shuffle(nest)
            if nest and rng.random() < 0.4:
                nest.pop(rng.randrange(len(nest)))
        dst = Layout(tensor, tuple(map(tuple, axes)))
    if tensor in ("x", "y") and len(conv.spatial) > 1 and rng.random() < 0.3:
        return space, *halves(rng, space, tensor)
    free = [a for a in grid.names if a not in src.used]
    if rng.random() < 0.5:
        src = replace(src, partial=grid.ordered(a for a in free if rng.random() < 0.6))
    if tensor in ("x", "y") and not src.partial and rng.random() < 0.6:
        dst = windowed(rng, space, dst)
    return space, src, dst


def halves(rng: Random, space: Space, tensor: str) -> tuple[Layout, Layout]:
    """Split along some rows; wanted split along all of them, with windows: one is cut out, one takes a halo."""
    places: list[list[str]] = [[] for _ in space.conv.spatial]
    for axis in space.grid.names:
        rng.choice(places).append(axis)
    rows = tuple(map(tuple, places))
    kept = rng.randrange(len(rows))
    src = Layout(tensor, ((), (), *(axes if i == kept else () for i, axes in enumerate(rows))))
    windows = tuple(space.window(tensor, 2 + i, axes) for i, axes in enumerate(rows))
    return src, Layout(tensor, ((), (), *rows), (None, None, *windows))


def run(space: Space, steps: tuple[Conversion, ...], src: Layout, dst: Layout, seed: int) -> None:
    """Execute the conversions; every value on the way must be what its type says."""
    oracle, rng = Oracle(space.conv, space.grid), np.random.default_rng(seed)
    whole = rng.integers(-99, 100, size=oracle.shapes[src.tensor]).astype(float)
    value, here = oracle.place(whole, src, rng), src
    for step in steps:
        assert step.src == here
        value, here = oracle.convert(step.kind, step.over, step.src, step.dst, value), step.dst
        oracle.assert_is(value, here, whole)
    assert here == dst


@pytest.mark.parametrize("chunk", range(20))
def test_every_pair_of_layouts_converts(chunk: int) -> None:
    for seed in range(chunk * 30, chunk * 30 + 30):
        space, src, dst = random_pair(Random(seed))
        run(space, redistribute(space, src, dst), src, dst, seed)


def pairs(count: int) -> Iterator[tuple[Space, Layout, Layout, tuple[Conversion, ...]]]:
    for seed in range(count):
        space, src, dst = random_pair(Random(seed))
        yield space, src, dst, redistribute(space, src, dst)


def test_the_pairs_drawn_are_of_every_kind() -> None:
    """So that the test above does not grow easy unnoticed."""
    seen = Counter[str]()
    for space, src, dst, steps in pairs(600):
        seen.update(step.kind for step in steps)
        last = steps[-1] if steps else None
        exchange = last is not None and last.kind == "exchange"
        seen["a window cut out, then an exchange"] += exchange and last.src.has_window
        seen["a window and moved axes in one"] += exchange and last.dst.has_window and last.src.axes != last.dst.axes
        seen["swapped axes"] += exchange and any(
            a != b and set(a) == set(b) for a, b in zip(last.src.axes, last.dst.axes, strict=True)
        )
        seen["ranks that hold nothing"] += space.empty_ranks(src) > 0 or space.empty_ranks(dst) > 0
        seen["groups"] += space.conv.groups > 1
        seen["three rows"] += len(space.conv.spatial) == 3
        seen["nested axes"] += any(len(a) > 1 for a in (*src.axes, *dst.axes))
    for kind in ("slice", *COLLECTIVES):
        assert seen[kind] >= 20, seen
    assert min(seen.values()) >= 10, seen


def test_equal_layouts_take_no_step() -> None:
    for space, src, _, _ in pairs(100):
        if not src.partial:
            assert redistribute(space, src, src) == ()


def test_no_step_moves_what_another_would_spare() -> None:
    """A partial value is reduced once; gathers come before windows; an exchange comes last, over a smallest group."""
    for space, _, dst, steps in pairs(600):
        kinds = [s.kind for s in steps]
        assert kinds.count("all_reduce") <= 1
        assert kinds.count("reduce_scatter") <= 1
        assert "exchange" not in kinds[:-1]
        for step in steps:
            assert step.over == space.grid.ordered(step.over)
            if step.kind == "all_gather":
                assert not any(s.kind == "exchange" for s in steps[: steps.index(step)])
            if step.kind == "exchange":
                assert step.over == space.moved_axes(step.src, dst)


G2 = Grid((("a", 2), ("b", 2)))
C2 = Conv(4, 8, 8, (Spatial("H", 8, 3, 1, 1, 1), Spatial("W", 8, 3, 1, 1, 1)))


def y(*axes: str, partial: str = "") -> Layout:
    """y[a, *, ba, *]: one letter an axis."""
    return Layout("y", tuple(tuple(a.replace("*", "")) for a in axes), partial=tuple(partial))


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        # [CF] 2.3.4: * <- o is an all-gather, o <- * drops local data, o <- o and * <- * are nothing
        (y("*", "a", "*", "*"), y("*", "*", "*", "*"), "all_gather over a"),
        (y("*", "*", "*", "*"), y("*", "a", "*", "*"), "slice"),
        (y("*", "a", "*", "*"), y("*", "a", "*", "*"), ""),
        # [CF] 2.3.4: o_d' <- o_d with d a proper part of d', and the other way
        (y("*", "ab", "*", "*"), y("*", "a", "*", "*"), "all_gather over b"),
        (y("*", "a", "*", "*"), y("*", "ab", "*", "*"), "slice"),
        # [CF] 2.3.5: reductions, fused with a split
        (y("*", "*", "*", "*", partial="a"), y("*", "*", "*", "*"), "all_reduce over a"),
        (y("*", "*", "*", "*", partial="a"), y("*", "a", "*", "*"), "reduce_scatter over a"),
        (y("*", "b", "*", "*", partial="a"), y("*", "ba", "*", "*"), "reduce_scatter over a"),
        # axes that undergo the same conversion share one collective
        (y("*", "*", "*", "*", partial="ab"), y("*", "*", "*", "*"), "all_reduce over a,b"),
        (y("*", "*", "*", "*", partial="ab"), y("a", "b", "*", "*"), "reduce_scatter over a,b"),
        (y("a", "b", "*", "*"), y("*", "*", "*", "*"), "all_gather over a,b"),
        (y("a", "b", "*", "*"), y("b", "a", "*", "*"), "all_to_all over a,b"),
        # one is scattered, the rest summed
        (y("*", "*", "*", "*", partial="ab"), y("*", "a", "*", "*"), "reduce_scatter over a; all_reduce over b"),
        # a slice of the addends before they are summed: less to sum
        (y("*", "*", "*", "*", partial="a"), y("b", "*", "*", "*"), "slice; all_reduce over a"),
        # storage by channel, role N or rows: an all-to-all
        (y("*", "a", "*", "*"), y("a", "*", "*", "*"), "all_to_all over a"),
        (y("a", "*", "*", "b"), y("a", "b", "*", "*"), "all_to_all over b"),
        # no collective fits: an outer axis gathered, axes swapped, or a sum scattered outside of another axis
        (y("*", "ab", "*", "*"), y("*", "b", "*", "*"), "exchange over a,b"),
        (y("*", "ab", "*", "*"), y("*", "ba", "*", "*"), "exchange over a,b"),
        (y("*", "b", "*", "*", partial="a"), y("*", "ab", "*", "*"), "reduce_scatter over a; exchange over a,b"),
    ],
    ids=str,
)
def test_what_a_conversion_takes(src: Layout, dst: Layout, steps: str) -> None:
    space = Space(C2, G2)
    got = redistribute(space, src, dst)
    assert "; ".join(f"{s.kind} over {','.join(s.over)}" if s.over else s.kind for s in got) == steps
    run(space, got, src, dst, 1)


def test_gathers_come_before_windows() -> None:
    space = Space(C2, G2)
    dst = Layout("x", ((), (), ("a",), ()), (None, None, space.window("x", 2, ("a",)), None))
    src = Layout("x", ((), ("b",), ("a",), ()))
    assert [(s.kind, s.over) for s in redistribute(space, src, dst)] == [("all_gather", ("b",)), ("exchange", ("a",))]


def test_axes_of_one_rank_need_no_exchange() -> None:
    """Swapped with an axis of one rank: nothing moves, so the step is a slice."""
    space = Space(C2, Grid((("a", 2), ("b", 1))))
    steps = redistribute(space, y("*", "ab", "*", "*"), y("*", "ba", "*", "*"))
    assert [(s.kind, s.over) for s in steps] == [("slice", ())]
