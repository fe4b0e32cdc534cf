"""Decode a video chunk after chunk on two processes or more, each with its part of every frame and of every cache.

    torchrun --nproc-per-node 2 examples/stream.py [--grid H=2]

The decoder is plain PyTorch: convolutions over time that are causal, each of which begins with the last two frames of
the chunk before. Its forward takes these caches and gives those for the next chunk, and that is all that a stream asks
of a module. Caches stay where they are, with the rows that the next chunk's convolutions read around them: a frame's
rows travel once. In float64, so that no digit hangs on the number of processes.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import interpolate, silu

import convgen


class Causal(nn.Conv3d):
    """A convolution that reads the two frames before each frame; before the first ones there are zeros."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__(channels, filters, 3, padding=(0, 1, 1))

    def step(self, x: Tensor, cache: Tensor | None) -> tuple[Tensor, Tensor]:
        """What it makes of frames, and the cache for those behind them."""
        cache = torch.zeros_like(x[:, :, :1]).repeat(1, 1, 2, 1, 1) if cache is None else cache
        x = torch.cat([cache, x], 2)
        return self(x), x[:, :, -2:]


class Decoder(nn.Module):
    """Latents [N, 4, T, H, W] to frames [N, 3, T, 4H, 4W]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.convs = nn.ModuleList([Causal(4, 2 * width), Causal(2 * width, width), Causal(width, 3)])

    def forward(self, z: Tensor, caches: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        x, kept = z, list[Tensor]()
        for k, conv in enumerate(self.convs):
            x, cache = conv.step(x, None if caches is None else caches[k])
            kept.append(cache)
            if k < 2:
                n, c, t, h, w = x.shape
                x = interpolate(silu(x).transpose(1, 2).reshape(n * t, c, h, w), scale_factor=2.0)
                x = x.reshape(n, t, c, 2 * h, 2 * w).transpose(1, 2)
        return torch.tanh(x), kept


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--grid", default="H=2")
    grid = parser.parse_args().grid

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    decoder = Decoder().eval().double()
    z = torch.randn(1, 4, 9, 9, 10, dtype=torch.float64)
    with torch.no_grad():
        want, caches = decoder(z)

    first, steady = convgen.stream(decoder, (z[:, :, :1],), (z[:, :, 1:3],), grid)
    y, state = first(z[:, :, :1])
    frames = [y]
    for start in range(1, 9, 2):
        y, state = steady(z[:, :, start : start + 2], state)
        frames.append(y)

    error = (torch.cat(frames, 2) - want).abs().max() / want.abs().max()
    if dist.get_rank() == 0:
        whole = sum(t.numel() * t.element_size() for t in caches)
        print(f"9 latent frames in 5 chunks on {grid}: off by less than 1e-12 of one process's: {bool(error < 1e-12)}")
        print(f"caches: {state.bytes} bytes on this rank, of {whole} in all")
        sent, again = steady.bytes_sent(state), steady.bytes_sent()
        print(f"a chunk of 2 frames sends {sent} bytes; with rows of cached frames sent again {again}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
