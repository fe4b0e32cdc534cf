"""What travels while a network computes: the same numbers, whatever the delays, and nothing left in flight."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from delayed_networks import check as check_delayed
from fault_cases import GUARD_S, NEVER_S
from free_networks import imported
from in_order import InOrder
from networks_on_ranks import check, with_passes
from networks_on_ranks import imported as module_of
from sampling import cases_of
from small_networks import ResNet
from torch import nn

from convgen.algebra.grid import Grid
from convgen.cost.flight_memory import packed_bytes, parts_of
from convgen.cost.network import volume
from convgen.cost.network_memory import MemoryWalk, network_memory
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.passes.bucket_gradients import BucketGradients
from convgen.passes.chunk_collectives import ChunkCollectives
from convgen.passes.contract import NetworkPass
from convgen.passes.start_halos import StartHalos
from convgen.program.flow import Flow, Start, Wait, backward, forward
from convgen.program.network import Bucket, Moved, Program
from convgen.program.rows import PlacedRow, place, place_gradient, stored_by_name
from convgen.program.verify.flights import flight_faults, order_faults
from convgen.program.verify.network import faults
from convgen.spec.exported import graph_of
from convgen.verify.processes import ProcessFailed, spawn
from convgen.verify.virtual import World

X = torch.randn(4, 3, 24, 20, generator=torch.Generator().manual_seed(3))


def resnet(grid: dict[str, int], *passes: Any) -> CompiledNetwork:
    """A small one of float32, with these passes alone."""
    return with_passes(_resnet(tuple(grid.items())), *passes)


@cache
def _resnet(grid: tuple[tuple[str, int], ...]) -> CompiledNetwork:
    torch.manual_seed(0)
    return compile_network(graph_of(ResNet(0.0), (X,), name="net")[0], Grid(grid))


def step_of(net: Any, of: torch.Tensor = X) -> Callable[[Any], Any]:
    """A rank's step of training: its output, its gradients, that of its input, and what it sent."""

    def program(end: Any) -> Any:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh, parameters="blocks")
        x = net.scatter("x", of, mesh).requires_grad_()
        y = model(x)
        start = len(getattr(end, "sent", ()))
        y.square().sum().backward()
        grads = {n: p.grad.clone() for n, p in model._known.items() if p.requires_grad}
        sent = [(s.collective, s.bytes, s.lane) for s in getattr(end, "sent", ())[start:]]
        return y.detach(), {n: getattr(g, "_block", g) for n, g in grads.items()}, x.grad, sent

    return program


def equal(a: Any, b: Any) -> bool:
    """Outputs and gradients of a rank, to the last bit."""
    same = all(torch.equal(a[1][n], g) for n, g in b[1].items())
    return same and torch.equal(a[0], b[0]) and torch.equal(a[2], b[2])


# ---- The same numbers ----


@pytest.mark.parametrize("size", [0, 1])
def test_buckets_change_no_bit(tmp_path: Path, size: int) -> None:
    plain, packed = resnet({"N": 2, "H": 2}), resnet({"N": 2, "H": 2}, BucketGradients(size))
    assert packed.program.buckets and not plain.program.buckets
    found = [imported(c.package().files, tmp_path / str(i)) for i, c in enumerate((plain, packed))]
    one, other = (World(4).run(step_of(net)) for net in found)
    assert all(equal(a, b) for a, b in zip(one, other, strict=True))
    said = volume(packed.program, of_inputs=True)["backward"]
    assert [(s["collective"], s["bytes_sent_per_rank"][1], s.get("lane", "")) for s in said] == other[1][3]
    assert sum(map(sum, (s["bytes_sent_per_rank"] for s in said))) == sum(s[1] for ran in one for s in ran[3])
    assert len(other[0][3]) < len(one[0][3])


