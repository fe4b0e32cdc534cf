"""From a layer to storage and roles: named, given, and what is searched where something is left open."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest
from generate import random_layout, random_roles

from convgen.algebra.conv import PHASES, Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles, nest
from convgen.algebra.space import Space
from convgen.compiler import Compiled, compile_layer
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.schedule import schedule_cost
from convgen.errors import InputError
from convgen.plan.candidates import Candidates
from convgen.plan.role_search import best_roles
from convgen.plan.roles_only import search_roles
from convgen.plan.terms import Objective, Terms
from convgen.spec.build import layer_from_dict

BASE: dict[str, Any] = {
    "name": "a", "layer": "conv2d", "input": [8, 64, 16, 16], "out_channels": 96, "kernel_size": 3, "padding": 1,
}  # fmt: skip


def compiled(objective: Objective = "seconds", **keys: Any) -> Compiled:
    return compile_layer(layer_from_dict(BASE | keys), objective=objective)


def told(one: Compiled) -> tuple[str, dict[str, str]]:
    stored = " ".join(str(layout) for layout in one.choice.stored.values())
    return stored, {phase: str(roles) for phase, roles in one.choice.roles.items()}


def check_cost(one: Compiled) -> None:
    """What the choice says it costs is what its schedule costs."""
    cost = schedule_cost(one.schedule, Model(one.space, one.machine, one.layer.dtype))
    assert (cost.seconds(), cost.sent_bytes()) == (one.choice.seconds, one.choice.sent_bytes)


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
    check_cost(one)


def test_rows_of_backward_filter_go_by_what_is_held() -> None:
    """x's window is there from forward if x is held gathered; if not, dy's window is there from backward-data."""
    common: dict[str, Any] = {"algorithm": "spatial", "grid": {"H": 4}}
    assert told(compiled(**common))[1]["backward_filter"] == "H=H"
    stored = compiled(**common, options={"hold_x": "stored"})
    assert told(stored)[1]["backward_filter"] == "H=H rows=input"
    assert [s.kind for s in stored.schedule.backward_filter if hasattr(s, "kind")] == ["all_reduce"]
    check_cost(stored)


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
    check_cost(one)


def test_missing_roles_are_searched_around_the_given() -> None:
    one = compiled(grid={"d": 2, "c": 2}, distribution=DISTRIBUTION, roles={"forward": {"d": "H"}})
    assert told(one)[1]["forward"] == "H=d", "an axis not listed has none"
    assert one.choice.label == "given, roles searched"
    check_cost(one)
    free = compiled(grid={"d": 2, "c": 2}, distribution=DISTRIBUTION)
    assert free.choice.seconds <= one.choice.seconds
    check_cost(free)


def test_given_storage_may_leave_ranks_empty() -> None:
    """3 samples over 8 ranks: roles are searched all the same, and none of them leaves a rank idle."""
    distribution = {"x": ["n", "*", "*", "*"], "w": ["*", "*"], "y": ["n", "*", "*", "*"]}
    one = compiled(input=[3, 64, 16, 16], grid={"n": 8}, distribution=distribution)
    assert all(not roles.axes("N") for roles in one.choice.roles.values())
    check_cost(one)


def test_axes_of_one_rank_are_left_alone() -> None:
    distribution = {"x": ["d", "one", "*", "*"], "w": ["one", "*"], "y": ["d", "one", "*", "*"]}
    one = compiled(grid={"d": 2, "one": 1}, distribution=distribution, roles={"forward": {"d": "N", "one": "F"}})
    assert told(one)[0] == "x[d, one, *, *] w[one, *] y[d, one, *, *]"
    check_cost(one)


def test_impossible_roles_are_refused() -> None:
    with pytest.raises(InputError, match="needs at most one group a rank"):
        compiled(groups=8, grid={"d": 2, "c": 2}, distribution=DISTRIBUTION, roles={"forward": {"c": "C"}})


@pytest.mark.parametrize("objective", ["seconds", "bytes"])
def test_role_search_is_exact(objective: Objective) -> None:
    """Against every triple of roles, on random storage; sharing makes the phases depend on each other."""
    rng = Random(4)
    for hold_gathered, bias in product((True, False), repeat=2):
        conv = Conv(4, 4, 4, (Spatial("W", 8, 3, rng.choice((1, 2)), 1, 1),), bias=bias)
        grid = Grid((("a", 2), ("b", rng.choice((2, 3)))))
        space = Space(conv, grid)
        terms = Terms(Model(space, load_machine("cuda"), "float32"), objective, hold_gathered=hold_gathered, bias=bias)
        candidates = Candidates(space)
        stored = {t: random_layout(rng, conv, grid, t) for t in ("x", "w", "y")}
        choices = {
            phase: rng.sample(all_, min(14, len(all_)))
            for phase, all_ in ((p, candidates.all_roles(p, stored)) for p in PHASES)
        }
        cost, roles = best_roles(terms, stored, choices)
        triples = (dict(zip(PHASES, three, strict=True)) for three in product(*choices.values()))
        assert cost == min(terms.total(stored, triple) for triple in triples)
        assert cost == terms.total(stored, roles)


def test_role_search_of_many_axes_ends() -> None:
    """Six axes have 6^6 roles a phase: found axis by axis, no worse than no roles at all or those of the storage."""
    conv = Conv(64, 64, 64, tuple(Spatial(n, 16, 3, 1, 1, 1) for n in "HW"))
    grid = Grid(tuple((a, 2) for a in "abcdef"))
    space = Space(conv, grid)
    terms = Terms(Model(space, load_machine("cpu"), "float32"), "seconds", hold_gathered=True, bias=False)
    stored = {
        "x": Layout("x", (("a", "b", "c"), ("d", "e", "f"), (), ())),
        "w": Layout("w", ((), ("d", "e", "f"))),
        "y": Layout("y", (("a", "b", "c"), ("d", "e", "f"), (), ())),
    }
    cost, roles = search_roles(terms, Candidates(space), stored, {})
    assert cost == terms.total(stored, roles)
    own = nest([(a, "N") for a in "abc"] + [(a, "C") for a in "def"])
    assert cost <= terms.total(stored, dict.fromkeys(PHASES, own))
    assert cost <= terms.total(stored, dict.fromkeys(PHASES, Roles(())))


def test_random_explicit_layers_cost_what_they_say() -> None:
    rng = Random(8)
    conv = {"input": [3, 6, 7, 5], "out_channels": 9, "groups": 3, "bias": True}
    for _ in range(12):
        layer = layer_from_dict(BASE | conv | {"grid": {"p": 2, "q": 3}})
        grid = layer.grid
        given = {t: [list(a) or "*" for a in random_layout(rng, layer.conv, grid, t).axes] for t in ("x", "w", "y")}
        phase = rng.choice(PHASES)
        roles = {a: r for r, axes in random_roles(rng, layer.conv, grid, phase).nests for a in axes}
        check_cost(compiled(**conv, grid={"p": 2, "q": 3}, distribution=given, roles={phase: roles}))
