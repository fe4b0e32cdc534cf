"""Plans of networks: tables against steps, steps against compiled schedules, plans against modules."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from generate import draws

from convgen.algebra.grid import Grid
from convgen.commands.main import cli, main
from convgen.compiler import compile_layer
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.schedule import schedule_cost
from convgen.cost.training_memory import STATES, layer_memory
from convgen.errors import InputError
from convgen.plan.network.eliminate import Elimination
from convgen.plan.network.graph import Graph, build
from convgen.plan.network.grids import factorisations, grids
from convgen.plan.network.longest_path import longest_paths
from convgen.plan.network.overlapped import overlapped
from convgen.plan.network.planner import GIB, Plan, plan_network
from convgen.plan.network.report import memory_parts, plan_text
from convgen.plan.network.sample import sample_parallelism
from convgen.plan.network.setting import Setting
from convgen.plan.network.write import plan_yaml, planned_layer
from convgen.spec.network import Network
from convgen.spec.network_reader import network_from_dict, read_network, with_batch
from convgen.spec.reader import layer_to_dict, read_layers
from convgen.spec.target import read_target
from convgen.verify.check import check

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "networks"
CPU = Setting(machine=load_machine("cpu"))
CUDA = Setting(machine=load_machine("cuda"), target=read_target("cuda"))


def branched(rng: random.Random, layers: int) -> Network:
    """A random network: a stem, then convolutions, poolings and normalisations, with additions across."""
    c = rng.choice([4, 6, 8])
    nodes: list[dict[str, Any]] = [{"name": "stem", "kind": "conv", "out_channels": c, "kernel_size": 3, "padding": 1}]
    alike = ["stem"]  # nodes of one shape
    for i in range(layers):
        at = rng.choice(alike[-2:])
        kind = rng.choice(["conv", "conv", "add", "batch_norm", "grouped"])
        if kind == "add" and len(alike) > 1:
            nodes.append({"name": f"n{i}", "kind": "add", "from": rng.sample(alike[-3:], 2)})
        elif kind == "batch_norm":
            nodes.append({"name": f"n{i}", "kind": "batch_norm", "from": at})
        else:
            k, groups = rng.choice([1, 3]), 2 if kind == "grouped" else 1
            conv = {"kind": "conv", "out_channels": c, "kernel_size": k, "padding": k // 2, "groups": groups}
            nodes.append({"name": f"n{i}", "from": at, "bias": rng.random() < 0.3} | conv)
        alike.append(f"n{i}")
    read = {
        name
        for node in nodes
        for name in ([node["from"]] if isinstance(node.get("from"), str) else node.get("from", []))
    }
    ends = [name for name in alike if name not in read]
    nodes.append({"name": "all", "kind": "concat", "from": ends} if len(ends) > 1 else {"name": "all", "kind": "relu"})
    if len(ends) == 1:
        nodes[-1]["from"] = ends[0]
    nodes += [
        {"kind": "max_pool", "kernel_size": 3, "stride": 2},
        {"kind": "global_avg_pool"},
        {"kind": "flatten"},
        {"name": "fc", "kind": "linear", "out_features": 6, "bias": True},
        {"kind": "softmax_loss"},
    ]
    return network_from_dict({"name": "random", "input": [rng.choice([2, 4, 5]), 3, 9, 8], "nodes": nodes})


def planned(graph: Graph, values: tuple[int, ...]) -> Plan:
    return Plan(graph, values, *graph.problem.total(values), None, "test")


def brute_force(graph: Graph) -> int:
    """The least cost over every way to store every tensor; layers then choose their options one by one."""
    problem, own = graph.problem, {v for (kind, _), v in graph.variable.items() if kind == "option"}
    stored = [range(1) if v in own else range(size) for v, size in enumerate(problem.sizes)]
    best = None
    for values in product(*stored):
        total, options = 0, {v: np.zeros(problem.sizes[v], dtype=np.int64) for v in own}
        for factor in problem.factors:
            index = tuple(slice(None) if v in own else values[v] for v in factor.scope)
            (free,) = [v for v in factor.scope if v in own] or [None]
            if free is None:
                total += int(factor.cost[index])
            else:
                options[free] = options[free] + factor.cost[index]
        total += sum(int(table.min()) for table in options.values())
        best = total if best is None else min(best, total)
    assert best is not None
    return best


@pytest.mark.slow
def test_exact_on_small_random_networks() -> None:
    """Elimination is brute force; the heuristic is never better, and sometimes worse."""
    rng = random.Random(3)
    gaps: list[float] = []
    # Small layers on slow arithmetic, so that it matters how they are split.
    level = replace(CPU.machine.levels[0], latency_s=1e-7)
    slow = replace(CPU.machine, levels=(level,), launch_s=1e-8, peak_flops=(("float32", 2e10),))
    setting = replace(CPU, machine=slow)
    cases = draws(120)
    for _ in range(cases):
        graph = build(branched(rng, rng.randint(1, 5)), Grid((("a", 2),)), setting, most_roles=4, most_splits=2)
        if prod(size for (kind, v), size in zip(graph.variable, graph.sizes, strict=True) if kind == "split") <= 600:
            least = Elimination(graph.problem).minimum
            assert least == brute_force(graph)
            gaps.append(graph.problem.total(longest_paths(graph.problem, graph.vertices))[0] / least - 1)
    assert len(gaps) >= 2 * cases // 3
    assert 0 == min(gaps) < max(gaps)


def test_tables_are_the_sum_of_steps() -> None:
    """For any choice of storage and options, not only the best."""
    rng = random.Random(4)
    for statistics in ("local", "global"):
        setting = replace(CPU, statistics=statistics, regather=True, recompute=True, hide_dw=statistics == "global")
        for _ in range(4):
            graph = build(branched(rng, 5), Grid((("a", 2), ("b", 2))), setting, most_roles=4, most_splits=5)
            for _ in range(4):
                values = tuple(rng.randrange(size) for size in graph.sizes)
                plan = planned(graph, values)
                steps = sum(s.cost.time_ps for node in plan.nodes for s in node.steps)
                assert steps == graph.problem.total(values)[0] == plan.cost_ps


def test_hidden_reductions_take_no_time() -> None:
    """Those of filters and biases, and of scales and shifts where normalisation is local."""
    network = branched(random.Random(2), 5)
    graph = build(network, Grid((("a", 2),)), replace(CPU, hide_dw=True), roles={"a": "N"})
    plan = planned(graph, Elimination(graph.problem).values)
    moved = [s for node in plan.nodes for s in node.steps if s.what.startswith(("dw over", "db over"))]
    assert {s.what[:2] for s in moved} == {"dw", "db"}
    assert sum(s.cost.time_ps for s in moved) == 0 < sum(s.cost.sent_bytes for s in moved)
    assert sum(s.cost.time_ps for node in plan.nodes for s in node.steps) == plan.cost_ps


def test_layers_cost_what_their_schedules_cost() -> None:
    """A row of the table is the compiled layer's schedule, priced by the model of all ranks."""
    compared = 0
    for network, setting, sizes in (
        (branched(random.Random(5), 6), CPU, (2, 3)),
        (with_batch(read_network(EXAMPLES / "alexnet.yaml"), 16), CUDA, (4, 2)),
    ):
        graph = build(network, Grid(tuple(zip("ab", sizes, strict=True))), setting, most_roles=5, most_splits=6)
        plan = planned(graph, Elimination(graph.problem).values)
        for node in plan.nodes:
            if node.option is not None and node.node.inputs != ("input",):
                one = compile_layer(planned_layer(plan, node, node.option), machine=setting.machine)
                cost = schedule_cost(one.schedule, Model(one.space, setting.machine, network.dtype))
                assert cost.time_ps() == sum(s.cost.time_ps for s in node.steps), node.node.name
                assert cost.sent_bytes() == node.sent_bytes
                compared += cost.sent_bytes() > 0
    assert compared >= 8


