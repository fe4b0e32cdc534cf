"""Layouts near a plan's: what they cost is their program's price, and few of them are better than the plan."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from sampling import draws
from test_plan_by_hand import branched
from test_plan_price import a_machine
from torch import nn

from convgen.algebra.grid import Grid
from convgen.cost.collectives import BEST, RINGS
from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.moving import PICOSECONDS
from convgen.cost.rows import program_cost
from convgen.errors import InputError
from convgen.network_compiler import by_samples, compile_network, plan_graph, sample_parallelism
from convgen.passes.bucket_gradients import closing
from convgen.plan.fewer import without_idle
from convgen.plan.parts import Room
from convgen.plan.program.annealed import annealed, further
from convgen.plan.program.by_timeline import by_timeline, overlapped_s
from convgen.plan.program.improved import improved
from convgen.plan.program.nearby import Nearby
from convgen.plan.program.overlapped import WORTH
from convgen.plan.program.ranks import NetworkPlan
from convgen.plan.program.step_ps import SIZES, Cost, Sum, longer_ps, step_ps
from convgen.plan.program.sweep import settle, sweep
from convgen.plan.program.written import plan_of, program_of
from convgen.plan.setting import Setting
from convgen.spec.exported import graph_of
from convgen.spec.network_graph import network_graph

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

from adversary import GAP, by_hand, drawn_network, in_order_s


def test_draws_cost_what_their_programs_do() -> None:
    """And a plan's file says them."""
    for number in range(draws(4)):
        draw = Random(f"near {number}")
        machine, graph = replace(a_machine(draw), hides_gradients=False), network_graph(branched(draw, 2))
        machine = replace(machine, collectives=(RINGS, BEST)[number % 2])
        plan = plan_graph(graph, draw.choice((2, 4, 6)), Setting(machine=machine))[1]
        near, taken = Nearby(plan.program, machine, "float32", by_step=number % 2 == 1), 0
        for _ in range(60):
            before = near.time_ps
            if (change := near.draw(draw, far=taken % 2 == 1)) is not None:
                near.take(change)
                taken += 1
                assert near.time_ps == before + change.more_ps
        program = near.program
        assert taken > 20
        assert program_cost(program, machine, "float32").time_ps == near.in_order_ps
        again = Nearby(program, machine, "float32", by_step=near.by_step)  # each row placed and priced whole
        assert (again.costs, again.time_ps) == (near.costs, near.time_ps)
        assert plan.parts is not None
        assert program_of(plan_of(program, ""), plan.parts).rows == program.rows


def test_row_by_row_costs_no_more_and_is_its_price() -> None:
    """Of layouts by letters, which leave much to find."""
    less = 0
    for number in range(4):
        draw = Random(f"sweep {number}")
        machine, graph = replace(a_machine(draw), hides_gradients=False), network_graph(branched(draw, 2))
        compiled, _ = plan_graph(graph, 4, Setting(machine=machine))
        program = sample_parallelism(compiled, 2)
        assert program is not None
        near = Nearby(program, machine, "float32", by_step=number % 2 == 1)
        start = near.kept()
        sweep(near)
        assert near.time_ps <= start.time_ps
        again = Nearby(near.program, machine, "float32", by_step=near.by_step)
        assert (again.costs, again.time_ps) == (near.costs, near.time_ps)
        less += near.time_ps < start.time_ps
        near.go_back(start)
        assert near.program.rows == program.rows
    assert less


def test_hops_cost_no_more_and_are_their_price() -> None:
    """From layouts by letters on: with hops the step is never longer, and now and then shorter."""
    less = 0
    for number in range(draws(3)):
        graph, machine, ranks = drawn_network(number)
        compiled, _ = plan_graph(graph, ranks, Setting(machine=machine))
        program = sample_parallelism(compiled, 2)
        assert program is not None
        steps: list[int] = []
        for hops in (0, 30):
            better, ps = improved(program, machine, "float32", 0, by_step=True, hops=hops)
            assert program_cost(better, machine, "float32").time_ps == ps
            steps.append(Nearby(better, machine, "float32", by_step=True).time_ps)
        assert steps[1] <= steps[0]
        less += steps[1] < steps[0]
    assert less


