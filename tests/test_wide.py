"""Rows that are one: one halo for several, and halos that travel while moments do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from free_networks import imported
from networks_on_ranks import check, with_passes
from networks_on_ranks import imported as module_of
from test_overlap import step_of
from test_timeline import a_machine
from torch import nn

from convgen.algebra.grid import Grid
from convgen.cost.network import volume
from convgen.cost.timeline import simulate
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.operations.fused import Fused
from convgen.passes.bucket_gradients import BucketGradients
from convgen.passes.start_halos import StartHalos
from convgen.passes.widen_halos import WidenHalos
from convgen.plan.program.overlapped import overlapped
from convgen.plan.program.widening import worth_widening
from convgen.program.flow import Local, Start, Wait, backward, forward
from convgen.program.network import Moved, Program, label
from convgen.program.verify.flights import order_faults
from convgen.program.verify.network import faults
from convgen.spec.exported import graph_of
from convgen.verify.virtual import World


class Chain(nn.Module):
    """Rows that follow each other in every way: strides, groups, dilation, transposed, pooling, norms between."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
        turned, pool = (nn.ConvTranspose2d, nn.AvgPool2d) if dims == 2 else (nn.ConvTranspose3d, nn.AvgPool3d)
        self.a, self.b, self.norm = conv(2, 4, 3, 1, 1), conv(4, 4, 5, 2, 2, groups=2, bias=False), norm(4)
        self.c, self.d, self.norm2 = conv(4, 6, 3, 1, 2, dilation=2), turned(6, 4, 4, 2, 1), norm(4, affine=False)
        self.e, self.pool, self.f = conv(4, 4, 3, padding=1, groups=4), pool(3, 1, 1), conv(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.b(torch.relu(self.a(x)) + 0.5))
        x = self.d(self.c(torch.sigmoid(self.norm(x))))
        x = self.e(nn.functional.silu(self.norm2(x)))
        return self.f(self.pool(torch.tanh(x)))


def of_one(program: Program) -> list[Fused]:
    return [row.bound.operation for row in program.rows if isinstance(row.bound.operation, Fused)]


@pytest.mark.parametrize(
    ("grid", "shape", "meanwhile"),
    [
        ({"H": 3}, (2, 2, 29, 23), True),
        ({"H": 4}, (1, 2, 5, 11), False),  # ranks without rows
        ({"H": 2, "W": 2}, (2, 2, 13, 10), True),
        ({"D": 2, "W": 2}, (1, 2, 11, 6, 9), True),
    ],
    ids=str,
)
def test_rows_that_are_one_change_nothing(grid: dict[str, int], shape: tuple[int, ...], *, meanwhile: bool) -> None:
    """Outputs, all gradients, buffers, and bytes as said."""
    torch.manual_seed(1)
    given = module_of(Chain(len(shape) - 2).double(), torch.randn(shape, dtype=torch.float64))
    passes = (WidenHalos(), *(StartHalos(), BucketGradients(0)) * meanwhile)
    compiled = with_passes(compile_network(given.graph, Grid(tuple(grid.items()))), *passes)
    assert list(faults(compiled.program)) == []
    assert [len(one.parts) for one in of_one(compiled.program)] == [5, 5, 6]
    assert WidenHalos().run(compiled.program) is compiled.program
    errors = check(given, grid, passes=passes)
    assert errors.right, errors


def compiled(module: nn.Module, shape: tuple[int, ...], **grid: int) -> CompiledNetwork:
    torch.manual_seed(0)
    return compile_network(graph_of(module, (torch.zeros(shape),), name="net")[0], Grid(tuple(grid.items())))


def tower(count: int) -> nn.Module:
    return nn.Sequential(*[m for _ in range(count) for m in (nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.ReLU())])


