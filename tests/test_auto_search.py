"""`algorithm: auto`: never worse than a named algorithm, optimal where that can be checked, the same every time."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from random import Random

import pytest
from generate import random_conv

from convgen.algebra.conv import PHASES, TENSORS, Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.roles import Roles, nest
from convgen.algebra.space import Space
from convgen.compiler import compile_layer
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.schedule import schedule_cost
from convgen.plan.auto import named_plan, search
from convgen.plan.balance import BALANCE
from convgen.plan.candidates import Candidates, named_problems
from convgen.plan.storage_only import best_storage
from convgen.plan.terms import Objective, Terms
from convgen.resources import data_file
from convgen.spec.reader import read_csv

MACHINES = ("cpu", "cuda", "hip", "sw26010")


def questions(
    conv: Conv, grid: Grid, machine: str = "cpu", objective: Objective = "seconds", held: bool = True
) -> tuple[Terms, Candidates]:
    space = Space(conv, grid)
    model = Model(space, load_machine(machine), "float32")
    return Terms(model, objective, hold_gathered=held, bias=conv.bias), Candidates(space)


def grid_of(*sizes: int) -> Grid:
    return Grid(tuple(zip("abcdef", sizes, strict=False)))


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (3, 2), (1, 4), (2, 2, 2)])
def test_never_worse_than_named(sizes: tuple[int, ...]) -> None:
    """On random layers, small ones with awkward extents and groups among them."""
    rng = Random(sum(sizes))
    for _ in range(6):
        small = random_conv(rng)
        wide = replace(small, batch=8, channels=12 * small.groups, filters=24 * small.groups, spatial=small.spatial[:2])
        conv = rng.choice((small, wide))
        terms, candidates = questions(conv, grid_of(*sizes), rng.choice(MACHINES), held=rng.random() < 0.5)
        found = search(terms, candidates).plan
        assert found.cost == terms.total(found.stored, found.roles)
        for name, stored, roles in named_problems(candidates):
            assert found.cost[0] <= named_plan(terms, candidates, stored, roles).cost[0], name


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "mesh1k_assumed", "alexnet"])
def test_never_worse_than_named_on_the_papers_layers(name: str) -> None:
    layers = read_csv(data_file("tuning", "layers", f"{name}.csv"), grid={"a": 2, "b": 2})
    for layer in Random(1).sample(layers, 3):
        for machine in ("cpu", "cuda"):
            terms, candidates = questions(layer.conv, layer.grid, machine)
            found = search(terms, candidates).plan
            for _, stored, roles in named_problems(candidates, allow_empty=True):
                assert found.cost[0] <= named_plan(terms, candidates, stored, roles).cost[0], layer.name


def test_other_roles_win_somewhere() -> None:
    """Storage that differs from the roles, or roles that differ by phase, beat every named algorithm."""
    conv = Conv(32, 64, 64, tuple(Spatial(n, 56, 3, 1, 1, 1) for n in "HW"))
    terms, candidates = questions(conv, grid_of(4, 4), "cuda")
    found = search(terms, candidates).plan
    named = min(named_plan(terms, candidates, s, r).cost for _, s, r in named_problems(candidates))
    assert found.cost[0] < 0.97 * named[0]


def arrangements(axes: Axes, dims: int) -> list[tuple[Axes, ...]]:
    """Each axis on a dimension or on none, in any order."""
    found: list[tuple[Axes, ...]] = []
    for places in product(range(-1, dims), repeat=len(axes)):
        nests = [[a for a, p in zip(axes, places, strict=True) if p == d] for d in range(dims)]
        found += product(*(map(tuple, permutations(nest)) for nest in nests))
    return found


def exhaustive(terms: Terms, candidates: Candidates) -> int:
    """The least time of all storage and all roles: given the roles, each tensor's storage is its own."""
    conv, axes = candidates.conv, candidates.axes
    choices: dict[str, list[Roles]] = {}
    for phase in PHASES:
        every: dict[Roles, None] = {}
        for places in arrangements(axes, len(candidates.letters)):
            pairs = [(a, role) for role, nest_ in zip(candidates.letters, places, strict=True) for a in nest_]
            if (settled := candidates.settled(phase, nest(pairs))) is not None:
                every |= dict.fromkeys(candidates.rows_choices(settled) if phase == "backward_filter" else (settled,))
        choices[phase] = list(every)
    layouts = {
        t: [one for a in arrangements(axes, len(conv.dims(t))) if candidates.stores(one := Layout(t, a))]
        for t in TENSORS
    }
    return min(
        sum(terms.local(phase, r)[0] for phase, r in zip(PHASES, three, strict=True))
        + sum(min(terms.term(t, one, *three)[0] for one in layouts[t]) for t in TENSORS)
        for three in product(*choices.values())
    )


@pytest.mark.parametrize("machine", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "conv",
    [
        Conv(8, 16, 64, (Spatial("W", 3, 3, 1, 1, 1),)),
        Conv(1, 512, 64, (Spatial("W", 4096, 5, 2, 2, 2),)),
        Conv(2, 64, 64, (Spatial("W", 3, 1),), groups=2, bias=True),
    ],
)
def test_the_optimum_is_found_on_one_axis(machine: str, conv: Conv) -> None:
    terms, candidates = questions(conv, grid_of(4), machine)
    assert search(terms, candidates).plan.cost[0] == exhaustive(terms, candidates)


def test_the_optimum_is_found_on_two_axes() -> None:
    """A layer with few roles to choose from: nothing but N, C and F can be split."""
    conv = Conv(16, 256, 512, (Spatial("W", 1, 3, 1, 1, 1),))
    terms, candidates = questions(conv, grid_of(4, 2), "cuda")
    assert search(terms, candidates).plan.cost[0] == exhaustive(terms, candidates)


