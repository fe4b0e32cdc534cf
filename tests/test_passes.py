"""Passes: text before, text after, and the nearest schedule that stays as it was."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
from generate import algorithm_problem, random_problem

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.space import Space
from convgen.passes.drop_single_rank import drop_single_rank
from convgen.passes.fuse_bias import fuse_bias
from convgen.passes.hold_x import hold_x
from convgen.passes.share import share
from convgen.schedule.build import lower
from convgen.schedule.nodes import Schedule
from convgen.schedule.text import parse, show
from convgen.schedule.verify import verify

LAYER = Conv(4, 8, 6, (Spatial("H", 8, 3, 1, 1, 1), Spatial("W", 8, 3, 1, 1, 1)))


def lines(text: str) -> list[str]:
    """Lines without the spaces that align them."""
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def body(schedule: Schedule, *phases: str) -> list[str]:
    """The sections named."""
    found: list[str] = []
    keep = False
    for line in lines(show(schedule))[:-1]:
        if line.endswith(":"):
            keep = line.strip(":") in phases
        if keep:
            found.append(line)
    return found


def naive(name: str, grid: dict[str, int], conv: Conv = LAYER) -> tuple[Schedule, Space]:
    problem = algorithm_problem(name, conv, Grid(tuple(grid.items())))
    space = Space(conv, problem.grid)
    return lower("s", space, problem.stored, problem.roles, bias=conv.bias), space


def with_bias(conv: Conv) -> Conv:
    return Conv(conv.batch, conv.channels, conv.filters, conv.spatial, conv.groups, True)


# ---- share


def test_share_gathers_dy_once_for_both_backward_phases() -> None:
    before, _ = naive("stationary-x", {"C": 2})
    assert body(before, "backward_data", "backward_filter") == lines("""
        backward_data:
          %dy_gathered = all_gather %dy dim=F over=C            : y[*, *, *, *]
          %dx = conv_backward_data %dy_gathered, %w             : x[*, C, *, *]
        backward_filter:
          %dy_gathered_2 = all_gather %dy dim=F over=C          : y[*, *, *, *]
          %dw = conv_backward_filter %dy_gathered_2, %x         : w[*, C]
    """)
    after = share(before)
    assert body(after, "backward_data", "backward_filter") == lines("""
        backward_data:
          %dy_gathered = all_gather %dy dim=F over=C  : y[*, *, *, *]
          %dx = conv_backward_data %dy_gathered, %w   : x[*, C, *, *]
        backward_filter:
          %dw = conv_backward_filter %dy_gathered, %x : w[*, C]
    """)


def test_share_leaves_a_schedule_in_which_nothing_is_equal() -> None:
    before, _ = naive("sample", {"N": 2})
    assert share(before) is before


def test_share_leaves_w_which_is_gone_by_backward() -> None:
    """Keeping forward's gathered w would cost a copy of w."""
    before = parse("""
        schedule s on grid(a=2) {
          stored: x[a, *, *, *] w[a, *] y[a, *, *, *]
          roles forward: N=a
          roles backward_data: N=a
          roles backward_filter: N=a
          forward:
            %w_gathered = all_gather %w dim=F over=a   : w[*, *]
            %y = conv_forward %x, %w_gathered          : y[a, *, *, *]
          backward_data:
            %w_gathered_2 = all_gather %w dim=F over=a : w[*, *]
            %dx = conv_backward_data %dy, %w_gathered_2 : x[a, *, *, *]
          backward_filter:
            %dw_partial = conv_backward_filter %dy, %x : w[*, *] partial(a)
            %dw = reduce_scatter %dw_partial dim=F over=a : w[a, *]
        }
    """)
    verify(before, Space(LAYER, before.grid))
    assert share(before) is before


SLICES = """
schedule s on grid(a=2, b=2) {
  stored: x[b, *, *, *] w[*, *] y[*, *, a, *]
  roles forward: N=b H=a
  roles backward_data: N=b H=a
  roles backward_filter: N=b H=a
  forward:
    %x_slice = slice %x dim=H                                   : x[b, *, a+(1,1), *]
    %y_local = conv_forward %x_slice, %w                        : y[b, *, a, *]
    %y = all_gather %y_local dim=N over=b                       : y[*, *, a, *]
  backward_data:
    %dy_slice = slice %dy dim=N                                 : y[b, *, a, *]
    %dy_halo = exchange %dy_slice dim=H over=a                  : y[b, *, a+(1,1), *]
    %dx_local = conv_backward_data %dy_halo, %w                 : x[b, *, a, *]
    %dx = all_gather %dx_local dim=H over=a                     : x[b, *, *, *]
  backward_filter:
    %dy_slice_2 = slice %dy dim=N                               : y[b, *, a, *]
    %x_slice_2 = slice %x dim=H                                 : x[b, *, a+(1,1), *]
    %dw_partial = conv_backward_filter %dy_slice_2, %x_slice_2  : w[*, *] partial(a,b)
    %dw = all_reduce %dw_partial over=a,b                       : w[*, *]
}
"""


