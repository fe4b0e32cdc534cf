"""Decode an image on four processes, each with a quarter of every activation, and draw it beside one process's.

    torchrun --nproc-per-node 4 examples/vae_decoder.py [--grid H=2,W=2] [--plot decoded.png]

The decoder is plain PyTorch, with all that an AutoencoderKL's has: residual blocks with group norms, attention in the
middle, nearest upsampling. Rows that don't divide by the grid are as right as others. What travels are halos, a few
numbers for norms, and keys and values of the attention; nothing is approximate, so there are no seams. In float64, so
that no byte of the images is rounded otherwise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import interpolate, scaled_dot_product_attention, silu

import convgen


class Residual(nn.Module):
    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, channels), nn.Conv2d(channels, filters, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, filters), nn.Conv2d(filters, filters, 3, padding=1)
        self.skip = nn.Conv2d(channels, filters, 1) if channels != filters else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(silu(self.norm1(x)))
        return self.skip(x) + self.conv2(silu(self.norm2(y)))


class Attention(nn.Module):
    """Each place of the image asks all others."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(8, channels), nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x).flatten(2).transpose(1, 2)).chunk(3, -1)
        y = scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x + self.out(y).transpose(1, 2).view(n, c, h, w)


class Decoder(nn.Module):
    """Latents [N, 4, H, W] to images [N, 3, 8H, 8W]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4 * width, 3, padding=1)
        self.middle = nn.Sequential(
            Residual(4 * width, 4 * width), Attention(4 * width), Residual(4 * width, 4 * width)
        )
        pairs = [(4 * width, 4 * width), (4 * width, 2 * width), (2 * width, width)]
        self.up = nn.ModuleList(nn.Sequential(nn.Conv2d(a, a, 3, padding=1), Residual(a, b)) for a, b in pairs)
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, latent: Tensor) -> Tensor:
        x = self.middle(self.first(latent))
        for up in self.up:
            x = up(interpolate(x, scale_factor=2.0))
        return self.last(silu(self.norm(x)))


def latent(rows: int, columns: int) -> Tensor:
    """Waves; the same on every rank."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, rows), torch.linspace(-1, 1, columns), indexing="ij")
    r = (x**2 + y**2).sqrt()
    return 2 * torch.stack([torch.sin(5 * r), torch.cos(4 * x + 3 * y), torch.sin(6 * x * y), r - 1])[None]


def as_bytes(image: Tensor) -> Tensor:
    """[3, H, W] of any numbers to [H, W, 3] of 0 to 255."""
    low, high = image.min(), image.max()
    return ((image - low) / (high - low) * 255).round().to(torch.uint8).permute(1, 2, 0)


def draw(one: Tensor, other: Tensor, path: Path) -> None:
    """Both images, and 255 times the difference of their bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    apart = (one.int() - other.int()).abs().mul(255).clamp(max=255).to(torch.uint8)
    figure, panes = pyplot.subplots(1, 3, figsize=(9, 2.8), layout="constrained")
    titles = ("one process", "four processes", f"difference: {int((one != other).sum())} of {one.numel():,} bytes")
    for pane, image, title in zip(panes, (one, other, apart), titles, strict=True):
        pane.imshow(image.numpy())
        pane.set_title(title, fontsize=10)
        pane.set_axis_off()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grid", default="H=2,W=2", help="axes are letters of [N, C, H, W] and F, and their ranks")
    parser.add_argument("--rows", type=int, default=27, help="of the latent; 8 times as many of the image")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    decoder, z = Decoder().double().eval(), latent(options.rows, 30).double()  # the same weights on every rank

    model = convgen.parallelize(decoder, (z,), options.grid, None)
    with torch.no_grad():
        image = model(z)[0]
    sent = sum(sum(s["bytes_sent_per_rank"]) for s in model.package.VOLUME["forward"])
    if dist.get_rank() == 0:
        with torch.no_grad():
            alone = decoder(z)[0]
        apart, most = float((image - alone).abs().max()), float(alone.abs().max())
        one, other = as_bytes(alone), as_bytes(image)
        print(f"{list(image.shape)} on {options.grid}: farthest {apart / most:.0e} of the largest value, "
              f"{int((one != other).sum())} of {one.numel():,} bytes differ")  # fmt: skip
        print(f"bytes that all processes send: {sent:,}")
        if options.plot is not None:
            draw(one, other, options.plot)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