class Smooth(nn.Module):
    """Convolutions that overlap in every way: even kernels, strides, dilation, groups, ragged extents."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
        self.a, self.b = conv(2, 4, 5, 1, 2), conv(4, 4, 3, 1, 2, dilation=2, groups=2, bias=False)
        self.norm, self.c = norm(4), conv(4, 3, 4, 2, 1)
        self.pool = (nn.AvgPool2d if dims == 2 else nn.AvgPool3d)(3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.norm(self.b(torch.tanh(self.pool(self.a(x))))))


@pytest.mark.parametrize(
    ("grid", "dims", "own", "gradients"),
    [
        ({"H": 3}, 2, False, "pieces"),
        ({"H": 2, "W": 2}, 2, True, "pieces"),
        ({"D": 2, "H": 1, "W": 2}, 3, False, "pieces"),
        ({"D": 2}, 3, True, "whole"),
    ],
    ids=str,
)
def test_halos_behind_the_interior(grid: dict[str, int], dims: int, own: bool, gradients: Any) -> None:
    """`own`: gradients of inputs have rows of their own, which fetch a halo of dy; else parts of dx are added."""
    torch.manual_seed(1)
    shape = (2, 2, *(29, 23)) if dims == 2 else (1, 2, 21, 17, 19)
    given = module_of(Smooth(dims).double(), torch.randn(shape, dtype=torch.float64))
    passes = (*(OwnGradients(),) * own, StartHalos(gradients=gradients), BucketGradients())
    program = compile_network(given.graph, Grid(tuple(grid.items()))).plain
    for one in passes:
        program = one.run(program)
    assert list(faults(program)) == []
    assert sum(row.early is not None for row in program.rows) >= 3
    behind = [one for row in program.rows for _, one in row.derived if one.early is not None]
    assert len(behind) >= 3 * own
    assert all(one.split for one in behind) == (gradients == "pieces" or not behind)
    errors = check(given, grid, passes=passes)
    assert errors.right, errors


@dataclass(frozen=True)
class OwnGradients(NetworkPass):
    """Gradients of convolutions' inputs by rows of their own, which have the roles of the convolution."""

    name = "own-gradients"

    def run(self, program: Program) -> Program:
        return replace(program, rows=tuple(self._row(row, program.grid) for row in program.rows))

    def _row(self, row: PlacedRow, grid: Grid) -> PlacedRow:
        if "x" not in row.bound.operation.gradients or row.derived:
            return row
        roles = dict(row.roles)
        names = stored_by_name(row.signature, row.reads, row.makes)
        own = place_gradient(row.bound, "x", grid, 0, roles, names)
        return place(row.bound, grid, row.way, roles, row.reads, row.makes, {"x": own})


def test_a_rank_without_a_boundary_takes_part(tmp_path: Path) -> None:
    """Rows of a stride of 2 and K = 2 read nothing of the rank above; and one rank may have no interior."""
    torch.manual_seed(2)
    for kernel, stride, pad, rows in ((3, 1, 1, 3), (2, 2, 0, 9)):
        module = nn.Sequential(nn.Conv2d(2, 3, kernel, stride, pad), nn.Tanh(), nn.Conv2d(3, 2, 3, 1, 1)).double()
        given = module_of(module, torch.randn(2, 2, rows, 6, dtype=torch.float64))
        errors = check(given, {"H": 2}, passes=(StartHalos(), BucketGradients(0)))
        assert errors.right, (kernel, stride, errors)


def test_calls_of_two_types_whose_backward_comes_later(tmp_path: Path) -> None:
    """A halo's gradient has the type of its own call on all ranks, also on one that sends none, and not the last
    call's."""
    module, x = nn.Sequential(nn.MaxPool2d(2, 1), nn.Tanh()), X[:, :, :9]
    compiled = with_passes(compile_network(graph_of(module, (x,), name="net")[0], Grid((("H", 2),))), StartHalos())
    net = imported(compiled.package().files, tmp_path)

    def program(end: Any) -> Any:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        kinds, start = list[torch.dtype](), end.start

        def noted(kind: str, tensor: torch.Tensor, *others: Any) -> Any:
            kinds.append(tensor.dtype)
            return start(kind, tensor, *others)

        end.start = noted
        blocks = [net.scatter("input", x, mesh).to(kind).requires_grad_() for kind in (torch.float32, torch.bfloat16)]
        with torch.autocast("cpu", torch.bfloat16):
            calls = [model(block) for block in blocks]
        for y in calls:
            y.sum().backward()
        return kinds, [block.grad for block in blocks]

    both = [torch.float32, torch.bfloat16]
    given = x.clone().requires_grad_()
    module(given).sum().backward()
    for rank, (kinds, grads) in enumerate(World(2).run(program)):
        assert kinds == both * 2 and [g.dtype for g in grads] == both
        assert given.grad is not None and torch.equal(grads[0], given.grad.split([5, 4], 2)[rank])


