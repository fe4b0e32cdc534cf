"""Plans of networks written by hand: what they take, their modules, and the command."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sampling import draws

from convgen.algebra.grid import Grid
from convgen.commands.main import cli, main
from convgen.compiler import compile_layer
from convgen.cost.every_output import HELD, every_output
from convgen.cost.machines import load_machine
from convgen.cost.rows import program_cost
from convgen.cost.timeline import simulate
from convgen.errors import InputError
from convgen.explain.planned_layers import layers_of
from convgen.explain.planned_scaling import memory_bytes
from convgen.network_compiler import (
    CompiledNetwork,
    compile_network,
    network_parts,
    on_one_rank,
    plan_graph,
    sample_parallelism,
)
from convgen.plan.factors import factorisations
from convgen.plan.parts import Keep, Room
from convgen.plan.program.layer_files import plan_text, planned_layers
from convgen.plan.program.ranks import NetworkPlan
from convgen.plan.program.search import Effort, Search, TooLittleMemory
from convgen.plan.setting import Setting
from convgen.program.network import Program
from convgen.spec.aten.describe import describe
from convgen.spec.network import Network
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import network_from_dict, read_network, with_batch
from convgen.spec.reader import layer_to_dict, read_layers
from convgen.spec.target import CPU
from convgen.verify.check import check

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "networks"
GIB = 1 << 30
ON_CPU, ON_CUDA = load_machine("cpu"), load_machine("cuda")
# Small layers on slow arithmetic, so that it matters how they are split.
SLOW = replace(
    ON_CPU, levels=(replace(ON_CPU.levels[0], latency_s=1e-7),), launch_s=1e-8, peak_flops=(("float32", 2e10),)
)


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


def plan(
    network: Network,
    ranks: int,
    machine: Any = ON_CPU,
    grid: Grid | None = None,
    room: Room = Room(keep="every"),  # noqa: B008
) -> tuple[CompiledNetwork, NetworkPlan]:
    return plan_graph(network_graph(network), ranks, Setting(machine=machine, room=room, statistics="local"), grid)


def searched(network: Network, grid: Grid, room: Room, machine: Any = SLOW) -> Search:
    graph = network_graph(network)
    parts = network_parts(graph, describe(graph.at(graph.batch)))
    return Search(parts, grid, machine, "float32", Effort(ways=3, others=4, stored=3, parameters=3), room)


def counted(program: Program, room: Room) -> int:
    return sum(one.bytes for one in every_output(program, room.parameter_bytes))


def test_memory_is_that_of_every_output_and_a_price_buys_less_of_it() -> None:
    """The search's count is the program's, under any bound; what fits costs no less; gathering again takes less."""
    rng, seen = random.Random(7), 0
    for _ in range(draws(12)):
        network, grid = branched(rng, rng.randint(1, 4)), Grid((("a", 2), ("b", 2)))
        for regather in (False, True):
            room = Room(keep="every", states=rng.choice((0, 1, 2)), regather=regather)
            free = searched(network, grid, room).run()
            assert free.memory_bytes == counted(free.program, room)
            try:
                searched(network, grid, replace(room, memory_bytes=1)).run()
            except TooLittleMemory as error:
                least = error.least
            bounds = sorted({free.memory_bytes, (free.memory_bytes + least) // 2, least})
            found = [searched(network, grid, replace(room, memory_bytes=bound)).run() for bound in bounds]
            for bound, one in zip(bounds, found, strict=True):
                assert one.memory_bytes == counted(one.program, room) <= bound
                assert program_cost(one.program, SLOW, "float32").time_ps == one.time_ps
            assert all(a.time_ps >= b.time_ps for a, b in pairwise(found))
            assert found[-1].time_ps == free.time_ps
            seen += found[0].time_ps > free.time_ps
    assert seen


def test_what_is_gathered_again_is_not_held() -> None:
    """Four ranks whose memory is short gather x again for dw, and say so in the layers' files."""
    network = with_batch(read_network(EXAMPLES / "mesh2k.yaml"), 1)
    grid, graph = Grid((("a", 2),)), network_graph(network)
    parts = network_parts(graph, describe(graph.at(1)))
    # By tiles some gradients' rows read x as it is stored, however much memory there is.
    machine = replace(ON_CUDA, tiles=None)

    def held(room: Room) -> tuple[int, Program]:
        found = Search(parts, grid, machine, "float32", room=room).run()
        kept = every_output(found.program, room.parameter_bytes)
        return sum(one.bytes for one in kept if one.what == HELD), found.program

    free = Search(parts, grid, machine, "float32", room=Room(keep="every")).run()
    tight = Room(round(0.9 * free.memory_bytes), keep="every", regather=True)
    (much, _), (little, program) = held(Room(keep="every")), held(tight)
    assert little < much
    assert any(layer.options.hold_x == "stored" for layer in planned_layers(network, program, CPU))
    assert not any(layer.options.hold_x == "stored" for layer in planned_layers(network, free.program, CPU))


