"""Calibration: lines through times, where ranks lie, what is written, and runs of real processes."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from convgen.algebra.grid import Grid
from convgen.calibrate.collectives import KINDS, Collective, misfits_of, together
from convgen.calibrate.fit import fit_line
from convgen.calibrate.launches import Stepped, launch_of
from convgen.calibrate.links import SIZES, Messages, levels_of, patterns
from convgen.calibrate.local import PRODUCTS, Local
from convgen.calibrate.nodes import Nodes, nodes_of
from convgen.calibrate.processor import cores_left
from convgen.calibrate.race import Case, Timing, climb, race, settle, tried
from convgen.calibrate.report import report_text
from convgen.calibrate.result import Calibration, assumed, machine_of, rounded
from convgen.calibrate.run import calibrate
from convgen.calibrate.shapes import SHAPES as SHAPE_LIST
from convgen.calibrate.shapes import Reached, measure_shapes
from convgen.calibrate.team import Team
from convgen.calibrate.write import check_output, machine_text, write_machine
from convgen.commands.main import cli, main
from convgen.compiler import compile_layer
from convgen.cost.machine import Machine
from convgen.cost.machine_measured import Probe, efficiency_like
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.rows import Price
from convgen.cost.schedule import schedule_cost
from convgen.cost.timeline import simulate
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.operations.convolution import Convolution
from convgen.spec.build import layer_from_dict
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import network_from_dict
from convgen.verify.processes import ProcessFailed, spawn

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
LOCAL = Local(
    device="some CPU, 2 threads",
    threads=2,
    memory_bytes=8e9,
    bytes_per_s=2e10,
    flops_per_s={"float32": 1e11, "float64": 5e10},
    convolution_flops_per_s=7e10,
)
SHAPES = [Reached(SHAPE_LIST[0], (5e10, 4e10, 3e10)), Reached(SHAPE_LIST[9], (5e9, 4e9, 3e9))]
LAUNCH_S = 1e-5
COLLECTIVES = [
    Collective("all_gather", 2, 1 << 12, 2e-4, 1e-4),
    Collective("all_gather", 2, 1 << 20, 8e-4, 1e-4),
    Collective("all_gather", 4, 1 << 12, 3e-4, 1e-4),
    Collective("all_reduce", 2, 1 << 12, 1e-4, 2e-4),
    Collective("all_reduce", 2, 1 << 12, 4e-4, 2e-4),
]
LINES = {"inside": (2e-5, 3e9), "across": (5e-5, 1e9), "shared": (6e-5, 7e8), "pair 1": (1e-5, 4e9)}


def messages_of(nodes: Nodes) -> dict[str, Messages]:
    """Messages that take exactly what LINES says."""
    found: dict[str, Messages] = {}
    for key, pattern in patterns(nodes).items():
        latency, rate = LINES.get(key, (1e-4, 5e8))
        times = tuple(Timing(key, size, latency + size / rate, 9, 0.1) for size in SIZES)
        found[key] = Messages(pattern, times, fit_line(SIZES, [t.seconds for t in times], key))
    return found


def calibration(nodes: Nodes, name: str = "mine") -> Calibration:
    messages = messages_of(nodes)
    processor = fit_line(SIZES, [4e-5 + size / 3e9 for size in SIZES], "the processor's time") if name else None
    machine = machine_of(name or "free", nodes, messages, LOCAL, SHAPES, LAUNCH_S, processor)
    machine = replace(machine, misfits=misfits_of(COLLECTIVES, rounded))
    return Calibration(
        date="2030-01-02",
        backend="gloo",
        torch="2.13.0",
        nodes=nodes,
        messages=messages,
        local=LOCAL,
        machine=machine,
        assumed=assumed(LOCAL),
        shapes=tuple(SHAPES),
        collectives=tuple(COLLECTIVES),
    )


# Lines


@settings(max_examples=60)
@given(
    latency=st.floats(1e-7, 1e-3),
    transfer=st.floats(1, 1e4),
    noise=st.lists(st.floats(-0.05, 0.05), min_size=len(SIZES), max_size=len(SIZES)),
)
def test_a_line_is_found_under_noise(latency: float, transfer: float, noise: list[float]) -> None:
    """The largest message's transfer takes so many latencies: from a rate hardly seen to a latency hardly seen.

    The true line has a sum of squared relative errors of at most n e^2, so the best one has no more, and at each size
    it is within sqrt(n) e of what was measured.
    """
    rate = SIZES[-1] / (transfer * latency)
    true = [latency + size / rate for size in SIZES]
    measured = [t * (1 + e) for t, e in zip(true, noise, strict=True)]
    fit = fit_line(SIZES, measured, "messages")
    worst = max(1e-6, *(abs(e / (1 + e)) for e in noise))
    bound = len(SIZES) ** 0.5 * worst
    assert fit.worst_error <= bound * 1.001
    assert fit.median_error <= fit.worst_error
    for size, m in zip(SIZES, measured, strict=True):
        assert abs(fit.seconds(size) - m) <= bound * 1.001 * m
    if 100 <= transfer <= 1000:  # both are seen well
        assert fit.latency_s == pytest.approx(latency, rel=0.2)
        assert fit.bytes_per_s == pytest.approx(rate, rel=0.2)


def test_a_line_without_noise_is_found_exactly() -> None:
    fit = fit_line(SIZES, [3e-5 + size / 2e9 for size in SIZES], "messages")
    assert fit.latency_s == pytest.approx(3e-5, rel=1e-9)
    assert fit.bytes_per_s == pytest.approx(2e9, rel=1e-9)
    assert fit.worst_error < 1e-9


def test_small_messages_count_as_much_as_large_ones() -> None:
    """Where large messages are 10 % slow, plain least squares would miss the latency by many times itself."""
    fit = fit_line(SIZES, [(3e-5 + size / 2e9) * (1.1 if size >= 1 << 20 else 1) for size in SIZES], "messages")
    assert fit.latency_s == pytest.approx(3e-5, rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "seconds", "said"),
    [
        ([64, 128], [1e-5, 2e-5], "2 sizes, a line needs 3"),
        ([64, 64, 64, 128], [1e-5] * 4, "2 sizes, a line needs 3"),
        ([64, 128, 256], [1e-5, -2e-5, 3e-5], "128 bytes took -2e-05 s"),
        ([64, 128, 256], [1e-5, 2e-5, float("nan")], "256 bytes took nan s"),
        ([64, 128, 256], [1e-5, 2e-5], "3 sizes and 2 times"),
        ([64, 1 << 10, 1 << 20], [3e-5, 2e-5, 1e-5], "times don't grow with the size"),
    ],
)
def test_times_on_no_line_are_refused(sizes: list[int], seconds: list[float], said: str) -> None:
    with pytest.raises(InputError) as caught:
        fit_line(sizes, seconds, "messages")
    assert said in caught.value.fact
    assert caught.value.hint


# Nodes


def test_ranks_lie_node_by_node() -> None:
    assert nodes_of(["a"] * 3 + ["b"] * 3) == Nodes(count=2, ranks=3)
    assert nodes_of(["a", "b"]) == Nodes(count=2, ranks=1)
    assert nodes_of(["a", "a"]).text == "2 ranks on 1 node"


@pytest.mark.parametrize(
    ("hosts", "said", "note"),
    [
        (["a", "a", "a", "b"], "nodes have 3, 1 ranks", "3 on a, 1 on b"),
        (["a", "b", "a", "b"], "ranks 0, 2 share a node", "1 on a, 1 on b, 1 on a, 1 on b"),
        (["b", "a", "a", "b"], "ranks 0, 3 share a node", "1 on b, 2 on a, 1 on b"),
    ],
)
def test_ranks_that_no_file_can_describe_are_refused(hosts: list[str], said: str, note: str) -> None:
    with pytest.raises(InputError) as caught:
        nodes_of(hosts)
    assert said in caught.value.fact
    assert [n.text for n in caught.value.notes] == [note]
    assert caught.value.hint


@pytest.mark.parametrize("nodes", [Nodes(1, 2), Nodes(1, 5), Nodes(2, 1), Nodes(2, 2), Nodes(3, 4)], ids=str)
def test_every_sender_is_sent_to_at_the_right_level(nodes: Nodes) -> None:
    found = patterns(nodes)
    for key, pattern in found.items():
        assert sorted(a for a, _ in pattern.to) == sorted(b for _, b in pattern.to)
        crosses = {a // nodes.ranks != b // nodes.ranks for a, b in pattern.to}
        assert crosses == {key in ("pair across", "across", "shared")}
    assert ("inside" in found) == (nodes.ranks > 1)
    assert ("across" in found) == (nodes.count > 1)
    assert ("shared" in found) == (nodes.count > 1 and nodes.ranks > 1)


def test_levels_are_the_lines_of_their_messages() -> None:
    two = Nodes(count=2, ranks=2)
    node, machine = levels_of(two, messages_of(two))
    assert (node.name, node.ranks, machine.ranks) == ("node", 2, None)
    assert (node.latency_s, node.bytes_per_s) == pytest.approx(LINES["inside"])
    assert (machine.latency_s, machine.bytes_per_s) == pytest.approx(LINES["across"])
    assert machine.shared_bytes_per_s == pytest.approx(2 * LINES["shared"][1])
    for nodes, key in ((Nodes(1, 2), "inside"), (Nodes(2, 1), "across")):
        (only,) = levels_of(nodes, messages_of(nodes))
        assert (only.latency_s, only.bytes_per_s) == pytest.approx(LINES[key])


# Files


@pytest.mark.parametrize("nodes", [Nodes(1, 2), Nodes(2, 1), Nodes(2, 2)], ids=str)
def test_what_is_written_reads_back(tmp_path: Path, nodes: Nodes) -> None:
    found, path = calibration(nodes, 'of "mine": \N{GREEK SMALL LETTER ALPHA}'), tmp_path / "m.yaml"
    write_machine(found, path)
    assert load_machine(str(path)) == found.machine
    assert [p.name for p in tmp_path.iterdir()] == ["m.yaml"]
    text = path.read_text(encoding="utf-8")
    assert "on 2030-01-02" in text and "torch 2.13.0" in text
    assert text.count("assumed: float32's") == 2  # bfloat16 and float16 of LOCAL
    assert max(map(len, text.splitlines())) <= 120
    assert nodes.text in report_text(found)
    assert found.machine.message_processor_s == pytest.approx(4e-5) and "message_processor_s: 4.000e-5" in text
    assert 1 / found.machine.processor_s_per_byte == pytest.approx(3e9, rel=1e-3)
    told = replace(found, machine=replace(found.machine, network_launch_s=2.5e-4), quantile=0.25)
    write_machine(told, path)
    assert load_machine(str(path)).network_launch_s == 2.5e-4 and "the quantile 0.25" in path.read_text("utf-8")


def test_a_core_that_is_left_carries_messages(tmp_path: Path) -> None:
    assert cores_left([range(4)] * 2, 1) and not cores_left([range(4)] * 2, 2) and not cores_left([[0], [1]], 1)
    found, path = calibration(Nodes(1, 2), ""), tmp_path / "m.yaml"
    write_machine(found, path)
    assert "processor" not in path.read_text(encoding="utf-8").replace("device: ", "")
    assert load_machine(str(path)).processor is None


def test_what_was_not_measured_is_said() -> None:
    text = machine_text(calibration(Nodes(1, 2))).replace("\n# ", " ")
    assert "Not measured: reduce_scatter, all_to_all, exchange, collectives that send more than 1 MiB a rank" in text
    assert f"{len(SHAPE_LIST) - 2} of {len(SHAPE_LIST)} shapes" in text


def test_a_collective_takes_what_was_measured_of_its_kind_group_and_size() -> None:
    machine = calibration(Nodes(1, 4)).machine
    over = machine.over_model
    assert over("all_gather", 2, 1 << 12) == pytest.approx(2) and over("all_gather", 2, 1 << 20) == pytest.approx(8)
    assert over("all_gather", 2, 1 << 16) == pytest.approx(4)  # between, as logarithms
    assert over("all_gather", 2, 16) == pytest.approx(2) and over("all_gather", 2, 1 << 30) == pytest.approx(8)
    assert over("all_gather", 8, 1 << 12) == pytest.approx(3)  # of the nearest group
    assert over("all_reduce", 2, 1 << 12) == pytest.approx(1)  # half and twice: the mean of their logarithms
    assert over("exchange", 2, 1 << 12) == 1.0  # not measured: by the links


def test_a_step_takes_what_was_measured() -> None:
    """A layer's gather and its convolutions, with the machine as the links say and as it was measured."""
    machine = calibration(Nodes(1, 2)).machine
    plain = replace(machine, misfits=(), probes=())
    layer = {"name": "a", "layer": "conv2d", "input": [2, 64, 28, 28], "out_channels": 64, "kernel_size": 3,
             "padding": 1, "grid": {"C": 2}, "algorithm": "stationary-x"}  # fmt: skip
    one = compile_layer(layer_from_dict(layer))
    steps, links = (
        {s.result: s.cost for s in schedule_cost(one.schedule, Model(one.space, m, "float32")).steps}
        for m in (machine, plain)
    )
    sent = steps["dy_gathered"].sent_bytes
    assert steps["dy_gathered"].seconds == pytest.approx(
        machine.over_model("all_gather", 2, sent) * links["dy_gathered"].seconds, rel=1e-6
    )
    for result, phase in (("y_partial", "forward"), ("dx", "backward_data"), ("dw", "backward_filter")):
        reached = steps[result].flops / (steps[result].seconds - machine.launch_s)
        assert reached == pytest.approx(machine.convolution_flops_per_s("float32", phase, (32, 64, 9, 1568, 1, 1)))


