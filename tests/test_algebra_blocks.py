"""The block rule and the grid, against lists split by hand."""

from __future__ import annotations

import pickle
from itertools import product
from random import Random

import numpy as np
import pytest
from generate import random_grid, uneven
from oracle import block as slow_block
from oracle import split

from convgen.algebra.blocks import Uneven, axis_size, block, most_of, span
from convgen.algebra.grid import Grid


def interval(elements: list[int], got: tuple[int, int]) -> bool:
    """Whether a half-open interval is just these elements; any empty one will do for none."""
    return elements == list(range(*got))


@pytest.mark.parametrize("extent", range(14))
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_the_first_blocks_get_one_more(extent: int, parts: int) -> None:
    pieces = split(list(range(extent)), parts)
    assert all(interval(pieces[i], block(0, extent, parts, i)) for i in range(parts))
    assert [block(3, 3 + extent, parts, i) for i in range(parts)] == [
        (3 + lo, 3 + hi) for lo, hi in (block(0, extent, parts, i) for i in range(parts))
    ]


def test_spans_of_nested_axes_and_groups_are_those_of_lists() -> None:
    rng = Random(1)
    for _ in range(400):
        groups, unit = rng.choice((1, 1, 2, 3, 4, 5)), rng.randint(1, 5)
        sizes = tuple(uneven(rng, rng.choice((1, 2, 3, 4))) for _ in range(rng.randint(0, 3)))
        for index in product(*map(range, sizes)):
            expected = slow_block(groups * unit, groups, sizes, index)
            assert interval(expected, span(groups * unit, groups, sizes, index, 0)), (groups, unit, sizes, index)


def test_blocks_by_shares_are_these_sizes_of_their_sum_and_plain_blocks_where_all_shares_are_alike() -> None:
    rng = Random(3)
    for _ in range(300):
        shares = [rng.randint(0, 9) for _ in range(rng.randint(1, 6))]
        if not any(shares):
            continue
        size, times = axis_size(shares), rng.randint(1, 3)
        assert [hi - lo for lo, hi in (block(0, times * sum(shares), size, i) for i in range(size))] == [
            times * w for w in shares
        ]
        alike, n = Uneven([rng.randint(1, 4)] * len(shares)), rng.randint(0, 40)
        assert [block(5, 5 + n, alike, i) for i in range(alike)] == [
            block(5, 5 + n, len(shares), i) for i in range(alike)
        ]


def test_the_most_that_a_rank_has_over_several_axes_with_shares() -> None:
    rng = Random(4)
    for _ in range(300):
        sizes = tuple(uneven(rng, rng.choice((2, 3, 4))) for _ in range(rng.randint(1, 3)))
        n = rng.randint(0, 60)
        spans = [span(n, 1, sizes, index, 0) for index in product(*map(range, sizes))]
        assert most_of(n, sizes) == max(hi - lo for lo, hi in spans)


def test_shares_are_equal_only_to_the_same_proportion() -> None:
    size = axis_size((6, 10))
    assert size == axis_size((3, 5)) and hash(size) == hash(axis_size((3, 5)))
    assert size != 2 and size != 2 and size != axis_size((5, 3)) and axis_size((4, 4)) == 2
    assert pickle.loads(pickle.dumps(size)) == size and int(size) == 2


def test_spans_of_arrays_are_those_of_integers() -> None:
    sizes = (2, 3, 2)
    indices = np.indices(sizes).reshape(3, -1)
    lo, hi = span(24, 4, sizes, tuple(indices), np.zeros(12, dtype=np.int64))
    for i, index in enumerate(product(*map(range, sizes))):
        assert (lo[i], hi[i]) == span(24, 4, sizes, index, 0)


@pytest.mark.parametrize(("extent", "groups"), [(7, 1), (3, 1), (12, 3), (12, 4), (10, 5), (4, 2)])
def test_gathering_the_inner_axis_gives_the_outer_axis_block(extent: int, groups: int) -> None:
    sizes = (2, 3, 2)
    for outer in range(1, 3):
        for index in product(*map(range, sizes[:outer])):
            inner = product(*map(range, sizes[outer:]))
            parts = [range(*span(extent, groups, sizes, (*index, *i), 0)) for i in inner]
            whole = range(*span(extent, groups, sizes[:outer], index, 0))
            assert [e for part in parts for e in part] == list(whole)


def test_an_axis_splits_inside_a_group_once_no_rank_has_two() -> None:
    assert [most_of(4, sizes) for sizes in ((), (2,), (2, 2), (3,), (3, 2))] == [4, 2, 1, 2, 1]
    # 3 groups of 4 over 2 ranks, then 2, then 2: the last axis halves a group, the rank without one has nothing.
    spans = [span(12, 3, (2, 2, 2), i, 0) for i in product(range(2), repeat=3)]
    assert spans[:6] == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12)]
    assert all(lo == hi for lo, hi in spans[6:])


def test_a_group_of_ranks_differs_along_its_axes_only() -> None:
    rng = Random(2)
    for _ in range(60):
        grid = random_grid(rng, 16)
        at = list(product(*(range(n) for _, n in grid.axes)))
        assert grid.ranks == len(at)
        assert [tuple(grid.at(r).values()) for r in range(grid.ranks)] == at
        axes = tuple(rng.sample(grid.names, rng.randint(0, len(grid.names))))
        fixed = [i for i, a in enumerate(grid.names) if a not in axes]
        ids = grid.group_ids(axes)
        for r in range(grid.ranks):
            expected = tuple(q for q in range(grid.ranks) if all(at[q][i] == at[r][i] for i in fixed))
            assert grid.group(r, axes) == expected
            assert tuple(np.flatnonzero(ids == ids[r])) == expected
            assert len(expected) == grid.over(axes)


def test_the_last_axis_varies_fastest() -> None:
    grid = Grid((("data", 2), ("chan", 3)))
    assert [grid.group(0, ("chan",)), grid.group(1, ("data",))] == [(0, 1, 2), (1, 4)]
