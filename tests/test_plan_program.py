"""Plans of whole networks: the least of all, by brute force, and the price of the program that comes out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from random import Random

import pytest
import torch
from click.testing import CliRunner
from free_networks import imported, ranks_of
from sampling import cases_of
from test_networks_free import Branches, compare, differ
from torch import nn

from convgen.algebra.grid import Grid
from convgen.commands.main import cli
from convgen.cost.machines import load_machine
from convgen.cost.rows import program_cost, row_cost
from convgen.errors import InputError
from convgen.explain.planned import Planned
from convgen.explain.planned_row import explained_layers
from convgen.network_compiler import compile_network, compile_plan, network_parts, plan_graph
from convgen.operations.bound import Bound
from convgen.plan.program.candidates import Way
from convgen.plan.program.search import Effort, Search
from convgen.plan.program.tables import Question
from convgen.plan.program.written import plan_of
from convgen.plan.setting import Setting
from convgen.program.network import label
from convgen.program.rows import PlacedRow, Stored, place
from convgen.spec.aten.describe import describe
from convgen.spec.exported import graph_of
from convgen.spec.graph import Graph
from convgen.spec.graph_file import write_graph
from convgen.spec.network_plan import read_plan, write_plan

LASSEN = load_machine("lassen")


class Small(nn.Module):
    """A residual block of a few rows, or two branches that are joined; a bias or none."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        c = draw.choice((4, 6))
        self.one = nn.Conv2d(3, c, 3, draw.choice((1, 2)), 1, bias=False)
        self.two = nn.Conv2d(c, c, draw.choice((1, 3)), padding="same", bias=draw.random() < 0.5)
        self.join = draw.choice((torch.add, lambda a, b: torch.cat([a, b], 1)))
        self.pool = nn.MaxPool2d(2) if draw.random() < 0.5 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        y = self.join(torch.relu(self.two(x)), x)
        return y if self.pool is None else self.pool(y)


def a_graph(draw: Random) -> Graph:
    x = torch.zeros(draw.choice((2, 4)), 3, draw.choice((6, 8)), draw.choice((6, 9)))
    return graph_of(Small(draw), (x,), name="small")[0]


def searched(graph: Graph, grid: Grid, effort: Effort, reduce_dtype: str = "") -> Search:
    parts = network_parts(graph, describe(graph.at(graph.batch)))._replace(reduce_dtype=reduce_dtype)
    return Search(parts, grid, LASSEN, "float32", effort)


@pytest.mark.parametrize("seed", cases_of(6, "test_a_plan_is_the_least_of_all"))
def test_a_plan_is_the_least_of_all(seed: int) -> None:
    """Every storage of every value, and for each every way of every row and of its gradients."""
    draw = Random(f"plan of a program {seed}")
    graph = a_graph(draw)
    grid = Grid(draw.choice(((("a", 2),), (("a", 2), ("b", 2)), (("a", 4), ("b", 2)))))
    search = searched(graph, grid, Effort(ways=2, others=3, stored=2, parameters=3), draw.choice(("", "bfloat16")))
    learnt = {n for n, t in search.tensors.items() if t.kind == "parameter"}
    found = search.run()
    assert program_cost(found.program, LASSEN, "float32").time_ps == found.time_ps
    variables = search.variables
    rows = [(search.question(i), bound) for i, bound in enumerate(search.rows)]
    cheapest: dict[tuple[int, tuple[int, ...]], dict[Way, int]] = {}
    least = None
    others: dict[int, int] = {}
    for values in product(*(range(len(search.domains[n])) for n in variables)):
        chosen = dict(zip(variables, values, strict=True))
        here: list[dict[Way, int]] = []
        for i, (question, bound) in enumerate(rows):
            cell = tuple(chosen.get(v, 0) for v in search.places(i))
            if (i, cell) not in cheapest:
                costs: dict[Way, list[int]] = {}
                for row in every_row(question, bound, cell, search):
                    cost = row_cost(row, search.price, question.types, question.wanted, question.bias, learnt=learnt)
                    costs.setdefault((row.way, row.roles), []).append(sum(cost))
                cheapest[i, cell] = {way: min(some) for way, some in costs.items()}
            here.append(cheapest[i, cell])
        total = sum(min(one.values()) for one in here)
        least = total if least is None else min(least, total)
        for i, row in enumerate(found.program.rows):
            apart = [ps for way, ps in here[i].items() if way[1] != row.roles]
            if apart:
                with_other = total - min(here[i].values()) + min(apart)
                others[i] = min(others.get(i, with_other), with_other)
    assert prod(len(search.domains[n]) for n in variables) > 1
    assert found.time_ps == least
    assert found.runner_up.keys() == {i for i in others if found.program.rows[i].bound.operation.is_product}
    for i, (_, more) in found.runner_up.items():
        assert found.time_ps + more == others[i]