def test_the_modules_of_a_plan_are_right(tmp_path: Path) -> None:
    """Through plan.yaml, on virtual ranks, with layers that join: one's y is stored as the next one's x."""
    network = branched(random.Random(9), 3)
    plan = plan_network(network, CPU, 4)
    file = tmp_path / "plan.yaml"
    file.write_text(plan_yaml(plan, "a test"))
    layers = read_layers(file)
    wanted = [planned_layer(plan, n, n.option) for n in plan.nodes if n.option is not None]
    assert [layer_to_dict(a) for a in layers] == [layer_to_dict(b) for b in wanted]
    assert layers[1].source.where(("grid",)).startswith(f"{file}:")
    for layer in layers:
        report = check(compile_layer(layer), transport="virtual", timeout_s=60)
        assert report.ok, report


def test_names_that_yaml_reads_as_something_else(tmp_path: Path) -> None:
    nodes = [
        {"name": "null", "kind": "conv", "out_channels": 4, "kernel_size": 1},
        {"name": "TRUE", "kind": "max_pool", "kernel_size": 3},
    ]
    network = network_from_dict({"name": "false", "input": [1, 2, 8, 8], "nodes": nodes})
    plan = plan_network(network, CPU, 4, grid=Grid((("true", 2), ("Null", 2))))
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan, "a test"))
    (layer,) = read_layers(tmp_path / "plan.yaml")
    assert (layer.name, layer.grid) == ("null", plan.grid)


