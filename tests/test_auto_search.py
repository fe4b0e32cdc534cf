"""`algorithm: auto`: priced as its schedule, never dearer than a named algorithm, optimal where that can be checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import permutations, product
from random import Random

import pytest
from generate import random_conv, random_problem
from named_layouts import named_layouts
from passing import passed

from convgen.algebra.conv import PHASES, TENSORS, Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.roles import Roles, nest
from convgen.algebra.space import Space
from convgen.compiler import compile_layer
from convgen.cost.layer_price import LayerPrice, Objective, sent_bytes
from convgen.cost.machines import load_machine
from convgen.cost.schedule import ScheduleCost, schedule_cost
from convgen.passes.fuse_bias import FuseBias
from convgen.passes.hold_x import HoldX
from convgen.passes.share import Share
from convgen.plan.layer_candidates import BALANCE, Candidates
from convgen.plan.layer_search import FoundLayout, LayerSearch
from convgen.program.build import lower
from convgen.resources import data_file
from convgen.spec.reader import read_csv

MACHINES = ("cpu", "cuda", "hip", "sw26010", "lassen")


def grid_of(*sizes: int) -> Grid:
    return Grid(tuple(zip("abcdef", sizes, strict=False)))


def price_of(conv: Conv, grid: Grid, machine: str = "cpu", objective: Objective = "seconds") -> LayerPrice:
    return LayerPrice(Space(conv, grid), load_machine(machine), "float32", objective)


def found_by(price: LayerPrice, *, held: bool = True) -> FoundLayout:
    return LayerSearch(price, held, {}, {}).found()


def cost_of(
    price: LayerPrice, stored: Mapping[str, Layout], roles: Mapping[str, Roles], *, held: bool = True
) -> ScheduleCost:
    """Of the schedule that is lowered from these and shared."""
    space = price.space
    schedule = lower("s", space, stored, roles, bias=space.conv.bias)
    hold = HoldX(choice="gathered" if held else "stored")
    return schedule_cost(passed(schedule, space, FuseBias(), hold, Share()), price.model)


def least(
    price: LayerPrice, stored: Mapping[str, Layout], roles: Mapping[str, Roles], *, held: bool = True
) -> tuple[int, int]:
    """(picoseconds, bytes) by the cheaper rows of backward-filter, which are a choice where rows are split."""
    last = roles["backward_filter"]
    splits = any(last.axes(letter) for letter in price.space.conv.letters)
    filters = [replace(last, rows=rows) for rows in (("output", "input") if splits else ("output",))]
    costs = [cost_of(price, stored, {**roles, "backward_filter": r}, held=held) for r in filters]
    return min(c.total().time_ps for c in costs), min(c.total().sent_bytes for c in costs)


def named(conv: Conv, grid: Grid) -> Iterator[tuple[str, dict[str, Layout], dict[str, Roles]]]:
    """The named algorithms' that leave no rank empty."""
    space = Space(conv, grid)
    for name, stored, roles in named_layouts(conv, grid):
        if all(space.empty_ranks(layout) == 0 for layout in stored.values()):
            yield name, stored, roles


