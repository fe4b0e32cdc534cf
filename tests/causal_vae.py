"""A causal VAE, small: convolutions that read two frames before a chunk's, of caches in every form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad


class Causal(nn.Module):
    """A convolution over time that begins with what its cache has; `pads` rows by zeros of its own, or by its edges."""

    def __init__(self, c: int, f: int, kernel: int = 3, stride: int = 1, pads: str = "zeros") -> None:
        super().__init__()
        self.around = (kernel // 2,) * 4 if pads == "edges" else ()
        between = 0 if self.around else (0, kernel // 2, kernel // 2)
        self.conv = nn.Conv3d(c, f, (3, kernel, kernel), (1, stride, stride), between)

    def forward(self, x: Tensor, cache: Tensor | None) -> tuple[Tensor, Tensor]:
        if cache is None:
            cache = torch.zeros_like(x[:, :, :1]).repeat(1, 1, 2, 1, 1)
        x = torch.cat([cache, x], 2)
        kept = x[:, :, -2:]
        return self.conv(pad(x, (*self.around, 0, 0), mode="replicate") if self.around else x), kept


class Vae(nn.Module):
    """Decodes latents z[N, 3, T, H, W] to y[N, 2, 2T, 2H, 2W], and encodes y to z: chunk after chunk.

    Caches of decode are a dict: of a convolution two frames; of the upsampling over time, which the first chunk has
    not, None, then two frames.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Causal(3, 4), Causal(4, 4, 5, pads="edges"), Causal(4, 2)
        self.time, self.norm = nn.Conv3d(4, 8, (3, 1, 1)), nn.GroupNorm(2, 4)
        self.down, self.last = Causal(2, 4, stride=2), nn.Conv3d(4, 3, 1)

    def forward(self, z: Tensor, caches: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        given = caches or {"a": None, "b": None, "time": None, "c": [None]}
        x, a = self.a(z, given["a"])
        x, b = self.b(torch.tanh(x), given["b"])
        x = x + x.square().mean(1, keepdim=True)
        before, kept = given["time"], None
        if caches is not None:
            before = torch.zeros_like(x[:, :, :1]).repeat(1, 1, 2, 1, 1) if before is None else before
            x = torch.cat([before, x], 2)
            kept = x[:, :, -2:]
            n, c, t, *rows = x.shape
            x = self.time(x).reshape(n, 2, c, t - 2, *rows).transpose(1, 2).transpose(2, 3).reshape(n, c, -1, *rows)
        n, c, t, h, w = x.shape
        flat = interpolate(x.transpose(1, 2).reshape(n * t, c, h, w), scale_factor=2.0, mode="nearest")
        x = flat.reshape(n, t, c, 2 * h, 2 * w).transpose(1, 2)
        y, c = self.c(torch.relu(x), given["c"][0])
        return y, {"a": a, "b": b, "time": kept, "c": [c]}

    def encode(self, y: Tensor, caches: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, caches = self.down(y, caches)
        return self.last(torch.tanh(x)), caches


def one_shot(vae: Vae, z: Tensor) -> Tensor:
    """What decode makes of all latents at once: their first frame, then all others."""
    y, caches = vae(z[:, :, :1])
    rest, _ = vae(z[:, :, 1:], caches)
    return torch.cat([y, rest], 2)


def seeded() -> Vae:
    torch.manual_seed(3)
    return Vae().double().eval()
