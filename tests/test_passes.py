"""Passes: text before, text after, and the nearest schedule that stays as it was."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
from generate import algorithm_problem, random_problem
from passing import CUDA, passed
from sampling import draws

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.algebra.space import Space
from convgen.cost.schedule import kind_of
from convgen.errors import InputError
from convgen.passes.contract import Context, run_passes, with_options
from convgen.passes.fuse_bias import FuseBias
from convgen.passes.fuse_layouts import FuseLayouts
from convgen.passes.hold_x import HoldX
from convgen.passes.share import Share
from convgen.program.build import lower
from convgen.program.nodes import PHASES, Schedule
from convgen.program.text import parse, show
from convgen.program.verify import verify
from convgen.spec.target import CPU

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
    before, space = naive("stationary-x", {"C": 2})
    assert body(before, "backward_data", "backward_filter") == lines("""
        backward_data:
          %dy_gathered = all_gather %dy dim=F over=C            : y[*, *, *, *]
          %dx = conv_backward_data %dy_gathered, %w             : x[*, C, *, *]
        backward_filter:
          %dy_gathered_2 = all_gather %dy dim=F over=C          : y[*, *, *, *]
          %dw = conv_backward_filter %dy_gathered_2, %x         : w[*, C]
    """)
    after = passed(before, space, Share())
    assert body(after, "backward_data", "backward_filter") == lines("""
        backward_data:
          %dy_gathered = all_gather %dy dim=F over=C  : y[*, *, *, *]
          %dx = conv_backward_data %dy_gathered, %w   : x[*, C, *, *]
        backward_filter:
          %dw = conv_backward_filter %dy_gathered, %x : w[*, C]
    """)


def test_share_leaves_a_schedule_in_which_nothing_is_equal() -> None:
    before, space = naive("sample", {"N": 2})
    assert passed(before, space, Share()) is before


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
    space = Space(LAYER, before.grid)
    verify(before, space)
    assert passed(before, space, Share()) is before


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
    space = Space(LAYER, before.grid)
    verify(before, space)
    after = passed(before, space, Share())
    verify(after, space)
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
    held = passed(before, space, HoldX(), Share())
    assert held.held() == ("x_gathered",)
    assert body(held, "backward_filter") == lines("""
        backward_filter:
          %dw = conv_backward_filter %dy, %x_gathered   : w[F, *]
    """)
    again = passed(before, space, HoldX(choice="stored"), Share())
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
    before, space = naive("stationary-y", {"F": 2})
    assert passed(before, space, HoldX()) is before
    stored = passed(before, space, HoldX(choice="stored"))
    assert passed(stored, space, HoldX(choice="stored")) is stored


# ---- fuse_bias


def test_the_bias_goes_to_a_convolution_whose_result_is_whole() -> None:
    before, space = naive("stationary-y", {"F": 2}, with_bias(LAYER))
    assert body(before, "forward") == lines("""
        forward:
          %x_gathered = all_gather %x dim=C over=F        : x[*, *, *, *]
          %y_summed = conv_forward %x_gathered, %w        : y[*, F, *, *]
          %y = add_bias %y_summed, %bias                  : y[*, F, *, *]
    """)
    after = passed(before, space, FuseBias())
    verify(after, space)
    assert body(after, "forward") == lines("""
        forward:
          %x_gathered = all_gather %x dim=C over=F        : x[*, *, *, *]
          %y = conv_forward %x_gathered, %w, %bias        : y[*, F, *, *]
    """)


def test_a_bias_behind_a_reduction_stays() -> None:
    before, space = naive("stationary-x", {"C": 2}, with_bias(LAYER))
    assert [kind_of(s) for s in before.forward] == ["conv_forward", "reduce_scatter", "add_bias"]
    assert passed(before, space, FuseBias()) is before


def test_no_bias_no_change() -> None:
    before, space = naive("sample", {"N": 2})
    assert passed(before, space, FuseBias()) is before


# ---- before them: axes of one rank


def test_an_axis_of_one_rank_leaves_no_step() -> None:
    made, space = naive("stationary-w", {"C": 2, "F": 1})
    verify(made, space)
    assert lines(show(made))[:2] == lines("""
        schedule s on grid(C=2, F=1) {
          stored: x[*, C, *, *] w[*, C] y[*, C, *, *]
    """)
    assert body(made, "forward") == lines("""
        forward:
          %y_partial = conv_forward %x, %w              : y[*, *, *, *] partial(C)
          %y = reduce_scatter %y_partial dim=F over=C   : y[*, C, *, *]
    """)


def test_an_axis_of_one_rank_hides_no_simpler_way() -> None:
    """It stands inside of `a` on N, where `a` could not go to C by an all-to-all: without it, it can."""
    stored = {
        "x": Layout("x", (("a", "one"), (), (), ())), "w": Layout("w", ((), ("a",))), "y": Layout("y", ((),) * 4),
    }  # fmt: skip
    space = Space(LAYER, Grid((("a", 2), ("one", 1))))
    made = lower("s", space, stored, dict.fromkeys(PHASES, Roles((("C", ("a",)), ("N", ("one",))))))
    verify(made, space)
    assert body(made, "forward", "backward_data") == lines("""
        forward:
          %x_moved = all_to_all %x dim=N,C over=a      : x[*, a, *, *]
          %y_partial = conv_forward %x_moved, %w       : y[*, *, *, *] partial(a)
          %y = all_reduce %y_partial over=a            : y[*, *, *, *]
        backward_data:
          %dx_local = conv_backward_data %dy, %w       : x[*, a, *, *]
          %dx = all_to_all %dx_local dim=N,C over=a    : x[a, *, *, *]
    """)


@pytest.mark.parametrize("virtual_padding", [False, True])
def test_axes_of_one_rank_change_nothing_but_the_grid(virtual_padding: bool) -> None:
    """A schedule is that of the grid without them, where their ranks are the same."""
    several = 0
    for seed in range(draws(150)):
        conv, grid, stored, roles = random_problem(Random(seed), 12)
        made = lower("s", Space(conv, grid, virtual_padding=virtual_padding), stored, roles, bias=conv.bias)
        single = grid.single
        bare = {tensor: layout.without(single) for tensor, layout in stored.items()}
        there = {phase: one.without(single) for phase, one in roles.items()}
        space = Space(conv, grid.bare, virtual_padding=virtual_padding)
        assert replace(made, grid=grid.bare) == lower("s", space, bare, there, bias=conv.bias)
        several += any(a in single for layout in stored.values() for a in layout.used)
    assert several > draws(150) / 10


# ---- all of them


@pytest.mark.parametrize("chunk", range(8))
def test_every_pass_leaves_a_schedule_that_verifies_and_is_done_at_once(chunk: int) -> None:
    for seed in range(chunk * 16, chunk * 16 + 16):
        rng = Random(seed)
        conv, grid, stored, roles = random_problem(rng, 16)
        target = CUDA if seed % 2 else CPU
        space = Space(conv, grid, virtual_padding=target.pads_virtually)
        schedule = lower("s", space, stored, roles, bias=conv.bias)
        held = HoldX(choice="stored" if rng.random() < 0.5 else "gathered")
        for one in (FuseBias(), held, Share(), FuseLayouts(least_part=1, most_boxes=8)):
            verify(schedule, space)
            before = schedule
            schedule = passed(before, space, one, target=target)
            assert (schedule is before) == (schedule == before)
            assert passed(schedule, space, one, target=target) is schedule
        verify(schedule, space)


# ---- the contract


def test_a_pass_says_the_options_that_are_not_the_defaults() -> None:
    passes = (HoldX(), FuseLayouts())
    assert [str(p) for p in passes] == ["hold-x", "fuse-layouts"]
    passes = with_options(passes, "hold-x{choice=stored}")
    passes = with_options(passes, "fuse-layouts{least_part=32 most_boxes=5}")
    assert passes == (HoldX(choice="stored"), FuseLayouts(least_part=32, most_boxes=5))
    assert [str(p) for p in passes] == ["hold-x{choice=stored}", "fuse-layouts{least_part=32 most_boxes=5}"]
    assert with_options(passes, "hold-x")[0] == HoldX(choice="stored")


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("hold-x{choice=never}", "hold-x: choice can't be 'never'", "with gathered or stored"),
        ("fuse-layouts{least_part=-1}", "least_part can't be '-1'", "with a number"),
        ("fuse-layouts{most=1}", "no option 'most'", "least_part, most_boxes"),
        ("share{all=1}", "no option 'all'", "share"),
        ("unshare", "no pass is named 'unshare'", "hold-x, share, fuse-layouts"),
        ("hold-x{", "cannot read the pass 'hold-x{'", "fuse-layouts{"),
    ],
)
def test_options_that_no_pass_has_are_refused(text: str, said: str, hint: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)) as error:
        with_options((HoldX(), Share(), FuseLayouts()), text)
    assert hint in error.value.hint


def test_a_pipeline_tells_what_each_pass_made() -> None:
    before, space = naive("stationary-y", {"F": 2})
    told: list[tuple[str, Schedule | None]] = []
    passes, context = (HoldX(choice="stored"), Share()), Context(space)
    after = run_passes(passes, before, lambda one, s: one.run(s, context), [lambda *stage: told.append(stage)])
    assert [stage for stage, _ in told] == ["hold-x{choice=stored}", "share"]
    assert told[0][1] == passed(before, space, HoldX(choice="stored")) and told[1][1] is after
