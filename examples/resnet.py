"""A small ResNet, plain PyTorch: nothing here knows of convgen, ranks or layouts.

convgen import examples.resnet:small_resnet --input 8,3,32,32 -o build/small_resnet.yaml
"""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions, and the input added to what they make."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != filters:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(y)) + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """Images [N, 3, H, W] to scores [N, classes].

    Args:
        width: filters of the first stage; each stage has twice as many, on half the rows and columns.
        depths: blocks of each stage.
    """

    def __init__(self, width: int = 16, depths: tuple[int, ...] = (1, 1, 1), classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages, channels = list[nn.Module](), width
        for i, depth in enumerate(depths):
            filters = width << i
            blocks = [Block(filters if b else channels, filters, 1 if b or not i else 2) for b in range(depth)]
            stages.append(nn.Sequential(*blocks))
            channels = filters
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        return self.classify(self.pool(self.stages(self.stem(image))).flatten(1))


def small_resnet(width: int = 16, classes: int = 4) -> ResNet:
    """Three stages of one block."""
    return ResNet(width, (1, 1, 1), classes)
