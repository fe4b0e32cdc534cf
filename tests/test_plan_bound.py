"""What no step is below: of single programs, whatever travels meanwhile, and of all candidates of a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner
from sampling import cases_of, draws
from test_plan_by_hand import branched
from test_plan_price import a_machine
from test_plan_program import a_graph, every_row

from convgen.algebra.grid import Grid
from convgen.commands.main import cli
from convgen.cost.machine import Machine
from convgen.cost.machine_measured import Probe
from convgen.cost.machines import load_machine
from convgen.cost.relaxed import Relaxed
from convgen.cost.rows import price_on, row_cost
from convgen.cost.timeline import simulate
from convgen.network_compiler import MEANWHILE, network_parts, plan_graph
from convgen.plan.program.bound import SHARES, Least, bound, busiest
from convgen.plan.program.by_timeline import overlapped_s
from convgen.plan.program.nearby import Nearby
from convgen.plan.program.search import Effort
from convgen.plan.setting import Setting
from convgen.program.network import Program, asked
from convgen.spec.aten.describe import describe
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import network_from_dict

ROUNDED = 1e-9  # picoseconds of rows are whole


def below_s(program: Program, machine: Machine, rank: int, *shares: float) -> float:
    """Seconds that the program's step is not below."""
    first, second = (Relaxed(price_on(program.grid, machine, "float32"), rank, share) for share in shares)
    wanted = program.differentiable(of_inputs=False)
    total = 0
    for row, types, bias in zip(program.rows, program.row_types, program.biased, strict=True):
        own = asked(row.bound, wanted)
        none = [False] * len(own)
        total += sum(row_cost(row, first, types, none, bias))
        total += sum(row_cost(row, second, types, own, bias)) - sum(row_cost(row, second, types, none, bias))
    return total * 1e-12


def wandered(program: Program, machine: Machine, draw: Random, steps: int) -> Program:
    """Another layout, some changes away."""
    near = Nearby(program, machine, "float32")
    for _ in range(steps):
        if (change := near.draw(draw)) is not None:
            near.take(change)
    return near.program


@pytest.mark.parametrize("seed", cases_of(8, "test_no_step_is_below_its_relaxed_price"))
def test_no_step_is_below_its_relaxed_price(seed: int) -> None:
    """Of any layout, with any passes, on any rank, for any shares."""
    draw = Random(f"relaxed {seed}")
    machine = replace(a_machine(draw), hides_gradients=False, adds_biases=draw.random() < 0.7)
    graph, ranks = network_graph(branched(draw, draw.randint(1, 4))), draw.choice((2, 3, 4, 6, 8))
    plan = plan_graph(graph, ranks, Setting(machine=machine))[1]
    for steps in (0, 3, 30):
        program = wandered(plan.program, machine, draw, steps)
        programs = [program]
        for one in MEANWHILE:
            if draw.random() < 0.7:
                programs.append(one.run(programs[-1]))
        taken = [simulate(one, machine, "float32").end_s for one in programs]
        taken.append(overlapped_s(program, machine, "float32"))
        for _ in range(4):
            shares = (draw.random(), draw.random()) if draw.random() < 0.7 else draw.choice(SHARES)
            below = below_s(program, machine, draw.randrange(program.grid.ranks), *shares)
            assert below <= min(taken) * (1 + ROUNDED), (steps, shares)


@pytest.mark.parametrize("seed", cases_of(4, "test_no_candidate_is_below_the_bound"))
def test_no_candidate_is_below_the_bound(seed: int) -> None:
    """By brute force over every storage of every value, every way of every row and of its gradients."""
    draw = Random(f"bound {seed}")
    graph, grid = a_graph(draw), Grid(draw.choice(((("a", 2),), (("a", 2), ("b", 2)))))
    machine = replace(a_machine(draw), hides_gradients=False)
    parts = network_parts(graph, describe(graph.at(graph.batch)))
    search = Least(parts, grid, machine, "float32", Effort(ways=2, others=2, stored=2, parameters=2))
    rank, shares = draw.randrange(grid.ranks), draw.choice((*SHARES, (draw.random(), draw.random())))
    least = None
    prices = tuple(Relaxed(search.price, rank, share) for share in shares)
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    learnt = {n for n, t in search.tensors.items() if t.kind == "parameter"}
    for values in product(*(range(len(search.domains[n])) for n in search.variables)):
        chosen = dict(zip(search.variables, values, strict=True))
        total = 0
        for i, bound_row in enumerate(search.rows):
            cell = tuple(chosen.get(v, 0) for v in search.places(i))
            if (i, cell) not in known:
                q = search.question(i)
                none = [False] * len(q.wanted)
                known[i, cell] = min(
                    sum(row_cost(row, prices[0], q.types, none, q.bias))
                    + sum(row_cost(row, prices[1], q.types, q.wanted, q.bias, learnt=learnt))
                    - sum(row_cost(row, prices[1], q.types, none, q.bias))
                    for row in every_row(q, bound_row, cell, search)
                )
            total += known[i, cell]
        least = total if least is None else min(least, total)
    assert search.below(rank, *shares) == least


