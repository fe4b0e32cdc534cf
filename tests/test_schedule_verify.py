"""The verifier: a valid schedule, and beside it its smallest invalid neighbours."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from generate import algorithm_problem, random_problem
from oracle import Oracle, random_tensors

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout, Window
from convgen.algebra.redistribute import COLLECTIVES
from convgen.algebra.space import Space
from convgen.errors import InputError, InternalError
from convgen.operations.layer import ROWS_OF_X
from convgen.program.build import lower
from convgen.program.nodes import PHASES, Compute, Convert, Schedule, Step, is_convolution
from convgen.program.text import parse
from convgen.program.verify import CHECKS, Facts, check_every_read_is_local, check_sent_is_received, verify

HALO = """
schedule halo on grid(n=2, h=2) {
  stored: x[n, *, h, *] w[*, *] y[n, *, h, *]
  roles forward: N=n H=h
  roles backward_data: N=n H=h
  roles backward_filter: N=n H=h
  forward:
    %x_halo = exchange %x dim=H over=h : x[n, *, h+(1,1), *]
    %y = conv_forward %x_halo, %w : y[n, *, h, *]
  backward_data:
    %dy_halo = exchange %dy dim=H over=h : y[n, *, h+(1,1), *]
    %dx = conv_backward_data %dy_halo, %w : x[n, *, h, *]
  backward_filter:
    %dw_partial = conv_backward_filter %dy, %x_halo : w[*, *] partial(n,h)
    %dw = all_reduce %dw_partial over=n,h : w[*, *]
}
"""
STATIONARY_W = """
schedule w on grid(n=2, c=2, f=2) {
  stored: x[n, (c,f), *, *] w[f, c] y[n, (f,c), *, *] bias[(f,c)]
  roles forward: N=n C=c F=f
  roles backward_data: N=n C=c F=f
  roles backward_filter: N=n C=c F=f
  forward:
    %x_gathered = all_gather %x dim=C over=f : x[n, c, *, *]
    %y_partial = conv_forward %x_gathered, %w : y[n, f, *, *] partial(c)
    %y_summed = reduce_scatter %y_partial dim=F over=c : y[n, (f,c), *, *]
    %y = add_bias %y_summed, %bias : y[n, (f,c), *, *]
  backward_data:
    %dy_gathered = all_gather %dy dim=F over=c : y[n, f, *, *]
    %dx_partial = conv_backward_data %dy_gathered, %w : x[n, c, *, *] partial(f)
    %dx = reduce_scatter %dx_partial dim=C over=f : x[n, (c,f), *, *]
  backward_filter:
    %dw_partial = conv_backward_filter %dy_gathered, %x_gathered : w[f, c] partial(n)
    %dw = all_reduce %dw_partial over=n : w[f, c]
    %db_partial = sum_bias %dy : bias[(f,c)] partial(n)
    %db = all_reduce %db_partial over=n : bias[(f,c)]
}
"""
MOVED = """
schedule moved on grid(a=2, b=2) {
  stored: x[*, (a,b), *, *] w[*, *] y[*, a, *, *]
  roles forward: N=a
  roles backward_data: N=a
  roles backward_filter: F=a C=b
  forward:
    %x_moved = exchange %x dim=N,C over=a,b : x[a, *, *, *]
    %y_local = conv_forward %x_moved, %w : y[a, *, *, *]
    %y = all_to_all %y_local dim=N,F over=a : y[*, a, *, *]
  backward_data:
    %dy_moved = all_to_all %dy dim=N,F over=a : y[a, *, *, *]
    %dx_local = conv_backward_data %dy_moved, %w : x[a, *, *, *]
    %dx_moved = all_to_all %dx_local dim=N,C over=a : x[*, a, *, *]
    %dx = slice %dx_moved dim=C : x[*, (a,b), *, *]
  backward_filter:
    %x_exchanged = exchange %x dim=C over=a,b : x[*, b, *, *]
    %dw_local = conv_backward_filter %dy, %x_exchanged : w[a, b]
    %dw = all_gather %dw_local dim=F,C over=a,b : w[*, *]
}
"""
VALID = {"HALO": HALO, "STATIONARY_W": STATIONARY_W, "MOVED": MOVED}
ROWS = tuple(Spatial(name, 8, 3, 1, 1, 1) for name in "HW")
LAYER = Conv(4, 8, 8, ROWS)
WITH_BIAS = replace(LAYER, bias=True)


def space_of(schedule: Schedule) -> Space:
    return Space(WITH_BIAS if "bias" in dict(schedule.stored) else LAYER, schedule.grid)


def refused(schedule: Schedule, space: Space) -> str:
    with pytest.raises(InternalError) as caught:
        verify(schedule, space)
    return str(caught.value)


@pytest.mark.parametrize("text", [HALO, STATIONARY_W, MOVED])
def test_valid_schedules_verify(text: str) -> None:
    schedule = parse(text)
    space = space_of(schedule)
    verify(schedule, space)
    oracle = Oracle(space.conv, space.grid)
    oracle.run(schedule, *random_tensors(oracle, 1))


# A schedule, the check that refuses it after a change, and the change.
NEIGHBOURS = """
# names
HALO check_names_are_defined_once
- %dx =
+ %x_halo =
HALO check_names_are_defined_once
- %y =
+ %w =
HALO check_every_read_is_defined
- conv_forward %x_halo
+ conv_forward %x_hallo
HALO check_every_read_is_defined
- conv_forward %x_halo
+ conv_forward %dy
HALO check_every_read_is_defined
- %y = conv_forward %x_halo, %w
+ %y = conv_forward %x_halo, %w, %bias
HALO check_every_read_is_defined
- conv_backward_data %dy_halo
+ conv_backward_data %dw_partial
HALO check_every_value_is_read
- conv_backward_data %dy_halo
+ conv_backward_data %dy
# types
HALO check_types_are_layouts
- x[n, *, h+(1,1), *]
+ x[n, *, h+(1,1)]
HALO check_types_are_layouts
- w[*, *] partial(n,h)
+ w[*, q] partial(n,h)
HALO check_types_are_layouts
- w[*, *] partial(n,h)
+ w[*, h] partial(n,h)
HALO check_types_are_layouts
- x[n, *, h+(1,1), *]
+ x[n, *+(1,1), h, *]
HALO check_types_are_layouts
- stored: x[n, *, h, *]
+ stored: x[n, *, h+(1,1), *]
STATIONARY_W check_types_are_layouts
- bias[(f,c)]
+ bias[f]
# what the head says
STATIONARY_W check_every_tensor_is_stored
- y[n, (f,c), *, *] bias[(f,c)]
+ y[n, (f,c), *, *]
HALO check_every_tensor_is_stored
- x[n, *, h, *] w[*, *]
+ w[*, *] x[n, *, h, *]
HALO check_roles_are_as_computed
- roles forward: N=n H=h
+ roles forward: N=n
HALO check_roles_are_as_computed
- roles backward_data: N=n H=h
+ roles backward_data: N=h H=n
HALO check_roles_are_as_computed
- roles backward_filter: N=n H=h
+ roles backward_filter: N=n H=h rows=input
HALO check_roles_are_as_computed
- roles forward: N=n H=h
+ roles forward: N=n D=h
STATIONARY_W check_roles_are_as_computed
- roles forward: N=n C=c F=f
+ roles forward: N=n C=f F=c
HALO check_held_x_is_as_said
- roles backward_filter: N=n H=h
+ roles backward_filter: N=n H=h
+ hold_x: stored
# results
HALO check_every_value_is_read
- %dx = conv_backward_data %dy_halo, %w : x[n, *, h, *]
HALO check_results_are_stored
- %y = conv_forward %x_halo, %w : y[n, *, h, *]
HALO check_results_are_stored
- , %w : y[n, *, h, *]
+ , %w : y[n, *, *, *]
HALO check_results_are_stored
- %dw = all_reduce %dw_partial over=n,h : w[*, *]
+ %dw = all_reduce %dw_partial over=n : w[*, *] partial(h)
STATIONARY_W check_every_value_is_read
- %db = all_reduce %db_partial over=n : bias[(f,c)]
# operands
HALO check_steps_take_their_operands
- conv_forward %x_halo, %w
+ conv_forward %w, %x_halo
HALO check_steps_take_their_operands
- conv_backward_filter %dy, %x_halo
+ conv_backward_filter %x_halo, %dy
HALO check_steps_take_their_operands
- conv_forward %x_halo, %w
+ conv_forward %x_halo, %w rows=input
HALO check_steps_take_their_operands
- %dy_halo = exchange %dy
+ %dy_halo = exchange %x
MOVED check_computations_make_blocks
- conv_forward %x_moved, %w : y[a, *, *, *]
+ conv_forward %x_moved, %w : y[a, *, *+(1,1), *]
# addends
STATIONARY_W check_no_partial_is_read_whole
- partial(c)
- %y_summed = reduce_scatter
+ partial(c)
+ %y_summed = all_gather
STATIONARY_W fine
- %y = add_bias %y_summed, %bias : y[n, (f,c), *, *]
+ %y_also = slice %y_summed : y[n, (f,c), *, *]
+ %y = add_bias %y_also, %bias : y[n, (f,c), *, *]
# windows: an exchange one row short is refused, one row long as well
HALO check_windows_are_needed
- x[n, *, h+(1,1), *]
+ x[n, *, h+(1,0), *]
HALO check_windows_are_needed
- x[n, *, h+(1,1), *]
+ x[n, *, h+(1,2), *]
HALO check_windows_are_needed
- y[n, *, h+(1,1), *]
+ y[n, *, h+(0,1), *]
# kinds
HALO check_conversion_is_typed
- exchange %x dim=H over=h
+ slice %x dim=H
HALO check_conversion_is_typed
- exchange %x dim=H over=h
+ all_gather %x dim=H over=h
HALO check_conversion_is_typed
- exchange %x dim=H over=h
+ all_to_all %x dim=H over=h
STATIONARY_W check_conversion_is_typed
- %dx = reduce_scatter
+ %dx = all_reduce
STATIONARY_W check_conversion_is_typed
- %dw = all_reduce
+ %dw = reduce_scatter
STATIONARY_W check_conversion_is_typed
- all_gather %x dim=C over=f : x[n, c, *, *]
+ all_gather %x dim=C over=c : x[n, f, *, *]
MOVED check_conversion_is_typed
- %y = all_to_all %y_local dim=N,F over=a : y[*, a, *, *]
+ %y_summed = all_to_all %y_local dim=N,F over=a : y[*, a, *, *] partial(b)
+ %y = all_reduce %y_summed over=b : y[*, a, *, *]
MOVED check_conversion_is_typed
- all_gather %dw_local
+ all_reduce %dw_local
MOVED check_conversion_is_typed
- exchange %x dim=C over=a,b : x[*, b, *, *]
+ all_to_all %x dim=C over=a,b : x[*, b, *, *]
# groups
HALO check_group_is_exact
- exchange %x dim=H over=h
+ exchange %x dim=H over=n,h
HALO check_group_is_exact
- exchange %x dim=H over=h
+ exchange %x dim=H over=n
HALO check_group_is_exact
- exchange %x dim=H over=h
+ exchange %x dim=H
HALO check_group_is_exact
- over=n,h : w
+ over=n : w
HALO check_group_is_exact
- over=n,h : w
+ over=h,n : w
STATIONARY_W check_group_is_exact
- all_gather %x dim=C over=f
+ all_gather %x dim=C over=c,f
STATIONARY_W check_group_is_exact
- all_gather %x dim=C over=f
+ all_gather %x dim=C over=c
STATIONARY_W check_group_is_exact
- reduce_scatter %dx_partial dim=C over=f
+ reduce_scatter %dx_partial dim=C over=c
MOVED check_group_is_exact
- all_to_all %dy dim=N,F over=a
+ all_to_all %dy dim=N,F over=b
MOVED check_group_is_exact
- exchange %x dim=C over=a,b
+ exchange %x dim=C over=a
MOVED check_group_is_exact
- slice %dx_moved dim=C
+ slice %dx_moved dim=C over=b
# operands that do not match
STATIONARY_W check_operands_match
- all_gather %x dim=C over=f : x[n, c, *, *]
+ all_gather %x dim=C over=c,f : x[n, *, *, *]
STATIONARY_W check_operands_match
- all_gather %dy dim=F over=c : y[n, f, *, *]
+ all_gather %dy dim=F over=c,f : y[n, *, *, *]
MOVED check_operands_match
- exchange %x dim=N,C over=a,b : x[a, *, *, *]
+ exchange %x dim=N,C over=a,b : x[b, *, *, *]
HALO check_rows_are_at_hand
- conv_forward %x_halo, %w : y[n, *, h, *]
+ conv_forward %x, %w : y[n, *, h, *]
# terms
HALO check_every_term_is_summed_once
- w[*, *] partial(n,h)
- %dw = all_reduce %dw_partial over=n,h
+ w[*, *] partial(n)
+ %dw = all_reduce %dw_partial over=n
STATIONARY_W check_every_term_is_summed_once
- w[f, c] partial(n)
- %dw = all_reduce %dw_partial over=n : w[f, c]
+ w[f, c]
+ %dw = slice %dw_partial : w[f, c]
# the bias
STATIONARY_W check_bias_is_added_once
- %y = add_bias %y_summed, %bias : y[n, (f,c), *, *]
+ %y = slice %y_summed : y[n, (f,c), *, *]
STATIONARY_W check_bias_is_added_once
- %y = add_bias %y_summed, %bias
+ %y_1 = add_bias %y_summed, %bias : y[n, (f,c), *, *]
+ %y = add_bias %y_1, %bias
STATIONARY_W check_bias_is_added_once
- conv_forward %x_gathered, %w
+ conv_forward %x_gathered, %w, %bias
STATIONARY_W check_bias_lies_as_what_it_is_added_to
- %y = add_bias %y_summed, %bias : y[n, (f,c), *, *]
+ %y_more = slice %y_summed dim=H : y[n, (f,c), *+(1,1), *]
+ %y = add_bias %y_more, %bias : y[n, (f,c), *, *]
STATIONARY_W check_conversion_is_typed
- sum_bias %dy : bias[(f,c)] partial(n)
+ sum_bias %dy : bias[(f,c)]
STATIONARY_W check_operands_match
- %db_partial = sum_bias %dy :
+ %db_partial = sum_bias %dy_gathered :
"""


def neighbours() -> list[tuple[str, str, str, str]]:
    """(schedule, check, text before, text after), a case for every line that names a schedule."""
    cases: list[tuple[str, str, list[str], list[str]]] = []
    for line in NEIGHBOURS.strip().splitlines():
        if line[0] in "-+":
            cases[-1][2 if line[0] == "-" else 3].append(line[2:])
        elif line[0] != "#":
            cases.append((*line.split(), [], []))
    return [(name, check, "\n    ".join(old), "\n    ".join(new)) for name, check, old, new in cases]


@pytest.mark.parametrize(("name", "check", "old", "new"), neighbours())
def test_the_smallest_invalid_neighbours(name: str, check: str, old: str, new: str) -> None:
    text = VALID[name]
    assert old in text
    schedule, space = parse(text.replace(old, new, 1)), space_of(parse(text))
    if check == "fine":
        verify(schedule, space)
    else:
        assert f": {check}\n" in refused(schedule, space)


def test_the_line_and_the_numbers_are_told() -> None:
    text = refused(parse(HALO.replace("h+(1,1), *]\n    %y", "h+(2,1), *]\n    %y")), Space(LAYER, parse(HALO).grid))
    assert text == (
        "schedule halo, 4 samples: check_windows_are_needed\n"
        "  %x_halo = exchange %x dim=H over=h : x[n, *, h+(2,1), *]\n"
        "  on H +(1,1) rows are needed, +(2,1) are wanted"
    )
    schedule = parse(STATIONARY_W.replace("all_gather %x dim=C over=f", "slice %x dim=C"))
    assert "rank 0 misses 256 elements" in refused(schedule, space_of(schedule))


def faults(check: Callable[[Facts], Iterator[tuple[Step | None, str]]], schedule: Schedule) -> list[str]:
    """What one check has to say, whatever the checks before it say."""
    return [text for _, text in check(Facts(schedule, space_of(schedule)))]


def test_a_read_that_is_not_local_is_told_by_rank() -> None:
    """The checks of index sets stand by themselves: what types would hide, numbers show."""
    assert faults(check_every_read_is_local, parse(HALO.replace("over=h : x[n", "over=n : x[n"))) == [
        "rank 0 needs 640 elements, owns 512 of them and receives 0"
    ]
    short = MOVED.replace("exchange %x dim=C over=a,b", "exchange %x dim=C over=b")
    assert faults(check_every_read_is_local, parse(short)) == [
        "rank 1 needs 1024 elements, owns 0 of them and receives 0"
    ]


def test_what_is_sent_and_what_is_taken_are_compared() -> None:
    twice = STATIONARY_W.replace("dim=F over=c : y[n, (f,c), *, *]", "dim=F over=c : y[n, f, *, *]", 1)
    assert faults(check_sent_is_received, parse(twice)) == [
        "rank 0 has 512 elements to send or keep, of which the group takes 1024"
    ]
    less = STATIONARY_W.replace("over=f : x[n, c, *, *]", "over=f : x[n, (c,f), *, *]")
    assert faults(check_sent_is_received, parse(less)) == [
        "rank 0 has 256 elements for rank 1, which takes 0",
    ]
    other = HALO.replace("over=n,h : w[*, *]", "over=n,h : w[*, h]")
    assert faults(check_sent_is_received, parse(other)) == ["rank 0 has 576 elements for rank 0, which takes 288"]


def test_every_check_refuses_something_here() -> None:
    elsewhere = {
        "check_every_read_is_local",
        "check_sent_is_received",
        "check_one_padding_fits",
        "check_forms_are_read_as_such",  # test_kernels_parts.py
    }
    assert {check for _, check, _, _ in neighbours()} - {"fine"} | elsewhere == {c.__name__ for c in CHECKS}


def test_another_grid_is_refused() -> None:
    schedule = parse(HALO)
    assert "its index space on grid(n=4)" in refused(schedule, Space(LAYER, Grid((("n", 4),))))


def test_blocks_without_their_window_are_refused() -> None:
    schedule = parse(HALO)
    x = schedule.types()["x"]
    halo = schedule.forward[0]
    bare = replace(schedule, forward=(replace(halo, kind="slice", over=(), type=x), *schedule.forward[1:]))
    assert "check_rows_are_at_hand" in refused(bare, space_of(bare))
    assert "rank 0 needs rows [0, 5) on H, it has [0, 4)" in refused(bare, space_of(bare))


def test_an_exchange_of_rows_that_no_rank_needs_is_fine() -> None:
    """Every product of D is with a row of padding, so nothing travels, over whichever axes."""
    conv, grid, stored, roles = random_problem(Random(5183), transposed=True)
    space = Space(conv, grid)
    schedule = lower("s", space, stored, roles, bias=conv.bias)
    assert any(step.over and not travel.need.any() for step, travel in Facts(schedule, space).conversions)
    verify(schedule, space)


def test_padding_that_differs_on_both_sides_needs_a_frame() -> None:
    """An unsplit dimension with more padding above than ATen adds is refused unless x has a window on it."""
    assert "check_one_padding_fits" in refused_without_a_window("sample", Spatial("W", 8, 3, 1, 0, 2), "N", (0, 2))


def refused_without_a_window(algorithm: str, rows: Spatial, axis: str, padding: tuple[int, int]) -> str:
    """Of two ranks along an axis, where x lies without the window that it wants."""
    conv = Conv(2, 2, 2, (rows,))
    problem = algorithm_problem(algorithm, conv, Grid(((axis, 2),)))
    space = Space(conv, problem.grid)
    schedule = lower("s", space, problem.stored, problem.roles)
    verify(schedule, space)
    types = schedule.types()
    assert types["x_slice"].windows[2] == Window(*padding)
    first = replace(schedule.forward[0], type=types["x"])
    return refused(replace(schedule, forward=(first, *schedule.forward[1:])), space)


def test_a_block_without_a_window_is_not_padded() -> None:
    """All rows on one of two ranks: one padding would fit them, and a module pads no block."""
    said = refused_without_a_window("spatial", Spatial("W", 1, 3, 3, 1, 2), "W", (1, 1))
    assert "check_one_padding_fits" in said and "rank 0 wants padding (1, 1) on W" in said


def test_rows_split_on_one_side_only_are_refused() -> None:
    """backward_filter takes its blocks from dy; said to take them from x, it would sum terms of the window twice."""
    schedule = parse(HALO.replace("conv_backward_filter %dy, %x_halo", "conv_backward_filter %dy, %x_halo rows=input"))
    assert "check_rows_are_at_hand" in refused(schedule, space_of(schedule))


def mutate(rng: Random, schedule: Schedule, layouts: list[Layout]) -> Schedule:
    """One field of one step changed."""
    phase = rng.choice([p for p in PHASES if schedule.section(p)])
    section = list(schedule.section(phase))
    i = rng.randrange(len(section))
    step = section[i]
    change: dict[str, Any] = {}
    names = schedule.grid.names
    types = schedule.types()
    match rng.choice(("type", "partial", "windows", "over", "kind", "source", "rows", "axes")):
        case "type":
            change["type"] = rng.choice([t for t in layouts if t.tensor == step.type.tensor])
        case "partial":
            change["type"] = replace(step.type, partial=tuple(a for a in names if rng.random() < 0.4))
        case "windows":
            change["type"] = replace(step.type, windows=())
        case "axes":
            axes = list(step.type.axes)
            a, b = rng.randrange(len(axes)), rng.randrange(len(axes))
            axes[a], axes[b] = axes[b], axes[a]
            change["type"] = replace(step.type, axes=tuple(axes))
        case "over" if isinstance(step, Convert):
            change["over"] = tuple(a for a in names if rng.random() < 0.5)
        case "kind" if isinstance(step, Convert):
            change["kind"] = rng.choice(("slice", *COLLECTIVES))
        case "source":
            same = [v for v, t in types.items() if t.tensor == types[_source(step)].tensor]
            value = rng.choice(same)
            change = {"inputs": (value, *step.inputs[1:])} if isinstance(step, Compute) else {"source": value}
        case "rows" if is_convolution(step):
            change["way"] = "" if step.way else ROWS_OF_X
        case _:
            del section[i]
            section = [s if not _reads(s, step.result) else _rewired(s, step) for s in section]
            return replace(schedule, **{phase: tuple(section)})
    section[i] = replace(step, **change)
    return replace(schedule, **{phase: tuple(section)})


def _source(step: Step) -> str:
    return step.inputs[0] if isinstance(step, Compute) else step.source


def _reads(step: Step, value: str) -> bool:
    return value in (step.inputs if isinstance(step, Compute) else (step.source,))


def _rewired(step: Step, gone: Step) -> Step:
    """The step reading what the one that is gone had read."""
    if isinstance(step, Compute):
        return replace(step, inputs=tuple(_source(gone) if v == gone.result else v for v in step.inputs))
    return replace(step, source=_source(gone))


def test_what_verifies_is_right() -> None:
    """Random changes of random schedules: what the verifier lets pass gives one device's results, on every rank."""
    outcomes = Counter[str]()
    for seed in range(150):
        rng = Random(seed)
        conv, grid, stored, roles = random_problem(rng)
        space = Space(conv, grid)
        schedule = lower("s", space, stored, roles, bias=conv.bias)
        layouts = list(schedule.types().values())
        oracle: Oracle | None = None
        for _ in range(8):
            changed = mutate(rng, schedule, layouts)
            if changed == schedule:
                continue
            try:
                verify(changed, space)
            except InternalError as error:
                outcomes[str(error).split("check_")[1].split()[0]] += 1
                continue
            outcomes["right"] += 1
            oracle = oracle or Oracle(conv, grid)
            oracle.run(changed, *random_tensors(oracle, seed))
    assert outcomes["right"] < 0.3 * outcomes.total(), outcomes
    assert len(outcomes) >= 10, outcomes


