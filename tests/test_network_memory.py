"""What a rank is said to hold in a step: counted by hand, and beside every storage that is made while one runs."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from networks_on_ranks import package
from sampling import cases_of, draws
from test_module_memory import Allocations
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.cost.convolution_copies import copies
from convgen.cost.network_memory import MemoryWalk, network_memory
from convgen.network_compiler import compile_network
from convgen.operations.convolution import Convolution
from convgen.operations.fused import Fused
from convgen.passes.widen_halos import WidenHalos
from convgen.program.network import Program
from convgen.spec.exported import graph_of
from convgen.verify.virtual import VirtualTransport, World

GRIDS = ({"N": 1}, {"N": 2}, {"H": 2}, {"C": 2}, {"N": 2, "H": 2})
MIXED = ({"H": 3}, {"H": 2, "W": 2}, {"C": 2, "H": 2})
EACH = 2 * 4 * 8 * 6 * 4  # bytes of a value of the network below


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(((x * 2) + 3) * 4)


class Several(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 4, 1, 1))
        self.parts = nn.Sequential(*(Part() for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x * self.weight)


def several(count: int, **grid: int) -> Program:
    graph = graph_of(Several(count), (torch.zeros(2, 4, 8, 6),), name="several")[0]
    return compile_network(graph, Grid(tuple(grid.items()))).program


def test_values_live_until_their_last_reader() -> None:
    """x, and what silu takes of each part, are kept; beside them at most a gradient and the one that is made of it."""
    for count in (2, 3, 4):
        for ranks in (1, 2):
            found = network_memory(several(count, H=ranks))
            assert found.saved == (1 + count) * EACH // ranks
            assert found.saved + found.passing == (1 + count + 2) * EACH // ranks


def test_blocks_of_channels() -> None:
    """Of a 3x3 convolution: y is made of copies of x, w and y in whole blocks of 16 channels, and then copied."""
    draw = Random(5)
    for _ in range(draws(20)):
        n, c, f, rows = draw.randint(1, 3), draw.randint(16, 70), draw.randint(16, 70), draw.randint(5, 9)
        graph = graph_of(nn.Conv2d(c, f, 3, padding=1, bias=False), (torch.zeros(n, c, rows, rows),), name="one")[0]
        (row,) = compile_network(graph, Grid((("N", 1),))).program.rows
        assert isinstance(row.bound.operation, Convolution)
        x, y, w = (n, c, rows, rows), (n, f, rows, rows), (f, c, 3, 3)
        one = n * rows * rows
        padded = {k: -(-k // 16) * 16 * one for k in (c, f)}
        most = f * c * 9 + max(padded[c] + padded[f] - f * one, padded[f])
        assert copies(row.bound.operation, x, y, w, None) == most


class Watched:
    """A transport whose own tensors are not counted; its results are. A sum stands where its addend stood."""

    def __init__(self, end: VirtualTransport) -> None:
        self.rank, self.size = end.rank, end.size
        self.mode: Allocations | None = None
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange"):
            setattr(self, kind, self._watched(kind, getattr(end, kind)))

    def _watched(self, kind: str, send: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(tensor: Tensor, *rest: Any) -> Tensor:
            mode = self.mode
            if mode is None:
                return send(tensor, *rest)
            mode.paused = True
            found = send(tensor, *rest)
            if kind == "all_reduce":
                found = tensor.copy_(found)
            mode.paused = False
            mode.count([found])
            return found

        return call


def measured(net: Any, x_global: Tensor, ranks: int, low: str = "") -> list[tuple[int, int]]:
    """By rank bytes that forward keeps, and the most of a step of training, with its input, without parameters."""

    def program(end: VirtualTransport) -> tuple[int, int]:
        transport = Watched(end)
        mesh = net.init_mesh("cpu", transport=transport)
        model = net.Network(mesh, parameters="blocks")
        x = net.scatter("x", x_global, mesh)

        def call() -> Tensor:
            with torch.autocast("cpu", getattr(torch, low or "bfloat16"), enabled=bool(low)):
                return model(x)

        call().square().mean().backward()
        for p in model.parameters():
            p.grad = None
        given = [getattr(t, "_block", t).detach() for t in (x, *model.parameters(), *model.buffers())]
        with Allocations(given) as mode:
            transport.mode = mode
            y = call()
            kept = mode.live - y.untyped_storage().nbytes()
            y.square().mean().backward()
            transport.mode = None
        return kept + x.untyped_storage().nbytes(), mode.peak + x.untyped_storage().nbytes()

    return World(ranks).run(program)


class Drawn(nn.Module):
    """Convolutions, norms, activations, pools, joins, a head that averages."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        c = draw.choice((16, 24))
        self.first = nn.Conv2d(3, c, draw.choice((3, 5)), padding="same")
        self.parts = nn.ModuleList(_drawn(draw, c) for _ in range(draw.randint(2, 4)))
        self.skips = [draw.random() < 0.4 for _ in self.parts]
        self.last = nn.Sequential(*[nn.AdaptiveAvgPool2d(1)] * draw.randint(0, 1), nn.Conv2d(c, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part, skips in zip(self.parts, self.skips, strict=True):
            x = part(x) + x if skips else part(x)
        return self.last(x)


def _drawn(draw: Random, c: int) -> nn.Module:
    kernel, groups = draw.choice((1, 3, 3)), draw.choice((1, 1, 4))
    norm = draw.choice((nn.BatchNorm2d(c), nn.GroupNorm(4, c), nn.Identity()))
    act = draw.choice((nn.ReLU(), nn.SiLU(), nn.GELU(), nn.Tanh()))
    conv = nn.Conv2d(c, c, kernel, padding="same", groups=groups, bias=draw.random() < 0.5)
    return nn.Sequential(conv, norm, act)


@pytest.mark.parametrize(
    ("grids", "low"), [(GRIDS, ""), (MIXED, ""), (GRIDS, "bfloat16")], ids=["plain", "mixed", "autocast"]
)
@pytest.mark.parametrize("seed", cases_of(10, "memory"))
def test_what_is_said_is_what_is_there(
    seed: int, grids: tuple[dict[str, int], ...], low: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every rank what forward keeps, within 10 %, and the most of a step, but for what ATen's kernels copy: within
    10 %, and under autocast 15 %, as what ATen casts within a sum is not seen."""
    monkeypatch.setattr(MemoryWalk, "_copies", lambda *_: 0)
    monkeypatch.setattr(MemoryWalk, "_wide", lambda *_: 0)
    draw = Random(f"memory {seed}")
    torch.manual_seed(seed)
    grid = Grid(tuple(grids[seed % len(grids)].items()))
    x = torch.randn(draw.choice((4, 8)), 3, 24, draw.choice((16, 20)))
    compiled = compile_network(graph_of(Drawn(draw), (x,), name="drawn")[0], grid, autocast=low)
    with package(compiled.package().files) as net:
        found = measured(net, x, grid.ranks, low)
    for rank, (kept, peak) in enumerate(found):
        said = MemoryWalk(compiled.program, 0, rank).memory()
        assert said.saved == pytest.approx(kept, rel=0.1), (rank, grid)
        assert said.saved + said.passing == pytest.approx(peak, rel=0.15 if low else 0.1), (rank, grid)


class Two(nn.Module):
    """Two convolutions that become one row, and one that doesn't."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 2, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.convs(x)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_within_a_wide_row_are_counted(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward of rows that became one makes the gradients of what lies between them, which no other row has."""
    monkeypatch.setattr(MemoryWalk, "_copies", lambda *_: 0)
    torch.manual_seed(0)
    x = torch.randn(4, 3, 24, 16)
    graph = graph_of(Two(), (x,), name="wide")[0]
    compiled = compile_network(graph, Grid((("H", ranks),)), passes=(WidenHalos(),))
    assert isinstance(compiled.program.rows[0].bound.operation, Fused)
    with package(compiled.package().files) as net:
        found = measured(net, x, ranks)
    for rank, (_, peak) in enumerate(found):
        said = MemoryWalk(compiled.program, 0, rank).memory()
        assert said.saved + said.passing == pytest.approx(peak, rel=0.1), rank
