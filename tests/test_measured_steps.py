"""Measured steps of a machine: their file, the prices that take them, and how a bench finds what is off."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import stdev
from typing import Any

import pytest

from convgen.algebra.grid import Grid
from convgen.bench.correct import as_steps, corrected_text, corrections
from convgen.bench.marks import Mark
from convgen.cost.machine import Machine
from convgen.cost.machine_file import read_machine
from convgen.cost.machines import load_machine
from convgen.cost.measured_steps import NONE, MeasuredSteps, Seconds, Travel, Work
from convgen.cost.rows import program_cost
from convgen.cost.steps_file import STEPS, as_written, steps_text, with_steps, write_steps
from convgen.cost.timeline import simulate
from convgen.cost.uncertainty import estimate
from convgen.errors import InputError
from convgen.explain.planned import Planned, planned_json, planned_text
from convgen.network_compiler import CompiledNetwork, compile_network, plan_graph
from convgen.plan.program.by_timeline import with_links
from convgen.plan.setting import Setting
from convgen.resources import data_file
from convgen.spec.graph import Graph
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import network_from_dict

CPU = load_machine("cpu")
NODES: list[dict[str, Any]] = [
    {"name": "a", "kind": "conv", "out_channels": 8, "kernel_size": 3, "padding": 1},
    {"name": "norm", "kind": "batch_norm"},
    {"kind": "relu"},
    {"name": "b", "kind": "conv", "out_channels": 8, "kernel_size": 3, "padding": 1, "bias": True},
    {"kind": "max_pool", "kernel_size": 2},
    {"kind": "flatten"},
    {"name": "fc", "kind": "linear", "out_features": 4},
]
WORK = Work("conv_forward", ("x",), (("C", 4), ("N", 2)), 100, 20, "float32")
TRAVEL = Travel("all_reduce", 2, "machine", 4096)
STEP = "{collective: all_reduce, ranks: 2, links: machine, bytes: 4096, seconds: 1e-3, spread: 0.1}"
ROW = "{row: relu, extents: {d0: 2}, flops: 0, elements: 8, type: float32, seconds: 1e-3, spread: 0}"


def graph() -> Graph:
    return network_graph(network_from_dict({"name": "small", "input": [4, 4, 16, 16], "nodes": NODES}))


def network(**grid: int) -> CompiledNetwork:
    return compile_network(graph(), Grid(tuple(grid.items())), machine=CPU)


def marks(compiled: CompiledNetwork, truth: Machine) -> list[list[list[Mark]]]:
    """What ranks' recorders would have of a step on a machine."""
    step, found = simulate(compiled.program, truth, "float32"), list[list[list[Mark]]]()
    for rank in range(step.ranks):
        mine = [s for s in step.spans if s.rank == rank and s.lane == "compute" and "(processor)" not in s.name]
        phases = ["forward" if s.end_s <= step.forward_s * (1 + 1e-9) else "backward" for s in mine]
        some = [Mark("local", s.name, p, s.start_s, s.end_s, s.seconds) for s, p in zip(mine, phases, strict=True)]
        found.append([[*some, *(Mark("move", t.name, t.phase, 0, 0, t.exposed_s) for t in step.travelled)]])
    return found


def corrected(compiled: CompiledNetwork, machine: Machine, truth: Machine) -> MeasuredSteps:
    alone = {(t.phase, t.name): Seconds(t.seconds, 0.0) for t in simulate(compiled.program, truth, "float32").travelled}
    return as_steps(corrections(compiled.program, machine, "float32", marks(compiled, truth), alone))


@pytest.mark.parametrize("grid", [{"N": 2}, {"H": 2}, {"C": 2}, {"N": 2, "F": 2}], ids=str)
def test_a_corrected_machine_predicts_what_was_measured(grid: dict[str, int]) -> None:
    """Of one that is 3 times as slow in computing and launching, on links 5 times as slow."""
    compiled = network(**grid)
    slow = with_links(CPU, 1 / 5)
    truth = replace(slow, efficiency=CPU.efficiency / 3, launch_s=3 * CPU.launch_s, memory_bytes_per_s=1e9)
    steps = corrected(compiled, CPU, truth)
    assert {type(step) for step, _ in steps.steps} == {Work, Travel}
    on = replace(CPU, steps=as_written(steps))
    before, after, wanted = (simulate(compiled.program, m, "float32") for m in (CPU, on, truth))
    assert after.serial_s == pytest.approx(wanted.serial_s, rel=1e-2) and before.serial_s < wanted.serial_s / 2
    assert corrected(compiled, on, truth) == NONE  # nothing is left to correct
    assert program_cost(compiled.plain, on, "float32").seconds == pytest.approx(
        simulate(compiled.plain, on, "float32").serial_s, rel=1e-9
    )