def test_memory_of_small_networks_has_digits() -> None:
    network = branched(random.Random(1), 1)
    plan = plan_network(network, CPU, 1, budget_bytes=100_000)
    assert re.search(
        r"memory  [1-9.]+e-05 GiB on the fullest rank, of 9.31e-05 ",
        plan_text(plan, sample_parallelism(network, CPU, 1)),
    )


def test_more_than_64_bits_hold() -> None:
    """Sums of tables would wrap: refused, and far below that still right."""
    network = read_network(EXAMPLES / "mesh2k.yaml")
    for batch, said in ((2_000_000, "a step of mesh2k on cpu may take 7 days"), (2**31 - 1, "2\\*\\*62 bytes")):
        with pytest.raises(InputError, match=said):
            build(with_batch(network, batch), Grid((("a", 2),)), CPU, most_roles=2, most_splits=2)
    slow = replace(CPU.machine, launch_s=1e29)
    with pytest.raises(InputError, match="days or more"):
        build(network, Grid((("a", 2),)), replace(CPU, machine=slow), most_roles=2, most_splits=2)


def test_memory_is_a_constraint() -> None:
    """[SP] VI: one sample of the 2K mesh model does not fit a GPU of 16 GB, and fits two. MODELS D has 20 GiB."""
    network = read_network(EXAMPLES / "mesh2k.yaml")
    with pytest.raises(InputError) as caught:
        plan_network(network, CUDA, 1, budget_bytes=16 * GIB)
    assert "at least 20.324 GiB a rank, 16.000 are given" in caught.value.fact
    assert "--ranks 2" in caught.value.hint
    assert "--recompute" in caught.value.hint
    assert plan_network(network, CUDA, 2, budget_bytes=16 * GIB).memory_bytes < 13 * GIB
    assert plan_network(network, replace(CUDA, keep="needed"), 1).memory_bytes < 8 * GIB


