"""Train a classifier on four processes, beside the same module on one: their losses are equal to the digits shown.

    convgen import examples.resnet:small_resnet --input 8,3,32,32 -o build/small_resnet.yaml
    convgen compile build/small_resnet.yaml --grid N=2,H=2 -o build
    torchrun --nproc-per-node 4 examples/train_resnet.py [--package DIR] [--steps N] [--save FILE]

Another grid, a plan or a named algorithm changes nothing here: layouts are the package's matter. The saved state dict
is the original module's own.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parent))
from resnet import small_resnet  # the original, to begin with its weights and to compare with


def batches(steps: int, samples: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Whole batches, alike on every rank: each class has a picture, and samples are it with noise."""
    draw = torch.Generator().manual_seed(1)
    pictures = 2 * torch.randn(4, 3, 4, 4, generator=draw).repeat_interleave(8, 2).repeat_interleave(8, 3)
    labels = [torch.randint(4, (samples,), generator=draw) for _ in range(steps)]
    return [(pictures[t] + torch.randn(samples, 3, 32, 32, generator=draw), t) for t in labels]


def train_on_one(model: torch.nn.Module, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = list[float]()
    for image, label in data:
        optimizer.zero_grad()
        loss = cross_entropy(model(image), label)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_on_ranks(net, model: torch.nn.Module, mesh, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = list[float]()
    for image, label in data:
        optimizer.zero_grad()
        scores = model(net.scatter("image", image, mesh))  # blocks in, blocks out
        loss = cross_entropy(net.gather("output", scores, mesh), label)  # a number, the same on every rank
        loss.backward()
        net.clip_grad_norm_(model.parameters(), 1.0)  # by the norm of the whole gradient
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", type=Path, default=Path("build/small_resnet"), metavar="DIR")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save", type=Path, metavar="FILE", help="the trained state dict, for the original module")
    options = parser.parse_args()
    if not options.package.is_dir():
        sys.exit(f"no {options.package}; the first lines of this file make it")
    sys.path.insert(0, str(options.package.parent))
    net = importlib.import_module(options.package.name)

    dist.init_process_group("gloo")
    mesh = net.init_mesh("cpu")
    torch.manual_seed(0)
    original = small_resnet()
    model = net.Network(mesh)  # seed=0 would draw torch's defaults by block, with no whole tensor anywhere
    model.load_full(original.state_dict())
    data = batches(options.steps)
    losses = train_on_ranks(net, model, mesh, data)
    state = model.full_state_dict()  # a collective: every rank calls it

    if dist.get_rank() == 0:
        alone = train_on_one(original, data)
        axes = ", ".join(f"{a}={n}" for a, n in net.SPEC["grid"].items())
        print(f"step   {dist.get_world_size()} processes, {axes}   1 process")
        for step, (ours, one) in enumerate(zip(losses, alone, strict=True), 1):
            print(f"{step:4d}   {ours:21.4f}   {one:9.4f}")
        own = original.state_dict()
        apart = max((state[n] - own[n]).abs().max().item() for n in own)
        print(f"the trained parameters and buffers differ by {apart:.1e} at most")
        if options.save:
            torch.save(state, options.save)
            small_resnet().load_state_dict(torch.load(options.save, weights_only=True))
            print(f"{options.save}: a state dict of small_resnet()")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
