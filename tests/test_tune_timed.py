"""What was measured in a plan: found for the problems that compiled layers have, and counted as measured."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from generate import random_problem
from test_tune_cli import CEILINGS, convgen, remember

from convgen.algebra.space import Space
from convgen.compiler import compile_layer
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.schedule import schedule_cost
from convgen.errors import InputError
from convgen.kernels.choose import local_problems
from convgen.kernels.config import largest
from convgen.program.nodes import is_convolution
from convgen.spec.layer import Layer
from convgen.spec.reader import read_layers
from convgen.spec.target import CPU, read_target
from convgen.tune.database import update
from convgen.tune.device import this_cpu
from convgen.tune.key import key_of
from convgen.tune.timed import as_measured, timed

NETWORK = """name: two
input: [4, 6, 9, 9]
nodes:
  - {name: one, kind: conv, out_channels: 8, kernel_size: 3, padding: 1, bias: true}
  - {kind: relu}
  - {name: two, kind: conv, out_channels: 5, kernel_size: 3, stride: 2}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Seen:
    """A model's source of times that knows every problem: a second for each, and which they were."""

    pads_virtually = False

    def __init__(self, known: object) -> None:
        self.known, self.keys = known, set[str]()

    def __call__(self, space: Space, operands: object) -> float:
        problem = self.known.problem(space, operands)  # type: ignore[attr-defined]
        self.keys.add(key_of(problem))
        return 1.0


@pytest.mark.parametrize("seed", range(12))
def test_the_problems_asked_for_are_those_of_the_compiled_layer(seed: int, tmp_path: Path, cache: Path) -> None:
    from convgen.tune.lookup import Remembered
    from convgen.tune.timed import Timed

    rng = random.Random(seed)
    conv, grid, _, _ = random_problem(rng)
    layer = Layer(name="layer", conv=replace(conv, bias=False), grid=grid, algorithm="auto")
    one = compile_layer(layer)
    seen = Seen(Timed(Remembered(CPU, None), "float32"))  # type: ignore[arg-type]
    cost = schedule_cost(one.schedule, Model(one.space, replace(load_machine("cpu"), timed=seen), "float32"))  # type: ignore[arg-type]
    steps = [s for _, s in one.schedule.steps() if is_convolution(s)]
    wanted = {key_of(largest(local_problems(one.layer, one.schedule, one.space, s))) for s in steps}
    assert seen.keys == wanted
    assert sum(s.cost.measured for s in cost.steps) == len(steps) == sum(s.cost.time_ps == 10**12 for s in cost.steps)
    on_gpu = Seen(Timed(Remembered(read_target("cuda"), None), "float32"))  # type: ignore[arg-type]
    schedule_cost(one.schedule, Model(one.space, replace(load_machine("cuda"), timed=on_gpu), "float32"))  # type: ignore[arg-type]
    last = len(conv.spatial) > 1  # channels are, on a GPU
    assert on_gpu.keys and all(("channels_last" in key) == last for key in on_gpu.keys)


def test_a_plan_takes_measured_times(tmp_path: Path, cache: Path) -> None:
    network, plan = tmp_path / "net.yaml", tmp_path / "plan.yaml"
    network.write_text(NETWORK)
    words = ("plan", network, "--machine", "cpu", "--ranks", 2, "--grid", "a=2")
    modelled = json.loads(convgen(*words, "--json", "-o", plan).stdout)
    for layer in read_layers(plan):
        file = tmp_path / f"{layer.name}.yaml"
        one = [line for line in plan.read_text().split("  - name: ")[1:] if line.startswith(layer.name)]
        body = one[0].split("others:")[0].splitlines()
        file.write_text("\n".join([f"name: {body[0]}", *(line[4:] for line in body[1:])]))
        every = dict.fromkeys(("forward", "backward_data", "backward_filter"), "aten")
        remember(file, cache, this_cpu(), every, ms=1e-5, p20=1e-5, p80=1e-5, aten_ms=1e-5, ratio=1.0)
    update(cache / "devices" / this_cpu().file_name, this_cpu(), {}, CEILINGS)
    done = convgen(*words, "--measured", "--json")
    measured = json.loads(done.stdout)
    steps = [s for n in measured["nodes"] for s in n["steps"] if s["kind"].startswith("conv_")]
    assert len(steps) == 5 and all(s["what"].endswith("measured") for s in steps)  # the first layer needs no dx
    assert {s["seconds"] for s in steps} == {1e-8}
    assert measured["seconds"] < modelled["seconds"]
    text = convgen(*words, "--measured").stdout
    assert "local   5 of 5 local convolutions measured" in text
    assert "measured" in convgen(*words, "--measured", "--explain", "two").stdout


def test_what_is_not_measured_is_as_fast_as_what_is(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "layer.yaml"
    file.write_text(
        "name: layer\nlayer: conv2d\ninput: [4, 6, 9, 9]\nout_channels: 5\nkernel_size: 1\ngrid: {N: 2}\n"
        "algorithm: sample\n"
    )
    for phase, share in (("forward", 0.2), ("backward_data", 0.6), ("backward_filter", 0.3)):
        remember(file, cache, this_cpu(), {phase: "aten"}, share=share)
    update(cache / "devices" / this_cpu().file_name, this_cpu(), {}, CEILINGS)
    made = as_measured(load_machine("cpu"), timed(CPU, "float32"))
    assert made.flops_per_s("float32") == pytest.approx(0.3 * 1e13)
    assert (made.memory_bytes_per_s, made.launch_s) == (1e13, pytest.approx(1e-7))


def test_without_measurements_it_is_refused(tmp_path: Path, cache: Path) -> None:
    network = tmp_path / "net.yaml"
    network.write_text(NETWORK)
    for machine, said in (("cpu", "no measured kernels for cpu"), ("lassen", "of which device")):
        done = convgen("plan", network, "--machine", machine, "--ranks", 2, "--measured")
        assert isinstance(done.exception, InputError) and said in str(done.exception)