def test_what_is_right_or_noise_stays_as_it_is() -> None:
    compiled = network(N=2)
    assert corrected(compiled, CPU, CPU) == NONE
    rounds = [marks(compiled, with_links(replace(CPU, efficiency=e), 1.0)) for e in (0.01, CPU.efficiency, 0.9)]
    every = [[one[rank][0] for one in rounds] for rank in range(2)]
    assert not [one for one in corrections(compiled.program, CPU, "float32", every, {}) if isinstance(one.step, Travel)]
    assert corrected_text([], "m.yaml").startswith("nothing is off")


def test_a_plan_takes_what_was_measured_and_says_so() -> None:
    """Its price is its program's, whatever was measured; convolutions over channels are planted as next to nothing."""
    draw, compiled = Random(3), network(C=2)
    known = corrected(compiled, CPU, with_links(replace(CPU, efficiency=CPU.efficiency / 3), 1 / 9)).steps
    on = replace(CPU, steps=MeasuredSteps(tuple((s, t._replace(seconds=draw.uniform(1e-6, 1e-3))) for s, t in known)))
    for machine in (on, replace(on, steps=MeasuredSteps(tuple((s, Seconds(1e-9, 0)) for s, _ in known)))):
        made, plan = plan_graph(graph(), 2, Setting(machine=machine))
        assert plan.seconds == pytest.approx(program_cost(plan.program, machine, "float32").seconds, rel=1e-9)
        said = Planned(made, plan, Setting(machine=machine), {})
        data = planned_json(said)
        assert data["seconds"] == pytest.approx(data["compute_seconds"] + data["communication_seconds"], rel=1e-9)
    assert data["measured_steps"] > 0 and f"known   {data['measured_steps']} of " in planned_text(said)


def test_faster_links_have_faster_travels() -> None:
    steps = MeasuredSteps(((WORK, Seconds(1.0, 0.1)), (TRAVEL, Seconds(1.0, 0.1))))
    found = with_links(replace(CPU, steps=steps), 4).steps
    assert (found.seconds(WORK), found.seconds(TRAVEL)) == (1.0, 0.25)
    assert CPU.without_bytes.steps == NONE and steps.updated(MeasuredSteps(((WORK, Seconds(2.0, 0)),))).steps == (
        (WORK, Seconds(2.0, 0)),
        (TRAVEL, Seconds(1.0, 0.1)),
    )


# ---- How far it may be off ----


def test_an_estimate_is_off_as_its_steps_are_together() -> None:
    """Against what machines of other numbers, drawn, take: links and computing each by the share that is said."""
    draw, compiled = Random(1), network(N=2)
    on = replace(CPU, launch_s=0.0, network_launch_s=0.0, uncertainty=(("computing", 0.1), ("links", 0.2)))
    plain = replace(compiled, program=compiled.plain)
    found = estimate(plain.program, on, "float32")
    assert found is not None and found.seconds == simulate(plain.program, on, "float32").end_s
    local, taken = simulate(plain.program, on, "float32").computing_s, list[float]()
    for _ in range(300):
        slower, longer = (math.exp(draw.gauss(0, s)) for s in (0.1, 0.2))
        other = replace(with_links(on, 1 / longer), memory_bytes_per_s=on.memory_bytes_per_s / slower)
        taken.append(simulate(plain.program, replace(other, efficiency=on.efficiency / slower), "float32").end_s)
    # All of computing together is the most that it can be off, and a kind of collective alone the least of links.
    assert 0.3 < found.deviation / stdev(taken) < 1.1 and found.deviation > 0.1 * local / 3
    assert estimate(plain.program, CPU, "float32") is None and found.is_alike(found)
    slower = replace(found, seconds=found.seconds * 1.001)
    assert not found.is_alike(slower)  # what they have in common tells nothing of which is faster
    assert found.is_alike(replace(slower, deviations={}))