@pytest.mark.parametrize("objective", ["seconds", "bytes"])
@pytest.mark.parametrize("held", [True, False])
def test_prices_are_those_of_the_schedule(objective: Objective, held: bool) -> None:
    """Of any storage and roles, to the picosecond and the byte; rows of backward-filter are the cheaper."""
    rng = Random(11)
    for i in range(40):
        problem = random_problem(rng, 12, transposed=i % 5 == 0)
        single, grid = problem.grid.single, problem.grid.bare
        price = price_of(problem.conv, grid, rng.choice(MACHINES), objective)
        stored = {t: layout.without(single) for t, layout in problem.stored.items()}
        roles = {phase: problem.roles[phase].without(single) for phase in PHASES}
        found = LayerSearch(price, held, {t: one.axes for t, one in stored.items()}, roles).found()
        assert found.stored == stored
        assert {p: r.nests for p, r in found.roles.items()} == {p: r.nests for p, r in roles.items()}
        cost = cost_of(price, stored, found.roles, held=held)
        if objective == "seconds":
            assert found.price == cost.total().time_ps == least(price, stored, roles, held=held)[0], problem
        else:
            sent = cost.total().sent_bytes
            assert sent_bytes(found.price) == sent == least(price, stored, roles, held=held)[1], problem


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (3, 2), (2, 2, 2), (4, 2, 2)])
def test_never_dearer_than_named(sizes: tuple[int, ...]) -> None:
    """On random layers, small ones with awkward extents, groups and transposed ones among them."""
    rng = Random(sum(sizes))
    for _ in range(6 if len(sizes) < 3 else 2):
        small = random_conv(rng, transposed=rng.random() < 0.3)
        wide = replace(small, batch=8, channels=12 * small.groups, filters=24 * small.groups)
        held = rng.random() < 0.5
        price = price_of(rng.choice((small, wide)), grid_of(*sizes), rng.choice(MACHINES))
        found = found_by(price, held=held)
        assert found.price == cost_of(price, found.stored, found.roles, held=held).total().time_ps
        for name, stored, roles in named(price.space.conv, price.grid):
            assert found.price <= least(price, stored, roles, held=held)[0], (name, price.space.conv)


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "mesh1k_assumed", "alexnet"])
def test_never_dearer_than_named_on_the_papers_layers(name: str) -> None:
    layers = read_csv(data_file("tuning", "layers", f"{name}.csv"), grid={"a": 2, "b": 2})
    for layer in Random(1).sample(layers, 2):
        for machine in ("cpu", "cuda"):
            price = price_of(layer.conv, layer.grid, machine)
            found = found_by(price)
            for _, stored, roles in named(layer.conv, layer.grid):
                assert found.price <= least(price, stored, roles)[0], layer.name


def test_other_roles_win_somewhere() -> None:
    """Storage that differs from the roles, or roles that differ by phase, beat every named algorithm."""
    conv = Conv(32, 64, 64, tuple(Spatial(n, 56, 3, 1, 1, 1) for n in "HW"))
    price = price_of(conv, grid_of(4, 4), "cuda")
    best = min(least(price, stored, roles)[0] for _, stored, roles in named(conv, price.grid))
    assert found_by(price).price < 0.97 * best


def arrangements(axes: Axes, dims: int) -> list[tuple[Axes, ...]]:
    """Each axis on a dimension or on none, in any order."""
    found: list[tuple[Axes, ...]] = []
    for places in product(range(-1, dims), repeat=len(axes)):
        nests = [[a for a, p in zip(axes, places, strict=True) if p == d] for d in range(dims)]
        found += product(*(map(tuple, permutations(nest)) for nest in nests))
    return found


def exhaustive(price: LayerPrice) -> int:
    """The least time of all roles, and of every storage that leaves no rank empty."""
    conv, axes, space = price.space.conv, price.grid.names, price.space
    candidates = Candidates(price, True, {})
    given = [dict(zip(axes, one, strict=True)) for one in product((*candidates.letters, "none"), repeat=len(axes))]
    legal = [roles for one in given if candidates.serves((roles := nest(one.items())).nests)]
    layouts = [
        [a for a in arrangements(axes, len(conv.dims(t))) if space.empty_ranks(Layout(t, a)) == 0] for t in TENSORS
    ]
    return min(
        LayerSearch(price, True, dict(zip(TENSORS, stored, strict=True)), dict(zip(PHASES, three, strict=True)))
        .found()
        .price
        for three in product(legal, repeat=len(PHASES))
        for stored in product(*layouts)
    )


@pytest.mark.parametrize("machine", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "conv",
    [
        Conv(8, 16, 2, (Spatial("W", 3, 3, 1, 1, 1),)),
        Conv(1, 512, 64, (Spatial("W", 4096, 5, 2, 2, 2),)),
        Conv(2, 64, 64, (Spatial("W", 3, 1),), groups=2, bias=True),
    ],
)
def test_the_optimum_is_found_on_one_axis(machine: str, conv: Conv) -> None:
    price = price_of(conv, grid_of(4), machine)
    assert found_by(price).price == exhaustive(price)


