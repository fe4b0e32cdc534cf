"""Decode latents of five sizes on four processes, by one compiled decoder, and draw them beside one process's.

    torchrun --nproc-per-node 4 examples/decode.py [--grid H=2,W=2] [--plot decoded.png]

Small, landscape, portrait, sizes that the grid doesn't divide, and one row of one column, of which three processes hold
nothing. The decoder (examples/vae_decoder.py) is exported once with rows and columns open; a size's first call makes
its steps ready on the ranks, and nothing is compiled again. In float64, so that no byte of an image is rounded
otherwise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import convgen

sys.path.insert(0, str(Path(__file__).parent))
from vae_decoder import Decoder, as_bytes, latent  # plain PyTorch

SIZES = {"small": (4, 4), "landscape": (6, 16), "portrait": (16, 6), "ragged": (13, 7), "1x1": (1, 1)}


def draw(pairs: dict[str, tuple[Tensor, Tensor]], path: Path) -> None:
    """Of each size one process's image above, that of all processes below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panes = pyplot.subplots(2, len(pairs), figsize=(10, 5), layout="constrained")
    for column, (name, (one, other)) in enumerate(pairs.items()):
        for pane, image in zip(panes[:, column], (one, other), strict=True):
            pane.imshow(image.numpy())
            pane.set_axis_off()
        panes[0, column].set_title(f"{name}, one process", fontsize=9)
        panes[1, column].set_title(f"{int((one != other).sum())} of {one.numel():,} bytes differ", fontsize=9)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grid", default="H=2,W=2", help="axes are letters of [N, C, H, W] and F, and their ranks")
    parser.add_argument("--width", type=int, default=16, help="channels of the last level")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    decoder = Decoder(options.width).double().eval()  # the same weights on every rank

    example = latent(6, 5).double()
    model = convgen.parallelize(decoder, (example,), options.grid, None, open={"latent": {"H": 2, "W": 3}})
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (rows, columns) in SIZES.items():
        z = latent(rows, columns).double()
        with torch.no_grad():
            image = model(z)[0]
            alone = decoder(z)[0]
        apart, most = float((image - alone).abs().max()), float(alone.abs().max())
        one, other = pairs[name] = as_bytes(alone), as_bytes(image)
        if dist.get_rank() == 0:
            print(f"{name:9} {rows:2} x {columns:2} to {one.shape[0]:3} x {one.shape[1]:3}: farthest "
                  f"{apart / most:.0e} of the largest value, {int((one != other).sum())} of {one.numel():,} bytes "
                  "differ")  # fmt: skip
    if dist.get_rank() == 0 and options.plot is not None:
        draw(pairs, options.plot)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