def test_less_memory_costs_more() -> None:
    """Regathering and recomputation are choices of the same search."""
    network = with_batch(read_network(EXAMPLES / "alexnet.yaml"), 64)
    setting, grid = replace(CUDA, regather=True, recompute=True), Grid((("a", 4),))
    free = plan_network(network, setting, 4, grid=grid)
    costs = [free.cost_ps]
    for share in (0.95, 0.85):
        tight = plan_network(network, setting, 4, grid=grid, budget_bytes=round(free.memory_bytes * share))
        assert tight.memory_bytes <= free.memory_bytes * share
        assert tight.cost_ps == sum(s.cost.time_ps for node in tight.nodes for s in node.steps)
        costs.append(tight.cost_ps)
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]
    with pytest.raises(InputError, match="needs at least"):
        plan_network(network, replace(setting, recompute=False), 4, grid=grid, budget_bytes=free.memory_bytes // 2)


def test_one_rank_and_axes_of_one_rank() -> None:
    network = branched(random.Random(1), 3)
    lassen = replace(CUDA, machine=load_machine("lassen"))
    alone = plan_network(network, lassen, 1)
    assert alone.seconds == sample_parallelism(network, lassen, 1).seconds
    assert sum(node.sent_bytes for node in alone.nodes) == 0
    two = plan_network(network, lassen, 2, grid=Grid((("a", 2),)))
    same = plan_network(network, lassen, 2, grid=Grid((("one", 1), ("a", 2), ("other", 1))))
    assert two.cost_ps == same.cost_ps


def test_not_worse_than_samples_alone() -> None:
    network = with_batch(read_network(EXAMPLES / "alexnet.yaml"), 16)
    sample = sample_parallelism(network, CUDA, 8)
    assert sample.seconds is not None
    assert plan_network(network, CUDA, 8, grid=Grid((("a", 4), ("b", 2)))).seconds < sample.seconds
    alone = sample_parallelism(network, CUDA, 32)
    assert (alone.seconds, alone.why_not) == (None, "32 ranks, 16 samples")


@pytest.mark.parametrize("statistics", ["local", "global"])
def test_reductions_behind_computation(statistics: str) -> None:
    """Nothing is lost or counted twice, and no more is hidden than there is to hide behind, for any choice."""
    rng = random.Random(8)
    for _ in range(6):
        setting = replace(CPU, statistics=statistics, recompute=True)
        graph = build(branched(rng, 5), Grid((("a", 2), ("b", 2))), setting, most_roles=4, most_splits=5)
        plan = planned(graph, tuple(rng.randrange(size) for size in graph.sizes))
        found = overlapped(plan)
        assert found.compute_ps + found.transfers_ps + found.reductions_ps == plan.cost_ps
        total = found.forward_ps + found.backward_ps
        assert total == plan.cost_ps - found.reductions_ps + found.exposed_ps
        dw = sum(
            s.cost.time_ps
            for n in plan.nodes
            for s in n.steps
            if s.what.startswith(("dw over", "db over"))
            or (s.phase, n.node.kind, s.communicates) == ("backward", "batch_norm", True)
        )
        both = statistics == "local"
        assert dw == found.reductions_ps if both else dw >= found.reductions_ps
        assert found.exposed_ps <= found.reductions_ps
        backward = [s for n in plan.nodes for s in n.steps if s.phase != "forward" and not s.communicates]
        assert found.reductions_ps - found.exposed_ps <= sum(s.cost.time_ps for s in backward)


@pytest.mark.parametrize(("dtype", "optimizer"), [("float32", "momentum"), ("bfloat16", "adam")])
def test_parameters_take_what_training_takes_of_the_compiled_layer(dtype: str, optimizer: Any) -> None:
    """Biases, and a float32 copy of 16-bit weights, included."""
    rng = random.Random(12)
    setting = replace(CPU, optimizer_states=STATES[optimizer])
    biased = 0
    for _ in range(4):
        graph = build(replace(branched(rng, 4), dtype=dtype), Grid((("a", 2), ("b", 2))), setting, most_roles=4)
        plan = planned(graph, tuple(rng.randrange(size) for size in graph.sizes))
        for node in plan.nodes:
            if node.option is None:
                continue
            layer = planned_layer(plan, node, node.option)
            one = compile_layer(layer)
            truth = layer_memory(one.schedule, one.space, dtype, optimizer=optimizer)
            said = [count for what, count in memory_parts(plan, node) if "its gradient and" in what]
            assert sum(said) == truth.weights + truth.gradients + truth.optimizer
            biased += layer.conv.bias
    assert biased


def test_grids_are_all_factorisations() -> None:
    assert list(factorisations(24, 3)) == [(6, 2, 2), (4, 3, 2)]
    assert list(factorisations(7, 2)) == []
    conv = read_network(EXAMPLES / "vgg16.yaml").node["conv3_1"].conv
    assert conv is not None
    found = grids(64, [(conv, 1)], CUDA, "float32")
    assert {tuple(sorted(g.sizes.values())) for g in found} == {(2, 2, 16), (2, 4, 8), (4, 4, 4)}
    assert [g.ranks for n in (1, 7, 6) for g in grids(n, [(conv, 1)], CUDA, "float32")] == [1, 7, 6]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["plan", str(EXAMPLES / "alexnet.yaml"), "--machine", "cuda", *arguments])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.yaml"
    assert run("--ranks", "2", "--plot", str(tmp_path / "p.png")).exit_code == 0
    shown = run("--ranks", "4", "-o", str(file))
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0].split()[:5] == ["layer", "x", "w", "y", "roles"]
    assert [line.split()[0] for line in lines[1:4]] == ["conv1", "conv2", "conv3"]
    assert (tmp_path / "p.png").stat().st_size > 10_000
    data = json.loads(run("--ranks", "4", "--json").output)
    assert data["seconds"] == pytest.approx(sum(s["seconds"] for n in data["nodes"] for s in n["steps"]))
    assert data["memory_bytes"] == data["input_memory_bytes"] + sum(n["memory_bytes"] for n in data["nodes"])
    assert data["heuristic_seconds"] >= data["seconds"]
    explained = run("--ranks", "4", "--explain", "conv2").output
    assert "conv_backward_filter" in explained
    assert "the whole plan would take" in explained
    done = CliRunner().invoke(cli, ["compile", str(file), "-o", str(tmp_path), "--target", "cpu"])
    assert done.output.splitlines()[0] == str(tmp_path / "conv1.py")
    assert len(done.output.splitlines()) == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "4", "--explain", "conv9"], "no node conv9"),
        (["--ranks", "4", "--explain", "input"], "alexnet's input has no steps"),
        (["--ranks", "4", "--explain", "fc6", "--json"], "don't go together"),
        (["--ranks", "4", "--memory", "nan"], "'--memory': nan is no finite number"),
        (["--ranks", "4", "--memory", "inf"], "'--memory': inf is no finite number"),
        (["--ranks", "4", "--memory", "1e-5"], "GiB a rank, 1e-05 are given"),
        (["--ranks", "4", "--grid", "a=3"], "has 3 ranks, --ranks says 4"),
        (["--ranks", "4", "--grid", "a=2,a=2"], "names axis a twice"),
        (["--ranks", "20011"], "splits nothing: no index of alexnet is above 9216"),
        (["--ranks", "100000"], "more than 65536"),
    ],
)
def test_refused(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    call = ["convgen", "plan", str(EXAMPLES / "alexnet.yaml"), "--machine", "cuda", *arguments]
    monkeypatch.setattr("sys.argv", call)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
