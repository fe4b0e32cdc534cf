"""Twenty steps of training of ResNet-18 on virtual ranks against one process, in float64: the largest errors.

    python bench/networks_training.py [--steps 20] [--only "4 of 64x64 H=2,W=2"]

SGD with momentum, a new random batch each. Images of 64x64, 4 of them, on 4 ranks by the letters of several grids and
as planned by price, 5 of them on N=4, and of 66x50 on 3 ranks. Errors are relative to the largest number of a tensor;
of losses to the loss. With more than 1e-10 of any it ends with an error.
"""

from __future__ import annotations

import copy
import math
import time
from typing import Any

import torch
from options import options
from torch import Tensor, nn

import convgen
from convgen.verify.virtual import VirtualTransport, World

CASES = [  # samples, rows, columns, grid
    (4, 64, 64, "N=4"), (4, 64, 64, "H=4"), (4, 64, 64, "H=2,W=2"), (4, 64, 64, "C=4"), (4, 64, 64, "N=2,H=2"),
    (4, 64, 64, "planned"), (5, 64, 64, "N=4"),
    (4, 66, 50, "N=3"), (4, 66, 50, "H=3"), (4, 66, 50, "W=3"), (4, 66, 50, "C=3"),
]  # fmt: skip
LIMIT = 1e-10


class Block(nn.Module):
    """[ResNet]'s basic block, with torchvision's names."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        narrow = nn.Conv2d(channels, filters, 1, stride, bias=False)
        self.downsample = (
            None if stride == 1 and channels == filters else nn.Sequential(narrow, nn.BatchNorm2d(filters))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """torchvision's resnet18, name by name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        for i, (channels, filters) in enumerate(((64, 64), (64, 128), (128, 256), (256, 512)), 1):
            blocks = Block(channels, filters, 1 if i == 1 else 2), Block(filters, filters, 1)
            self.add_module(f"layer{i}", nn.Sequential(*blocks))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for i in range(1, 5):
            x = self.get_submodule(f"layer{i}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet18() -> nn.Module:
    torch.manual_seed(0)
    return ResNet18().double()


def losses_of(model: nn.Module, call: Any, n: int, h: int, w: int, steps: int) -> list[float]:
    draw, losses = torch.Generator().manual_seed(1), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        x = torch.randn(n, 3, h, w, dtype=torch.float64, generator=draw)
        labels = torch.randint(1000, (n,), generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def run(n: int, h: int, w: int, grid: str, steps: int, truth: tuple[list[float], dict[str, Tensor]]) -> float:
    """Prints a case; the largest error."""
    module, start = resnet18(), time.time()
    x = torch.zeros(n, 3, h, w, dtype=torch.float64)
    how = {"grid": "a=2,b=2", "algorithm": "auto"} if grid == "planned" else {"grid": grid}
    net = convgen.from_torch(module, (x,), name="resnet18", **how)
    compiled = time.time() - start

    def program(end: VirtualTransport) -> tuple[list[float], dict[str, Tensor]]:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(module.state_dict())

        def call(x: Tensor) -> Tensor:
            return net.gather("output", model(net.scatter("x", x, mesh)), mesh)

        losses = losses_of(model, call, n, h, w, steps)
        return losses, model.full_state_dict()

    losses, state = World(math.prod(net.NET.grid.values())).run(program)[0]
    of_losses = max(abs(a - b) / abs(b) for a, b in zip(losses, truth[0], strict=True))

    def worst(names: list[str]) -> float:
        return max(float((state[n] - truth[1][n]).abs().max() / truth[1][n].abs().max()) for n in names)

    running = [n for n in truth[1] if "running" in n]
    learnt = [n for n in truth[1] if n not in running and not n.endswith("tracked")]
    print(
        f"{n} of {h}x{w} {grid:8s} losses {of_losses:.1e}  parameters {worst(learnt):.1e}"
        f"  statistics {worst(running):.1e}  ({compiled:.0f} s to compile, {time.time() - start - compiled:.0f} s)",
        flush=True,
    )
    return max(of_losses, worst(learnt), worst(running))


def main() -> None:
    asked = options(__doc__, steps=20, only=("", "cases whose text has this"))
    torch.set_num_threads(1)
    truths: dict[tuple[int, int, int], tuple[list[float], dict[str, Tensor]]] = {}
    worst = 0.0
    for n, h, w, grid in CASES:
        if asked.only not in f"{n} of {h}x{w} {grid}":
            continue
        if (n, h, w) not in truths:
            module = copy.deepcopy(resnet18())
            truths[n, h, w] = losses_of(module, module, n, h, w, asked.steps), module.state_dict()
        worst = max(worst, run(n, h, w, grid, asked.steps, truths[n, h, w]))
    if worst > LIMIT:
        raise SystemExit(f"{worst:.1e} is more than {LIMIT}")


if __name__ == "__main__":
    main()
