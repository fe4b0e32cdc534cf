"""Gathers and scatters that travel by chunks: the same numbers, faults that are found, and a choice by the timeline."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from free_networks import free_network, imported
from networks_on_ranks import check, with_passes
from networks_on_ranks import imported as module_of
from test_overlap import step_of
from test_timeline import a_machine
from torch import nn

from convgen.algebra.grid import Grid
from convgen.cost.machine import Machine
from convgen.cost.machine_measured import Misfit
from convgen.cost.network import volume
from convgen.cost.timeline import simulate
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.packages import runtime_of
from convgen.passes.bucket_gradients import BucketGradients
from convgen.passes.chunk_collectives import ChunkCollectives
from convgen.passes.start_halos import StartHalos
from convgen.plan.program.overlapped import overlapped
from convgen.program.flow import Flow, Local, Start, Wait, backward, forward
from convgen.program.network import Program
from convgen.program.rows import Chunks
from convgen.program.verify.flights import flight_faults, order_faults
from convgen.program.verify.network import faults
from convgen.spec.exported import graph_of
from convgen.spec.target import read_target
from convgen.verify.network import check_network, report_text
from convgen.verify.virtual import World

X = torch.randn(5, 4, 13, 11, generator=torch.Generator().manual_seed(5))


class Pair(nn.Module):
    """Two convolutions whose chunks read each other's rows, in strides that leave some out."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 6, 5, padding=2, bias=bias)
        self.b = nn.Conv2d(6, 4, 3, stride=2, padding=1, groups=2, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


@cache
def pair(grid: tuple[tuple[str, int], ...]) -> CompiledNetwork:
    torch.manual_seed(1)
    return compile_network(graph_of(Pair(), (X[:, :4],), name="net")[0], Grid(grid))


@pytest.mark.parametrize(
    ("grid", "index", "count"),
    [({"F": 2}, "H", 4), ({"C": 3}, "W", 5), ({"N": 2, "F": 2}, "N", 2)],
    ids=str,
)
def test_chunks_of_any_dimension_are_right(grid: dict[str, int], index: str, count: int) -> None:
    torch.manual_seed(2)
    given = module_of(Pair().double(), X.double())
    passes = (ChunkCollectives(count, index), StartHalos(), BucketGradients(0))
    program = compile_network(given.graph, Grid(tuple(grid.items()))).plain
    for one in passes:
        program = one.run(program)
    assert list(faults(program)) == []
    assert {r.chunks.index for r in program.rows if r.chunks} == {index}
    assert all(one.run(program) == program for one in passes)
    errors = check(given, grid, passes=passes)
    assert errors.right, errors


@pytest.mark.parametrize("axis", ["C", "F"])
def test_chunks_of_samples_change_no_bit(axis: str, tmp_path: Path) -> None:
    """But of biases, which are added to a sum that has been rounded."""
    torch.manual_seed(3)
    x = X.double()
    compiled = compile_network(graph_of(Pair(bias=False).double(), (x,), name="net")[0], Grid(((axis, 2),)))
    found: list[Any] = []
    for i, passes in enumerate([(), (ChunkCollectives(2, "N"),)]):
        one = with_passes(compiled, *passes)
        net = imported(one.package().files, tmp_path / str(i))
        found.append(World(2).run(step_of(net, x)))
    said = volume(one.program, of_inputs=True)["backward"]
    for rank, (plain, cut) in enumerate(zip(*found, strict=True)):
        assert torch.equal(plain[0], cut[0]) and torch.equal(plain[2], cut[2])
        assert all(torch.allclose(plain[1][n], g, rtol=1e-12) for n, g in cut[1].items())
        assert [(s["collective"], s["bytes_sent_per_rank"][rank], s.get("lane", "")) for s in said] == cut[3]
        assert sum(s[1] for s in plain[3]) == sum(s[1] for s in cut[3])


@pytest.mark.parametrize("grid", [{"C": 2}, {"F": 2}, {"C": 2, "N": 2}], ids=str)
@pytest.mark.parametrize("index", ["N", "H"])
def test_a_bias_is_added_as_chunks_are_put_together(
    grid: dict[str, int], index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit as its row would, in no pass of its own where a sum goes by chunks."""
    torch.manual_seed(3)
    compiled = compile_network(graph_of(Pair(), (X,), name="net")[0], Grid(tuple(grid.items())))
    one = with_passes(compiled, ChunkCollectives(2, index))
    net = imported(one.package().files, tmp_path)
    runtime, added = runtime_of(net), list[int]()
    own: Any = runtime.JoinedWithBias.__call__

    def counted(self: Any, *reads: Any) -> Any:
        added.append(1)
        return own(self, *reads)

    def apart(self: Any, *reads: Any) -> Any:
        *pieces, vector = reads
        return self.bias.run(self.joined(pieces), vector)[0]

    found: list[Any] = []
    for way in (counted, apart):
        monkeypatch.setattr(runtime.JoinedWithBias, "__call__", way)
        found.append(World(prod(grid.values())).run(step_of(net, X)))
    assert bool(added) == any(row.chunks and row.chunks.result for row in one.program.rows)
    for one_way, other in zip(*found, strict=True):
        assert torch.equal(one_way[0], other[0]) and torch.equal(one_way[2], other[2])
        assert all(torch.equal(one_way[1][n], g) for n, g in other[1].items())


def test_chunks_of_what_a_bias_lies_along() -> None:
    """Each has a part of it, so that it stays a row of its own."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.Tanh()).double()
    graph, tensors = graph_of(module, (torch.randn(4, 6, dtype=torch.float64),))
    found = 0
    for seed in range(400):
        one = free_network(Random(seed), graph, Grid((("A", 2),)), passes=[ChunkCollectives(4, "F")])
        product, bias, _ = one.program.rows
        if product.chunks is None or not product.chunks.result or any((*bias.fetch, *bias.store)):
            continue
        report = check_network(one, {**tensors, **module.state_dict()})
        assert report.ok, report_text(report)
        found += bool(product.store[0])
    assert found


@pytest.mark.parametrize("index", ["N", "H"])
def test_a_gpus_chunks_travel_with_channels_last(index: str) -> None:
    graph, tensors = graph_of(Pair(), (X,), name="net")
    compiled = compile_network(graph, Grid((("C", 2),)), target=read_target("cuda:sm_90"))
    one = with_passes(compiled, ChunkCollectives(2, index))
    assert any(row.chunks for row in one.program.rows)
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)


def test_fewer_samples_than_chunks(tmp_path: Path) -> None:
    """A package takes any number of samples: ranks that have fewer than chunks compute as many as they have."""
    compiled = with_passes(pair((("N", 2), ("F", 2))), ChunkCollectives(2, "N"))
    assert any(row.chunks for row in compiled.program.rows)
    plain = with_passes(pair((("N", 2), ("F", 2))))
    found: list[Any] = []
    for i, one in enumerate((compiled, plain)):
        net = imported(one.package().files, tmp_path / str(i))

        def program(end: Any, net: Any = net) -> Any:
            mesh = net.init_mesh("cpu", transport=end)
            model, x = net.Network(mesh), net.scatter("x", X[:1], mesh)
            y = model(x, batch=1)
            y.square().sum().backward()
            return [net.gather("output", y.detach(), mesh, batch=1), *model.full_gradients().values()]

        found.append(World(4).run(program))
    for one, two in zip(*found, strict=True):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(one, two, strict=True))


