"""From a layer to storage and roles: named, given, and what is searched where something is left open."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from generate import random_layout, random_roles

from convgen.algebra.conv import PHASES
from convgen.compiler import Compiled, compile_layer
from convgen.errors import InputError
from convgen.spec.build import layer_from_dict

BASE: dict[str, Any] = {
    "name": "a", "layer": "conv2d", "input": [8, 64, 16, 16], "out_channels": 96, "kernel_size": 3, "padding": 1,
}  # fmt: skip


def compiled(**keys: Any) -> Compiled:
    return compile_layer(layer_from_dict(BASE | keys))


def told(one: Compiled) -> tuple[str, dict[str, str]]:
    stored = " ".join(str(layout) for layout in one.choice.stored.values())
    return stored, {phase: str(roles) for phase, roles in one.choice.roles.items()}


def seconds(one: Compiled) -> float:
    return one.cost.total().seconds


@pytest.mark.parametrize(
    ("algorithm", "grid", "stored", "roles"),
    [
        ("sample", {"N": 4}, "x[N, *, *, *] w[*, *] y[N, *, *, *]", "N=N"),
        ("spatial", {"H": 2, "W": 2}, "x[*, *, H, W] w[*, *] y[*, *, H, W]", "H=H W=W"),
        ("stationary-x", {"N": 2, "C": 2}, "x[N, C, *, *] w[*, C] y[N, C, *, *]", "N=N C=C"),
        ("stationary-y", {"N": 2, "F": 2}, "x[N, F, *, *] w[F, *] y[N, F, *, *]", "N=N F=F"),
        ("stationary-w", {"C": 2, "F": 2}, "x[*, (C,F), *, *] w[F, C] y[*, (F,C), *, *]", "C=C F=F"),
        ("integrated", {"N": 2, "F": 2}, "x[N, *, *, *] w[F, *] y[N, *, *, *]", "N=N F=F"),
        ("sample", {"N": 2, "G": 1}, "x[N, G, *, *] w[G, *] y[N, G, *, *]", None),
    ],
)
def test_named_algorithms(algorithm: str, grid: dict[str, int], stored: str, roles: str | None) -> None:
    one = compiled(algorithm=algorithm, grid=grid)
    assert told(one)[0] == stored
    if roles is not None:
        assert told(one)[1] == dict.fromkeys(PHASES, roles)
    assert one.choice.label == algorithm


def test_rows_of_backward_filter_go_by_what_is_held() -> None:
    """x's window is there from forward if x is held gathered; if not, dy's window is there from backward-data."""
    common: dict[str, Any] = {"algorithm": "spatial", "grid": {"H": 4}}
    assert told(compiled(**common))[1]["backward_filter"] == "H=H"
    stored = compiled(**common, options={"hold_x": "stored"})
    assert told(stored)[1]["backward_filter"] == "H=H rows=input"
    assert [s.kind for s in stored.schedule.backward_filter if hasattr(s, "kind")] == ["all_reduce"]


def test_rows_stay_where_nothing_is_gained() -> None:
    for kernel, padding in ((1, 0), (3, 1)):
        one = compiled(algorithm="spatial", grid={"N": 4}, kernel_size=kernel, padding=padding)
        assert one.choice.roles["backward_filter"].rows == "output"


DISTRIBUTION = {"x": ["d", "c", "*", "*"], "w": ["*", "c"], "y": ["d", "c", "*", "*"]}


def test_given_roles_are_taken_as_written() -> None:
    roles = {
        "forward": {"c": "C", "d": "N"},
        "backward_data": {"c": "N", "d": "N"},
        "backward_filter": {"d": "N", "c": "C"},
    }
    one = compiled(grid={"d": 2, "c": 2}, distribution=DISTRIBUTION, roles=roles)
    assert told(one)[1] == {"forward": "N=d C=c", "backward_data": "N=(c,d)", "backward_filter": "N=d C=c"}
    assert one.choice.label == "given"


def test_missing_roles_are_searched_around_the_given() -> None:
    one = compiled(grid={"d": 2, "c": 2}, distribution=DISTRIBUTION, roles={"forward": {"d": "H"}})
    assert told(one)[1]["forward"] == "H=d", "an axis not listed has none"
    assert one.choice.label == "given, roles searched"
    free = compiled(grid={"d": 2, "c": 2}, distribution=DISTRIBUTION)
    assert seconds(free) <= seconds(one)


def test_given_storage_may_leave_ranks_empty() -> None:
    """3 samples over 8 ranks: roles are searched all the same, and none of them leaves a rank idle."""
    distribution = {"x": ["n", "*", "*", "*"], "w": ["*", "*"], "y": ["n", "*", "*", "*"]}
    one = compiled(input=[3, 64, 16, 16], grid={"n": 8}, distribution=distribution)
    assert all(not roles.axes("N") for roles in one.choice.roles.values())


def test_axes_of_one_rank_are_left_alone() -> None:
    distribution = {"x": ["d", "one", "*", "*"], "w": ["one", "*"], "y": ["d", "one", "*", "*"]}
    one = compiled(grid={"d": 2, "one": 1}, distribution=distribution, roles={"forward": {"d": "N", "one": "F"}})
    assert told(one)[0] == "x[d, one, *, *] w[one, *] y[d, one, *, *]"


def test_impossible_roles_are_refused() -> None:
    with pytest.raises(InputError, match="needs at most one group a rank"):
        compiled(groups=8, grid={"d": 2, "c": 2}, distribution=DISTRIBUTION, roles={"forward": {"c": "C"}})


def test_searched_roles_take_no_more_than_written_ones() -> None:
    """On random storage: all roles searched, beside one phase's and all of them written."""
    rng = Random(8)
    conv = {"input": [3, 6, 7, 5], "out_channels": 9, "groups": 3, "bias": True, "grid": {"p": 2, "q": 3}}
    for _ in range(8):
        layer = layer_from_dict(BASE | conv)
        given = {
            t: [list(a) or "*" for a in random_layout(rng, layer.conv, layer.grid, t).axes] for t in ("x", "w", "y")
        }
        written = {
            phase: {a: r for r, axes in random_roles(rng, layer.conv, layer.grid, phase).nests for a in axes}
            for phase in PHASES
        }
        phase = rng.choice(PHASES)
        all_, one, none = (
            seconds(compiled(**conv, distribution=given, **({"roles": roles} if roles else {})))
            for roles in (written, {phase: written[phase]}, {})
        )
        assert none <= one <= all_
