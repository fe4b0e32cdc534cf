"""Networks that bench/overlap.py measures; nothing but torch is needed."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


def tower(channels: int, count: int, kernel: int = 3) -> nn.Module:
    layers = [nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False) for _ in range(count)]
    return nn.Sequential(*layers)


class Block(nn.Module):
    """ResNet's basic block."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(filters), nn.BatchNorm2d(filters)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != filters:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet18() -> nn.Module:
    sizes = [64, 64, 128, 256, 512]
    blocks = [
        Block(c if first else f, f, 2 if first and c != f else 1) for c, f in pairwise(sizes) for first in (True, False)
    ]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class Twice(nn.Sequential):
    def __init__(self, channels: int, filters: int) -> None:
        convs = [nn.Conv2d(channels, filters, 3, padding=1), nn.Conv2d(filters, filters, 3, padding=1)]
        super().__init__(convs[0], nn.ReLU(), convs[1], nn.ReLU())


class UNet(nn.Module):
    """Two levels of halving, skips by concatenation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        c = channels
        self.down1, self.down2, self.middle = Twice(1, c), Twice(c, 2 * c), Twice(2 * c, 4 * c)
        self.open2, self.up2 = nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), Twice(4 * c, 2 * c)
        self.open1, self.up1 = nn.ConvTranspose2d(2 * c, c, 2, 2), Twice(2 * c, c)
        self.head = nn.Conv2d(c, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(nn.functional.max_pool2d(a, 2))
        y = self.open2(self.middle(nn.functional.max_pool2d(b, 2)))
        y = self.open1(self.up2(torch.cat([b, y], 1)))
        return self.head(self.up1(torch.cat([a, y], 1)))