def test_a_convolution_reaches_what_those_like_it_do() -> None:
    """As measured where it was; in between better than the mean does; never beyond all that was measured."""

    def true(shape: tuple[float, ...]) -> float:
        work = math.log2(math.prod(shape))
        return 0.8 / (1 + 2.0 ** (0.5 * (22 - work)) + 2.0 / shape[0] + 1.0 / shape[1])

    rng = random.Random(1)
    plain = [s for s in SHAPE_LIST if s.groups == 1]
    sizes = [(s.channels, s.filters, s.kernel**2, s.pixels) for s in plain]
    probes = tuple(
        Probe(channels=c, filters=f, taps=t, pixels=n, efficiency=(true((c, f, t, n)),) * 3) for c, f, t, n in sizes
    )
    off: list[float] = []
    mean = statistics.mean(math.log(p.efficiency[0]) for p in probes)
    for p in probes:
        assert efficiency_like(probes, "forward", p.shape) == pytest.approx(p.efficiency[0], rel=0.1)
    for _ in range(100):
        a, b = rng.sample(sizes, 2)
        between = tuple(math.sqrt(m * n) for m, n in zip(a, b, strict=True))
        wanted = math.log(true(between))
        off.append(
            abs(math.log(efficiency_like(probes, "forward", (*between, 1, 1))) - wanted) / max(abs(mean - wanted), 0.1)
        )
    assert statistics.median(off) < 0.5
    least, most = (pick(p.efficiency[0] for p in probes) for pick in (min, max))
    for far in ((1, 1, 1, 1, 1, 1), (1 << 14, 1 << 14, 121, 1 << 20, 1, 1), (1, 1, 1, 1 << 20, 4096, 64)):
        assert least <= efficiency_like(probes, "forward", far) <= most


