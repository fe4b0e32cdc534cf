"""Measuring a machine: races, what a collective and a launch take, and runs of real processes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibrations import calibration, fit_on_a_line, on_a_line

from convgen.algebra.grid import Grid
from convgen.calibrate.collectives import KINDS, together
from convgen.calibrate.launches import Stepped, launch_of
from convgen.calibrate.local import PRODUCTS
from convgen.calibrate.nodes import Nodes
from convgen.calibrate.race import Case, climb, race, settle, tried
from convgen.calibrate.run import calibrate
from convgen.calibrate.shapes import SHAPES as SHAPE_LIST
from convgen.calibrate.shapes import measure_shapes
from convgen.calibrate.team import Team
from convgen.calibrate.write import write_machine
from convgen.commands.main import main
from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.timeline import simulate
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import network_from_dict
from convgen.verify.processes import ProcessFailed, spawn

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")

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


# Processes

LAUNCHED = """
from calibrations import fit_on_a_line, on_a_line
from functools import partial
from convgen.calibrate import links, local, processor, race, run, shapes
from convgen.commands.main import main

links.race, processor.fit_line = on_a_line, fit_on_a_line
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
    monkeypatch.setattr("convgen.calibrate.processor.fit_line", fit_on_a_line)
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
