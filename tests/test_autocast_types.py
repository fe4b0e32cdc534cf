"""Networks compiled for torch.autocast: what ranks send under it is what VOLUME says, and prices and plans follow."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from free_networks import free_network, imported, sent_by
from operation_cases import a_grid
from sampling import cases_of
from test_networks_autocast import MODULES, X, a_valid_network, made
from test_networks_edited import same
from test_reduce_dtype import convgen_
from torch import nn

import convgen
from convgen.algebra.grid import Grid
from convgen.cost.machines import load_machine
from convgen.cost.network import volume
from convgen.cost.network_memory import network_memory
from convgen.cost.rows import price_on, program_cost
from convgen.cost.timeline import simulate
from convgen.errors import InputError
from convgen.network_compiler import CompiledNetwork, compile_network, compile_plan, plan_graph
from convgen.passes.bucket_gradients import BucketGradients
from convgen.plan.program.edited import read_text
from convgen.plan.program.written import plan_of
from convgen.plan.setting import Setting
from convgen.program.network_text import show
from convgen.spec.exported import graph_of
from convgen.spec.graph import Graph
from convgen.spec.graph_file import write_graph
from convgen.spec.network_plan import read_plan, write_plan
from convgen.verify.network import check_network
from convgen.verify.virtual import World


def with_types(compiled: CompiledNetwork, autocast: str, summed: str = "") -> CompiledNetwork:
    """The same network for autocast of this type, whose parameters' gradients travel in that."""
    program, other = (
        replace(p, autocast=autocast, reduce_dtype=summed, buckets=()) for p in (compiled.program, compiled.other)
    )
    program = BucketGradients(1).run(program) if compiled.program.buckets else program
    return replace(compiled, program=program, other=replace(other, buckets=program.buckets))


@pytest.mark.parametrize("seed", cases_of(12, "test_bytes_under_autocast"))
def test_bytes_under_autocast(seed: int, tmp_path: Path) -> None:
    """Any roles, storage and travel: each collective, forward and backward, has the bytes that VOLUME says."""
    draw = Random(f"autocast bytes {seed}")
    if seed % 2:
        module, x = a_valid_network(draw)
        graph, tensors = graph_of(deepcopy(module), (x,), name="net")
    else:
        module, x = made(draw.choice([*MODULES])), X
        graph, tensors = graph_of(module, (x,), name="net")
    state = deepcopy(module.state_dict()) | tensors
    low, summed = draw.choice(["bfloat16", "float16"]), draw.choice(["", "bfloat16", "float32"])
    one = with_types(free_network(draw, graph, a_grid(draw)), low, summed)
    net = imported(one.package().files, tmp_path)

    def program(end: Any) -> tuple[list[tuple[str, int]], set[torch.dtype]]:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(state)
        block = net.scatter("x", x, mesh).requires_grad_()
        with torch.autocast("cpu", getattr(torch, low)):
            made = model(block)
        several = list(made) if isinstance(made, tuple) else [made]
        torch.autograd.backward(several, [torch.ones_like(y) for y in several])
        sent = [(one.collective, one.bytes) for one in end.sent]
        return sent, {g.dtype for g in model.full_gradients().values()}

    for rank, (sent, kinds) in enumerate(World(one.program.grid.ranks).run(program)):
        assert sent == sent_by(one.program, rank, of_inputs=True)
        assert kinds == {torch.float32}