def test_what_settles_is_better_around_rows_that_were_changed() -> None:
    graph, machine, ranks = drawn_network(2)
    program = plan_graph(graph, ranks, Setting(machine=machine, by_step=True))[1].program
    near, draw = Nearby(program, machine, "float32", by_step=True), Random("settles")
    for _ in range(draws(10)):
        start, rows = near.kept(), set[int]()
        while not rows:
            if (change := near.draw(draw, far=True)) is not None:
                near.take(change)
                rows = {*change.rows}
        changed_ps = near.time_ps
        settle(near, rows)
        assert near.time_ps <= changed_ps
        again = Nearby(near.program, machine, "float32", by_step=True)
        assert (again.costs, again.time_ps) == (near.costs, near.time_ps)
        near.go_back(start)
        settle(near, ())
        assert near.program.rows == program.rows


def some_costs(draw: Random) -> list[Cost]:
    """Of rows that sum gradients over several axes, by bytes of a bucket or far less."""

    def one() -> Sum:
        size = draw.choice((100, 2**18, 2**20, 2**23))
        return Sum(draw.choice((("N",), ("N", "C"))), draw.randint(1, 40), draw.randint(0, 9), size)

    rows: list[Cost] = []
    for _ in range(draw.randint(1, 12)):
        numbers = (draw.choice((0, draw.randint(0, 30))) for _ in range(4))
        rows.append(Cost(*numbers, tuple(one() for _ in range(draw.randint(0, 2)))))
    return rows


def by_ps(costs: list[Cost], mebibytes: int) -> int:
    """A step with buckets of this size, one picosecond after the other."""
    backward = [*reversed(costs)]
    sums = [(i, one) for i, row in enumerate(backward) for one in row.sums]
    leaving = [0] * len(backward)
    for _, members in closing([(one.over, one.size) for _, one in sums], mebibytes):
        there = [sums[k][1] for k in members]
        leaving[sums[members[-1]][0]] += sum(one.ps for one in there) + max(one.latency for one in there)
    time = left = 0  # left: halves of picoseconds that the lane has
    for row, more in zip(backward, leaving, strict=True):
        for work, on_link in ((row.before, True), (row.alone, False), (row.behind, True)):
            todo = 2 * work
            while todo:
                time += 1
                todo -= 1 if on_link and left else 2
                left -= min(left, 1 if on_link else 2)
        left += 2 * more
    return sum(row.forward for row in costs) + time + left // 2


def test_a_step_is_its_rows_and_what_sums_add() -> None:
    draw = Random("steps")
    for _ in range(500):
        costs = some_costs(draw)
        assert step_ps(costs) == min(by_ps(costs, mebibytes) for mebibytes in SIZES)
        assert longer_ps(costs) == step_ps(costs) - sum(one.base for one in costs) >= 0


def wider() -> nn.Sequential:
    """Convolutions of ever more filters, each with a norm and a rectifier."""
    rows: list[nn.Module] = []
    for c, f in ((16, 64), (64, 256), (256, 512), (512, 512)):
        rows += [nn.Conv2d(c, f, 3, 1 if c == 16 else 2, 1, bias=False), nn.BatchNorm2d(f), nn.ReLU()]
    return nn.Sequential(*rows)


@pytest.mark.parametrize("name", ["lassen", "dgx_h200"])
def test_what_is_counted_quickly_is_near_what_is_timed(name: str) -> None:
    """Where sums of gradients outlast backward: buckets have latencies, and a move's latency leaves sums the link."""
    machine, graph = load_machine(name), graph_of(wider(), (torch.zeros(16, 16, 32, 32),), name="wider")[0]
    for axes in ((("N", 8),), (("N", 16),), (("N", 4), ("H", 2)), (("N", 4), ("C", 2)), (("N", 2), ("F", 4))):
        program = compile_network(graph, Grid(axes), machine=machine).plain
        counted = Nearby(program, machine, "float32", by_step=True).time_ps / PICOSECONDS
        assert counted == pytest.approx(overlapped_s(program, machine, "float32"), rel=0.025)


@pytest.mark.parametrize("in_order", [False, True], ids=("by the step", "in order"))
def test_annealing_finds_nothing_better(in_order: bool) -> None:
    """`python bench/adversary.py` looks at more networks, real ones too, and at more layouts of each."""
    for number in range(draws(4)):
        graph, machine, ranks = drawn_network(number)
        plan = plan_graph(graph, ranks, Setting(machine=machine, by_step=not in_order))[1]
        draw, program = Random(f"annealing {number}"), replace(plan.program, grid=without_idle(plan.program.grid))
        if in_order:
            found_s = in_order_s(program, machine, 300, draw)
        else:
            found_s = annealed(program, machine, "float32", 300, draw).seconds
        assert found_s >= plan.step_s * (1 - GAP), number