class Two(nn.Module):
    """Two outputs: a loss of one alone asks nothing of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.Conv2d(4, 6, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": self.a(x), "b": self.b(x)}


@pytest.mark.parametrize("asked", ["a", "b"])
@pytest.mark.parametrize("axis", ["C", "F"])
def test_a_loss_of_one_output_alone(axis: str, asked: str, tmp_path: Path) -> None:
    """The other one's chunks have no gradient to begin with."""
    torch.manual_seed(3)
    module, x = Two().double(), X.double()
    compiled = with_passes(compile_network(graph_of(module, (x,), name="net")[0], Grid(((axis, 2),))))
    program = ChunkCollectives(3, "N").run(compiled.program)
    assert all(row.chunks for row in program.rows)
    net = imported(replace(compiled, program=program).package().files, tmp_path)
    module(x)[asked].square().sum().backward()

    def step(end: Any) -> dict[str, torch.Tensor]:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(module.state_dict())
        net.gather(asked, model(net.scatter("x", x, mesh).requires_grad_())[asked], mesh).square().sum().backward()
        return model.full_gradients()

    for found in World(2).run(step):
        wanted = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        assert found.keys() == wanted.keys() == {f"{asked}.weight"}
        assert all(torch.allclose(found[n], g, rtol=1e-10) for n, g in wanted.items())


# ---- The verifier ----


@cache
def cut_program() -> Program:
    return with_passes(pair((("N", 2), ("F", 2))), ChunkCollectives(2, "H"), BucketGradients(0)).program


WRONG = {
    "2 chunks of Q": Chunks("Q", 2, 0, False),
    "is no dimension of y": Chunks("C", 2, 0, False),
    "moves the dimension": Chunks("F", 2, None, True),
    "nothing of it travels": Chunks("H", 2, None, False),
    "for 50 chunks": Chunks("H", 50, 0, False),
    "is no dimension of w": Chunks("H", 2, 1, False),
    "does not move": Chunks("H", 2, 0, True),
}


@pytest.mark.parametrize("fault", WRONG)
def test_chunks_that_are_wrong_are_found(fault: str) -> None:
    program = cut_program() if fault != "moves the dimension" else with_passes(pair((("C", 2),))).program
    rows = tuple(replace(r, chunks=WRONG[fault]) if i == 0 else r for i, r in enumerate(program.rows))
    assert any(fault in found for found in flight_faults(replace(program, rows=rows)))