def test_best_storage_is_the_best_of_all_for_given_roles() -> None:
    conv = Conv(8, 8, 8, (Spatial("W", 16, 3, 1, 1, 1),))
    terms, candidates = questions(conv, grid_of(2, 2))
    three = Roles((("N", ("a",)), ("C", ("b",)))), Roles((("F", ("a",)),)), Roles((("W", ("a", "b")),))
    found = best_storage(terms, candidates, dict(zip(PHASES, three, strict=True)))
    for tensor, layout in found.items():
        costs = [
            terms.term(tensor, other, *three)[0]
            for axes in arrangements(("a", "b"), len(conv.dims(tensor)))
            if candidates.stores(other := Layout(tensor, axes))
        ]
        assert terms.term(tensor, layout, *three)[0] == min(costs)


def test_no_rank_is_left_empty() -> None:
    rng = Random(3)
    for _ in range(12):
        conv, grid = random_conv(rng), grid_of(*rng.choice(((2, 3), (4,), (5, 2))))
        terms, candidates = questions(conv, grid, rng.choice(MACHINES))
        plan = search(terms, candidates).plan
        assert all(candidates.space.empty_ranks(layout) == 0 for layout in plan.stored.values())
        for phase, roles in plan.roles.items():
            for layout in terms.wanted(phase, roles).values():
                if not layout.has_window:
                    assert candidates.space.empty_ranks(layout) == 0


def test_nothing_to_split_means_copies() -> None:
    """One sample, one channel, one filter, one row: every rank does it, and nothing is sent."""
    terms, candidates = questions(Conv(1, 1, 1, (Spatial("W", 1, 1),)), grid_of(2, 2))
    plan = search(terms, candidates).plan
    assert {str(r) for r in plan.roles.values()} == {"none"}
    assert plan.cost[1] == 0


def test_fewest_copies_where_costs_are_equal() -> None:
    """Sample partitioning of many samples needs no copies of x or y, and none are made."""
    conv = Conv(64, 8, 8, tuple(Spatial(n, 32, 3, 1, 1, 1) for n in "HW"))
    terms, candidates = questions(conv, grid_of(2, 2))
    plan = search(terms, candidates).plan
    assert [candidates.copies(plan.stored[t]) for t in ("x", "y")] == [1, 1]


def test_groups_are_split_without_communication() -> None:
    """Depthwise, one sample, small rows: role G needs nothing sent in any phase."""
    conv = Conv(1, 512, 512, tuple(Spatial(n, 4, 3, 1, 1, 1) for n in "HW"), groups=512)
    terms, candidates = questions(conv, grid_of(4), "cpu")
    plan = search(terms, candidates).plan
    assert {str(r) for r in plan.roles.values()} == {"G=a"}
    assert plan.cost[1] == 0


def test_bytes_as_the_objective() -> None:
    """Work stays shared out, and no named algorithm as even sends less."""
    layers = read_csv(data_file("tuning", "layers", "resnet50.csv"), grid={"a": 2, "b": 2})
    for layer in layers[3:54:17]:
        terms, candidates = questions(layer.conv, layer.grid, objective="bytes")
        plan = search(terms, candidates).plan
        assert all(candidates.imbalance(phase, r) <= BALANCE for phase, r in plan.roles.items())
        for _, stored, roles in named_problems(candidates):
            if all(candidates.imbalance(phase, r) <= BALANCE for phase, r in roles.items()):
                assert plan.cost[0] <= named_plan(terms, candidates, stored, roles).cost[0]


def test_imbalance_of_roles() -> None:
    conv = Conv(4, 6, 8, (Spatial("W", 14, 3, 2, 1, 1),))
    candidates = Candidates(Space(conv, grid_of(4)))

    def share(role: str, phase: str = "forward") -> float:
        return candidates.imbalance(phase, nest([("a", role)]))

    assert share("N") == 1
    assert share("none") == 4
    assert share("C") == pytest.approx(2 / 6 * 4)
    assert share("W") == pytest.approx(2 / 7 * 4), "7 output rows"
    assert share("W", "backward_data") == pytest.approx(4 / 14 * 4), "14 input rows"


def test_named_problems_cover_every_multiset() -> None:
    """N, H, W, C, F on two equal axes: 15 multisets of stationary-w, 4 of integrated with an F, all stored apart."""
    conv = Conv(8, 8, 8, tuple(Spatial(n, 8, 3, 1, 1, 1) for n in "HW"))
    found = list(named_problems(Candidates(Space(conv, grid_of(2, 2)))))
    assert len({tuple(map(str, stored.values())) for _, stored, _ in found}) == len(found)
    assert sum(name == "integrated" for name, _, _ in found) == 4
    assert len(found) == 15 + 4
    unequal = list(named_problems(Candidates(Space(conv, grid_of(4, 2)))))
    assert len(unequal) == 25 + 7, "axes that differ in size are not interchangeable"


def test_the_searchs_cost_is_the_schedules() -> None:
    layers = read_csv(data_file("tuning", "layers", "resnet50.csv"), grid={"a": 2, "b": 1, "c": 2}, bias=True)
    for layer in layers[::11]:
        for objective in ("seconds", "bytes"):
            one = compile_layer(layer, objective=objective)  # type: ignore[arg-type]
            cost = schedule_cost(one.schedule, Model(one.space, one.machine, layer.dtype))
            assert (cost.seconds(), cost.sent_bytes()) == (one.choice.seconds, one.choice.sent_bytes)
            assert one.choice.label == "auto"
            assert one.choice.explanation