def test_one_large_sample_needs_two_gpus() -> None:
    """[SP] VI: one sample of the 2K mesh model does not fit a GPU of 16 GB, and fits two; MODELS D has 20 GiB, of which
    10.28 are activations of convolutions, normalisations and ReLUs."""
    network = read_network(EXAMPLES / "mesh2k.yaml")
    with pytest.raises(InputError) as caught:
        plan(network, 1, ON_CUDA, room=Room(16 * GIB, keep="every"))
    assert "needs at least 20.325 GiB a rank, 16.000 are given" in caught.value.fact
    assert "--ranks 2" in caught.value.hint
    assert "--keep needed" in caught.value.hint
    assert plan(network, 2, ON_CUDA, room=Room(16 * GIB, keep="every"))[1].memory_bytes < 13 * GIB
    needed = plan(network, 1, ON_CUDA, room=Room())[1]
    assert needed.memory_bytes < 8 * GIB
    outputs = sum(k.bytes for k in every_output(needed.program, Room(keep="every").parameter_bytes)
                  if k.what.startswith("outputs"))  # fmt: skip
    assert (outputs / 2 + 288 / 1024 * GIB) / GIB == pytest.approx(10.28, abs=0.02)  # the input has no error signal


def test_layers_take_what_the_plan_takes() -> None:
    """By either count, layers and the rest add up to it; steps to seconds, hidden ones to none."""
    rng = random.Random(4)
    keeps: tuple[Keep, Keep] = ("every", "needed")
    seen = {False: 0, True: 0}
    for keep in keeps:
        for hides in (False, True):
            machine = replace(SLOW, hides_gradients=hides)
            compiled, found = plan(branched(rng, 5), 4, machine, room=Room(keep=keep))
            layers = layers_of(found, machine, compiled.dtype)
            rest = found.memory_bytes - sum(one.kept_bytes for one in layers)
            assert rest >= 0
            assert memory_bytes(found.program, found.room) == found.memory_bytes
            assert sum(s.time_ps for one in layers for s in one.steps) == round(found.seconds * 1e12)
            sums = [s for one in layers for s in one.steps if s.communicates and s.what.split(" ")[0].endswith(".dw")]
            seen[hides] += len(sums)
            assert all((s.time_ps == 0) == hides for s in sums)
    assert all(seen.values())


def test_the_modules_of_a_plan_are_right(tmp_path: Path) -> None:
    """Through plan.yaml, on virtual ranks, with layers that join: one's y is stored as the next one's x."""
    network = branched(random.Random(9), 3)
    _, found = plan(network, 4)
    file = tmp_path / "plan.yaml"
    file.write_text(plan_text(network, found.program, CPU, ["a test"], 0, []))
    layers = read_layers(file)
    wanted = planned_layers(network, found.program, CPU)
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
    _, found = plan(network, 4, grid=Grid((("true", 2), ("Null", 2))))
    (tmp_path / "plan.yaml").write_text(plan_text(network, found.program, CPU, ["a test"], 0, []))
    (layer,) = read_layers(tmp_path / "plan.yaml")
    assert (layer.name, layer.grid) == ("null", found.program.grid)


def test_more_than_64_bits_hold() -> None:
    """Sums of tables would wrap: refused."""
    network = read_network(EXAMPLES / "mesh2k.yaml")
    with pytest.raises(InputError, match="hours, more than plans add up"):
        plan(with_batch(network, 2_000_000), 2, grid=Grid((("a", 2),)))
    with pytest.raises(InputError, match="hours, more than plans add up"):
        plan(network, 2, replace(ON_CPU, launch_s=1e29), grid=Grid((("a", 2),)))


