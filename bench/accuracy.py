"""Do ranks train to one process's accuracy ([CF] 6.3)? ResNet-20 on drawn images: curves, and accuracies at the end.

    python bench/accuracy.py [--images 10000] [--epochs 10] [--seeds 3] [--runs FILE] [--plot PNG]

Images of 32x32 in 10 classes come from one generator: a class is two smooth pictures, a sample one of them turned
round its edges, with another class's picture and noise above it. A fifth as many are kept for tests. ResNet-20 trains
in float32 with SGD on one process, and on processes by N, H, C, and N and H, with batch norms' statistics of the whole
batch, of a sample's rows wherever they lie (spatial), and of each rank's part (local). A seed draws the weights and the
order of images, alike for all ways.

What differs from one process is the order of float32 sums, and, where statistics are not the whole batch's, what is
computed. A way is as good where the mean of its accuracies over seeds is no further from one process's than chance
takes it in 19 of 20 such studies (Welch's t, Bonferroni over the ways); the table says both. Runs are kept in FILE as
they end, and what is there is not run again. Exits with 1 where a way is not as good.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from options import options
from scipy import stats
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

import convgen
from convgen.pictures.figures import matplotlib, save_figure, settings
from convgen.spec.text import parse_grid
from convgen.verify.processes import spawn

CLASSES, SIZE, BATCH, RATE = 10, 32, 100, 0.1
CHANCE = 0.05  # of a study in which all ways are as good to say that one is not
WHOLE, SPATIAL, LOCAL = "global", "spatial", "local"
WAYS: dict[str, tuple[str, str]] = {  # grid, statistics
    "one process": ("", WHOLE),
    "N=2": ("N=2", WHOLE),
    "N=2, local": ("N=2", LOCAL),
    "H=2": ("H=2", WHOLE),
    "H=2, local": ("H=2", LOCAL),
    "C=2": ("C=2", WHOLE),
    "N=2,H=2": ("N=2,H=2", WHOLE),
    "N=2,H=2, spatial": ("N=2,H=2", SPATIAL),
    "N=2,H=2, local": ("N=2,H=2", LOCAL),
}


@dataclass(frozen=True)
class Task:
    """How much of it.

    Attributes:
        images: that are trained on.
        epochs: over all of them.
    """

    images: int
    epochs: int


@dataclass(frozen=True)
class Images:
    """Images [S, 3, 32, 32] with their labels [S]."""

    x: Tensor
    labels: Tensor


def drawn(samples: int, seed: int) -> Images:
    """As many samples of the ten classes; the classes are the same for any seed."""
    of_classes, draw = torch.Generator().manual_seed(20), torch.Generator().manual_seed(seed)
    rough = torch.randn(2 * CLASSES, 3, 4, 4, generator=of_classes)
    smooth = interpolate(rough, size=(SIZE, SIZE), mode="bicubic", align_corners=False)
    pictures = smooth.view(CLASSES, 2, 3, SIZE, SIZE)
    labels = torch.randint(CLASSES, (samples,), generator=draw)
    others = (labels + torch.randint(1, CLASSES, (samples,), generator=draw)) % CLASSES
    turns = torch.randint(SIZE, (2, 2, samples), generator=draw)

    def of(classes: Tensor, turn: Tensor) -> Tensor:
        picked = pictures[classes, torch.randint(2, (samples,), generator=draw)]
        pairs = zip(picked, turn[0].tolist(), turn[1].tolist(), strict=True)
        return torch.stack([picture.roll((down, right), (1, 2)) for picture, down, right in pairs])

    noise = torch.randn(samples, 3, SIZE, SIZE, generator=draw)
    return Images(of(labels, turns[0]) + 0.8 * of(others, turns[1]) + 1.5 * noise, labels)


class Block(nn.Module):
    """Two convolutions and a sum, [ResNet] 4.2's for small images; what is added is cut and padded without weights."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        self.stride, self.more = stride, filters - channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        if self.more or self.stride > 1:
            x = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return (y + x).relu()