class Pair(nn.Module):
    """Two convolutions and a norm: what reads low, and what reads as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.n(self.a(x))))


def pair() -> Graph:
    torch.manual_seed(1)
    return graph_of(Pair(), (torch.zeros(4, 3, 16, 16),), name="net")[0]


GRID = Grid((("N", 2), ("H", 2)))


def test_what_is_half_and_what_stays() -> None:
    """Halos and gradients of activations are half of float32's bytes; moments and parameters' gradients stay, and are
    half where they travel so."""
    sent: dict[tuple[str, str], dict[str, int]] = {}
    for low, summed in (("", ""), ("bfloat16", ""), ("float16", "bfloat16")):
        program = compile_network(pair(), GRID, autocast=low, reduce_dtype=summed, passes=()).program
        steps = [s for cut in volume(program).values() for s in cut]
        sent[low, summed] = {s["step"]: sum(s["bytes_sent_per_rank"]) for s in steps}
    plain, low, both = sent.values()
    halves = {step for step, n in low.items() if 2 * n == plain[step]}
    assert {"a_sum.x", "b_sum.x"} <= halves and plain.keys() == low.keys() == both.keys()
    assert all(n == plain[step] for step, n in low.items() if step not in halves)
    weights = {"a_sum.dw", "a.dx1", "b_sum.dw", "b.dx1"}
    assert halves == plain.keys() - weights - {"n_moments", "n.dp"}
    assert {step for step, n in both.items() if 2 * n == plain[step]} == halves | weights


def test_prices_plans_and_memory_follow(tmp_path: Path) -> None:
    """Steps are shorter where values are narrower and products faster; a plan's file keeps the types."""
    graph, machine = pair(), load_machine("lassen")
    plain, low = (compile_network(graph, GRID, autocast=kind).plain for kind in ("", "bfloat16"))
    assert program_cost(low, machine, "float32").time_ps < program_cost(plain, machine, "float32").time_ps
    assert simulate(low, machine, "float32").end_s < simulate(plain, machine, "float32").end_s
    assert network_memory(low).saved < network_memory(plain).saved
    assert network_memory(low).parameters == network_memory(plain).parameters
    (halo,) = (m for m in low.forward() if m.step == "b_sum.x")
    price = price_on(GRID, machine, "float32")
    assert price.of(low.dtype_of(halo)) is price.of("bfloat16") and price.of("float32") is price
    assert price_on(GRID, machine, "tfloat32").of("float32").dtype == "tfloat32"  # whose products are the network's
    compiled, found = plan_graph(graph, 4, Setting(machine=machine, autocast="bfloat16", reduce_dtype="bfloat16"), GRID)
    assert found.program.autocast == found.program.reduce_dtype == "bfloat16"
    assert found.seconds == program_cost(found.program, machine, "float32").seconds
    file = tmp_path / "plan.yaml"
    file.write_text(write_plan(plan_of(compiled.plain, "net.yaml")))
    read = read_plan(file)
    again = compile_plan(graph, read).plain
    assert (again.autocast, again.reduce_dtype) == ("bfloat16", "bfloat16")
    assert compile_plan(graph, read, autocast="", reduce_dtype="").plain.autocast == ""
    file.write_text(write_plan(replace(read, autocast="float64")))
    with pytest.raises(InputError, match="there is no autocast of float64"):
        read_plan(file)


def test_a_text_says_it() -> None:
    one = compile_network(pair(), GRID, autocast="float16", reduce_dtype="bfloat16")
    text = show(one.program)
    assert "  reduce_dtype: bfloat16\n  autocast: float16\n" in text
    same(one)
    with pytest.raises(InputError, match="there is no autocast of float32"):
        read_text(text.replace("autocast: float16", "autocast: float32"), "net.txt")


def test_check_runs_under_it() -> None:
    one = compile_network(pair(), GRID, autocast="bfloat16", reduce_dtype="bfloat16")
    report = check_network(one, {})
    errors = {kind.kind: kind.error for kind in report.compared}
    assert report.ok and report.dtype == "bfloat16" and errors["outputs"] > 2.0**-10


def test_commands_take_it(tmp_path: Path) -> None:
    file = tmp_path / "net.yaml"
    file.write_text(write_graph(pair()))
    on, low = (file, "--grid", "N=2,H=2"), ("--autocast", "bfloat16")
    sent: list[int] = []
    for number, words in enumerate(((), low)):
        assert convgen_("compile", *on, *words, "-o", tmp_path / str(number)).exit_code == 0
        steps = json.loads((tmp_path / f"{number}/net/volume.json").read_text())["forward"]
        sent.append(sum(sum(s["bytes_sent_per_rank"]) for s in steps if s["collective"] == "exchange"))
    assert 0 < 2 * sent[1] == sent[0]
    assert "--autocast bfloat16" in (tmp_path / "1/net/network.py").read_text()
    assert "under autocast of bfloat16" in convgen_("explain", *on, *low).output
    ends = [
        json.loads(convgen_("simulate", *on, *words, "--machine", "lassen", "--json").output) for words in ((), low)
    ]
    assert ends[1]["step_s"] < ends[0]["step_s"]
    plan = tmp_path / "plan.yaml"
    assert convgen_("plan", file, "--machine", "lassen", "--ranks", 4, *low, "-o", plan).exit_code == 0
    assert read_plan(plan).autocast == "bfloat16"
    schedule = tmp_path / "1/net/schedule.txt"
    assert f"{schedule} says it" in str(convgen_("check", file, "--schedule", schedule, *low).exception)
    layer = convgen_("compile", Path(__file__).parents[1] / "examples/spatial_2x2.yaml", *low, "-o", tmp_path)
    assert "--autocast bfloat16 is of a network" in str(layer.exception)
    with pytest.raises(InputError, match="there is no autocast of float32"):
        convgen.from_torch(nn.Conv2d(3, 4, 3), (torch.zeros(2, 3, 6, 6),), "N=2", autocast="float32")