def test_plans_say_how_far_they_are_from_the_best() -> None:
    """The bound is below the plan, and below what is found near it."""
    for number in range(draws(4)):
        draw = Random(f"bound of a plan {number}")
        machine, ranks = replace(a_machine(draw), hides_gradients=False), draw.choice((2, 4, 6, 8))
        by_step = number % 2 == 0
        setting = Setting(machine=machine, by_step=by_step)
        plan = plan_graph(network_graph(branched(draw, draw.randint(1, 4))), ranks, setting)[1]
        found = bound(plan, machine, "float32")
        assert found is not None and found.anywhere_s is not None
        assert found.plan_s == plan.step_s
        assert found.anywhere_s <= found.plan_s * (1 + ROUNDED)
        assert 0 <= found.gap <= found.plan_s / found.anywhere_s
        if not by_step:
            assert found.gap == 0 or found.candidates_s >= found.plan_s * 0.99
        assert busiest(plan.program, machine, "float32") < plan.program.grid.ranks


def test_plans_with_statistics_by_parts_have_a_bound() -> None:
    """Parts are of the plan's layout, which one rank has not."""
    convolution = {"kind": "conv", "out_channels": 8, "kernel_size": 3, "padding": 1}
    nodes = [convolution | {"name": "a"}, {"kind": "batch_norm"}, {"kind": "relu"}, convolution | {"name": "b"}]
    graph = network_graph(network_from_dict({"name": "normed", "input": [1, 8, 256, 256], "nodes": nodes}))
    lassen = load_machine("lassen")
    plan = plan_graph(graph, 4, Setting(machine=lassen, statistics="local", by_step=False))[1]
    found = bound(plan, lassen, "float32")
    assert plan.parts is not None and any(any(stored) for stored in plan.parts.fixed.values())
    assert found is not None and found.anywhere_s is not None and found.anywhere_s <= found.plan_s


def test_the_command_says_it() -> None:
    file = Path(__file__).resolve().parent.parent / "examples" / "networks" / "alexnet.yaml"
    words = ["plan", str(file), "--machine", "lassen", "--ranks", "4", "--batch", "32"]
    data: Any = json.loads(CliRunner().invoke(cli, [*words, "--json"]).output)
    text = CliRunner().invoke(cli, words).output
    bounds = data["bound"]
    assert bounds["gap"] == pytest.approx(data["overlapped_seconds"] / bounds["candidates_seconds"] - 1)
    assert f"at most {bounds['gap']:.2%} from the best of its grid's candidates" in text
    assert f"{bounds['gap_anywhere']:.2%} from any layout" in text
    hidden = json.loads(CliRunner().invoke(cli, [*words, "--hide-dw", "--json"]).output)
    assert hidden["bound"] is None and "bound" not in CliRunner().invoke(cli, [*words, "--hide-dw"]).output


def test_measured_machines_say_nothing_of_other_blocks() -> None:
    measured = Probe(channels=16, filters=16, taps=9, pixels=256, efficiency=(0.5, 0.5, 0.5))
    cpu = replace(load_machine("cpu"), probes=(measured,))
    plan = plan_graph(network_graph(branched(Random("measured"), 1)), 2, Setting(machine=cpu, by_step=True))[1]
    found = bound(plan, cpu, "float32")
    assert found is not None and found.anywhere_s is None and found.gap_anywhere is None
    assert 0 < found.candidates_s <= found.plan_s