def resnet20() -> nn.Module:
    """Three stages of three blocks, 16, 32 and 64 filters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    channels = 16
    for filters, stride in ((16, 1), (32, 2), (64, 2)):
        for k in range(3):
            layers.append(Block(channels, filters, stride if k == 0 else 1))
            channels = filters
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def trained(task: Task, way: tuple[str, str], seed: int, _: int) -> list[tuple[float, float]]:
    """(mean loss, share of test images whose class is found) of each epoch, alike on all ranks."""
    grid, kind = way
    torch.manual_seed(seed)
    model = resnet20()
    data, test = drawn(task.images, 1), drawn(task.images // 5 // BATCH * BATCH, 2)
    if grid:
        model = convgen.parallelize(model, (data.x[:BATCH],), grid, None, statistics=kind)  # by its letters
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=1e-4)
    batches = task.images // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.epochs * batches)
    order, curve = torch.Generator().manual_seed(seed), list[tuple[float, float]]()
    for _ in range(task.epochs):
        model.train()
        losses = list[float]()
        for chosen in torch.randperm(task.images, generator=order).view(batches, BATCH):
            optimizer.zero_grad()
            loss = cross_entropy(model(data.x[chosen]), data.labels[chosen])
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            found = torch.cat([model(x).argmax(1) for x in test.x.split(BATCH)])
        curve.append((statistics.fmean(losses), (found == test.labels).float().mean().item()))
    return curve


class Runs:
    """Curves by way and seed, in a file as they end."""

    def __init__(self, file: Path | None, task: Task) -> None:
        self.file, self.task = file, task
        kept = json.loads(file.read_text()) if file is not None and file.exists() else {}
        self.all: dict[str, Any] = kept

    def curve(self, name: str, seed: int) -> list[tuple[float, float]]:
        key = f"{name}; {self.task.images} images, {self.task.epochs} epochs; seed {seed}"
        if key not in self.all:
            grid, _ = WAYS[name]
            ranks = math.prod(parse_grid(grid).values()) if grid else 1
            curves = spawn(partial(trained, self.task, WAYS[name], seed), ranks, 24 * 3600)
            self.all[key] = curves[0]
            print(f"{key}: {100 * curves[0][-1][1]:.1f} %", file=sys.stderr, flush=True)
            if self.file is not None:
                self.file.write_text(json.dumps(self.all, indent=0))
        return [(loss, share) for loss, share in self.all[key]]


def by_chance(some: Sequence[float], others: Sequence[float]) -> float:
    """How far the means of two samples of one distribution are apart at most, but for CHANCE over all ways."""
    if min(len(some), len(others)) < 2:
        return math.inf
    parts = [(statistics.variance(s) / len(s), len(s) - 1) for s in (some, others)]
    if not (squared := sum(part for part, _ in parts)):
        return 0.0
    freedom = squared**2 / sum(part**2 / n for part, n in parts)
    return float(stats.t.ppf(1 - CHANCE / (2 * (len(WAYS) - 1)), freedom)) * math.sqrt(squared)


Curves = dict[str, list[list[tuple[float, float]]]]  # by way: of each seed


def table(curves: Curves) -> int:
    """Prints it; how many ways are not as good as one process."""
    ends = {name: [100 * curve[-1][1] for curve in of] for name, of in curves.items()}
    one = ends["one process"]
    print(f"{'way':<20} {'accuracy, % (seeds)':<26} {'mean':>6} {'spread':>7} {'from one process':>17} {'allowed':>8}")
    worse = 0
    for name, shares in ends.items():
        apart = statistics.fmean(shares) - statistics.fmean(one)
        spread = statistics.stdev(shares) if len(shares) > 1 else 0.0
        allowed = by_chance(shares, one)
        worse += abs(apart) > allowed
        each = ", ".join(f"{share:.1f}" for share in shares)
        said = (f"{apart:+.2f}", f"{allowed:.2f}") if name != "one process" else ("", "")
        print(f"{name:<20} {each:<26} {statistics.fmean(shares):>6.2f} {spread:>7.2f} {said[0]:>17} {said[1]:>8}")
    return worse


def draw(curves: Curves, file: Path) -> None:
    """Accuracy by epoch: the mean of seeds a line, one process's least and most a band."""
    mpl = matplotlib()
    with settings(mpl):
        figure = mpl.figure.Figure(figsize=(7.0, 4.2), layout="constrained")
        axes = figure.subplots()
        epochs = range(1, len(curves["one process"][0]) + 1)
        for name, of in curves.items():
            by_epoch = [[100 * share for _, share in row] for row in zip(*of, strict=True)]
            if name == "one process":
                lows, highs = [min(row) for row in by_epoch], [max(row) for row in by_epoch]
                axes.fill_between(epochs, lows, highs, alpha=0.25, color="black", linewidth=0)
            black = {"color": "black", "linewidth": 2.0} if name == "one process" else {}
            axes.plot(epochs, [statistics.fmean(row) for row in by_epoch], label=name, **black)
        axes.set(xlabel="epoch", ylabel="test images whose class is found, %")
        axes.legend(fontsize=8, ncols=2)
        save_figure(figure, file, 110)


def main() -> None:
    asked = options(__doc__, images=10000, epochs=10, seeds=3, runs="", plot="")
    runs = Runs(Path(asked.runs) if asked.runs else None, Task(asked.images, asked.epochs))
    curves: Curves = {name: [] for name in WAYS}
    for seed in range(asked.seeds):
        for name in WAYS:
            curves[name].append(runs.curve(name, seed))
    worse = table(curves)
    if asked.plot:
        draw(curves, Path(asked.plot))
    print(f"{worse} of {len(WAYS) - 1} ways are further from one process than chance takes them")
    sys.exit(worse > 0)


if __name__ == "__main__":
    main()