def test_one_rank_and_axes_of_one_rank() -> None:
    network, lassen = branched(random.Random(1), 3), load_machine("lassen")
    compiled, alone = plan(network, 1, lassen)
    assert alone.seconds == program_cost(on_one_rank(compiled), lassen, "float32").seconds
    assert not any(one.sent_bytes for one in layers_of(alone, lassen, "float32"))
    two, same = (
        plan(network, 2, lassen, grid=Grid(axes))[1] for axes in ((("a", 2),), (("one", 1), ("a", 2), ("other", 1)))
    )
    assert two.seconds == same.seconds


def test_not_worse_than_samples_alone() -> None:
    network = with_batch(read_network(EXAMPLES / "alexnet.yaml"), 16)
    compiled, found = plan(network, 8, ON_CUDA, grid=Grid((("a", 4), ("b", 2))))
    sample = sample_parallelism(compiled, 8)
    assert sample is not None
    assert found.seconds < program_cost(sample, ON_CUDA, "float32").seconds
    assert sample_parallelism(plan(network, 32, ON_CUDA, grid=Grid((("a", 32),)))[0], 32) is None


def test_grids_are_all_factorisations() -> None:
    assert list(factorisations(24, 3)) == [(6, 2, 2), (4, 3, 2)]
    assert list(factorisations(7, 2)) == []


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["plan", str(EXAMPLES / "alexnet.yaml"), "--machine", "cuda", *arguments])


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    assert run("--ranks", "2", "--plot", str(tmp_path / "p.png")).exit_code == 0
    shown = run("--ranks", "4", "-o", str(file))
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0].split()[:5] == ["layer", "x", "w", "y", "roles"]
    assert [line.split()[0] for line in lines[1:4]] == ["conv1", "conv2", "conv3"]
    assert (tmp_path / "p.png").stat().st_size > 10_000
    data = json.loads(run("--ranks", "4", "--in-order", "--json").output)
    assert data["seconds"] == pytest.approx(sum(s["seconds"] for n in data["nodes"] for s in n["steps"]))
    assert data["memory_bytes"] == data["other_memory_bytes"] + sum(n["memory_bytes"] for n in data["nodes"])
    assert data["heuristic_seconds"] >= data["seconds"]
    alone = compile_network(network_graph(read_network(EXAMPLES / "alexnet.yaml")), Grid((("N", 4),)), machine=ON_CUDA)
    meanwhile = simulate(alone.program, ON_CUDA, "float32", alike=True).end_s
    assert data["sample_parallelism"]["overlapped_seconds"] == pytest.approx(meanwhile)
    assert meanwhile < data["sample_parallelism"]["seconds"]
    assert {n["name"]: n["kind"] for n in data["nodes"]}["pool5_flatten"] == "flatten"
    explained = run("--ranks", "4", "--in-order", "--explain", "conv2").output
    assert "conv_backward_filter" in explained
    assert "the whole plan would take" in explained
    done = CliRunner().invoke(cli, ["compile", str(file), "-o", str(tmp_path), "--target", "cpu"])
    assert done.output.splitlines()[0] == str(tmp_path / "conv1.py")
    assert len(done.output.splitlines()) == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "4", "--explain", "conv9"], "alexnet has no conv9"),
        (["--ranks", "4", "--explain", "input"], "alexnet's input has no steps"),
        (["--ranks", "4", "--explain", "fc6", "--json"], "don't go together"),
        (["--ranks", "4", "--memory", "nan"], "'--memory': nan is no finite number"),
        (["--ranks", "4", "--memory", "inf"], "'--memory': inf is no finite number"),
        (["--ranks", "4", "--memory", "1e-5"], "GiB a rank, 1e-05 are given"),
        (["--ranks", "4", "--grid", "a=3"], "has 3 ranks, --ranks says 4"),
        (["--ranks", "4", "--grid", "a=2,a=2"], "names axis a twice"),
        (["--ranks", "20011", "--grid", "a=20011"], "splits nothing: no index of alexnet is above 9216"),
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
