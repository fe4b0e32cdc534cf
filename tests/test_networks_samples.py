"""Other numbers of samples than a package was compiled for: one, fewer than ranks; samples joined with heads."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from free_networks import free_network, imported, ranks_of
from sampling import cases_of
from small_networks import seeded
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.spec.aten.sizes import for_any_sizes
from convgen.spec.exported import graph_of

NUMBERS = (1, 3)


class Heads(nn.Module):
    """Tokens whose samples are joined with heads, a product written out, an expansion, a flattened head."""

    def __init__(self) -> None:
        super().__init__()
        self.take = nn.Linear(6, 6)
        self.place = nn.Parameter(torch.randn(1, 4, 6))
        self.norm = nn.BatchNorm1d(4)
        self.give = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        x = self.norm(x + self.place.expand(n, -1, -1))
        q = self.take(x).view(n, t, 2, 3).transpose(1, 2).reshape(n * 2, t, 3)
        a = torch.softmax(q @ q.transpose(1, 2), -1) @ q
        one = torch.einsum("btc,bsc->bts", x, x) @ x
        y = a.view(n, 2, t, 3).transpose(1, 2).reshape(n, t, c) + one
        return self.give(torch.cat([y, x]).flatten(1))


def grads(module: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}, x.grad


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def run(folder: Path, draw: Random | None, grid: Grid, batch: int) -> None:
    """A package for `batch` samples with others: in evaluation, where one sample has statistics too."""
    seeded()
    module = Heads().double().eval()
    x = torch.randn(8, 4, 6, dtype=torch.float64)
    graph, _ = graph_of(module.train(), (x[:batch],), name="heads")
    module.eval()
    compiled = compile_network(graph, grid) if draw is None else free_network(draw, graph, grid)
    net = imported(compiled.package().files, folder)
    state = {n: t.detach().clone() for n, t in module.state_dict().items()}
    for n in (batch, *NUMBERS):
        dy = torch.randn(2 * n, 5, dtype=torch.float64)
        y, wanted, dx = grads(module, x[:n], dy)
        for one in ranks_of(net, grid, {"x": x[:n]}, state, [dy], ["output"], train=False):
            assert far(one.outputs[0], y) < 1e-10, (grid, batch, n)
            assert one.inputs[0] is not None and far(one.inputs[0], dx) < 1e-10, (grid, batch, n)
            assert all(far(one.gradients[p], g) < 1e-10 for p, g in wanted.items()), (grid, batch, n)


@pytest.mark.parametrize(("grid", "batch"), [("N=2", 4), ("N=2,C=2", 1), ("W=2", 1)])
def test_a_network_by_letters(grid: str, batch: int, tmp_path: Path) -> None:
    axes = tuple((a, int(n)) for a, n in (part.split("=") for part in grid.split(",")))
    run(tmp_path, None, Grid(axes), batch)


@pytest.mark.parametrize("seed", cases_of(2, "test_a_network_of_any_layout"))
def test_a_network_of_any_layout(seed: int, tmp_path: Path) -> None:
    draw = Random(f"samples {seed}")
    run(tmp_path, draw, Grid(draw.choice(((("a", 2),), (("a", 3),), (("a", 2), ("b", 2))))), draw.choice((1, 2, 4)))


def test_rows_are_described_for_any_number_and_otherwise_for_one() -> None:
    """What turns samples round has rows for its own number alone, and so has the graph."""
    x = torch.randn(3, 4)
    graph, _ = graph_of(nn.Linear(4, 4), (x,), name="net")
    same, here, many, *_ = for_any_sizes(graph)
    assert same == graph and here.rows[0].operation != many.rows[0].operation

    class Padded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.pad(x.T, (1, 1), mode="reflect").T

    graph, _ = graph_of(Padded(), (x,), name="net")
    alone, here, many, *_ = for_any_sizes(graph)
    assert not alone.is_dynamic and here == many
