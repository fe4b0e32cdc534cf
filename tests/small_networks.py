"""Small networks that have what large ones have."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.spec.exported import graph_of
from convgen.spec.graph import Graph
from convgen.spec.graph_edit import with_dtype


class Block(nn.Module):
    """[ResNet]'s basic block."""

    def __init__(self, channels: int, filters: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        plain = stride == 1 and channels == filters
        self.down = (
            None
            if plain
            else nn.Sequential(nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.down is None else self.down(x)))


class ResNet(nn.Module):
    """A stem of 5x5/2 and max pooling, two blocks, global pooling, dropout, a linear layer."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 5, 2, 2)
        self.bn1 = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = Block(4, 4)
        self.layer2 = Block(4, 6, 2)
        self.gap = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(p)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.bn1(self.conv1(x))))
        return self.fc(self.drop(torch.flatten(self.gap(self.layer2(self.layer1(x))), 1)))


class UNet(nn.Module):
    """Two ways up, a transposed convolution and nearest upsampling, each with the way down beside it; a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.LeakyReLU(0.1))
        self.down2 = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU())
        self.low = nn.Conv2d(6, 6, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(6, 4, 2, 2)
        self.join2 = nn.Conv2d(10, 4, 3, padding=1)
        self.up1 = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(4, 4, 3, padding=1))
        self.join1 = nn.Conv2d(8, 3, 1)
        self.register_buffer("weights", torch.tensor([0.5, 1.5, 2.5]).view(3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        pool = nn.functional.avg_pool2d
        a = self.down1(x)
        b = self.down2(pool(a, 2))
        c = self.up2(torch.relu(self.low(pool(b, 2))))
        d = self.up1(torch.relu(self.join2(torch.cat([b, c], 1))))
        y = self.join1(torch.cat([a, d], 1))
        return {"out": y * self.weights, "low": b}


def resnet() -> tuple[nn.Module, Tensor]:
    """The module in float64, and an input whose rows no 2 divides."""
    seeded()
    return ResNet(0.25).double(), torch.randn(3, 3, 29, 22, dtype=torch.float64)


def undropped() -> tuple[nn.Module, Tensor]:
    seeded()
    return ResNet(0.0).double(), torch.randn(3, 3, 29, 22, dtype=torch.float64)


def unet() -> tuple[nn.Module, Tensor]:
    seeded()
    return UNet().double(), torch.randn(3, 2, 20, 12, dtype=torch.float64)


def seeded() -> None:
    manual_seed: Any = torch.manual_seed
    manual_seed(0)


Made = Callable[[], tuple[nn.Module, Tensor]]


@cache
def exported(made: Made) -> tuple[Graph, dict[str, Tensor]]:
    module, x = made()
    return graph_of(module, (x,))


def compiled(
    made: Made, algorithm: str | None = None, dtype: str = "float64", **grid: int
) -> tuple[CompiledNetwork, dict[str, Tensor]]:
    graph, tensors = exported(made)
    return compile_network(with_dtype(graph, dtype), Grid(tuple(grid.items())), algorithm), tensors