def test_more_layouts_are_no_longer_and_have_room() -> None:
    """`convgen plan --layouts`: a plan's step is its program's, and the plan takes no more memory than its room has."""
    for number in range(draws(4)):
        graph, machine, ranks = drawn_network(number + 20)
        plan = plan_graph(graph, ranks, Setting(machine=machine, by_step=True))[1]
        bounded = replace(plan, room=replace(plan.room, memory_bytes=plan.memory_bytes))
        for one in (plan, bounded):
            more = further(one, ranks, machine, "float32", 500)
            assert more.step_s == overlapped_s(more.program, machine, "float32") <= plan.step_s, number
            assert more.checked(machine, "float32").ranks == ranks
            assert one is plan or more.memory_bytes <= plan.memory_bytes, number


def test_annealing_takes_what_is_shorter_and_fits() -> None:
    graph, machine, ranks = drawn_network(1)
    compiled, _ = plan_graph(graph, ranks, Setting(machine=machine))
    program = sample_parallelism(compiled, 2)
    assert program is not None
    start = overlapped_s(program, machine, "float32")
    found = annealed(program, machine, "float32", 400, Random(0))
    assert found.seconds == overlapped_s(found.program, machine, "float32") < start
    assert (found.looked, 0 < found.timed < 400) == (400, True)
    none = annealed(program, machine, "float32", 400, Random(0), fits=lambda _: False)
    assert (none.seconds, none.program) == (start, program)


@pytest.mark.parametrize("how", [{}, {"by_step": True, "recompute": True}, {"by_step": True, "autocast": "bfloat16"}])
def test_layouts_that_nobody_would_look_at_are_refused(how: dict[str, Any]) -> None:
    machine = drawn_network(0)[1]
    with pytest.raises(InputError, match="layouts near a plan"):
        Setting(machine=machine, room=Room(keep="needed"), layouts=1, **how)


def test_no_step_is_longer_than_that_of_samples_alone() -> None:
    """By sums of plans by sums, and of others with what travels meanwhile; where there are fewer samples than ranks, on
    as many ranks as there are samples."""
    looked = [0, 0]
    for number in range(draws(7)):
        draw = Random(f"samples {number}")
        machine = replace(a_machine(draw), hides_gradients=False)
        setting = Setting(machine=machine, by_step=draw.random() < 0.7)
        graph = network_graph(branched(draw, draw.randint(1, 4)))
        batch = graph.batch
        ranks = batch + draw.choice((1, 2)) if number % 2 else draw.randint(min(2, batch), batch)
        compiled, plan = plan_graph(graph, ranks, setting)
        samples = by_samples(compiled, min(ranks, batch))
        looked[batch < ranks] += 1
        if plan.step is not None:
            assert plan.step.overlapped <= overlapped_s(samples, machine, "float32") / WORTH, number
        else:
            assert plan.seconds <= program_cost(samples, machine, "float32").seconds, number
    assert all(looked)


def test_other_numbers_of_ranks_are_looked_at_by_the_step() -> None:
    """Where a plan that is found there with little effort is not much longer than the shortest step."""
    machine, graph = load_machine("lassen"), by_hand("alexnet", 8)
    looked: list[Grid] = []

    def search(grid: Grid, machine: Machine) -> NetworkPlan:
        looked.append(grid)
        return plan_graph(graph, grid.ranks, Setting(machine=machine), grid)[1]

    one, four = Grid((("a", 1),)), Grid((("a", 2), ("b", 2)))
    plan = replace(search(one, machine), elsewhere=(four,))
    chosen = by_timeline(plan, search, lambda one: one, lambda *_: 0.0, machine, "float32")
    assert looked[-1] == four == chosen.program.grid
    assert (
        chosen.step_s
        == overlapped_s(chosen.program, machine, "float32")
        < overlapped_s(plan.program, machine, "float32")
    )
    looked.clear()
    stays = by_timeline(plan, search, lambda one: one, lambda *_: inf, machine, "float32")
    assert {*looked} == {one} and stays.program.grid == one