def test_no_rank_is_left_empty() -> None:
    rng = Random(3)
    for _ in range(12):
        conv, grid = random_conv(rng), grid_of(*rng.choice(((2, 3), (4,), (5, 2))))
        price = price_of(conv, grid, rng.choice(MACHINES))
        found = found_by(price)
        assert all(price.space.empty_ranks(layout) == 0 for layout in found.stored.values())


def test_axes_beyond_three_are_searched() -> None:
    """Six axes have 6^6 roles a phase: of those that grow, none is dearer than one axis of as many ranks."""
    conv = Conv(64, 64, 64, tuple(Spatial(n, 16, 3, 1, 1, 1) for n in "HW"))
    assert found_by(price_of(conv, grid_of(*(2,) * 6))).price <= found_by(price_of(conv, grid_of(64))).price


def test_nothing_to_split_means_copies() -> None:
    """One sample, one channel, one filter, one row: every rank does it, and nothing is sent."""
    price = price_of(Conv(1, 1, 1, (Spatial("W", 1, 1),)), grid_of(2, 2))
    found = found_by(price)
    assert {str(r) for r in found.roles.values()} == {"none"}
    assert cost_of(price, found.stored, found.roles).total().sent_bytes == 0


def test_fewest_copies_where_costs_are_equal() -> None:
    """Sample partitioning of many samples needs no copies of x or y, and none are made."""
    conv = Conv(64, 8, 8, tuple(Spatial(n, 32, 3, 1, 1, 1) for n in "HW"))
    found = found_by(price_of(conv, grid_of(2, 2)))
    assert [sorted(found.stored[t].used) for t in ("x", "y")] == [["a", "b"]] * 2


def test_groups_are_split_without_communication() -> None:
    """Depthwise, one sample, small rows: role G needs nothing sent in any phase."""
    conv = Conv(1, 512, 512, tuple(Spatial(n, 4, 3, 1, 1, 1) for n in "HW"), groups=512)
    price = price_of(conv, grid_of(4))
    found = found_by(price)
    assert {str(r) for r in found.roles.values()} == {"G=a"}
    assert cost_of(price, found.stored, found.roles).total().sent_bytes == 0


def test_bytes_as_the_objective() -> None:
    """Work stays shared out, and no named algorithm as even sends less."""
    layers = read_csv(data_file("tuning", "layers", "resnet50.csv"), grid={"a": 2, "b": 2})
    for layer in layers[3:54:17]:
        price = price_of(layer.conv, layer.grid, objective="bytes")
        of, found = Candidates(price, True, {}), found_by(price)

        def is_even(roles: Mapping[str, Roles], of: Candidates = of) -> bool:
            ways = ((p, (int(roles[phase].rows == "input"), roles[phase].nests)) for p, phase in enumerate(PHASES))
            return all(of.imbalance(p, way) <= BALANCE for p, way in ways)

        assert is_even(found.roles)
        sent = cost_of(price, found.stored, found.roles).total().sent_bytes
        for _, stored, roles in named(layer.conv, layer.grid):
            if is_even(roles):
                assert sent <= least(price, stored, roles)[1]


def test_imbalance_of_roles() -> None:
    conv = Conv(4, 6, 8, (Spatial("W", 14, 3, 2, 1, 1),))
    candidates = Candidates(price_of(conv, grid_of(4)), True, {})

    def share(role: str, phase: int = 0) -> float:
        return candidates.imbalance(phase, (0, nest([("a", role)]).nests))

    assert share("N") == 1
    assert share("none") == 4
    assert share("C") == pytest.approx(2 / 6 * 4)
    assert share("W") == pytest.approx(2 / 7 * 4), "7 output rows"
    assert share("W", 1) == pytest.approx(4 / 14 * 4), "14 input rows"


def test_axes_of_one_rank_are_left_out() -> None:
    layers = read_csv(data_file("tuning", "layers", "resnet50.csv"), grid={"a": 2, "b": 1, "c": 2}, bias=True)
    for layer in layers[::18]:
        one = compile_layer(layer)
        assert one.choice.label == "auto" and one.choice.explanation
        assert not any("b" in layout.used for layout in one.choice.stored.values())
