"""Sums of parameters' gradients that travel in a type of their own: the bytes that are said, and no bit else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from free_networks import free_network, imported, ranks_of, sent_by
from operation_cases import a_grid
from sampling import cases_of
from test_networks_edited import same
from test_networks_free import a_network, differ
from torch import nn

import convgen
from convgen.algebra.grid import Grid
from convgen.commands.main import cli
from convgen.cost.flight_memory import packed_bytes
from convgen.cost.machines import load_machine
from convgen.cost.network import volume
from convgen.cost.rows import price_on, program_cost
from convgen.cost.timeline import simulate
from convgen.errors import InputError
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.passes.bucket_gradients import BucketGradients
from convgen.plan.program.edited import read_text
from convgen.program.network import Program
from convgen.program.network_text import show
from convgen.program.verify.network import faults
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype
from convgen.spec.graph_file import write_graph
from convgen.verify.network import check_network
from convgen.verify.processes import ProcessFailed, spawn

ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}


def travelling(compiled: CompiledNetwork, kind: str) -> CompiledNetwork:
    """The same network whose parameters' gradients travel in this type."""
    program, other = (replace(p, reduce_dtype=kind, buckets=()) for p in (compiled.program, compiled.other))
    program = BucketGradients(1).run(program) if compiled.program.buckets else program
    return replace(compiled, program=program, other=replace(other, buckets=program.buckets))


def sums(program: Program) -> list[Any]:
    """What brings parameters' gradients to where they are stored."""
    moved = [m for m in program.backward(of_inputs=True) if m.is_of_gradient]
    return [m for m in moved if program.values[m.value].kind == "parameter" and m.conversion.kind != "slice"]


@pytest.mark.parametrize("seed", cases_of(8, "test_any_layout_and_any_roles"))
def test_any_layout_and_any_roles(seed: int, tmp_path: Path) -> None:
    """Outputs and inputs' gradients stay to the last bit, parameters' gradients are of their own type and as far off as
    it rounds, and ranks send what VOLUME says."""
    draw = Random(f"reduce dtype {seed}")
    torch.set_default_dtype(torch.float64)
    try:
        module, x = a_network(draw)
        graph, _ = graph_of(module, (x,), name="net")
        grid, kind = a_grid(draw), draw.choice([*ROUNDOFF])
        plain = free_network(draw, graph, grid)
        reduced = travelling(plain, kind)
        assert list(faults(reduced.program)) == []
        nets = [imported(c.package().files, tmp_path / str(i)) for i, c in enumerate((plain, reduced))]
        state = {n: t.detach().clone() for n, t in module.state_dict().items()}
        dy = torch.randn(module(x).shape)
        ran, other = (ranks_of(net, grid, {"x": x}, state, [dy], ["output"]) for net in nets)
    finally:
        torch.set_default_dtype(torch.float32)
    floor = 1e-2 * max(float(g.abs().max()) for g in ran[0].gradients.values())
    for rank, (one, two) in enumerate(zip(ran, other, strict=True)):
        assert torch.equal(one.outputs[0], two.outputs[0])
        assert one.inputs[0] is not None and two.inputs[0] is not None and torch.equal(one.inputs[0], two.inputs[0])
        assert two.sent == sent_by(reduced.program, rank, of_inputs=True)
        for n, g in one.gradients.items():
            assert two.gradients[n].dtype == g.dtype
            assert differ(two.gradients[n], g, floor) < 16 * ROUNDOFF[kind], n
    of = [(m.step, plain.program.dtype_of(m), reduced.program.dtype_of(m)) for m in sums(plain.program)]
    assert all(a == "float64" and b == kind for _, a, b in of)