def test_one_halo_stands_for_several() -> None:
    """As wide as all together, and no other exchange; wide where latencies are long, each its own where they aren't."""
    one = compiled(tower(3), (2, 4, 32, 16), H=2)
    plain, wide = one.plain, WidenHalos().run(one.plain)
    kinds = [[s["collective"] for s in volume(p)["forward"]] for p in (plain, wide)]
    assert kinds == [["exchange"] * 3, ["exchange"]]
    (halo,) = volume(wide)["forward"]
    assert halo["bytes_sent_per_rank"] == [2 * 4 * 3 * 16 * 4] * 2  # three rows of all samples and channels
    slow, quick = a_machine(1e-3, 1e9, 1e-7), a_machine(1e-9, 1e12, 1e-3)
    assert len(of_one(overlapped(plain, slow, "float32"))) == 1
    assert overlapped(plain, slow, "float32").values.keys() < plain.values.keys()
    assert not of_one(overlapped(plain, quick, "float32"))
    assert worth_widening(plain, quick, "float32") is plain
    took = [simulate(p, slow, "float32").end_s for p in (wide, plain)]
    assert took[0] < 0.7 * took[1]


class Normed(nn.Module):
    """A batch norm between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.norm(self.a(x))))


def test_a_halo_travels_while_moments_do(tmp_path: Path) -> None:
    """It is started before them, and its gradient is waited for behind theirs."""
    one = compiled(Normed(), (2, 3, 16, 16), H=2)
    wide = WidenHalos().run(one.plain)
    (row,) = [r for r in wide.rows if isinstance(r.bound.operation, Fused)]
    said = [
        step.name.rpartition(".")[0] + kind
        for steps in (forward(wide), backward(wide))
        for step in steps
        for kind in [{Start: " starts", Wait: " waits", Local: ""}.get(type(step))]
        if kind and label(row) in step.name
    ]
    assert said == [f"{label(row)} {verb}" for verb in ("starts", "waits") * 2]
    names = [getattr(step, "name", getattr(step, "step", "")) for step in forward(wide)]
    moments = next(i for i, name in enumerate(names) if name.endswith("moments"))
    assert names.index(f"{label(row)}.x0") < moments < names.index(label(row))
    back = [*backward(wide)]
    start, end = (next(i for i, step in enumerate(back) if isinstance(step, kind)) for kind in (Start, Wait))
    between = [step.step.rpartition(".")[2] for step in back[start:end] if isinstance(step, Moved)]
    assert between == ["dx2", "dx1"]  # of the filters, and of the norm's coefficients
    early = [step for step in backward(wide) if not isinstance(step, Wait)]
    assert any("never waited for" in fault for fault in order_faults(wide, early))
    slow = a_machine(1e-3, 1e9, 1e-7)
    took, plain = (simulate(p, slow, "float32") for p in (wide, one.plain))
    assert took.end_s < 0.9 * plain.end_s and took.hidden > 0.1
    net = imported(with_passes(one, WidenHalos()).package().files, tmp_path)
    sent = World(2).run(step_of(net, torch.randn(2, 3, 16, 16)))[1][3]
    said = volume(wide, of_inputs=True)["backward"]
    assert [(s["collective"], s["bytes_sent_per_rank"][1], s.get("lane", "")) for s in said] == sent


class Split(nn.Module):
    """What lies between is read twice, or is an output."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.a, self.b, self.twice = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1), twice

    def forward(self, x: torch.Tensor) -> Any:
        y = self.a(x)
        return self.b(y) + y if self.twice else (self.b(y), y)


@pytest.mark.parametrize("twice", [True, False])
def test_what_others_read_stays(twice: bool) -> None:
    plain = compiled(Split(twice=twice), (1, 2, 12, 8), H=2).plain
    assert WidenHalos().run(plain) is plain


def test_channels_that_are_split_between_are_left_alone() -> None:
    """A row that sums over split channels reads what all ranks make."""
    plain = compiled(tower(2), (1, 4, 12, 8), H=2, C=2).plain
    assert all("C" not in dict(r.roles) for r in WidenHalos().run(plain).rows if isinstance(r.bound.operation, Fused))


def test_after_buckets_rows_keep_their_names() -> None:
    packed = BucketGradients(0).run(compiled(tower(3), (2, 4, 32, 16), H=2).plain)
    assert packed.buckets and WidenHalos().run(packed) is packed


def test_rows_of_another_number_of_samples_are_one_as_well() -> None:
    one = with_passes(compiled(tower(3), (2, 4, 32, 16), H=2), WidenHalos())
    assert [type(r.bound.operation) for r in one.other.rows] == [type(r.bound.operation) for r in one.program.rows]
    here, there = (p.values[label(p.rows[-1])].shape for p in (one.program, one.other))
    assert here[1:] == there[1:] and here[0] != there[0]
    assert list(faults(one.other)) == []