def test_rows_of_padding_behind_a_halo() -> None:
    """Rank 0 makes rows of its own, a row of rank 1's, and rows of padding, which read nothing."""
    module = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ConstantPad2d((0, 5, 0, 5), 0.5), nn.Conv2d(3, 2, 2, padding=(3, 4)))
    for rows in (2, 3):
        given = module_of(module.double(), torch.randn(2, 2, rows, 3, dtype=torch.float64))
        for grid in ({"H": 2}, {"H": 2, "W": 2}):
            errors = check(given, grid, passes=(StartHalos(),))
            assert errors.right, (rows, grid, errors)


# ---- Order, delays, ends ----


@pytest.mark.parametrize("seed", cases_of(2, "test_random_networks_whatever_the_delays"))
def test_random_networks_whatever_the_delays(seed: int, tmp_path: Path) -> None:
    check_delayed(seed, tmp_path, processes=False)


def test_started_in_one_order_on_all_ranks(tmp_path: Path) -> None:
    """Groups [0, 1], [2, 3], [0, 2], [1, 3] and all: run strictly in the order of their starts, none waits for ever."""
    compiled = resnet({"N": 2, "H": 2}, StartHalos(), BucketGradients(1))
    net = imported(compiled.package().files, tmp_path)
    runtime = _runtime(net)

    class InPlace(runtime.TorchTransport):  # what is started is over: a stream that runs what is posted, in its order
        def start(self, kind: str, tensor: Any, splits: Any, group: Any, lane: str) -> Any:
            return runtime.Landed(getattr(self, kind)(tensor, splits, group))

    found = InOrder(runtime, 4, streams="one", transport=InPlace).run(step_of(net))
    assert all(equal(a, b) for a, b in zip(found, World(4).run(step_of(net)), strict=True))


