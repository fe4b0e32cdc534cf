"""Index sets: what ranks hold, need and send, against sets of indices."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from generate import random_conv, random_grid, random_layout
from oracle import Oracle

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import volume
from convgen.algebra.layout import Layout, Window
from convgen.algebra.space import Space


def windowed(rng: Random, space: Space, layout: Layout) -> Layout:
    """The layout with windows on some of its spatial dimensions."""
    windows = list(layout.windows)
    for d in range(2, len(windows)):
        if rng.random() < 0.6:
            windows[d] = space.window(layout.tensor, d, layout.axes[d])
    return replace(layout, windows=tuple(windows))


def random_typed(rng: Random, max_ranks: int = 12) -> tuple[Space, Oracle, Layout]:
    conv, grid = random_conv(rng), random_grid(rng, max_ranks)
    space, tensor = Space(conv, grid), rng.choice(("x", "w", "y"))
    layout = random_layout(rng, conv, grid, tensor)
    return space, Oracle(conv, grid), layout if tensor == "w" else windowed(rng, space, layout)


@pytest.mark.parametrize("seed", range(200))
def test_held_is_what_the_type_says(seed: int) -> None:
    space, oracle, layout = random_typed(Random(seed))
    boxes, mask = space.held(layout), oracle.mask(layout)
    shape = oracle.shapes[layout.tensor]
    for rank in oracle.ranks:
        box = np.zeros(shape, dtype=bool)
        box[tuple(slice(int(lo), int(hi)) for lo, hi in boxes[rank])] = True
        assert (box == mask[rank]).all()
    counts = mask.reshape(len(oracle.at), -1).sum(axis=1)
    assert (volume(boxes) * space.weight(layout.tensor) == counts).all()
    assert space.empty_ranks(layout) == (counts == 0).sum()


@pytest.mark.parametrize("seed", range(200))
def test_a_frame_is_the_window_and_its_zero_rows(seed: int) -> None:
    space, oracle, layout = random_typed(Random(1000 + seed))
    frames, elements = space.frame(layout), space.elements(layout)
    for rank in oracle.ranks:
        expected = oracle.frame(layout, rank)
        got = frames[rank].tolist()
        if expected is None:
            assert any(lo == hi for lo, hi in got)
            assert elements[rank] == 0
        else:
            assert [tuple(p) for p in got] == expected[: len(got)]
            assert elements[rank] == np.prod([hi - lo for lo, hi in expected])


@pytest.mark.parametrize("seed", range(300))
def test_moves_are_needed_minus_owned_from_one_owner_each(seed: int) -> None:
    rng = Random(2000 + seed)
    conv, grid = random_conv(rng), random_grid(rng, 12)
    space, oracle, tensor = Space(conv, grid), Oracle(conv, grid), rng.choice(("x", "y", "w"))
    src, dst = (random_layout(rng, conv, grid, tensor) for _ in range(2))
    if tensor != "w":
        dst = windowed(rng, space, dst)
    moves = space.moves(src, dst)
    assert (moves == oracle.moves(src, dst)).all()
    own, need = oracle.mask(src), oracle.mask(dst)
    missing = (need & ~own).reshape(grid.ranks, -1).sum(axis=1)
    assert (moves.sum(axis=0) == missing).all()


def travelled(space: Space, oracle: Oracle, src: Layout, dst: Layout) -> set[str]:
    """Axes along which some element travels."""
    pairs = list(zip(*np.nonzero(oracle.moves(src, dst)), strict=True))
    return {a for a in space.grid.names if any(oracle.at[i][a] != oracle.at[j][a] for i, j in pairs)}


@pytest.mark.parametrize("seed", range(120))
def test_the_group_is_the_smallest_that_serves_any_number_of_samples(seed: int) -> None:
    """A module runs with any number of samples: along each axis of the group something travels for some number."""
    rng = Random(3000 + seed)
    conv, grid = random_conv(rng), random_grid(rng, 6)
    tensor = rng.choice(("x", "y", "w"))
    src, dst = (random_layout(rng, conv, grid, tensor) for _ in range(2))
    numbers = range(1, 2 * grid.enough + 1) if src.axes[0] != dst.axes[0] and tensor != "w" else [conv.batch]
    spaces = [Space(replace(conv, batch=n), grid) for n in numbers]
    axes = set[str]().union(*(travelled(s, Oracle(s.conv, grid), src, dst) for s in spaces))
    assert set(Space(conv, grid).moved_axes(src, dst)) == axes


def test_a_second_dimension_takes_its_halo_where_the_first_is_windowed_already() -> None:
    """x whole on H has its window cut out; the halo on W then travels along W only, corners included."""
    rows = (Spatial("H", 9, 3, 1, 1, 1), Spatial("W", 9, 3, 1, 1, 1))
    conv, grid = Conv(1, 1, 1, rows), Grid((("a", 3), ("b", 3)))
    space, oracle = Space(conv, grid), Oracle(conv, grid)
    one = Window(1, 1)
    src = Layout("x", ((), (), ("a",), ("b",)), (None, None, one, None))
    dst = Layout("x", ((), (), ("a",), ("b",)), (None, None, one, one))
    assert space.moved_axes(src, dst) == ("b",)
    moves = space.moves(src, dst)
    assert (moves == oracle.moves(src, dst)).all()
    # Rank (0, 0) holds rows [0, 4): four rows of one column from rank (0, 1), and nothing from (1, 1).
    assert moves[1, 0] == 4
    assert moves[:, 0].sum() == 4


def test_a_corner_comes_from_the_rank_that_holds_it() -> None:
    rows = (Spatial("H", 8, 3, 1, 1, 1), Spatial("W", 8, 3, 1, 1, 1))
    space = Space(Conv(1, 1, 1, rows), Grid((("H", 2), ("W", 2))))
    src = Layout("x", ((), (), ("H",), ("W",)))
    dst = replace(src, windows=(None, None, Window(1, 1), Window(1, 1)))
    assert space.moves(src, dst).tolist() == [[0, 4, 4, 1], [4, 0, 1, 4], [4, 1, 0, 4], [1, 4, 4, 0]]


def test_copies_send_to_their_own_side_only() -> None:
    """x copied over c: each copy of the halo stays among the ranks with one coordinate on c."""
    space = Space(Conv(1, 1, 1, (Spatial("W", 8, 3, 1, 1, 1),)), Grid((("W", 2), ("c", 2))))
    src = Layout("x", ((), (), ("W",)))
    dst = replace(src, windows=(None, None, Window(1, 1)))
    assert space.moves(src, dst).tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]]
    assert space.moved_axes(src, dst) == ("W",)


def test_blocks_smaller_than_the_halo_take_rows_from_several_ranks() -> None:
    space = Space(Conv(1, 1, 1, (Spatial("W", 6, 7, 1, 3, 3),)), Grid((("W", 6),)))
    src = Layout("x", ((), (), ("W",)))
    dst = replace(src, windows=(None, None, space.window("x", 2, ("W",))))
    moves = space.moves(src, dst)
    assert all(moves[i, j] == (0 < abs(i - j) <= 3) for i in range(6) for j in range(6))


@pytest.mark.parametrize("stride", [2, 3])
def test_one_by_one_with_a_stride_needs_nothing_of_others(stride: int) -> None:
    for extent in (8, 14, 56):
        s = Spatial("W", extent, 1, stride)
        space = Space(Conv(1, 1, 1, (s,)), Grid((("W", 2),)))
        src = Layout("x", ((), (), ("W",)))
        dst = replace(src, windows=(None, None, space.window("x", 2, ("W",))))
        if extent % (2 * stride) == 0:
            assert space.moved_axes(src, dst) == ()