class Tower(nn.Module):
    """What is summed in it is the gradients of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3, 2), nn.Conv2d(6, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def tower(grid: Grid, kind: str = "") -> tuple[nn.Module, torch.Tensor, CompiledNetwork]:
    torch.manual_seed(1)
    module, x = Tower().double(), torch.randn(6, 3, 10, 9, dtype=torch.float64)
    return module, x, compile_network(graph_of(module, (x,), name="net")[0], grid, reduce_dtype=kind)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_each_addend_is_rounded_and_their_sum(tmp_path: Path, ranks: int, buckets: bool, kind: str) -> None:
    """Of ranks that have some samples each: what plain torch makes of these, rounded, added, and rounded."""
    module, x, compiled = tower(Grid((("N", ranks),)), kind)
    program = replace(compiled.plain, buckets=())
    program = BucketGradients().run(program) if buckets else program
    compiled = replace(compiled, program=program)
    net: Any = imported(compiled.package().files, tmp_path)
    dy = torch.randn(module(x).shape, dtype=torch.float64)
    addends: list[dict[str, torch.Tensor]] = []
    for part, of_part in zip(x.chunk(ranks), dy.chunk(ranks), strict=True):
        module.zero_grad()
        module(part).backward(of_part)
        addends.append({n: p.grad for n, p in module.named_parameters() if p.grad is not None})
    low: torch.dtype = getattr(torch, kind)
    state = {n: t.detach().clone() for n, t in module.state_dict().items()}
    for ran in ranks_of(net, compiled.program.grid, {"x": x}, state, [dy], ["output"]):
        for n, g in ran.gradients.items():
            want = sum(one[n].to(low).double() for one in addends).to(low).double()  # type: ignore[union-attr]
            assert torch.equal(g, want), n
    assert bool(compiled.program.buckets) == buckets
    assert {b.dtype for b in compiled.program.buckets} <= {kind}


def test_prices_and_memory_follow() -> None:
    """Sums of float32 that travel in bfloat16: the bytes of theirs are half, as is a bucket."""
    machine = load_machine("lassen")
    _, _, compiled = tower(Grid((("N", 2),)))
    plain = replace(compiled.plain, values={n: replace(v, dtype="float32") for n, v in compiled.plain.values.items()})
    packed = BucketGradients(0).run(plain)
    for one in (plain, packed):
        half = replace(one, reduce_dtype="bfloat16", buckets=tuple(replace(b, dtype="bfloat16") for b in one.buckets))
        assert list(faults(half)) == []
        whole, low = ([s["bytes_sent_per_rank"] for s in volume(p)["backward"]] for p in (one, half))
        assert whole and [[2 * n for n in sent] for sent in low] == whole
        rows = [(m.placed, m.conversion) for m in sums(one)]
        price = price_on(one.grid, machine, "float32")
        low = price.of("bfloat16")
        saved = sum(price.chain(row, (c,)) - low.chain(row, (c,), parameter=True) for row, c in rows)
        costs = [program_cost(program, machine, "float32").time_ps for program in (one, half)]
        assert saved > 0 and costs[0] - costs[1] == saved
        ends = [simulate(program, machine, "float32").end_s for program in (one, half)]
        assert ends[1] < ends[0]
    assert {r: 2 * n for r, n in packed_bytes(half, 0).items()} == packed_bytes(packed, 0)


@pytest.mark.parametrize("seed", cases_of(2, "test_a_text_says_it"))
def test_a_text_says_it(seed: int) -> None:
    draw = Random(f"reduce dtype of a text {seed}")
    module, x = a_network(draw)
    graph, _ = graph_of(module, (x,), name="net")
    one = travelling(free_network(draw, graph, a_grid(draw)), draw.choice([*ROUNDOFF]))
    assert f"  reduce_dtype: {one.program.reduce_dtype}\n" in show(one.program)
    same(one)
    text = show(one.program).replace(f"reduce_dtype: {one.program.reduce_dtype}", "reduce_dtype: float64")
    with pytest.raises(InputError, match="reduce_dtype float64 is no type in which gradients are summed"):
        read_text(text, "net.txt")


def test_check_knows_how_far_off_sums_may_be() -> None:
    for kind in ROUNDOFF:
        module, _, compiled = tower(Grid((("N", 2), ("H", 2))), kind)
        report = check_network(compiled, dict(module.state_dict()))
        errors = {one.kind: one.error for one in report.compared}
        assert report.ok and errors["outputs"] < 1e-12 < errors["gradients of parameters"] < 16 * ROUNDOFF[kind], kind


@pytest.mark.slow
def test_a_module_that_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and what an optimizer makes of them stay in the parameters' type; ranks that say otherwise are told."""
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(1)
    module, x = Tower(), torch.randn(6, 3, 10, 9)

    def program(rank: int) -> tuple[list[float], list[str]]:
        model: Any = convgen.parallelize(module, (x,), "N=2", "sample", reduce_dtype=torch.bfloat16)
        model(x).square().mean().backward()
        kinds = [str(g.dtype) for g in model.full_gradients().values()]
        module.zero_grad()
        module(x).square().mean().backward()
        wanted = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        return [differ(g, wanted[n]) for n, g in model.full_gradients().items()], kinds

    for errors, kinds in spawn(program, 2):
        assert 1e-5 < max(errors) < 2.0**-7 and {*kinds} == {"torch.float32"}

    def others(rank: int) -> None:
        model: Any = convgen.parallelize(module, (x,), "N=2", "sample", reduce_dtype="bfloat16" if rank else None)
        model(x)

    with pytest.raises(ProcessFailed, match="ranks"):
        spawn(others, 2)


def test_commands_take_it(tmp_path: Path) -> None:
    _, _, compiled = tower(Grid((("N", 2),)))
    file = tmp_path / "net.yaml"
    file.write_text(write_graph(with_dtype(compiled.graph, "float32")))
    on, low = (file, "--grid", "N=2"), ("--reduce-dtype", "bfloat16")
    sent: list[int] = []
    for number, words in enumerate(((), low)):
        assert convgen_("compile", *on, *words, "-o", tmp_path / str(number)).exit_code == 0
        steps = json.loads((tmp_path / f"{number}/net/volume.json").read_text())["backward"]
        sent.append(sum(sum(step["bytes_sent_per_rank"]) for step in steps))
    assert 0 < 2 * sent[1] == sent[0]
    assert "--reduce-dtype bfloat16" in (tmp_path / "1/net/network.py").read_text()
    checked = convgen_("check", *on, *low)
    assert checked.exit_code == 0 and "volume" in checked.output.lower(), checked.output
    schedule = tmp_path / "1/net/schedule.txt"
    assert f"{schedule} says it" in str(convgen_("check", file, "--schedule", schedule, *low).exception)
    assert convgen_("check", file, "--schedule", schedule).exit_code == 0
    layer = convgen_("compile", Path(__file__).parents[1] / "examples/spatial_2x2.yaml", *low, "-o", tmp_path)
    assert "--reduce-dtype bfloat16 is of a network's parameters" in str(layer.exception)
    with pytest.raises(InputError, match="reduce_dtype int8 is no type in which gradients are summed"):
        convgen.from_torch(nn.Conv2d(3, 4, 3), (torch.zeros(2, 3, 6, 6),), "N=2", reduce_dtype="int8")


def convgen_(*words: object) -> Any:
    return CliRunner().invoke(cli, [str(word) for word in words])