def test_a_chunk_that_is_read_before_it_is_there_is_found() -> None:
    program, cut = cut_program(), with_passes(pair((("C", 2),)), ChunkCollectives(3, "H")).program
    for one in (program, cut):
        for steps in ([*forward(one)], [*backward(one)]):
            assert list(order_faults(one, steps)) == []
            waits = [i for i, s in enumerate(steps) if isinstance(s, Wait) and ":" in s.name]
            for i in waits:
                name = steps[i].name  # type: ignore[union-attr]
                assert any(name in f for f in order_faults(one, [*steps[:i], *steps[i + 1 :]]))
                if any(isinstance(s, Local) and s.part == "chunk" for s in steps[i + 1 :]):
                    assert any("reads" in f for f in order_faults(one, _late(steps, i))), steps[i]


def _late(steps: list[Flow], i: int) -> list[Flow]:
    return [*steps[:i], *steps[i + 1 :], steps[i]]


# ---- What is chosen ----


def test_chunks_are_taken_where_the_link_is_slow_and_launches_are_cheap() -> None:
    module = nn.Sequential(*(nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(2)))
    slow, costly = a_machine(1e-5, 4e8, 1e-7), a_machine(1e-8, 1e12, 1e-2)
    for axis in "CF":
        graph = graph_of(module, (torch.zeros(8, 32, 32, 32),), name="net")[0]
        program = compile_network(graph, Grid(((axis, 2),))).plain
        chosen = overlapped(program, slow, "float32")
        assert all(row.chunks for row in chosen.rows)
        assert not any(row.chunks for row in overlapped(program, costly, "float32").rows)
        found, plain = simulate(chosen, slow, "float32"), simulate(program, slow, "float32")
        assert found.end_s < plain.end_s and found.hidden > 0.5
        starts = [s for s in forward(chosen) if isinstance(s, Start)]
        assert {t.name for t in found.travelled} >= {s.name for s in starts}
        for count in (2, 4, 8):  # nothing that the timeline has as faster is left
            other = ChunkCollectives(count).run(program)
            assert found.end_s <= simulate(other, slow, "float32").end_s * (1 + 1e-9)


@pytest.mark.parametrize("axis", ["F", "C"])
def test_chunks_are_off_the_model_as_what_sends_as_many_bytes(axis: str) -> None:
    """Where less is off by more each takes as much longer; where it is off by less, all take what the whole does."""
    graph = graph_of(nn.Conv2d(32, 32, 3, padding=1, bias=False), (torch.zeros(8, 32, 32, 32),), name="net")[0]
    program = compile_network(graph, Grid(((axis, 2),))).plain
    free = replace(a_machine(0.0, 1e8), memory_bytes_per_s=1e30)  # bytes alone count
    kind = "all_gather" if axis == "F" else "reduce_scatter"
    whole = 8 * 32 * 32 * 32 // 2 * 4.0

    def moving(machine: Machine, count: int) -> float:
        made = ChunkCollectives(count).run(program) if count > 1 else program
        return sum(one.seconds for one in simulate(made, machine, "float32").travelled if one.kind == kind)

    for small in (0.25, 4.0):
        misfit = Misfit(kind=kind, ranks=2, bytes=(whole / 4, whole), over_model=(small, 1.0))
        off = replace(free, misfits=(misfit,))
        assert moving(off, 1) == pytest.approx(moving(free, 1))
        assert moving(free, 4) == pytest.approx(moving(free, 1))
        assert moving(off, 4) == pytest.approx(max(small, 1.0) * moving(free, 1))


def test_chunks_that_go_a_quicker_way_take_its_time() -> None:
    """Where a collective of a chunk's bytes was measured to be far faster than one of a few more."""
    graph = graph_of(nn.Conv2d(32, 32, 3, padding=1, bias=False), (torch.zeros(8, 32, 32, 32),), name="net")[0]
    program = compile_network(graph, Grid((("F", 2),))).plain
    whole = 8 * 32 * 32 * 32 // 2 * 4.0
    made = ChunkCollectives(4).run(program)
    times: list[float] = []
    for above in (whole / 4 * 1.2, whole / 4 * 2):  # of the second nobody knows whether it begins to be slow at once
        misfit = Misfit(kind="all_gather", ranks=2, bytes=(whole / 4, above, whole), over_model=(0.1, 1.0, 1.0))
        machine = replace(a_machine(0.0, 1e8), memory_bytes_per_s=1e30, misfits=(misfit,))
        travelled = simulate(made, machine, "float32").travelled
        times.append(sum(one.seconds for one in travelled if one.kind == "all_gather"))
    assert times[0] == pytest.approx(0.1 * times[1])