def test_a_network_and_a_layer_price_a_convolution_alike() -> None:
    """Channels, filters and groups of a rank by its block, or by its roles."""
    machine = calibration(Nodes(1, 2)).machine
    for groups, letter, algorithm in ((1, "C", "stationary-x"), (1, "F", "stationary-y"), (8, "G", "stationary-x")):
        layer = {"name": "a", "layer": "conv2d", "input": [2, 64, 12, 12], "out_channels": 96, "kernel_size": 3,
                 "padding": 1, "groups": groups, "grid": {letter: 2}, "algorithm": algorithm}  # fmt: skip
        one = compile_layer(layer_from_dict(layer))
        costs = schedule_cost(one.schedule, Model(one.space, machine, "float32")).steps
        price = Price(one.layer.grid, machine, "float32")
        for s in costs:
            if s.kind.startswith("conv_"):
                operation = Convolution(s.phase, one.layer.conv)
                roles = {letter: (letter,)}
                assert price.local(operation, 0, roles) == pytest.approx(s.cost.time_ps, rel=1e-6)


def test_other_commands_take_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    write_machine(calibration(Nodes(2, 2)), path)
    layer = "name: a\nlayer: conv1d\ninput: [4, 4, 64]\nout_channels: 4\nkernel_size: 3\ngrid: {a: 4}\n"
    (tmp_path / "a.yaml").write_text(layer)
    network = "name: n\ninput: [4, 4, 16, 16]\nnodes:\n  - {kind: conv, out_channels: 8, kernel_size: 3, padding: 1}\n"
    (tmp_path / "n.yaml").write_text(network)
    for command in (
        ["compile", tmp_path / "a.yaml", "--emit", "cost", "--machine", path],
        ["plan", tmp_path / "n.yaml", "--machine", path, "--ranks", "4", "--json"],
    ):
        done = CliRunner().invoke(cli, [str(word) for word in command])
        assert done.exit_code == 0, done.output


