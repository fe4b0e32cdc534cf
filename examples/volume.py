"""Segment volumes that no process can hold: a 3-D U-Net trained and run on files of Zarr, which each process reads and
writes by region.

    python examples/volume.py write build/volumes [--extent 64]          # the files, chunk by chunk
    torchrun --nproc-per-node 4 examples/volume.py train build/volumes --checkpoints build/kept
    torchrun --nproc-per-node 4 examples/volume.py predict build/volumes --checkpoints build/kept

A volume is balls in noise, its label which voxels are of a ball; each number is a function of its place (`numbers`). A
process reads its region of an image with the rows around it that its first convolution wants, so that nothing is sent
for them. A checkpoint has model, optimizer, scheduler and which batch is next. Training goes on from the last whole one
on whatever grid, so behind a restart of torchrun's, too, which `--kill 1` shows: with --max-restarts 1, and, for torch
2.13, --standalone and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (pytorch/pytorch#135712).
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zarr
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import convgen
from convgen.data import Blocks, Loader, write
from examples.unet3d import Loss, UNet3d

BALLS = 3  # of a volume
Region = tuple[slice, slice, slice]


# ---- Files ----


def numbers(sample: int, region: Region, extent: int) -> tuple[Any, Any]:
    """Image and label of a region of a volume: of whole numbers, so alike on every machine."""
    z, y, x = np.ogrid[region]
    label = np.zeros([s.stop - s.start for s in region], dtype=np.uint8)
    for ball in range(BALLS):
        centre = [(extent * (3 + (sample * 7 + ball * 5 + axis * 3) % 11)) // 16 for axis in range(3)]
        label |= sum((at - c) ** 2 for at, c in zip((z, y, x), centre, strict=True)) < (extent // 6) ** 2
    mixed = (z * 73_856_093 ^ y * 19_349_663 ^ x * 83_492_791 ^ sample * 2_654_435_761) & 0xFFFF_FFFF
    noise = (mixed * 2_246_822_519 & 0xFFFF_FFFF) >> 16
    return (label + noise / 2**16 - 0.5).astype(np.float32), label


def regions(shape: tuple[int, ...], size: int) -> Iterator[Region]:
    """Cubes of so many voxels a side."""
    starts = itertools.product(*(range(0, n, size) for n in shape))
    for at in starts:
        yield tuple(slice(lo, min(lo + size, n)) for lo, n in zip(at, shape, strict=True))  # type: ignore[misc]


def write_volumes(folder: Path, extent: int, chunk: int, train: int = 4, validate: int = 1) -> None:
    """Groups `train` and `validate` of images [samples, 1, D, H, W] and labels [samples, D, H, W], chunk by chunk."""
    first = 0
    for name, count in (("train", train), ("validate", validate)):
        group = zarr.open_group(folder / name, mode="w")
        rows, cube = (extent,) * 3, (chunk,) * 3
        image = group.create_array("image", shape=(count, 1, *rows), chunks=(1, 1, *cube), dtype="float32")
        label = group.create_array("label", shape=(count, *rows), chunks=(1, *cube), dtype="uint8")
        for sample in range(count):
            for region in regions(rows, chunk):
                image[sample, 0, *region], label[sample, *region] = numbers(first + sample, region, extent)
        first += count


def source(folder: Path, name: str) -> dict[str, Any]:
    group: Any = zarr.open_group(folder / name, mode="r")
    return {"volume": group["image"], "label": group["label"]}


# ---- Networks ----


class Ball(nn.Module):
    """Volumes to the probability that a voxel is of a ball, [N, 1, D, H, W]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, volume: Tensor) -> Tensor:
        return self.network(volume).softmax(1)[:, 1:]


def example(array: Any, samples: int, dtype: torch.dtype) -> Tensor:
    """A tensor of so many samples' shape, of one number, so that it takes no memory."""
    return torch.zeros((), dtype=dtype).expand(samples, *array.shape[1:])


def package(module: nn.Module, arrays: list[Any], samples: int, grid: str) -> Any:
    """Compiled for the shapes of arrays; their types are the module's, and that of labels."""
    types = [next(module.parameters()).dtype, torch.int64]
    examples = [example(a, samples, t) for a, t in zip(arrays, types, strict=False)]
    return convgen.from_torch(module, tuple(examples), grid)


# ---- Checkpoints ----


