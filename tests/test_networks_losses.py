"""Losses inside of networks: summed on ranks, divided by the global count, and never whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_networks import seeded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.spec.exported import graph_of
from convgen.verify.network import check_network, report_text

OPTIONS: list[dict[str, Any]] = [
    {}, {"ignore_index": 1}, {"reduction": "sum"}, {"label_smoothing": 0.2}, {"weight": True, "ignore_index": 0}
]  # fmt: skip


class Scored(nn.Module):
    """Scores of three classes for every pixel, and their loss."""

    def __init__(self, weight: bool = False, **options: Any) -> None:
        super().__init__()
        self.scores, self.options = nn.Conv2d(2, 3, 3, padding=1), options
        self.weight: Tensor | None
        self.register_buffer("weight", torch.tensor([0.5, 1.0, 2.0]) if weight else None)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(self.scores(x), target, self.weight, **self.options)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "mean")
@pytest.mark.parametrize("grid", [{"N": 2}, {"H": 2, "W": 2}], ids=["N", "HW"])
def test_cross_entropy_is_summed_on_ranks(options: dict[str, Any], grid: dict[str, int]) -> None:
    seeded()
    module = Scored(**options).double()
    x, target = torch.randn(3, 2, 5, 6, dtype=torch.float64), torch.randint(3, (3, 5, 6))
    graph, tensors = graph_of(module, (x, target))
    one = compile_network(graph, Grid(tuple(grid.items())))
    assert not one.described.whole
    report = check_network(one, tensors)
    assert report.ok, report_text(report)