def every_row(question: Question, bound: Bound, cell: tuple[int, ...], search: Search) -> Iterator[PlacedRow]:
    """Every way of a row for one storage of its values, with every gradient's."""
    grid = search.bare
    for option in question.options:
        (way, roles), parameters = option.way, dict(option.parameters)
        signature = bound.operation.signatures[way]
        places = iter(cell)
        reads = [parameters[k] if c is None else c[next(places)] for k, c in enumerate(question.operands)]
        makes = [c[next(places)] for c in question.results]
        names: Mapping[str, Stored] = {
            **{f"d{r.name}": s for r, s in zip(signature.results, makes, strict=True)},
            **{r.name: s for r, s in zip(signature.results, makes, strict=True)},
            **{o.name: s for o, s in zip(signature.inputs, reads, strict=True)},
        }
        options: list[list[tuple[str, PlacedRow] | None]] = []
        for name, ways in question.gradients:
            one = bound.operation.gradients[name]
            own = [
                (name, replace(placed, back=(None,) * len(one.reads)))
                for w, r in ways
                for placed in [
                    place(
                        Bound(one.operation, one.reads, (name,)), grid, w, dict(r),
                        [names[n] for n in one.reads], [names[name]],
                    )
                ]
            ]  # fmt: skip
            options.append([*own, *([None] if signature.reduction == "sum" else [])])
        for some in product(*options):
            derived = dict(one for one in some if one is not None)
            yield place(bound, grid, way, dict(roles), reads, makes, derived)


def test_a_planned_network_is_right_and_its_file_says_it(tmp_path: Path) -> None:
    """Planned, written, read, compiled, run; the same program, the same bytes, and other numbers of samples."""
    torch.set_default_dtype(torch.float64)
    try:
        module, x = Branches(Random("planned"), 3), torch.randn(4, 3, 13, 11)
        graph, _ = graph_of(module, (x,), name="net")
        compiled, plan = plan_graph(graph, 4, Setting(machine=LASSEN))
        assert program_cost(compiled.program, LASSEN, "float64").seconds == pytest.approx(plan.seconds)
        assert plan.seconds <= min(
            program_cost(compile_network(graph, Grid(axes)).program, LASSEN, "float64").seconds
            for axes in ((("N", 4),), (("H", 4),), (("C", 4),), (("N", 2), ("H", 2)))
        )
        file = tmp_path / "plan.yaml"
        file.write_text(write_plan(plan_of(plan.program, "net.yaml", "lassen", plan.seconds)))
        again = compile_plan(graph, read_plan(file))
        assert again.program == compiled.program
        assert again.package().files["network.py"] == compiled.package().files["network.py"]
        net = imported(again.package().files, tmp_path)
        compare(module, x, net, again.program.grid, again.program)
        state = {n: t.detach().clone() for n, t in module.state_dict().items()}
        more = torch.cat([x, x])
        module.train()
        y = module(more).detach()
        for ran in ranks_of(net, again.program.grid, {"x": more}, state, [torch.ones_like(y)], ["output"]):
            assert differ(ran.outputs[0], y) < 1e-10
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("roles: \"N=N", "roles: \"Q=N", "has no index Q"),
        ("way: 0", "way: 7", "has ways 0 to"),
        ("network_plan: small\n", "network_plan: small\nrowz: 3\n", "unknown key 'rowz'"),
        ("network_plan: small\n", "network_plan: other\n", "the plan is of 'other', and the network is small"),
        ("grid: {N: 2}", "grid: {b: 2}", "axes are b"),
        ('- {makes: "one"', '- {makes: "three"', "the plan says three"),
    ],
)  # fmt: skip
def test_a_wrong_plan_is_refused_with_its_line(old: str, new: str, said: str, tmp_path: Path) -> None:
    graph = a_graph(Random("refused"))
    text = write_plan(plan_of(compile_network(graph, Grid((("N", 2),))).program, "small.yaml"))
    assert old in text
    file = tmp_path / "plan.yaml"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError) as refused:
        compile_plan(graph, read_plan(file))
    assert said in str(refused.value)