class State:
    """What a checkpoint has: it is torch's own to store it, and to load it on another grid."""

    def __init__(self, model: nn.Module, optimizer: Any, **others: Any) -> None:
        self.model, self.optimizer, self.others = model, optimizer, others

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, **{n: one.state_dict() for n, one in self.others.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        for name, one in self.others.items():
            one.load_state_dict(state[name])


def last(folder: Path | None) -> Path | None:
    """The newest checkpoint that is whole: its metadata are written when all ranks have stored their parts."""
    whole = [one.parent for one in folder.glob("*/.metadata")] if folder else []
    return max(whole, key=lambda one: int(one.name), default=None)


# ---- Training ----

Told = Callable[[str], None]


@dataclass(frozen=True)
class Training:
    """A network on this grid, with all that changes while it is trained."""

    net: Any
    mesh: Any
    model: Any
    loader: Loader
    optimizer: torch.optim.Optimizer
    scheduler: Any

    @property
    def state(self) -> State:
        return State(self.model, self.optimizer, scheduler=self.scheduler, loader=self.loader)

    def steps(self, epochs: int) -> Iterator[tuple[int, int, float]]:
        """From where the loader is: (epoch, step, loss) behind each step; the loss is alike on every rank."""
        for epoch in range(self.loader.epoch, epochs):
            self.loader.set_epoch(epoch)
            for batch in self.loader:
                self.optimizer.zero_grad()
                loss = self.model(batch["volume"], batch["label"], batch=len(batch.samples), halo=["volume"])
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                yield epoch, epoch * len(self.loader) + self.loader.batches.done, loss.item()


def original(width: int, levels: int) -> nn.Module:
    """The network and its loss, with the same weights on every rank."""
    torch.manual_seed(0)
    return Loss(UNet3d(width, levels))


def learning(parameters: Any, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(parameters, 0.01)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def begun(alone: nn.Module, folder: Path, grid: str, batch: int, epochs: int) -> Training:
    arrays = source(folder, "train")
    net = package(alone, [*arrays.values()], batch, grid)
    mesh = net.init_mesh("cpu")
    model = net.Network(mesh)
    model.load_full(alone.state_dict())
    loader = Blocks(arrays, net, mesh, halo="volume").loader(batch, shuffle=True)
    return Training(net, mesh, model, loader, *learning(model.parameters(), epochs * len(loader)))


def validated(model: nn.Module, loader: Loader) -> float:
    """The mean loss of batches of one size."""
    model.eval()
    with torch.no_grad():
        losses = [model(b["volume"], b["label"], batch=len(b.samples), halo=["volume"]).item() for b in loader]
    model.train()
    return sum(losses) / len(losses)


def train(options: argparse.Namespace, told: Told) -> None:
    alone = original(options.width, options.levels)
    training = begun(alone, options.folder, options.grid, options.batch, options.epochs)
    loader, net, mesh = training.loader, training.net, training.mesh
    others = Blocks(source(options.folder, "validate"), net, mesh, halo="volume").loader(1)
    found = last(options.checkpoints)
    if found is not None:
        dcp.load({"state": training.state}, checkpoint_id=found)
        told(f"goes on behind step {found.name}")
    first_try = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for epoch, step, loss in training.steps(options.epochs):
        told(f"epoch {epoch}  step {step:3d}  loss {loss:.4f}")
        if epoch == options.kill and first_try and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % len(loader) == 0:
            told(f"epoch {epoch}  validation {validated(training.model, others):.4f}")
        if options.checkpoints and step % options.every == 0:
            dcp.save({"state": training.state}, checkpoint_id=options.checkpoints / str(step))
    read = loader.blocks.bytes_read + others.blocks.bytes_read
    told(f"bytes that this process has read: {read:,}")


def predict(options: argparse.Namespace, told: Told) -> None:
    """Writes `validate/ball`, of the last checkpoint."""
    arrays = source(options.folder, "validate")
    image, label = arrays["volume"], arrays.pop("label")
    net = package(Ball(UNet3d(options.width, options.levels)), [image], 1, options.grid)
    mesh = net.init_mesh("cpu")
    model = net.Network(mesh).eval()
    found = last(options.checkpoints)
    if found is None:
        raise SystemExit(f"no checkpoint in {options.checkpoints}")
    dcp.load({"state": {"model": model.state_dict()}}, checkpoint_id=found)
    group = zarr.open_group(options.folder / "validate", mode="a")
    if dist.get_rank() == 0:
        group.create_array("ball", shape=image.shape, chunks=image.chunks, dtype="float32", overwrite=True)
    dist.barrier()
    target, right = group["ball"], torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        for k, batch in enumerate(Blocks(arrays, net, mesh, halo="volume").loader(1)):
            ball = model(batch["volume"], halo=["volume"])
            write(target, net, "output", ball, mesh, at=k)
            own, _, *rows = net.region("output", mesh)
            truth = torch.from_numpy(label[(slice(own.start + k, own.stop + k), *rows)])
            right += ((ball[:, 0] > 0.5) == truth.bool()).sum()
    dist.all_reduce(right)
    told(f"{options.folder}/validate/ball: {right.item() / label.size:.1%} of {label.size:,} voxels are right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "train", "predict"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extent", type=int, default=64, help="voxels a side that are written")
    parser.add_argument("--chunk", type=int, default=32, help="of which a file has as many a side")
    parser.add_argument("--grid", default="D=2,H=2", help="axes are letters of [N, C, D, H, W] and F, and their ranks")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--levels", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--checkpoints", type=Path, metavar="DIR")
    parser.add_argument("--every", type=int, default=2, metavar="STEPS", help="between two checkpoints")
    parser.add_argument("--kill", type=int, metavar="EPOCH", help="rank 1 kills itself in it, the first time")
    options = parser.parse_args()
    if options.what == "write":
        write_volumes(options.folder, options.extent, options.chunk)
        return
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    {"train": train, "predict": predict}[options.what](options, lambda text: print(text, flush=True) if first else None)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
