"""What tensors of a decode take at a time on a rank: whole on one device, in tiles there, split by convgen.

    PYTHONPATH=.../diffusers OMP_NUM_THREADS=1 python bench/decode_memory.py [--latent 64x48] [--grids H=2 H=2,W=2]

AutoencoderKL's decoder of its usual depth, at a quarter of its channels, in float32. Of the module, whole and with
`enable_tiling`, the storages that a decode makes are counted while it runs; of convgen, `peak_bytes` of each rank, of
which the largest is printed. Parameters and the latent are none of them; the image is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from zoo.makers import decoded, diffusers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from echo import Echo
from free_networks import imported
from test_module_memory import Allocations

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.spec.exported import exported
from convgen.spec.text import parse_grid

CHANNELS: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "block_out_channels": (32, 64, 128, 128), "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4, "sample_size": 256,
}  # fmt: skip


def taken(run: Any, given: torch.nn.Module, z: torch.Tensor) -> float:
    """MiB of storages that live at a time while a function runs."""
    with torch.no_grad(), Allocations([z, *given.parameters(), *given.buffers()]) as mode:
        run(z)
    return mode.peak / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--latent", default="64x48")
    parser.add_argument("--grids", nargs="*", default=["H=2", "H=4", "H=2,W=2"], metavar="GRID")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    h, w = map(int, args.latent.split("x"))
    torch.manual_seed(0)
    module, _ = diffusers("AutoencoderKL", (1, 4, h, w), decoded, **CHANNELS)()
    module.eval()
    found = exported(
        module, (torch.zeros(1, 4, 12, 10),), name="decoder", training=False, opened={"x": {"H": 2, "W": 3}}
    )
    for text in args.grids:
        grid = Grid(tuple(parse_grid(text).items()))
        with tempfile.TemporaryDirectory(prefix="decode_memory_") as folder:
            net = imported(compile_network(found.graph, grid).package().files, Path(folder))
            peaks: list[int] = []
            for rank in range(grid.ranks):
                model = net.Network(net.init_mesh("cpu", transport=Echo(rank, grid.ranks)), parameters="blocks").eval()
                with torch.no_grad():
                    peaks.append(model.peak_bytes(N=1, H=h, W=w))
        print(
            f"{text}: {max(peaks) / 2**20:.1f} MiB on the fullest rank, {min(peaks) / 2**20:.1f} on the emptiest",
            flush=True,
        )
    z = torch.randn(1, 4, h, w)
    print(f"whole on one device: {taken(module, module, z):.1f} MiB", flush=True)
    autoencoder: Any = next(m for m in module.modules() if hasattr(m, "enable_tiling"))
    autoencoder.enable_tiling()
    tile = autoencoder.tile_latent_min_size
    print(f"in tiles of {tile} x {tile} there: {taken(module, module, z):.1f} MiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