def test_share_cuts_x_again_but_dy_once() -> None:
    """A view of x is free and can't be held beside x; within backward one slice serves both phases."""
    before = parse(SLICES)
    verify(before, Space(LAYER, before.grid))
    after = share(before)
    verify(after, Space(LAYER, before.grid))
    assert body(after, "backward_filter") == lines("""
        backward_filter:
          %x_slice_2 = slice %x dim=H                              : x[b, *, a+(1,1), *]
          %dw_partial = conv_backward_filter %dy_slice, %x_slice_2 : w[*, *] partial(a,b)
          %dw = all_reduce %dw_partial over=a,b                    : w[*, *]
    """)
    assert after.held() == ()


# ---- hold_x


def test_x_is_held_gathered_or_gathered_again() -> None:
    before, space = naive("stationary-y", {"F": 2})
    held = share(hold_x(before, "gathered"))
    assert held.held() == ("x_gathered",)
    assert body(held, "backward_filter") == lines("""
        backward_filter:
          %dw = conv_backward_filter %dy, %x_gathered   : w[F, *]
    """)
    again = share(hold_x(before, "stored"))
    verify(again, space)
    assert again.held() == ()
    assert body(again, "backward_filter") == lines("""
        backward_filter:
          %x_gathered_2 = all_gather %x dim=C over=F    : x[*, *, *, *]
          %dw = conv_backward_filter %dy, %x_gathered_2 : w[F, *]
    """)
    assert "hold_x: stored" in show(again)
    assert parse(show(again)) == again


def test_the_choice_that_is_there_already_changes_nothing() -> None:
    before, _ = naive("stationary-y", {"F": 2})
    assert hold_x(before, "gathered") is before
    assert hold_x(hold_x(before, "stored"), "stored") == hold_x(before, "stored")


# ---- fuse_bias


def test_the_bias_goes_to_a_convolution_whose_result_is_whole() -> None:
    before, space = naive("stationary-y", {"F": 2}, with_bias(LAYER))
    assert body(before, "forward") == lines("""
        forward:
          %x_gathered = all_gather %x dim=C over=F        : x[*, *, *, *]
          %y_summed = conv_forward %x_gathered, %w        : y[*, F, *, *]
          %y = add_bias %y_summed, %bias                  : y[*, F, *, *]
    """)
    after = fuse_bias(before)
    verify(after, space)
    assert body(after, "forward") == lines("""
        forward:
          %x_gathered = all_gather %x dim=C over=F        : x[*, *, *, *]
          %y = conv_forward %x_gathered, %w, %bias        : y[*, F, *, *]
    """)


def test_a_bias_behind_a_reduction_stays() -> None:
    before, _ = naive("stationary-x", {"C": 2}, with_bias(LAYER))
    assert [type(s).__name__ for s in before.forward] == ["Convolve", "Convert", "AddBias"]
    assert fuse_bias(before) is before


def test_no_bias_no_change() -> None:
    before, _ = naive("sample", {"N": 2})
    assert fuse_bias(before) is before


# ---- drop_single_rank


def test_an_axis_of_one_rank_leaves_no_step() -> None:
    before, space = naive("stationary-w", {"C": 2, "F": 1})
    assert body(before, "forward") == lines("""
        forward:
          %x_gathered = all_gather %x dim=C over=F                     : x[*, C, *, *]
          %y_partial = conv_forward %x_gathered, %w                    : y[*, F, *, *] partial(C)
          %y = reduce_scatter %y_partial dim=F over=C                  : y[*, (F,C), *, *]
    """)
    after = drop_single_rank(before, space)
    verify(after, space)
    assert body(after, "forward") == lines("""
        forward:
          %y_partial = conv_forward %x, %w              : y[*, *, *, *] partial(C)
          %y = reduce_scatter %y_partial dim=F over=C   : y[*, C, *, *]
    """)
    assert after.grid == before.grid


def test_axes_of_several_ranks_stay() -> None:
    before, space = naive("stationary-w", {"C": 2, "F": 2})
    assert drop_single_rank(before, space) is before


def test_an_axis_of_one_rank_that_nothing_names_stays() -> None:
    problem = algorithm_problem("sample", LAYER, Grid((("N", 2),)))
    grid = Grid((("N", 2), ("idle", 1)))
    space = Space(LAYER, grid)
    before = lower("s", space, problem.stored, problem.roles)
    assert drop_single_rank(before, space) is before


def test_the_choice_of_x_survives_dropping() -> None:
    before, space = naive("stationary-w", {"C": 2, "F": 1})
    assert drop_single_rank(hold_x(before, "stored"), space).hold_x == "stored"


# ---- all of them


@pytest.mark.parametrize("chunk", range(8))
def test_every_pass_leaves_a_schedule_that_verifies_and_is_done_at_once(chunk: int) -> None:
    for seed in range(chunk * 16, chunk * 16 + 16):
        rng = Random(seed)
        conv, grid, stored, roles = random_problem(rng, 16)
        space = Space(conv, grid)
        schedule = lower("s", space, stored, roles, bias=conv.bias)
        dropped = partial(drop_single_rank, space=space)
        held = partial(hold_x, choice="stored" if rng.random() < 0.5 else "gathered")
        for run in (dropped, fuse_bias, held, share):
            verify(schedule, space)
            before = schedule
            schedule = run(before)
            assert (schedule is before) == (schedule == before)
            assert run(schedule) is schedule
        verify(schedule, space)
