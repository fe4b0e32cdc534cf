"""What conversions take: those that are known to be alike take what each takes by itself."""

from __future__ import annotations

from random import Random

import pytest
from sampling import cases_of

from convgen.algebra.blocks import axis_size
from convgen.algebra.grid import Grid
from convgen.algebra.involved import NAME, Side, converted, one_tensor
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.relations import Taps
from convgen.algebra.tensors import Dim, Rows
from convgen.cost.busiest import sent_elements
from convgen.cost.machines import load_machine
from convgen.cost.moving import Moves
from convgen.cost.routes import Routes


def a_layout(draw: Random, dims: int, names: str, *, windows: bool, sides: tuple[Side, ...], grid: Grid) -> Layout:
    """Some axes on some dimensions; windows where the last dimension is read by a convolution."""
    axes: list[Axes] = [()] * dims
    left: list[str] = []
    for a in draw.sample(names, len(names)):
        d = draw.randrange(-2, dims)
        if d >= 0:
            axes[d] = (*axes[d], a)
        elif d == -1:
            left.append(a)
    wanted = one_tensor(grid.axes, sides).window(NAME, dims - 1, axes[-1]) if windows and axes[-1] else None
    partial = () if windows else grid.ordered(left)
    return Layout(NAME, tuple(axes), (None,) * (dims - 1) + (wanted,), partial)


def _knows_nothing(grid: Grid, machine: str) -> Moves:
    found = Moves(grid, load_machine(machine), 4)
    found.routes = Routes(grid, found.machine.levels)
    return found


@pytest.mark.parametrize("machine", ["lassen", "cuda"])
@pytest.mark.parametrize("seed", cases_of(4, "test_conversions_that_are_alike_take_as_long"))
def test_conversions_that_are_alike_take_as_long(machine: str, seed: int) -> None:
    """Even and ragged blocks, windows and addends: one that knows all the others, and one that knows nothing."""
    draw = Random(f"alike {machine} {seed}")
    grid = Grid(tuple((a, draw.choice((2, 2, 3, 4))) for a in "abc"))
    knows = Moves(grid, load_machine(machine), 4)
    some = 0
    for _ in range(60):
        dims = draw.randint(2, 4)
        extents = [draw.choice((4, 12, 24, 24, 23)) for _ in range(dims)]
        sides = [Side(Dim("NCHW"[d], n)) for d, n in enumerate(extents)]
        sides[-1] = Side(sides[-1].dim, Rows(Taps(3, 1, 1, 1), Dim("o", extents[-1])))
        fixed = tuple(sides)
        sets = one_tensor(grid.axes, fixed)
        src, dst = (
            a_layout(draw, dims, "abc", windows=w, sides=fixed, grid=grid) for w in (False, draw.random() < 0.5)
        )
        dst = Layout(NAME, dst.axes, dst.windows)
        takes = knows.chain(sets, src, dst)
        assert takes == _knows_nothing(grid, machine).chain(sets, src, dst)
        assert takes == sum(knows.conversion(sets, c) for c in converted(sets, src, dst))
        found, stored = Layout(NAME, dst.axes, dst.windows, ()), Layout(NAME, src.axes)
        assert knows.collected(sets, found, stored) == _knows_nothing(grid, machine).collected(sets, found, stored)
        some += takes > 0
    assert some > 20


@pytest.mark.parametrize("seed", cases_of(4, "test_the_busiest_rank_counts_where_ranks_have_shares"))
def test_the_busiest_rank_counts_where_ranks_have_shares(seed: int) -> None:
    """A price is of the bytes of the rank that sends most, also where an extent divides by the number of ranks."""
    draw = Random(f"shares {seed}")
    sizes: list[int] = [2, 3, axis_size((1, 3)), axis_size((2, 1, 3)), axis_size((1, 1, 1, 5))]
    uneven = 0
    for _ in range(60):
        grid = Grid(tuple((a, draw.choice(sizes)) for a in "ab"))
        sides = tuple(Side(Dim("NCHW"[d], draw.choice((12, 24, 24, 23)))) for d in range(draw.randint(2, 4)))
        sets, moves = one_tensor(grid.axes, sides), Moves(grid, load_machine("lassen"), 4)
        src, dst = (a_layout(draw, len(sides), "ab", windows=False, sides=sides, grid=grid) for _ in range(2))
        for c in converted(sets, src, Layout(NAME, dst.axes)):
            sent = sent_elements(sets, c)
            assert moves.moved(sets, c).sent == sent.max(), (grid, c)
            uneven += c.kind in ("all_gather", "reduce_scatter") and sent.max() > sent.min()
    assert uneven