def test_damaged_text_is_verified_or_refused() -> None:
    rng = Random(6)
    seen = Counter[str]()
    for _ in range(800):
        text = list(rng.choice((HALO, STATIONARY_W, MOVED)))
        i = rng.randrange(len(text))
        text[i : i + 1] = rng.choice(([], [text[i]] * 2, [rng.choice("%:=()[]{},+* acfhnw12xy\n")]))
        with suppress(InputError):
            schedule = parse("".join(text))
            try:
                verify(schedule, space_of(schedule))
                seen["verified"] += 1
            except InternalError:
                seen["refused"] += 1
    assert min(seen.values()) > 50


@pytest.mark.parametrize("ranks", [{"N": 2, "H": 2, "W": 2, "C": 2}, {"N": 2, "H": 2, "C": 2, "F": 2}], ids=str)
def test_it_is_quick(ranks: dict[str, int]) -> None:
    """Run between passes of every compile: x"""
    conv = Conv(32, 64, 64, tuple(Spatial(name, 56, 3, 1, 1, 1) for name in "HW"), bias=True)
    problem = algorithm_problem("stationary-w", conv, Grid(tuple(ranks.items())))
    space = Space(conv, problem.grid)
    schedule = lower("s", space, problem.stored, problem.roles, bias=True)
    verify(schedule, space)  # what is made once
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    try:
        verify(schedule, space)
    finally:
        sys.setprofile(None)
    assert calls["call"] + calls["c_call"] < 15_000


def test_a_bias_added_on_a_partial_is_refused() -> None:
    schedule = parse(STATIONARY_W)
    gathered, conv, scatter, _ = schedule.forward
    added = Compute(result="y_added", type=conv.type, operation="add_bias", inputs=(conv.result, "bias"))
    bad = replace(schedule, forward=(gathered, conv, added, replace(scatter, source="y_added", result="y")))
    assert "check_no_partial_is_read_whole" in refused(bad, space_of(schedule))
