"""Windows against the pairs (output row, tap) that touch each input row."""

from __future__ import annotations

from functools import partial
from itertools import product
from random import Random

import numpy as np
import pytest
from generate import random_spatial
from oracle import frame_rows, one_padding, rows_reaching, rows_read

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Window
from convgen.algebra.relations import ReadBy
from convgen.algebra.space import Space
from convgen.algebra.windows import edge_padding, fits_one_padding, output_frame

SOME = [random_spatial(Random(seed), "W", 14) for seed in range(70)]
HARD = [  # kernels wider than the tensor, strides wider than the kernel, padding wider than either
    Spatial("W", 3, kernel=5, pad_lo=2, pad_hi=2),
    Spatial("W", 9, kernel=1, stride=3),
    Spatial("W", 9, kernel=2, stride=3, pad_lo=1, dilation=2),
    Spatial("W", 5, kernel=2, stride=2, pad_lo=5, pad_hi=4),
    Spatial("W", 8, kernel=4, pad_lo=1, pad_hi=2),
    Spatial("W", 7, kernel=3, stride=2, pad_lo=3, pad_hi=3, dilation=3),
]


@pytest.mark.parametrize("s", SOME + HARD, ids=str)
def test_input_window_is_from_the_first_row_read_to_the_last(s: Spatial) -> None:
    for lo in range(s.out + 1):
        for hi in range(lo, s.out + 1):
            read = rows_read(s, range(lo, hi))
            got = s.taps.window(lo, hi)
            assert got == ((min(read), max(read) + 1) if read else (got[0], got[0]))


@pytest.mark.parametrize("s", SOME + HARD, ids=str)
def test_output_window_has_the_rows_whose_taps_reach_the_block(s: Spatial) -> None:
    for lo in range(s.extent + 1):
        for hi in range(lo, s.extent + 1):
            reaching = rows_reaching(s, range(lo, hi))
            got = range(*ReadBy(s.taps).window(lo, hi))
            assert list(got) == reaching
            readers = [o for o in range(-30, 40) if rows_read(s, [o]) & set(range(lo, hi))]
            assert set(readers) <= set(got)
            if s.dilation == 1:
                assert readers == list(got)


@pytest.mark.parametrize("s", SOME + HARD, ids=str)
def test_output_frame_is_the_least_that_one_padding_serves(s: Spatial) -> None:
    for lo in range(s.extent):
        for hi in range(lo + 1, s.extent + 1):
            got = output_frame(s.taps, lo, hi)
            assert got == frame_rows(s, range(lo, hi))
            below, above = edge_padding(s.taps, lo, hi, *got)
            assert fits_one_padding(s.taps, below, above)
            assert below == one_padding(s, (lo, hi), got)
    start, end = output_frame(s.taps, 2, 2)
    assert start == end


@pytest.mark.parametrize("s", SOME[:30] + HARD, ids=str)
def test_arrays_are_treated_as_integers(s: Spatial) -> None:
    pairs = [(lo, hi) for lo, hi in product(range(s.extent + 1), repeat=2) if lo <= hi]
    lo, hi = np.array(pairs).T
    for rule in (s.taps.window, ReadBy(s.taps).window, partial(output_frame, s.taps)):
        got = np.stack(rule(lo, hi), -1)
        assert [tuple(p) for p in got.tolist()] == [rule(*p) for p in pairs]


@pytest.mark.parametrize("s", SOME + HARD, ids=str)
def test_output_rows_are_those_whose_taps_are_inside_the_padded_tensor(s: Spatial) -> None:
    inside = range(-s.pad_lo, s.extent + s.pad_hi)
    rows = [o for o in range(60) if rows_read(s, [o]) <= set(inside)]
    assert rows == list(range(s.out))


