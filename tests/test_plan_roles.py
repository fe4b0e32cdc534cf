"""Roles by phase, w stored over any axes, x held or not: the planner's tables against brute force.

Brute force knows nothing of terms: it lowers every combination of splits, roles and storage to a schedule, runs the
passes, and adds up the steps.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import pytest
from generate import draws
from test_plan_network import CPU, branched

from convgen.algebra.conv import PHASES
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.algebra.space import Space
from convgen.cost.model import Model
from convgen.cost.schedule import schedule_cost
from convgen.cost.training_memory import layer_memory
from convgen.operations.layer import wanted
from convgen.passes.contract import Context
from convgen.passes.fuse_bias import FuseBias
from convgen.passes.hold_x import HoldX
from convgen.passes.share import Share
from convgen.plan.network.bounded import DoesNotFit, solve
from convgen.plan.network.conv_node import ConvNode
from convgen.plan.network.graph import Graph, build
from convgen.program.build import lower

Point = tuple[int, int]  # picoseconds, bytes


def worth(points: Iterable[Point]) -> list[Point]:
    """Those that no other betters in both."""
    found: list[Point] = []
    for cost, memory in sorted(points):
        if not found or memory < found[-1][1]:
            found.append((cost, memory))
    return found


def schedules(node: ConvNode, x: Layout, y: Layout, space: Space, model: Model) -> Iterator[Point]:
    """What every option costs and takes, by lowering it."""
    choices = node.choices
    for w in choices.w:
        stored = {"x": x, "w": w, "y": y}

        def offered(phase: str, roles: Roles, stored: dict[str, Layout] = stored) -> bool:
            wants = wanted(space, phase, roles)
            return all(node.offers(phase, stored[want.tensor], want) for want in wants)

        lists = zip(PHASES, (choices.forward, choices.data, choices.filter), strict=True)
        forward, data, filter_ = ([r for r in some if offered(phase, r)] for phase, some in lists)
        for three in product(forward, data if node.dx else (Roles(()),), filter_):
            roles: dict[str, Roles] = dict(zip(PHASES, three, strict=True))
            plain = lower("layer", space, stored, roles, bias=node.conv.bias)
            if not node.dx:
                plain = replace(plain, backward_data=())
            for hold in ("gathered", "stored") if node.setting.regather else ("gathered",):
                schedule = plain
                for one in (FuseBias(), HoldX(choice=hold), Share()):
                    schedule = one.run(schedule, Context(space))
                memory = layer_memory(schedule, space, node.dtype)
                total = memory.weights + memory.gradients + memory.optimizer + memory.held
                yield schedule_cost(schedule, model).time_ps(), total


def brute_force(graph: Graph) -> list[Point]:
    """What all plans worth having cost and take."""
    layers: dict[tuple[int, int, int], list[Point]] = {}
    for node in set(graph.convs.values()):
        space = Space(node.conv, graph.grid, virtual_padding=node.space.virtual_padding)
        model = Model(space, graph.setting.machine, node.dtype)
        for (i, x), (j, y) in product(enumerate(node.xs), enumerate(node.ys)):
            layers[id(node), i, j] = worth(schedules(node, x, y, space, model))
    names = [name for kind, name in graph.variable if kind == "split"]
    found: list[Point] = []
    for splits in product(*(range(len(graph.splits[name])) for name in names)):
        chosen = {graph.variable["split", name]: value for name, value in zip(names, splits, strict=True)}
        points = [(0, 0)]
        for factor in graph.factors:
            if all(v in chosen for v in factor.scope):
                index = tuple(chosen[v] for v in factor.scope)
                more = int(factor.cost[index]), int(factor.memory[index]) if factor.memory is not None else 0
                points = [(cost + more[0], memory + more[1]) for cost, memory in points]
        for name, node in graph.convs.items():
            ends = graph.root[graph.network.node[name].inputs[0]], name
            i, j = (chosen[graph.variable["split", end]] for end in ends)
            points = worth((a + c, b + d) for a, b in points for c, d in layers[id(node), i, j])
        found = worth([*found, *points])
    return found


@pytest.mark.parametrize("regather", [False, True])
def test_plans_are_brute_force(regather: bool) -> None:
    """Without a budget, and with any; some plans have roles that differ by phase, and w split over spare axes."""
    rng = random.Random(21)
    met: Counter[str] = Counter()
    level = replace(CPU.machine.levels[0], latency_s=1e-7)
    slow = replace(CPU.machine, levels=(level,), launch_s=1e-8, peak_flops=(("float32", 2e10),))
    setting = replace(CPU, machine=slow, regather=regather)
    for _ in range(draws(3)):
        grid = Grid(rng.choice([(("a", 2),), (("a", 2), ("b", 2)), (("a", 3),)]))
        graph = build(branched(rng, rng.randint(1, 3)), grid, setting, most_roles=2, most_more=1, most_splits=2)
        points = brute_force(graph)
        free = solve(graph.problem, None)
        assert (free.cost, free.memory) == points[0]
        for budget in {memory - rng.randint(0, 1) for _, memory in rng.sample(points, min(4, len(points)))}:
            allowed = [cost for cost, memory in points if memory <= budget]
            if not allowed:
                with pytest.raises(DoesNotFit):
                    solve(graph.problem, budget)
                continue
            found = solve(graph.problem, budget)
            assert found.cost == allowed[0]
            assert found.memory <= budget
            met["budgets"] += 1
        for name in graph.convs:
            option = graph.option(free.values, name)
            met["by phase"] += len({r.nests for r in option.roles}) > 1
            by_role = {a for role, axes in option.roles[0].nests for a in axes if role in "CFG"}
            met["spare"] += bool(option.w.used - by_role)
        met["networks"] += 1
    assert all(met[what] for what in ("budgets", "networks"))
    if met["networks"] > 20:
        assert met["by phase"]
        assert met["spare"]