@pytest.mark.parametrize(
    ("grid", "one", "before", "named"),
    [
        ({"N": 3}, BucketGradients(0), "begin", "over N"),
        ({"H": 3}, StartHalos(), "Halo._begin", "over H"),
        ({"H": 3}, StartHalos(), "Halo._wait", "over H"),
        ({"F": 3}, ChunkCollectives(2, "N"), "Going.wait", "over F"),
        ({"C": 3}, ChunkCollectives(2, "N"), "send", "over C"),
    ],
    ids=str,
)
def test_a_rank_that_is_killed_with_a_collective_in_flight(
    grid: dict[str, int], one: NetworkPass, before: str, named: str, tmp_path: Path
) -> None:
    """`before`: the call of the runtime that rank 1 does not come back from: it starts, or waits for, something. The
    others end with the name of a step: that one's, or of the next that they come to."""
    compiled = resnet(grid, one)
    assert any(isinstance(s, Start) for s in (*forward(compiled.program), *backward(compiled.program)))
    net = imported(compiled.package().files, tmp_path)

    def program(rank: int) -> None:
        mesh = net.init_mesh("cpu", timeout=NEVER_S)
        model = net.Network(mesh)
        model(net.scatter("x", X, mesh)).square().sum().backward()
        if rank == 1:
            owner, _, name = before.rpartition(".")
            runtime = getattr(_runtime(net), owner) if owner else _runtime(net)
            setattr(runtime, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        model(net.scatter("x", X, mesh)).square().sum().backward()

    with pytest.raises(ProcessFailed) as error:
        spawn(program, 3, GUARD_S)
    assert named in str(error.value)
    assert re.search(r"net: (ranks \[.*\] did not come to )?step %", str(error.value))


@pytest.mark.parametrize("axis", ["H", "C"])
def test_processes_find_what_virtual_ranks_find(tmp_path: Path, axis: str) -> None:
    passes = (StartHalos(), ChunkCollectives(2, "" if axis == "H" else "N"), BucketGradients(1))
    net = imported(resnet({"N": 1, axis: 2}, *passes).package().files, tmp_path)
    virtual = World(2).run(step_of(net))

    def program(_: int) -> Any:
        mesh = net.init_mesh("cpu")
        return step_of(net)(net.NET.place(mesh).transport)

    found = spawn(program, 2)
    assert all(equal(a, b) for a, b in zip(found, virtual, strict=True))


def _runtime(net: Any) -> Any:
    return sys.modules[type(net.NET).__module__]


# ---- Backward passes that are not whole ----


class Heads(nn.Module):
    """Two outputs, a parameter that both read, and one that two rows read."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.tanh(self.body(torch.tanh(self.body(x))))
        return {"a": self.one(x), "b": self.other(x)}


def heads(tmp_path: Path) -> tuple[Heads, torch.Tensor, Any]:
    torch.manual_seed(4)
    module, x = Heads().double(), torch.randn(4, 6, dtype=torch.float64)
    graph, _ = graph_of(module, (x,), name="net")
    compiled = with_passes(compile_network(graph, Grid((("N", 2),))), BucketGradients(0))
    (bucket,) = compiled.program.buckets
    assert len(bucket.steps) == 8  # the body's weight and bias twice: both of its rows' sums
    return module, x, imported(compiled.package().files, tmp_path)


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def on_ranks(net: Any, x: torch.Tensor, module: nn.Module, use: Callable[[Any, Any], Any]) -> list[Any]:
    def program(end: Any) -> Any:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(module.state_dict())
        return use(model, net.scatter("x", x, mesh))

    return World(2).run(program)


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], rtol=1e-12, atol=1e-12) for n in a)


def test_some_outputs_some_parameters_and_again(tmp_path: Path) -> None:
    module, x, net = heads(tmp_path)

    def half(model: Any, x: torch.Tensor) -> Any:
        model(x)["a"].sum().backward()  # nothing of `other`: the bucket is never full
        return model.full_gradients()

    def twice(model: Any, x: torch.Tensor) -> Any:
        total = sum(y.sum() for y in model(x).values())
        total.backward(retain_graph=True)
        total.backward()
        return model.full_gradients()

    def frozen(model: Any, x: torch.Tensor) -> Any:
        model.get_parameter("body.weight").requires_grad_(requires_grad=False)
        sum(y.sum() for y in model(x).values()).backward()
        return model.full_gradients()

    def of_the_input(model: Any, x: torch.Tensor) -> Any:
        x.requires_grad_()
        y = sum(y.sum() for y in model(x).values())
        (dx,) = torch.autograd.grad(y, [x], retain_graph=True)
        y.backward()
        assert torch.equal(dx, x.grad)
        return model.full_gradients()

    def calls(model: Any, x: torch.Tensor) -> Any:
        (sum(y.sum() for y in model(x).values()) + sum(y.sum() for y in model(x).values())).backward()
        return model.full_gradients()

    sum(y.sum() for y in module(x).values()).backward()
    whole = gradients_of(module)
    module.zero_grad()
    module(x)["a"].sum().backward()
    of_a = gradients_of(module)
    two = {n: 2 * g for n, g in whole.items()}
    wished = {half: of_a, twice: two, calls: two, of_the_input: whole,
              frozen: {n: g for n, g in whole.items() if n != "body.weight"}}  # fmt: skip
    for use, expected in wished.items():
        for found in on_ranks(net, x, module, use):
            assert close({n: g for n, g in found.items() if n in expected}, expected), use
            assert not any(g.any() for n, g in found.items() if n not in expected), use


def test_a_transport_without_start_is_as_before(tmp_path: Path) -> None:
    net = imported(resnet({"N": 1, "H": 2}, StartHalos(), BucketGradients(0)).package().files, tmp_path)

    class Plain:
        def __init__(self, end: Any) -> None:
            self.rank, self.size = end.rank, end.size
            for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange"):
                setattr(self, kind, getattr(end, kind))

    found = World(2).run(lambda end: step_of(net)(Plain(end)))
    assert all(equal(a, b) for a, b in zip(found, World(2).run(step_of(net)), strict=True))


# ---- Memory ----


def test_what_is_in_flight_is_counted() -> None:
    """By hand: of a 3x3 convolution a rank's boundary reads three rows a side that has a neighbour."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Conv2d(c, f, 3, padding=1, bias=False) for c, f in ((2, 4), (4, 2))))
    compiled = compile_network(graph_of(module, (torch.zeros(1, 2, 30, 20),), name="net")[0], Grid((("H", 3),)))
    early, plain = with_passes(compiled, StartHalos()).program, with_passes(compiled).program
    for row, channels in zip(early.rows, (2, 4), strict=True):
        parts = [parts_of(row, early.grid, rank) for rank in range(3)]
        assert [sum(p.strip * prod(p.reads[0]) for p in some) for some in parts] == [
            60 * channels * n for n in (1, 2, 1)
        ]
    middle, first = ([MemoryWalk(p, 1, rank).memory().saved for p in (early, plain)] for rank in (1, 0))
    windows, strips, own = 12 * 20 * (2 + 4), 6 * 20 * (2 + 4), 10 * 20 * (2 + 4)
    assert middle[0] - middle[1] == 4 * (own + strips - windows)
    padded, strips = (11 - 12) * 20 * (2 + 4), 3 * 20 * (2 + 4)  # at the edge a row of zeros is put above, by a copy
    assert first[0] - first[1] == 4 * (padded + strips)
    assert network_memory(early).peak == max(MemoryWalk(early, 1, rank).memory().peak for rank in range(3))
    packed = with_passes(compiled, BucketGradients(0)).program
    elements = sum(p.numel() for p in module.parameters())
    assert sum(packed_bytes(packed, 1).values()) == 4 * elements
    assert packed_bytes(packed, 1).keys() == {0}  # started when the first row's backward is over


# ---- The verifier ----


@cache
def program_of() -> Program:
    return resnet({"N": 1, "H": 2}, StartHalos(), BucketGradients(0)).program


def test_a_program_that_is_right_has_no_fault() -> None:
    program = program_of()
    assert list(flight_faults(program)) == []
    assert program == BucketGradients(0).run(program) == StartHalos().run(program)


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_what_is_read_before_its_wait_is_found(which: str) -> None:
    program = program_of()
    steps: list[Flow] = [*(forward(program) if which == "forward" else backward(program))]
    assert list(order_faults(program, steps)) == []
    waits = [i for i, s in enumerate(steps) if isinstance(s, Wait) and not s.name.startswith("bucket")]
    assert waits
    for i in waits:
        late = [*steps[:i], *steps[i + 1 :], steps[i]]
        assert any("reads" in fault for fault in order_faults(program, late)), steps[i]
        assert any("never waited" in fault for fault in order_faults(program, [*steps[:i], *steps[i + 1 :]]))
    start = next(i for i, s in enumerate(steps) if isinstance(s, Start))
    assert any("not in flight" in f for f in order_faults(program, [*steps[:start], *steps[start + 1 :]]))
    assert any("twice" in f for f in order_faults(program, [*steps[:start], *steps[start : start + 1], *steps[start:]]))


def _no_parameter(bucket: Bucket, program: Program) -> Bucket:
    other = next(m for m in program.backward() if program.values[m.value].kind == "made")
    return replace(bucket, steps=(*bucket.steps, other.step))


BUCKETS: dict[str, Callable[[Bucket, Program], Bucket]] = {
    "no gradient of a parameter": _no_parameter,
    "in 2 buckets": lambda b, _: replace(b, steps=(*b.steps, b.steps[0])),
    "is all_reduce over": lambda b, _: replace(b, over=("N",)),
    "0 steps are named": lambda b, _: replace(b, steps=(*b.steps, "nothing.dw")),
}


@pytest.mark.parametrize("fault", BUCKETS)
def test_a_bucket_that_is_wrong_is_found(fault: str) -> None:
    program = program_of()
    (bucket,) = program.buckets
    wrong = replace(program, buckets=(BUCKETS[fault](bucket, program),))
    assert any(fault in found for found in flight_faults(wrong))


def test_sums_that_are_half_in_a_bucket_and_rows_that_are_no_halo(tmp_path: Path) -> None:
    torch.manual_seed(4)
    graph, _ = graph_of(Heads(), (torch.randn(4, 6),), name="net")
    program = with_passes(compile_network(graph, Grid((("N", 2),))), BucketGradients(0)).program
    (bucket,) = program.buckets
    names = [m.step for m in program.backward() if isinstance(m, Moved) and m.value == "body.weight"]
    assert len(names) == 2
    less = replace(bucket, steps=tuple(s for s in bucket.steps if s != names[0]))
    assert any("only some sums" in f for f in flight_faults(replace(program, buckets=(less,))))
    rows = tuple(replace(row, early=0) for row in program.rows)
    assert any("no exchange alone" in f for f in flight_faults(replace(program, rows=rows)))
