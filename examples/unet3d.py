"""Segment volumes with a 3-D U-Net whose depth and rows are split over four processes, loss and all.

    torchrun --nproc-per-node 4 examples/unet3d.py [--steps N] [--grid D=2,H=2]

The network is plain PyTorch. A process holds a fourth of every activation. Halos travel for convolutions, a few numbers
for norms, two for the loss, and none for poolings, transposed convolutions and concatenations of even blocks; backward,
sums of parameters' gradients too.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import convgen


def convolved(channels: int, filters: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(channels, filters, 3, padding=1), nn.InstanceNorm3d(filters, affine=True), nn.ReLU())


class UNet3d(nn.Module):
    """Volumes [N, 1, D, H, W] to scores [N, classes, D, H, W]: down by strides, up by transposed convolutions."""

    def __init__(self, width: int = 4, levels: int = 2, classes: int = 2) -> None:
        super().__init__()
        widths = [width << i for i in range(levels + 1)]
        self.first = convolved(1, width)
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(nn.Sequential(nn.MaxPool3d(2), convolved(a, b)) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(convolved(2 * a, a) for a, _ in reversed(pairs))
        self.last = nn.Conv3d(width, classes, 1)

    def forward(self, volume: Tensor) -> Tensor:
        skips = [self.first(volume)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        return self.last(x)


class Loss(nn.Module):
    """The network and its loss in one, so that the scores are never gathered."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, volume: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(self.network(volume), label)


def batch(step: int, samples: int = 2, extent: int = 16) -> tuple[Tensor, Tensor]:
    """Boxes in noise, and which voxels are of the box; the same whole tensors on every rank."""
    draw = torch.Generator().manual_seed(step)
    label = torch.zeros(samples, extent, extent, extent, dtype=torch.int64)
    for one in label:
        a, b, c = torch.randint(extent // 2, (3,), generator=draw).tolist()
        one[a : a + 8, b : b + 8, c : c + 8] = 1
    return label[:, None] + 0.5 * torch.randn(samples, 1, extent, extent, extent, generator=draw), label


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--grid", default="D=2,H=2", help="axes are letters of [N, C, D, H, W] and F, and their ranks")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    alone = Loss(UNet3d())  # the same weights on every rank

    net = convgen.from_torch(alone, batch(0), options.grid)
    mesh = net.init_mesh("cpu")
    model = net.Network(mesh)
    model.load_full(alone.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    one = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)

    first = dist.get_rank() == 0
    if first:
        print(f"step   {dist.get_world_size()} processes, {options.grid}   1 process")
    for step in range(options.steps):
        volume, label = batch(step)
        optimizer.zero_grad()
        loss = model(net.scatter("volume", volume, mesh), net.scatter("label", label, mesh))
        loss.backward()  # the loss is of the whole batch, and alike on every rank
        optimizer.step()
        if first:
            one.zero_grad()
            same = alone(volume, label)
            same.backward()
            one.step()
            print(f"{step + 1:4d}   {loss.item():20.4f}   {same.item():9.4f}", flush=True)

    sent = {part: sum(sum(s["bytes_sent_per_rank"]) for s in steps) for part, steps in net.VOLUME.items()}
    trained = UNet3d()
    trained.load_state_dict({n.removeprefix("network."): t for n, t in model.full_state_dict().items()})
    if first:
        print(f"bytes that all processes send in a step: forward {sent['forward']:,}, backward {sent['backward']:,}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
