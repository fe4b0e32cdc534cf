"""The cost of a schedule is the sum of its steps."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from generate import random_problem
from passing import passed

from convgen.algebra.conv import PHASES, Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.algebra.space import Space
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.schedule import ScheduleCost, schedule_cost
from convgen.passes.fuse_bias import FuseBias
from convgen.passes.hold_x import HoldX
from convgen.passes.share import Share
from convgen.program.build import lower


def cost_of(space: Space, stored: dict[str, Layout], roles: dict[str, Roles], model: Model, held: str) -> ScheduleCost:
    schedule = lower("s", space, stored, roles, bias=space.conv.bias)
    hold = HoldX(choice="gathered" if held == "gathered" else "stored")
    return schedule_cost(passed(schedule, space, FuseBias(), hold, Share()), model)


def test_totals_are_sums_over_phases() -> None:
    rng = Random(5)
    problem = random_problem(rng, 8)
    space = Space(replace(problem.conv, bias=True), problem.grid)
    cost = cost_of(space, problem.stored, problem.roles, Model(space, load_machine("cpu"), "float64"), "gathered")
    assert cost.total().time_ps == sum(cost.total(p).time_ps for p in ("forward", "backward_data", "backward_filter"))
    assert cost.total().sent_bytes == sum(s.cost.sent_bytes for s in cost.steps)
    assert cost.total().seconds == pytest.approx(sum(s.cost.seconds for s in cost.steps))
    assert all(s.cost.sent_bytes == 8 * s.cost.elements for s in cost.steps)


def test_flops_of_one_rank() -> None:
    """On one rank each phase computes 2 N F C Ho Wo K^2 flops, and nothing is sent."""
    conv = Conv(2, 6, 10, (Spatial("H", 9, 3, 1, 1, 1), Spatial("W", 7, 3, 1, 1, 1)))
    space = Space(conv, Grid((("a", 1),)))
    stored = {t: Layout(t, ((),) * len(conv.dims(t))) for t in ("x", "w", "y")}
    cost = cost_of(
        space, stored, dict.fromkeys(PHASES, Roles(())), Model(space, load_machine("cpu"), "float32"), "gathered"
    )
    assert [s.cost.flops for s in cost.steps] == [2 * 2 * 10 * 6 * 9 * 7 * 9] * 3
    assert cost.total().sent_bytes == 0


def test_groups_divide_the_flops() -> None:
    conv = Conv(2, 6, 12, (Spatial("W", 8, 3, 1, 1, 1),), groups=3)
    space = Space(conv, Grid((("a", 1),)))
    stored = {t: Layout(t, ((),) * len(conv.dims(t))) for t in ("x", "w", "y")}
    cost = cost_of(
        space, stored, dict.fromkeys(PHASES, Roles(())), Model(space, load_machine("cpu"), "float32"), "gathered"
    )
    assert {s.cost.flops for s in cost.steps} == {2 * 2 * 12 * 2 * 8 * 3}


def test_faster_links_and_devices_cost_less() -> None:
    rng = Random(2)
    machine = load_machine("cpu")
    (level,) = machine.levels
    twice = replace(level, bytes_per_s=2 * level.bytes_per_s, latency_s=level.latency_s / 2)
    faster = replace(machine, levels=(twice,))
    stronger = replace(machine, efficiency=1.0)
    for _ in range(20):
        problem = random_problem(rng, 8)
        space = Space(problem.conv, problem.grid)
        times = [
            cost_of(space, problem.stored, problem.roles, Model(space, m, "float32"), "gathered").total().time_ps
            for m in (machine, faster, stronger)
        ]
        assert times[1] <= times[0]
        assert times[2] <= times[0]
