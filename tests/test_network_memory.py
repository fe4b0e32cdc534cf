"""What a rank is said to hold in a step, counted by hand."""

from __future__ import annotations

from random import Random

import torch
from sampling import draws
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.cost.convolution_copies import copies
from convgen.cost.network_memory import network_memory
from convgen.network_compiler import compile_network
from convgen.operations.convolution import Convolution
from convgen.program.network import Program
from convgen.spec.exported import graph_of

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
