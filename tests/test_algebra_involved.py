"""Conversions on the axes that they involve: the same as on the whole grid, pair of ranks by pair of ranks."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray
from sampling import cases_of

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets, overlaps
from convgen.algebra.involved import Side, collected, converted, most_elements, one_tensor
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Conversion, redistribute
from convgen.algebra.relations import Taps
from convgen.algebra.tensors import Dim, Rows
from convgen.cost.exchanges import exchange_traffic
from convgen.cost.links import Links, collective_seconds
from convgen.cost.machines import load_machine
from convgen.cost.moving import PICOSECONDS, Moves
from convgen.cost.traffic import elements_received, elements_sent


def a_case(draw: Random) -> tuple[IndexSets, Layout, Layout, Layout]:
    """A tensor on a grid: how it is stored, what a row wants of it, and what it finds as its gradient."""
    axes = tuple((a, draw.choice((2, 2, 3, 4))) for a in "abc"[: draw.choice((1, 2, 3))])
    count = draw.choice((1, 2, 3, 4))
    sides: list[Side] = []
    for d in range(count):
        dim, rows = Dim("N" if d == 0 else f"d{d}", draw.choice((1, 2, 3, 4, 5, 7, 8, 12))), None
        taps = Taps(draw.choice((1, 2, 3)), draw.choice((1, 2)), draw.choice((0, 1)))
        out = (dim.extent + 2 * taps.pad - taps.kernel) // taps.stride + 1
        if draw.random() < 0.5 and out > 0:
            rows = Rows(taps, Dim(f"o{d}", out))
        sides.append(Side(dim, rows))
    sets = one_tensor(axes, tuple(sides))
    names = [a for a, _ in axes]
    stored, read = split(draw, names, count), split(draw, names, count)
    windows = tuple(
        sets.window("t", d, a) if s.rows else None for d, (s, a) in enumerate(zip(sides, read, strict=True))
    )
    rest = sets.grid.ordered({*names} - {a for one in read for a in one})
    return (
        sets,
        Layout("t", stored),
        Layout("t", read, windows),
        Layout("t", read, windows, rest if draw.random() < 0.7 else ()),
    )


def split(draw: Random, names: list[str], count: int) -> tuple[Axes, ...]:
    found: list[list[str]] = [[] for _ in range(count + 1)]
    for a in draw.sample(names, len(names)):
        draw.choice(found).append(a)
    return tuple(map(tuple, found[:count]))


def pairs_of(sets: IndexSets, c: Conversion) -> NDArray[np.int64]:
    """What rank i sends rank j in an exchange, all ranks with all."""
    if c.reduction is None:
        return sets.moves(c.src, c.dst)
    apart = sets.grid.group_ids({*c.src.used, *c.src.partial})
    flows = overlaps(sets.held(c.src), sets.held(c.dst)) * (apart[:, None] == apart[None, :])
    np.fill_diagonal(flows, 0)
    return flows


def axes_of(grid: Grid, flows: NDArray[np.int64]) -> Axes:
    one, other = np.nonzero(flows)
    return grid.ordered(a for a, at in grid.coordinates.items() if np.any(at[one] != at[other]))


@pytest.mark.parametrize("seed", cases_of(8, "test_the_same_as_on_the_whole_grid"))
def test_the_same_as_on_the_whole_grid(seed: int) -> None:
    """Chains, axes that move, traffic, and seconds on machines of one level and of several."""
    draw = Random(f"involved {seed}")
    machines = [load_machine(name) for name in ("cpu", "lassen", "taihulight")]
    for _ in range(60):
        sets, stored, read, found = a_case(draw)
        assert converted(sets, stored, read) == redistribute(sets, stored, read)
        back = collected(sets, found, stored)
        if found.has_window:
            (c,) = back
            flows = pairs_of(sets, c)
            # addends are gathered even where they are none
            assert {*axes_of(sets.grid, flows)} | {*found.partial} == {*c.over}
        assert most_elements(sets, read) == sets.elements(read).max()
        machine = draw.choice(machines)
        moves = Moves(sets.grid, machine, 4)
        for c in (*converted(sets, stored, read), *back):
            if c.kind == "slice":
                assert moves.conversion(sets, c) == 0
            elif c.kind == "exchange":
                flows = pairs_of(sets, c)
                one, other = np.nonzero(flows)
                sizes = flows[one, other]
                if not c.src.has_window or c.reduction is not None:
                    ends = [np.bincount(end, weights=sizes, minlength=sets.grid.ranks) for end in (one, other)]
                    most = exchange_traffic(sets, c.src, c.dst, adds=c.reduction is not None)
                    assert most[:2] == (ends[0].max(), max(e.max() for e in ends))
                seconds = Links(sets.grid, machine.levels).exchange(one, other, sizes * 4) if len(one) else 0
                assert abs(moves.conversion(sets, c) - seconds * PICOSECONDS) <= 1
            else:
                what = (sets, c.kind, c.over, c.src, c.dst)
                busy = int(np.maximum(elements_sent(*what), elements_received(*what)).max())
                seconds, _ = collective_seconds(
                    sets.grid, machine.levels, c.kind, c.over, busy * 4, machine.add_s_per_byte,
                    machine.collectives.of(c.kind),
                )  # fmt: skip
                assert abs(moves.conversion(sets, c) - seconds * PICOSECONDS) <= 1 + seconds * 1e-3