def test_a_measured_step_is_off_as_its_repeats_are() -> None:
    compiled = network(H=2)
    on = replace(CPU, uncertainty=(("computing", 0.1), ("links", 0.1)))
    steps = corrected(compiled, on, replace(with_links(CPU, 1 / 5), efficiency=CPU.efficiency / 3, launch_s=1e-3))
    known = [MeasuredSteps(tuple((s, t._replace(spread=p)) for s, t in steps.steps)) for p in (0.0, 1.0)]
    quiet, noisy = (estimate(compiled.program, replace(on, steps=one), "float32") for one in known)
    assert quiet is not None and noisy is not None
    assert quiet.seconds == noisy.seconds and quiet.deviation < 0.2 * noisy.deviation


def test_a_plan_says_how_sure_it_is() -> None:
    sure, unsure = (
        Planned(*plan_graph(graph(), 2, setting), setting, {})
        for setting in (
            Setting(machine=replace(CPU, uncertainty=(("computing", u), ("links", u)))) for u in (1e-9, 9.0)
        )
    )
    assert (sure.alike == [] and "sample parallelism alone" in unsure.alike) or unsure.program == unsure.sample
    assert "one standard deviation; alike with none" in planned_text(sure)
    assert "one rank alone" in unsure.alike and "alike with one rank alone" in planned_text(unsure)
    data = planned_json(unsure)
    assert data["deviation_seconds"] > data["overlapped_seconds"] and data["alike"] == unsure.alike
    assert planned_json(Planned(*plan_graph(graph(), 2, Setting(machine=CPU)), Setting(machine=CPU), {}))["alike"] == []


# ---- The file ----


def test_a_file_keeps_every_other_line(tmp_path: Path) -> None:
    file, own = tmp_path / "m.yaml", data_file("tuning", "machines", "lassen.yaml").read_text()
    file.write_text(own)
    first = MeasuredSteps(((WORK, Seconds(1.23456e-3, 0.1)), (TRAVEL, Seconds(2e-5, 0.0))))
    write_steps(file, first)
    assert file.read_text() == own + steps_text(first) and read_machine(file).steps == as_written(first)
    file.write_text(file.read_text() + "# the end\n")
    write_steps(file, NONE)
    assert file.read_text() == own + "# the end\n" and read_machine(file) == replace(load_machine("lassen"), steps=NONE)
    other = f"{STEPS}:\n  - {STEP}\n  -\n    {ROW[1:-1].replace(', ', chr(10) + '    ').replace('{d0', '{ d0')}\n"
    middle = other.replace("extents: { d0: 2}", "extents: {d0: 2}") + own
    file.write_text(middle)
    assert len(read_machine(file).steps.steps) == 2
    write_steps(file, first)
    assert file.read_text() == own + steps_text(first) == with_steps(middle, first)


def test_a_list_that_is_no_block_is_left_alone(tmp_path: Path) -> None:
    file, own = tmp_path / "m.yaml", data_file("tuning", "machines", "cpu.yaml").read_text()
    file.write_text(f'{own}"{STEPS}": [{STEP}]\n')
    before = file.read_text()
    with pytest.raises(InputError, match="can't be put into it"):
        write_steps(file, MeasuredSteps(((WORK, Seconds(1.0, 0)),)))
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (STEP.replace("1e-3", "0"), "seconds can't be 0"),
        (STEP.replace("1e-3", "-1e-3"), "seconds can't be"),
        (STEP.replace("0.1", "-1"), "spread can't be"),
        (STEP.replace(", spread: 0.1", ""), "spread in"),
        (STEP.replace("all_reduce", "all_reduces"), "unknown collective"),
        (STEP.replace("4096", "0"), "bytes can't be"),
        (STEP.replace("ranks", "rank"), "unknown key"),
        (STEP.replace("}", ", type: float32}"), "unknown key"),
        (f"{STEP}, {STEP}", "measured twice"),
        (ROW.replace("d0: 2", "d0: 0.5"), "extents.d0 can't be"),
        (ROW.replace("flops: 0", "flops: -1"), "flops can't be"),
        (ROW.replace("seconds: 1e-3", "seconds: fast"), "seconds can't be"),
        (ROW.replace("}, flops", "}, gradients: x, flops"), "gradients is no list"),
        ("7", "is no mapping"),
    ],
)
def test_what_is_no_measurement_is_refused(wrong: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(f"{data_file('tuning', 'machines', 'cpu.yaml').read_text()}{STEPS}: [{wrong}]\n")
    with pytest.raises(InputError, match=said) as caught:
        read_machine(file)
    assert "m.yaml:" in str(caught.value)
