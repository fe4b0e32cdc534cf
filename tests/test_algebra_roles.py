"""Roles: what they ask of operands, how groups settle them, and what is refused."""

from __future__ import annotations

from random import Random

import pytest
from generate import named_problem, random_conv, random_grid, random_problem, random_roles

from convgen.algebra.conv import PHASES, Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles, default_nesting, nest, settle_groups
from convgen.algebra.space import Space
from convgen.errors import InputError
from convgen.operations.layer import wanted

SAME = (Spatial("H", 8, 3, 1, 1, 1), Spatial("W", 8, 3, 1, 1, 1))


def texts(layouts: tuple[Layout, ...]) -> list[str]:
    return [str(layout) for layout in layouts]


@pytest.mark.parametrize(
    ("phase", "role", "types"),
    [
        ("forward", "N", ["x[a, *, *, *]", "w[*, *]", "y[a, *, *, *]"]),
        ("forward", "C", ["x[*, a, *, *]", "w[*, a]", "y[*, *, *, *] partial(a)"]),
        ("forward", "F", ["x[*, *, *, *]", "w[a, *]", "y[*, a, *, *]"]),
        ("forward", "H", ["x[*, *, a+(1,1), *]", "w[*, *]", "y[*, *, a, *]"]),
        ("forward", "none", ["x[*, *, *, *]", "w[*, *]", "y[*, *, *, *]"]),
        ("backward_data", "N", ["y[a, *, *, *]", "w[*, *]", "x[a, *, *, *]"]),
        ("backward_data", "C", ["y[*, *, *, *]", "w[*, a]", "x[*, a, *, *]"]),
        ("backward_data", "F", ["y[*, a, *, *]", "w[a, *]", "x[*, *, *, *] partial(a)"]),
        ("backward_data", "W", ["y[*, *, *, a+(1,1)]", "w[*, *]", "x[*, *, *, a]"]),
        ("backward_filter", "N", ["y[a, *, *, *]", "x[a, *, *, *]", "w[*, *] partial(a)"]),
        ("backward_filter", "C", ["y[*, *, *, *]", "x[*, a, *, *]", "w[*, a]"]),
        ("backward_filter", "F", ["y[*, a, *, *]", "x[*, *, *, *]", "w[a, *]"]),
        ("backward_filter", "H", ["y[*, *, a, *]", "x[*, *, a+(1,1), *]", "w[*, *] partial(a)"]),
    ],
)
def test_a_role_asks_of_operands_what_the_table_says(phase: str, role: str, types: list[str]) -> None:
    space = Space(Conv(4, 4, 4, SAME), Grid((("a", 2),)))
    assert texts(wanted(space, phase, nest([("a", role)]))) == types


def test_either_activation_may_be_the_block_in_backward_filter() -> None:
    space = Space(Conv(4, 4, 4, SAME), Grid((("a", 2),)))
    got = wanted(space, "backward_filter", nest([("a", "H")], "input"))
    assert texts(got) == ["y[*, *, a+(1,1), *]", "x[*, *, a, *]", "w[*, *] partial(a)"]


def test_role_g_splits_the_groups_of_all_three() -> None:
    space = Space(Conv(4, 8, 8, SAME, groups=4), Grid((("a", 2),)))
    assert texts(wanted(space, "forward", nest([("a", "G")]))) == ["x[*, a, *, *]", "w[a, *]", "y[*, a, *, *]"]


def test_axes_of_one_role_nest_in_the_order_given() -> None:
    assert str(nest([("b", "C"), ("n", "N"), ("a", "C"), ("z", "none")])) == "N=n C=(b,a)"


def refusal(conv: Conv, pairs: list[tuple[str, str]], grid: dict[str, int]) -> str:
    with pytest.raises(InputError) as caught:
        settle_groups(conv, Grid(tuple(grid.items())), "forward", nest(pairs))
    assert caught.value.path == ("roles", "forward", pairs[-1][0])
    assert caught.value.hint
    return str(caught.value)