@pytest.mark.parametrize("s", SOME + HARD, ids=str)
def test_one_padding_fits_where_aten_would_have_these_rows(s: Spatial) -> None:
    rng = Random(str(s))
    for _ in range(40):
        x, y = sorted(rng.sample(range(-4, 20), 2)), sorted(rng.sample(range(-4, 12), 2))
        below, above = edge_padding(s.taps, *x, *y)
        assert bool(fits_one_padding(s.taps, below, above)) == (one_padding(s, (x[0], x[1]), (y[0], y[1])) is not None)


def window(s: Spatial, ranks: int, tensor: str) -> Window | None:
    conv = Conv(1, 1, 1, (s,))
    return Space(conv, Grid((("W", ranks),))).window(tensor, 2, ("W",))


@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_the_papers_symmetric_halo_is_stride_1_odd_kernel_same_padding(kernel: int) -> None:
    """[SP] III-A: O = floor(K/2) rows on each side, in forward and in backward."""
    half = kernel // 2
    s = Spatial("W", 56, kernel, pad_lo=half, pad_hi=half)
    assert window(s, 4, "x") == window(s, 4, "y") == Window(half, half)


@pytest.mark.parametrize(
    ("s", "ranks", "forward", "backward"),
    [
        (Spatial("W", 224, 7, 2, 3, 3), 4, (3, 2), (1, 2)),  # ResNet's first layer: less than K//2 = 3 on one side
        (Spatial("W", 56, 3, 2, 1, 1), 4, (1, 0), (0, 1)),
        (Spatial("W", 16, 2, 1, 0, 1), 4, (0, 1), (1, 0)),  # an even kernel
        (Spatial("W", 16, 3, 1, 2, 2, 2), 4, (2, 2), (2, 2)),  # dilation
        (Spatial("W", 16, 3, 1, 2, 0), 4, (2, 0), (0, 2)),  # causal
        (
            Spatial("W", 10, 3),
            2,
            (1, 1),
            (2, 2),
        ),  # valid: x [0,6) and [4,10); dy [-2,5) and [3,10) of 8, zeros included
    ],
)
def test_halos_known_by_heart(s: Spatial, ranks: int, forward: tuple[int, int], backward: tuple[int, int]) -> None:
    got = window(s, ranks, "x"), window(s, ranks, "y")
    assert got[0] is not None and got[1] is not None
    assert (got[0].lo, got[0].hi) == forward
    assert (got[1].lo, got[1].hi) == backward


def test_a_window_tells_the_most_that_any_rank_wants() -> None:
    """Rows wanted beyond the own block, counted row by row, for random layers and grids."""
    rng = Random(3)
    for _ in range(300):
        s = random_spatial(rng, "W", 14)
        ranks = rng.choice((1, 2, 3, 4, 5))
        space = Space(Conv(1, 1, 1, (s,)), Grid((("W", ranks),)))
        axes = ("W",) if rng.random() < 0.8 else ()
        for tensor, other in (("x", "y"), ("y", "x")):
            got = space.window(tensor, 2, axes)
            below, above = [], []
            for r in range(ranks):
                own = [int(b[r]) for b in space.block(tensor, 2, axes)]
                block = range(*(int(b[r]) for b in space.block(other, 2, axes)))
                read = sorted(rows_read(s, block)) if tensor == "x" else rows_reaching(s, block)
                if read:
                    below.append(own[0] - read[0])
                    above.append(read[-1] + 1 - own[1])
            if got is not None:
                assert got == (Window(max(below), max(above)) if below else Window(0, 0))
            elif axes:  # every block serves as it is: nothing is missing inside the tensor
                extent = s.extent if tensor == "x" else s.out
                for r in range(ranks):
                    own = range(*(int(b[r]) for b in space.block(tensor, 2, axes)))
                    block = range(*(int(b[r]) for b in space.block(other, 2, axes)))
                    read = rows_read(s, block) if tensor == "x" else set(rows_reaching(s, block))
                    assert {i for i in read if 0 <= i < extent} <= set(own)
