"""Small networks with branches, on random grids, with a layout of its own for every value and roles for every row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from free_networks import free_network, imported, ranks_of, sent_by
from operation_cases import a_grid
from sampling import cases_of
from torch import nn

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.program.verify.network import faults
from convgen.spec.exported import graph_of

Maker = Callable[[Random, int], nn.Module]


class Branches(nn.Module):
    """Convolutions, norms, pools, a gate, a skip by concatenation, an upsampling, a head: some of them, by chance."""

    def __init__(self, draw: Random, channels: int) -> None:
        super().__init__()
        c = 2 * draw.randint(1, 3)
        self.stem = nn.Conv2d(channels, c, draw.choice((3, 5)), draw.choice((1, 2)), 2, bias=draw.random() < 0.5)
        self.norm = draw.choice((nn.BatchNorm2d(c), nn.GroupNorm(2, c), nn.InstanceNorm2d(c, affine=True)))
        self.pool = draw.choice((nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, ceil_mode=True), nn.Identity()))
        self.deep = nn.Conv2d(c, 2 * c, 3, padding=draw.choice((0, 1)), groups=draw.choice((1, 2)))
        self.deeper = draw.choice((nn.BatchNorm2d(2 * c), nn.Identity()))
        self.up = draw.choice((nn.ConvTranspose2d(2 * c, c, 2, 2), nn.Sequential(nn.Conv2d(2 * c, c, 1))))
        self.gate = nn.Linear(c, c) if draw.random() < 0.5 else None
        self.size = draw.choice(("nearest", "bilinear"))
        self.head = nn.Linear(2 * c, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        y = self.up(torch.sigmoid(self.deeper(self.deep(self.pool(x)))))
        if self.gate is not None:
            x = x * self.gate(x.mean((2, 3)))[:, :, None, None]
        y = nn.functional.interpolate(y, x.shape[2:], mode=self.size)
        return self.head(torch.cat([x, y], 1).flatten(2).mean(2))


class Volume(nn.Module):
    """Three dimensions, a residual, dropout of nothing."""

    def __init__(self, draw: Random, channels: int) -> None:
        super().__init__()
        c = draw.randint(2, 4)
        self.one = nn.Conv3d(channels, c, 3, draw.choice((1, 2)), 1)
        self.two = nn.Conv3d(c, c, 3, 1, 1, groups=draw.choice((1, c)))
        self.norm = nn.BatchNorm3d(c)
        self.three = nn.ConvTranspose3d(c, 2, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.one(x))
        return self.three(self.norm(self.two(x)) + x)


def a_network(draw: Random) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(draw.randrange(2**31))
    channels, n = draw.randint(1, 3), draw.randint(2, 4)
    if draw.random() < 0.3:
        return Volume(draw, channels), torch.randn(n, channels, *(draw.randint(4, 7) for _ in range(3)))
    return Branches(draw, channels), torch.randn(n, channels, *(draw.randint(9, 13) for _ in range(2)))


def differ(got: torch.Tensor, want: torch.Tensor, floor: float = 0.0) -> float:
    return float((got - want).abs().max()) / max(float(want.abs().max()), floor, 1e-30) if want.numel() else 0.0


def compare(module: nn.Module, x: torch.Tensor, net: object, grid: Grid, program: object) -> None:
    state = {n: t.detach().clone() for n, t in module.state_dict().items()}
    assert list(faults(program)) == []  # type: ignore[arg-type]
    module.zero_grad()
    given = x.clone().requires_grad_()
    y = module(given)
    dy = torch.randn(y.shape)
    y.backward(dy)
    for rank, ran in enumerate(ranks_of(net, grid, {"x": x}, state, [dy], ["output"])):
        assert differ(ran.outputs[0], y.detach()) < 1e-10
        assert ran.inputs[0] is not None and given.grad is not None and differ(ran.inputs[0], given.grad) < 1e-9
        wanted = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        assert set(ran.gradients) == set(wanted)
        floor = 1e-3 * max(float(g.abs().max()) for g in wanted.values())
        for n, g in wanted.items():
            assert differ(ran.gradients[n], g, floor) < 1e-9, n
        for n, b in module.named_buffers():
            assert differ(ran.state[n].double(), b.double()) < 1e-10, n
        assert ran.sent == sent_by(program, rank, of_inputs=True)  # type: ignore[arg-type]
    state = {n: t.detach().clone() for n, t in module.state_dict().items()}
    with torch.no_grad():
        y = module.eval()(x)
    module.train()
    for ran in ranks_of(net, grid, {"x": x}, state, [dy], ["output"], train=False):
        assert differ(ran.outputs[0], y) < 1e-10


@pytest.mark.parametrize("seed", cases_of(8, "test_any_layout_of_every_value_and_any_roles_of_every_row"))
def test_any_layout_of_every_value_and_any_roles_of_every_row(seed: int, tmp_path: Path) -> None:
    draw = Random(f"free network {seed}")
    torch.set_default_dtype(torch.float64)
    try:
        module, x = a_network(draw)
        graph, _ = graph_of(module, (x,), name="net")
        grid = a_grid(draw)
        compiled = free_network(draw, graph, grid)
        net = imported(compiled.package().files, tmp_path)
        compare(module, x, net, grid, compiled.program)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("axes", [{"N": 2}, {"H": 3}, {"C": 2}, {"F": 2}, {"H": 2, "W": 2}, {"N": 2, "C": 2}], ids=str)
def test_named_layouts(axes: dict[str, int], tmp_path: Path) -> None:
    draw = Random(f"named network {axes}")
    torch.set_default_dtype(torch.float64)
    try:
        module, x = Branches(draw, 3), torch.randn(3, 3, 11, 9)
        graph, _ = graph_of(module, (x,), name="net")
        grid = Grid(tuple(axes.items()))
        compiled = compile_network(graph, grid)
        net = imported(compiled.package().files, tmp_path)
        compare(module, x, net, grid, compiled.program)
        more = torch.cat([x, x + 1])  # another number of samples
        graph_more = graph.at(6)
        again = compile_network(graph_more, grid)
        compare(module, more, net, grid, again.program)
    finally:
        torch.set_default_dtype(torch.float32)
