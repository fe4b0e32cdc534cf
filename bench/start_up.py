"""How long `parallelize` takes at a start: with exports that are kept, and without (CONVGEN_EXPORTS=0), in turn.

    python bench/start_up.py [--ranks 2] [--rounds 5] [--networks small_resnet,resnet50]

Processes of this machine, new ones each time, that have imported torch and nothing of torch.export. "first" is with an
empty cache, "again" with what the start before has left there: without exports the package alone. Seconds of the
longest rank, medians over rounds; the order of the two changes from round to round. ResNet-50 is written below, with
layers of torch.nn; images of 64 x 64.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from options import options
from torch import Tensor, nn

import convgen
from convgen.verify.processes import spawn
from examples.resnet import small_resnet

WIDTHS, DEPTHS = (64, 128, 256, 512), (3, 4, 6, 3)


class Bottleneck(nn.Module):
    """1x1, 3x3 with the stride, 1x1 to four times the width, and what it is added to."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        return self.relu(y + self.shortcut(x))


class ResNet50(nn.Module):
    """He et al., Deep residual learning for image recognition (2016), with the stride in the 3x3 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        self.stem, channels, blocks = nn.Sequential(*stem), 64, []
        for k, (width, depth) in enumerate(zip(WIDTHS, DEPTHS, strict=True)):
            for i in range(depth):
                blocks.append(Bottleneck(channels, width, 2 if k and not i else 1))
                channels = 4 * width
        self.blocks, self.fc = nn.Sequential(*blocks), nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(nn.functional.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "small_resnet": (small_resnet, (8, 3, 32, 32)),
    "resnet50": (ResNet50, (8, 3, 64, 64)),
}


def started(name: str, ranks: int) -> float:
    """Seconds of the longest rank."""
    make, shape = NETWORKS[name]

    def program(_: int) -> float:
        torch.manual_seed(0)
        module: Any = make()
        torch.distributed.barrier()
        start = time.perf_counter()
        convgen.parallelize(module, (torch.zeros(shape),), {"N": ranks}, "sample")
        return time.perf_counter() - start

    return max(spawn(program, ranks, 3600.0))


def main() -> None:
    args = options(__doc__, ranks=2, rounds=5, networks=",".join(NETWORKS))
    print(f"ranks {args.ranks}, rounds {args.rounds}: seconds of parallelize, without kept exports and with them")
    for name in args.networks.split(","):
        taken: dict[tuple[str, str], list[float]] = {}
        for i in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                for exports in ("0", "1") if i % 2 else ("1", "0"):
                    os.environ |= {"CONVGEN_EXPORTS": exports, "CONVGEN_CACHE": str(Path(folder) / exports)}
                    for when in ("first", "again"):
                        taken.setdefault((when, exports), []).append(started(name, args.ranks))
        for when in ("first", "again"):
            off, on = (statistics.median(taken[when, exports]) for exports in ("0", "1"))
            print(f"{name:<14} {when:<6} {off:7.2f} {on:7.2f}  {off / on:4.1f} times", flush=True)


if __name__ == "__main__":
    main()