def test_a_file_that_reads_back_otherwise_is_not_written(tmp_path: Path) -> None:
    found = calibration(Nodes(1, 2))
    other = replace(found, machine=replace(found.machine, launch_s=1.23456e-5))  # more digits than the file has
    with pytest.raises(Exception, match="reads back as another machine"):
        write_machine(other, tmp_path / "m.yaml")
    assert not list(tmp_path.iterdir())


def test_noise_and_a_convolution_above_the_peak_are_said() -> None:
    nodes = Nodes(1, 2)
    fast = replace(LOCAL, convolution_flops_per_s=2e11)
    machine = machine_of("m", nodes, messages_of(nodes), fast, SHAPES, LAUNCH_S)
    assert (dict(machine.peak_flops)["float32"], machine.efficiency) == (2e11, 1.0)
    found = replace(calibration(nodes), local=fast, machine=machine)
    assert "the convolution's below" in machine_text(found)
    assert "Unsteady" not in machine_text(found)
    noisy = {
        key: replace(m, timings=tuple(replace(t, spread=0.8) for t in m.timings)) for key, m in found.messages.items()
    }
    assert "Unsteady: repeats of a message differ by 80%" in machine_text(replace(found, messages=noisy))


@pytest.mark.parametrize(
    ("output", "said"),
    [("no/such/m.yaml", "cannot write"), ("m.json", "no name for a machine file"), (".", "is a folder")],
)
def test_outputs_that_cannot_be_are_refused(tmp_path: Path, output: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        check_output(tmp_path / output)
    assert said in caught.value.fact
    assert caught.value.hint


# Races


class Alone(Team):
    """A team of one, without a process group."""

    def __init__(self, quantile: float = 0.5) -> None:
        self.rank, self.size, self.device, self.quantile = 0, 1, CPU, quantile

    def barrier(self) -> None: ...

    def agree(self, answer: bool) -> bool:
        return answer

    def most(self, values: torch.Tensor) -> torch.Tensor:
        return values


@pytest.fixture
def napping(monkeypatch: pytest.MonkeyPatch) -> Naps:
    naps = Naps()
    monkeypatch.setattr("convgen.calibrate.race.time", SimpleNamespace(perf_counter=lambda: naps.now))
    return naps


class Naps:
    """Calls that only move the clock of races."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self, *milliseconds: float) -> list[list[Case]]:
        """A call for each; sizes are microseconds."""
        return [[Case("nap", round(1e3 * ms), lambda ms=ms: self._sleep(ms / 1e3))] for ms in milliseconds]

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_race_finds_how_long_calls_take(napping: Naps) -> None:
    team = Alone()
    for timing in race(team, [tried(team, case) for (case,) in napping(5, 20)], 0.2):
        assert timing.seconds == pytest.approx(timing.size / 1e6)
        assert timing.spread == pytest.approx(0, abs=1e-9)
        assert timing.laps in (6, 7)  # of 30 ms each, added up in floats


def test_of_a_race_counts_what_is_asked_for(napping: Naps) -> None:
    """A call that takes 10 ms, and every third time 40 ms."""
    turn = [0]

    def call() -> None:
        turn[0] += 1
        napping.now += 40e-3 if turn[0] % 3 == 0 else 10e-3

    for quantile, seconds in ((0.0, 10e-3), (0.5, 10e-3), (1.0, 40e-3)):
        (found,) = race(Alone(quantile), [Case("call", 1, call, 10e-3)], 0.5)
        assert found.seconds == pytest.approx(seconds)


def test_a_launch_of_a_network_is_what_its_step_lacks() -> None:
    """The step is simulated with one, which is then found again; what is shorter than modelled has none."""
    machine = calibration(Nodes(1, 2)).machine
    nodes = [{"kind": "conv", "out_channels": 8, "kernel_size": 3, "padding": 1}, {"kind": "relu"}]
    network = network_from_dict({"name": "n", "input": [2, 8, 9, 9], "nodes": nodes})
    program = compile_network(network_graph(network), Grid((("N", 2),))).program
    slow = replace(machine, network_launch_s=3e-4)
    seconds = simulate(program, slow, "float32", of_inputs=True).end_s
    assert launch_of(machine, Stepped(program, seconds)) == pytest.approx(3e-4)
    assert launch_of(machine, Stepped(program, 1e-9)) == 0.0
    assert slow.rows_launch_s == 3e-4 and machine.rows_launch_s == machine.launch_s


def test_sizes_stop_growing_when_time_runs_short(napping: Naps) -> None:
    assert [case.size for case in climb(Alone(), napping(1, 4, 16, 64, 10_000), 0.5, at_least=1)] == [
        1000,
        4000,
        16_000,
    ]
    assert len(climb(Alone(), napping(1, 2), 0.0, at_least=2)) == 2
    assert settle(Alone(), [case for (case,) in napping(1, 4, 16, 10_000)], 10e-3).size == 16_000


# Processes


def on_a_line(team: Team, cases: Sequence[Case], seconds: float) -> list[Timing]:
    """A race whose times are then put on a line: on a busy machine they may be on none, and are rightly refused."""
    return [replace(t, seconds=1e-5 + t.size / 1e9) for t in race(team, cases, seconds)]


LAUNCHED = """
from test_calibrate import on_a_line
from functools import partial
from convgen.calibrate import links, local, processor, race, run, shapes
from convgen.commands.main import main

links.race = on_a_line
race.BLOCK_S, race.TRIES, processor.LAPS, processor.LEAST_S = 1e-3, 1, 2, 1e-3
local.PRODUCTS["cpu"] = local.PRODUCTS["cpu"][:2]
run.measure_shapes = partial(shapes.measure_shapes, shapes=shapes.SHAPES[:2])
main()
"""


def on_two_nodes(folder: Path, rank: int) -> Machine:
    team = Team(CPU)
    found = calibrate(team, "m", folder / "m.yaml", 0.05, lambda _: None, host="ab"[rank // 2])
    if rank == 0:
        write_machine(found, folder / "m.yaml")
    return found.machine


def test_two_nodes_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes that take themselves for two nodes: both levels, alike on every rank, and written."""
    monkeypatch.setattr("convgen.calibrate.race.BLOCK_S", 1e-3)  # the processes are forked
    monkeypatch.setattr("convgen.calibrate.race.TRIES", 1)
    monkeypatch.setattr("convgen.calibrate.processor.LAPS", 2)
    monkeypatch.setattr("convgen.calibrate.run.measure_shapes", partial(measure_shapes, shapes=SHAPE_LIST[:2]))
    monkeypatch.setattr("convgen.calibrate.launches.BLOCKS", 2)
    monkeypatch.setattr("convgen.calibrate.links.race", on_a_line)
    monkeypatch.setitem(PRODUCTS, "cpu", PRODUCTS["cpu"][:2])
    monkeypatch.setattr("convgen.calibrate.collectives.LEAST_LAPS", 2)
    machines: list[Machine] = spawn(lambda rank: on_two_nodes(tmp_path, rank), 4)
    assert len(set(machines)) == 1
    assert load_machine(str(tmp_path / "m.yaml")) == machines[0]
    assert [(level.name, level.ranks) for level in machines[0].levels] == [("node", 2), ("machine", None)]
    assert machines[0].levels[1].shared_bytes_per_s


def test_all_ranks_stop_before_measuring_where_nothing_can_be_written(tmp_path: Path) -> None:
    def program(_: int) -> tuple[str, list[str]]:
        said: list[str] = []
        with pytest.raises(InputError) as caught:
            calibrate(Team(CPU), "m", tmp_path / "no" / "m.yaml", 60.0, said.append)
        return caught.value.fact, said

    first, second = spawn(program, 2)
    assert first == second
    assert "/no is no folder" in first[0] and not first[1]


def test_a_lost_rank_is_named() -> None:
    def program(rank: int) -> None:
        team = Team(CPU)
        team.barrier()  # gloo connects ranks while they join: one that leaves before is not lost, it never was there
        if rank == 1:
            os._exit(0)
        team.barrier()

    with pytest.raises(ProcessFailed, match="rank 0 lost the others"):
        spawn(program, 2)


def launched(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command on two ranks, as docs/machines.md says, but for the times of messages."""
    (folder / "launched.py").write_text(LAUNCHED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "launched.py"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "calibrate", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False,
        timeout=1800,
    )  # fmt: skip


def test_the_command_measures_and_writes(tmp_path: Path) -> None:
    done = launched(tmp_path, "-o", "here.yaml", "--seconds", "1", "--json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    machine = load_machine(str(tmp_path / "here.yaml"))
    assert (found["file"], machine.name, machine.ranks_per_node, found["nodes"]) == ("here.yaml", "here", 2, 1)
    inside = found["messages"]["inside"]
    assert machine.levels[0].bytes_per_s == pytest.approx(inside["bytes_per_s"], rel=1e-3)
    assert machine.levels[0].bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert len(inside["times"]) >= 4
    assert {c["kind"] for c in found["collectives"]} == set(KINDS) == {m.kind for m in machine.misfits}
    assert machine.probes and all(e > 0 for p in machine.probes for e in p.efficiency)
    assert 1e7 < machine.memory_bytes_per_s < 1e13 and 1e7 < dict(machine.peak_flops)["float32"] < 1e14
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here.yaml", "launched.py"]


def test_one_process_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["convgen", "calibrate", "-o", "m.yaml"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "this is one process alone" in said
    assert "torchrun --nproc-per-node=2 -m convgen.cli calibrate" in said


@pytest.mark.parametrize("seed", range(20))
def test_a_collective_takes_until_its_last_rank_leaves(seed: int) -> None:
    """Of one node by its clock, whoever waits for whom; of several the mean, whatever their clocks say."""
    draw = random.Random(seed)
    node, nodes = draw.choice((1, 2, 4)), draw.choice((1, 2, 3))
    takes = [draw.uniform(1, 2) for _ in range(nodes)]
    spans: list[tuple[float, float]] = []
    for seconds in takes:
        clock, last = draw.uniform(-1e3, 1e3), draw.randrange(node)  # who comes last, and it or another leaves last
        leaves = draw.randrange(node)
        for rank in range(node):
            entered = 0.0 if rank == last else -draw.uniform(0, 5)
            left = seconds if rank == leaves else seconds * draw.uniform(0.5, 1)
            spans.append((clock + entered, clock + left))
    assert together(spans, node * nodes, node) == pytest.approx(sum(takes) / nodes, rel=1e-9)
    by_group = [together(spans[i : i + node], node, node) for i in range(0, len(spans), node)]
    assert together(spans, node, node) == pytest.approx(sum(by_group) / nodes, rel=1e-9)