def test_channel_roles_need_at_most_one_group_a_rank() -> None:
    text = refusal(Conv(1, 32, 32, SAME, groups=8), [("a", "C")], {"a": 2})
    assert "needs at most one group a rank" in text
    assert "2 ranks, so 4 groups a rank" in text
    assert "role G on a (no communication), or a: 8" in text
    refusal(Conv(1, 32, 32, SAME, groups=8), [("b", "G"), ("a", "F")], {"a": 2, "b": 2})


def test_role_g_needs_groups_to_split() -> None:
    assert "the layer has 1 group" in refusal(Conv(1, 4, 4, SAME), [("a", "G")], {"a": 2})
    assert "at most one group" in refusal(Conv(1, 4, 4, SAME, 2), [("b", "G"), ("a", "G")], {"b": 2, "a": 2})


def test_a_channel_role_that_splits_whole_groups_is_role_g() -> None:
    conv, grid = Conv(1, 8, 8, SAME, groups=2), Grid((("a", 2), ("b", 2)))
    assert str(settle_groups(conv, grid, "forward", nest([("a", "C")]))) == "G=a"
    assert str(settle_groups(conv, grid, "forward", nest([("a", "C"), ("b", "C")]))) == "G=a C=b"
    assert str(settle_groups(conv, grid, "forward", nest([("a", "F"), ("b", "C")]))) == "G=b F=a"
    assert str(settle_groups(conv, grid, "forward", nest([("a", "G"), ("b", "F")]))) == "G=a F=b"
    depthwise = Conv(1, 8, 8, SAME, groups=8)
    assert str(settle_groups(depthwise, Grid((("a", 8),)), "forward", nest([("a", "F")]))) == "G=a"


def test_settling_twice_changes_nothing() -> None:
    for seed in range(300):
        rng = Random(seed)
        conv, grid = random_conv(rng), random_grid(rng)
        for phase in PHASES:
            roles = random_roles(rng, conv, grid, phase)
            assert settle_groups(conv, grid, phase, roles) == roles


def test_each_axis_splits_each_tensor_once_and_is_partial_where_it_splits_none() -> None:
    """A role's axis splits the tensors that have its index; where those are the inputs only, the output is partial."""
    for seed in range(300):
        conv, grid, _, roles = random_problem(Random(seed))
        space = Space(conv, grid)
        for phase in PHASES:
            *inputs, out = wanted(space, phase, roles[phase])
            for axes in (a for _, a in roles[phase].nests):
                for a in axes:
                    in_inputs = [a in t.used for t in inputs]
                    assert any(in_inputs)
                    assert (a in out.partial) == (all(in_inputs) and a not in out.used)
            assert not any(t.partial for t in inputs)
            assert not out.has_window


def test_nesting_follows_the_largest_operand() -> None:
    grid = Grid((("a", 2), ("b", 2)))
    stored = {
        "x": Layout("x", ((), ("b", "a"), (), ())),
        "w": Layout("w", ((), ("a", "b"))),
        "y": Layout("y", ((), (), (), ())),
    }
    big_x, big_w = Conv(8, 8, 8, SAME), Conv(1, 8, 800, SAME)
    pairs = {"a": "C", "b": "C"}
    assert default_nesting(Space(big_x, grid), "forward", pairs, stored) == (("b", "C"), ("a", "C"))
    assert default_nesting(Space(big_w, grid), "forward", pairs, stored) == (("a", "C"), ("b", "C"))
    nowhere = {t: Layout(t, ((),) * len(layout.axes)) for t, layout in stored.items()}
    assert default_nesting(Space(big_x, grid), "forward", pairs, nowhere) == (("a", "C"), ("b", "C"))


def test_named_algorithms_give_every_axis_its_letter() -> None:
    for seed in range(60):
        problem = named_problem(Random(seed))
        for phase in PHASES:
            given = {a: role for role, axes in problem.roles[phase].nests for a in axes}
            for a in problem.grid.names:
                assert given[a] == a or (a in "CF" and given[a] == "G")


def test_roles_print_as_they_are_written() -> None:
    assert str(Roles(())) == "none"
    assert str(nest([("a", "H")], "input")) == "H=a rows=input"
