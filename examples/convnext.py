"""A small ConvNeXt, as anyone would write it: channels last inside of a block, scales a channel, stochastic depth.

convgen import examples.convnext:small_convnext --input 4,3,64,64 -o convnext.yaml
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Norm(nn.LayerNorm):
    """Of [N, C, H, W], over channels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """A depthwise convolution 7x7, then two layers for every pixel."""

    def __init__(self, channels: int, drop: float) -> None:
        super().__init__()
        self.mix = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.wide, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale, self.drop = nn.Parameter(torch.full((channels,), 0.1)), drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.mix(x).permute(0, 2, 3, 1))
        y = (self.scale * self.narrow(nn.functional.gelu(self.wide(y)))).permute(0, 3, 1, 2)
        if self.training and self.drop:
            y = y * (torch.empty_like(y[:, :1, :1, :1]).bernoulli_(1 - self.drop) / (1 - self.drop))
        return x + y


def small_convnext(classes: int = 10, widths: tuple[int, ...] = (16, 32, 64), drop: float = 0.1) -> nn.Module:
    rows: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), Norm(widths[0])]
    for i, width in enumerate(widths):
        if i:
            rows += [Norm(widths[i - 1]), nn.Conv2d(widths[i - 1], width, 2, 2)]
        rows += [Block(width, drop), Block(width, drop)]
    head = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], classes)
    )
    return nn.Sequential(*rows, head)