def test_a_plans_numbers_unfold_into_steps(tmp_path: Path) -> None:
    """Each row's steps add up to its price; names that are none are refused; scaling is drawn."""
    graph = a_graph(Random("unfolds"))
    compiled, plan = plan_graph(graph, 4, Setting(machine=LASSEN))
    planned = Planned(compiled, plan, Setting(machine=LASSEN), {})
    cost = program_cost(plan.program, LASSEN, compiled.dtype)
    for layer in planned.layers:
        sums = [sum(column) for column in zip(*(cost.rows[i] for i in layer.numbers), strict=True)]
        assert [layer.compute_ps, layer.moving_ps] == sums
        for row in layer.rows:
            assert f"{sum(sums) * 1e-9:.4f}" in explained_layers(planned, label(row))
    with pytest.raises(InputError, match="small has no nothing"):
        explained_layers(planned, "nothing")
    file, picture = tmp_path / "small.yaml", tmp_path / "scaling.svg"
    file.write_text(write_graph(graph))
    words = ["plan", str(file), "--machine", "lassen", "--ranks", "4", "--plot", str(picture)]
    done = CliRunner().invoke(cli, words)
    assert "sample  parallelism alone" in done.stdout
    assert "ranks" in picture.read_text()


def test_options_of_memory_are_honoured_or_refused(tmp_path: Path) -> None:
    """Two values a parameter take twice what one takes; what graphs have not is said."""
    file = tmp_path / "small.yaml"
    file.write_text(write_graph(a_graph(Random("options"))))
    words = ["plan", str(file), "--machine", "lassen", "--ranks", "2"]
    one, two = (
        json.loads(CliRunner().invoke(cli, [*words, "--optimizer-states", n, "--json"]).stdout)["memory"] for n in "12"
    )
    assert two["optimizer"] == 2 * one["optimizer"] > 0
    every = json.loads(CliRunner().invoke(cli, [*words, "--keep", "every", "--json"]).stdout)
    assert every["memory_bytes"] > 0 and every["memory"] is None
    refused = CliRunner().invoke(cli, [*words, "--keep", "every", "--recompute"])
    assert isinstance(refused.exception, InputError)
    assert "keep is every" in refused.exception.fact


class Depthwise(nn.Module):
    """Nothing travels for it where channels are split."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(32, 32, 1, groups=32), nn.BatchNorm2d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


def test_running_statistics_lie_as_moments_do(tmp_path: Path) -> None:
    """Where channels are split they are, too: nothing is gathered for them, and they are right."""
    torch.set_default_dtype(torch.float64)
    try:
        module = Depthwise()
        x = torch.randn(2, 32, 2, 1)
        graph, _ = graph_of(module, (x,), name="net")
        slow = replace(LASSEN, launch_s=1e-9, peak_flops=(("float64", 1e8),))
        compiled, plan = plan_graph(graph, 4, Setting(machine=slow))
        means = {n: v.stored for n, v in plan.program.values.items() if "running_mean" in n}
        assert len(means) == 2 and all(any(stored) for stored in means.values()), means
        compare(module, x, imported(compiled.package().files, tmp_path), plan.program.grid, compiled.program)
    finally:
        torch.set_default_dtype(torch.float32)
