"""MONAI's networks of volumes on blocks of files: trained and run by region, beside one process.

    PYTHONPATH=/path/to/monai python bench/monai_volumes.py [--grid D=2,H=2] [--steps 3]

SegResNet with a cross entropy, AutoencoderKlMaisi with the error of what it decodes. Processes read their regions of
mapped files, train some steps of SGD with momentum, and write what the trained network makes by region into a file.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import convgen
from convgen.data import write
from convgen.spec.text import parse_grid
from convgen.verify.processes import spawn

EXTENTS = 16, 24, 16


class Segmented(nn.Module):
    """Scores and their loss."""

    def __init__(self) -> None:
        super().__init__()
        of: Any = importlib.import_module("monai.networks.nets").SegResNet
        self.network = of(
            spatial_dims=3, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 2), blocks_up=(1,)
        )

    def forward(self, volume: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.network(volume)
        return scores, cross_entropy(scores, label)


class Decoded(nn.Module):
    """What is decoded of the latents' means, and how far it is from the volume."""

    def __init__(self) -> None:
        super().__init__()
        maisi: Any = importlib.import_module("monai.apps.generation.maisi.networks.autoencoderkl_maisi")
        self.network = maisi.AutoencoderKlMaisi(
            spatial_dims=3, in_channels=1, out_channels=1, latent_channels=4, num_channels=(8, 16),
            num_res_blocks=(1, 1), norm_num_groups=4, norm_eps=1e-6, attention_levels=(False, False),
            with_encoder_nonlocal_attn=False, with_decoder_nonlocal_attn=False, use_checkpointing=False,
            use_convtranspose=False, norm_float16=False, num_splits=1, dim_split=1,
        )  # fmt: skip

    def forward(self, volume: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        mean, _ = self.network.encode(volume)
        made = self.network.decode(mean)
        return made, mse_loss(made, volume + 0.1 * label[:, None])


# Maisi's norms are of float32, whatever the network is of.
NETWORKS = (("SegResNet", Segmented, torch.float64, 1e-10), ("AutoencoderKlMaisi", Decoded, torch.float32, 1e-4))


def trained(module: nn.Module, call: Callable[[Any], tuple[Tensor, Tensor]], batches: Any) -> list[float]:
    optimizer, losses = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9), list[float]()
    for batch in batches:
        optimizer.zero_grad()
        _, loss = call(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compared(
    make: Callable[[], nn.Module], dtype: torch.dtype, grid: str, steps: int, folder: Path
) -> tuple[float, float, int, int]:
    """(relative difference of losses, of what is made, bytes read by the rank that reads most, by one process)."""
    draw = np.random.default_rng(0)
    np.save(folder / "volume.npy", draw.standard_normal((steps, 1, *EXTENTS), dtype=np.float32))
    np.save(folder / "label.npy", draw.integers(2, size=(steps, *EXTENTS), dtype=np.uint8))
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("volume", "label")}
    torch.manual_seed(0)
    module = make().to(dtype)
    state = {n: t.clone() for n, t in module.state_dict().items()}
    volume, label = torch.tensor(arrays["volume"], dtype=dtype), torch.tensor(arrays["label"]).long()
    net = convgen.from_torch(module, (volume[:1], label[:1]), grid)
    wanted = trained(module, lambda k: module(volume[k : k + 1], label[k : k + 1]), range(steps))
    with torch.no_grad():
        truth = module(volume[:1], label[:1])[0].numpy()
    np.lib.format.open_memmap(folder / "made.npy", mode="w+", dtype=truth.dtype, shape=truth.shape)

    def program(_: int) -> tuple[list[float], int]:
        mesh = net.init_mesh("cpu")
        model = net.Network(mesh)
        model.load_full(state)

        def blocks(k: int) -> tuple[Tensor, ...]:
            return tuple(net.block(name, array[k : k + 1], mesh) for name, array in arrays.items())

        losses = trained(model, lambda k: model(*blocks(k)), range(steps))
        with torch.no_grad():
            y, _ = model(*blocks(0))
        write(np.load(folder / "made.npy", mmap_mode="r+"), net, "0", y, mesh)
        read = (prod(s.stop - s.start for s in net.region(n, mesh)) * a.itemsize for n, a in arrays.items())
        return losses, steps * sum(read)

    found = spawn(program, prod(parse_grid(grid).values()), 600)
    off = max(abs(a / b - 1) for losses, _ in found for a, b in zip(losses, wanted, strict=True))
    apart = float(np.abs(np.load(folder / "made.npy") - truth).max() / np.abs(truth).max())
    return off, apart, max(read for _, read in found), sum(a.nbytes for a in arrays.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="D=2,H=2")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    print(f"{options.steps} steps on {options.grid}    losses  what is made  bytes read by a rank, by one process")
    worst = 0.0
    for name, make, dtype, limit in NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            off, apart, read, whole = compared(make, dtype, options.grid, options.steps, Path(folder))
        print(f"{name:20}  {off:10.0e}  {apart:12.0e}  {read:,} of {whole:,}", flush=True)
        worst = max(worst, off / limit, apart / limit)
    sys.exit(bool(worst > 1))


if __name__ == "__main__":
    main()
