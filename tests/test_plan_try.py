"""`convgen plan --try K`: which layouts are run, how sure the fastest is, and the plan that is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from convgen.bench.rounds import took
from convgen.bench.tried import candidates, sure, tried_text
from convgen.commands.main import cli
from convgen.cost.machine_file import read_machine
from convgen.cost.machines import load_machine
from convgen.cost.steps_file import steps_text
from convgen.cost.timeline import simulate
from convgen.errors import InputError
from convgen.explain.planned_scaling import memory_bytes
from convgen.plan.parts import Room
from convgen.plan.setting import Setting
from convgen.resources import data_file
from convgen.spec.graph import Graph
from convgen.spec.graph_file import write_graph
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import network_from_dict
from convgen.spec.target import CPU

ROOT = Path(__file__).resolve().parent.parent
LASSEN = load_machine("lassen")


def graph(samples: int = 4) -> Graph:
    nodes = [
        {"name": "a", "kind": "conv", "out_channels": 16, "kernel_size": 3, "padding": 1},
        {"kind": "relu"},
        {"name": "b", "kind": "conv", "out_channels": 8, "kernel_size": 3, "padding": 1},
    ]
    return network_graph(network_from_dict({"name": "two", "input": [samples, 4, 128, 128], "nodes": nodes}))


def test_candidates_are_distinct_and_the_best_come_first() -> None:
    found = candidates(graph(), 2, Setting(machine=LASSEN), CPU, 16)
    assert len(found) >= 3 and [one.seconds for one in found] == sorted(one.seconds for one in found)
    programs = [one.compiled.plain for one in found]
    assert all(a != b for i, a in enumerate(programs) for b in programs[:i])
    for one in found:
        assert one.seconds == simulate(one.compiled.program, LASSEN, "float32", alike=True).end_s
        assert one.compiled.program.grid.ranks == 2
    names = {one.name for one in found}
    assert names & {"plan", "samples"} and any("=2" in name for name in names)
    first = candidates(graph(), 2, Setting(machine=LASSEN), CPU, 2)
    assert [one.name for one in first] == [one.name for one in found[:2]]


@pytest.mark.parametrize("types", [{"reduce_dtype": "bfloat16"}, {"autocast": "bfloat16"}])
def test_candidates_have_the_types_that_were_asked(types: dict[str, str]) -> None:
    """Letters over all ranks, too: what runs beside each other moves and computes in the same types."""
    found = candidates(graph(), 2, Setting(machine=LASSEN, **types), CPU, 16)
    assert {one.name for one in found} & {"H=2", "W=2", "C=2", "F=2"}
    for one in found:
        program = one.compiled.program
        assert {name: getattr(program, name) for name in types} == types, one.name


def test_candidates_fit_the_memory() -> None:
    free = candidates(graph(), 2, Setting(machine=LASSEN), CPU, 16)
    needs = sorted(memory_bytes(one.compiled.plain, Room()) for one in free)
    assert needs[0] < needs[-1]
    room = Room((needs[0] + needs[-1]) // 2)
    bounded = candidates(graph(), 2, Setting(machine=LASSEN, room=room), CPU, 16)
    assert bounded and all(memory_bytes(one.compiled.plain, room) <= (room.memory_bytes or 0) for one in bounded)
    with pytest.raises(InputError, match="needs at least"):
        candidates(graph(), 2, Setting(machine=LASSEN, room=Room(1000)), CPU, 16)


def test_how_sure_the_fastest_is() -> None:
    """Certain where no round says otherwise, even where rounds are noisier than layouts differ; a toss where alike."""
    draw = np.random.default_rng(1)
    noise = draw.uniform(1, 3, 40)
    assert sure([noise, noise * 1.05, noise * 1.2]) == [1.0, 0.0, 0.0]
    one, other = draw.normal(10, 1, (2, 41))
    shares = sure([one, other, one + 50])
    assert sum(shares) == 1 and shares[2] == 0
    apart = sure([draw.normal(10, 1, 41), draw.normal(12, 1, 41)])
    assert apart[0] > 0.95


def test_text_says_what_the_model_would_have_taken() -> None:
    compiled = SimpleNamespace(graph=SimpleNamespace(name="net"), program=SimpleNamespace(grid="grid(a=2)"))

    def one(name: str, modelled: float, measured: float, fastest: float) -> Any:
        seconds = took(np.array([[measured] * 3]))
        candidate = SimpleNamespace(name=name, compiled=compiled, seconds=modelled, estimate=None)
        return SimpleNamespace(candidate=candidate, took=seconds, fastest=fastest)

    lines = tried_text([one("rows", 2.0, 1.0, 0.9), one("plan", 1.0, 1.1, 0.1)], 2, "here").splitlines()
    assert lines[-2:] == [
        "fastest rows: it is so in 90% of resamples of the rounds",
        "modelled plan, which takes 10.0% longer",
    ]
    same = tried_text([one("plan", 1.0, 1.0, 1.0), one("rows", 2.0, 1.1, 0.0)], 2, "here").splitlines()
    assert same[-1].startswith("fastest plan")


def test_the_fastest_is_written_under_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(write_graph(graph()))
    own = data_file("tuning", "machines", "cpu.yaml").read_text()
    (tmp_path / "m.yaml").write_text(own)
    words = [
        "plan",
        "two.yaml",
        "--machine",
        "m.yaml",
        "--ranks",
        "2",
        "--try",
        "2",
        "--seconds",
        "0.1",
        "--correct",
        "--json",
        "-o",
        "plan.yaml",
    ]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "convgen"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launch, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert first["seconds"] <= second["seconds"] and len(first["by_rank"]) == 2
    text = (tmp_path / "plan.yaml").read_text()
    assert text.splitlines()[0] == "# convgen plan two.yaml --machine m.yaml --ranks 2"
    (took,) = (float(line.split()[1]) for line in text.splitlines() if line.startswith("milliseconds: "))
    assert took == pytest.approx(first["seconds"] * 1e3, rel=1e-4)
    known = read_machine(tmp_path / "m.yaml").steps  # no machine is so fast as the model of this one
    assert known and (tmp_path / "m.yaml").read_text() == own + steps_text(known)
    assert f"{len(known.steps)} measured step" in done.stderr
    made = CliRunner().invoke(cli, ["compile", str(tmp_path / "plan.yaml"), "-o", str(tmp_path)])
    assert made.exit_code == 0, made.output


@pytest.mark.parametrize(
    ("words", "world", "said"),
    [
        ("--ranks 2 --try 3", "", "no launcher has started any"),
        ("--ranks 2 --try 3", "4", "4 processes are here"),
        ("--ranks 2 --correct", "2", "nothing is measured without --try"),
        ("--ranks 2 --seconds 3", "2", "--seconds: nothing runs without --try"),
        ("--ranks 2 --try 3 --correct", "2", "lassen is one that comes with convgen"),
        ("--ranks 1,2 --try 3", "2", "--try is of one plan"),
        ("--ranks 2 --try 3 --explain a", "2", "--explain is of one modelled plan"),
        ("--ranks 2 --try 3 --grid a=2", "2", "--grid is of one modelled plan"),
    ],
)
def test_refused(words: str, world: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two.yaml").write_text(write_graph(graph()))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
    line = ["plan", str(tmp_path / "two.yaml"), "--machine", "lassen", *words.split()]
    with pytest.raises(InputError) as caught:
        CliRunner().invoke(cli, line, catch_exceptions=False, standalone_mode=False)
    assert said in str(caught.value)
