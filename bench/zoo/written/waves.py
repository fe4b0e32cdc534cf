"""Networks of audio, of fields and of volumes, as papers and their public code write them, small."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from zoo.makers import Make, small
from zoo.written.papers import Of, Sum, conv

# ---- Audio, one dimension ----


def hifigan() -> nn.Module:
    """A generator: transposed convolutions, and sums of residual stacks with dilations."""

    def stack(c: int, k: int) -> nn.Module:
        return nn.Sequential(
            *(
                Sum(
                    nn.LeakyReLU(0.1),
                    weight_norm(nn.Conv1d(c, c, k, dilation=d, padding=d * (k - 1) // 2)),
                    nn.LeakyReLU(0.1),
                    weight_norm(nn.Conv1d(c, c, k, padding=(k - 1) // 2)),
                )
                for d in (1, 3)
            )
        )

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.first(x)
        for up, stacks in zip(m.ups, m.stacks, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(s(x) for s in stacks) / len(stacks)
        return torch.tanh(m.last(F.leaky_relu(x)))

    return Of(
        run,
        first=weight_norm(nn.Conv1d(6, 16, 7, padding=3)),
        ups=nn.ModuleList(weight_norm(nn.ConvTranspose1d(2 * c, c, 4, 2, 1)) for c in (8, 4)),
        stacks=nn.ModuleList(nn.ModuleList(stack(c, k) for k in (3, 5)) for c in (8, 4)),
        last=weight_norm(nn.Conv1d(4, 1, 7, padding=3)),
    )


def period_discriminator() -> nn.Module:
    """HiFi-GAN's: audio folded by a period, reflected at its end."""

    def run(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        n, c, t = x.shape
        x = F.pad(x, (0, -t % 3), "reflect").view(n, c, -1, 3)
        found = []
        for layer in m.layers:
            x = F.leaky_relu(layer(x), 0.1)
            found.append(x)
        return torch.flatten(m.last(x), 1, -1), *found

    layers = [parametrizations.weight_norm(nn.Conv2d(a, b, (5, 1), (3, 1), (2, 0))) for a, b in ((1, 4), (4, 8))]
    return Of(run, layers=nn.ModuleList(layers), last=nn.Conv2d(8, 1, (3, 1), padding=(1, 0)))


class Encodec(nn.Module):
    """Convolutions padded to the past by reflection, with a remainder on the right; an LSTM between; ends trimmed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = weight_norm(nn.Conv1d(1, 4, 7)), weight_norm(nn.Conv1d(4, 8, 4, 2))
        self.lstm, self.up = nn.LSTM(8, 8, 2), weight_norm(nn.ConvTranspose1d(8, 4, 4, 2))
        self.last = weight_norm(nn.Conv1d(4, 1, 7))

    @staticmethod
    def past(layer: Any, x: Tensor) -> Tensor:
        k, s = layer.kernel_size[0], layer.stride[0]
        frames = math.ceil((x.shape[-1] - s) / s) if s > 1 else 0
        rest = max(frames * s + s - x.shape[-1], 0)
        return layer(F.pad(x, (k - s, rest), "reflect"))

    def forward(self, x: Tensor) -> Tensor:
        y = F.elu(self.past(self.down, F.elu(self.past(self.first, x))))
        z = y.permute(2, 0, 1)
        y = (self.lstm(z)[0] + z).permute(1, 2, 0)
        y = self.up(F.elu(y))
        return self.past(self.last, F.elu(y[..., : y.shape[-1] - 2]))


class Demucs(nn.Module):
    """A U-Net of waves: gated 1x1, skips cut to the middle, normalised by its own deviation, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, 8, 4), nn.ReLU(), nn.Conv1d(b, 2 * b, 1), nn.GLU(1))
            for a, b in ((2, 4), (4, 8))
        )
        self.decoder = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, 2 * a, 3, padding=1), nn.GLU(1), nn.ConvTranspose1d(a, b, 8, 4))
            for a, b in ((8, 4), (4, 4))
        )
        self.lstm, self.wide = nn.LSTM(8, 8, bidirectional=True), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        mono = x.mean(1, keepdim=True)
        mean, std = mono.mean(-1, keepdim=True), mono.std(-1, keepdim=True)
        x, skips = (x - mean) / (1e-5 + std), []
        for layer in self.encoder:
            x = layer(x)
            skips.append(x)
        x = self.wide(self.lstm(x.permute(2, 0, 1))[0]).permute(1, 2, 0)
        for layer in self.decoder:
            skip = skips.pop()
            more = skip.shape[-1] - x.shape[-1]
            x = layer(x + skip[..., more // 2 : skip.shape[-1] - (more - more // 2)])
        return (x * std + mean).view(x.shape[0], 2, 2, -1)


class ConvTasNet(nn.Module):
    """Masks of a learnt basis, with norms over channels and time, depthwise and dilated."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv1d(1, c, 8, 4, bias=False), nn.ConvTranspose1d(c, 1, 8, 4, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(c, c, 1), nn.PReLU(), nn.GroupNorm(1, c, 1e-8),
                          nn.Conv1d(c, c, 3, padding=d, dilation=d, groups=c), nn.PReLU(), nn.Conv1d(c, c, 1))
            for d in (1, 2)
        )  # fmt: skip
        self.mask = nn.Conv1d(c, 2 * c, 1)

    def forward(self, x: Tensor) -> Tensor:
        w = F.relu(self.encoder(x))
        mean = w.mean(1, keepdim=True)
        y = (w - mean) / (w.var(1, keepdim=True, unbiased=False) + 1e-8).sqrt()
        for block in self.blocks:
            y = y + block(y)
        n, c, t = w.shape
        mask = F.relu(self.mask(y)).view(n, 2, c, t)
        return self.decoder((w.unsqueeze(1) * mask).view(2 * n, c, t)).view(n, 2, -1)


class SincNet(nn.Module):
    """Filters that are computed of two cut-off frequencies each."""

    def __init__(self, filters: int = 6, size: int = 11) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.linspace(0.05, 0.3, filters).view(-1, 1))
        self.band = nn.Parameter(torch.full((filters, 1), 0.05))
        half = (size - 1) // 2
        self.register_buffer("window", 0.54 - 0.46 * torch.cos(2 * math.pi * torch.arange(half) / size))
        self.register_buffer("time", 2 * math.pi * torch.arange(-half, 0.0).view(1, -1))
        self.norm, self.pool = nn.BatchNorm1d(filters), nn.MaxPool1d(3)

    def forward(self, x: Tensor) -> Tensor:
        low = self.low.abs() + 0.02
        high = torch.clamp(low + self.band.abs(), 0.02, 0.5)
        band = (high - low)[:, 0]
        left = (torch.sin(high @ self.time) - torch.sin(low @ self.time)) / (self.time / 2) * self.window
        filters = torch.cat([left, 2 * band.view(-1, 1), left.flip(1)], 1) / (2 * band[:, None])
        y = F.conv1d(x, filters.unsqueeze(1))
        return F.leaky_relu(self.norm(self.pool(y.abs())))


def tcn() -> nn.Module:
    """Causal residual blocks: padded on both sides, the right end chomped off."""

    class Chomp(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.n = n

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :, : -self.n].contiguous()

    def block(d: int) -> nn.Module:
        return nn.Sequential(weight_norm(nn.Conv1d(8, 8, 3, padding=2 * d, dilation=d)), Chomp(2 * d), nn.ReLU())

    return nn.Sequential(nn.Conv1d(4, 8, 1), Sum(block(1)), nn.ReLU(), Sum(block(2)), nn.ReLU(), nn.Conv1d(8, 2, 1))


def inception_time() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.neck(x)
        z = m.norm(torch.cat([*(c(y) for c in m.convs), m.pooled(F.max_pool1d(x, 3, 1, 1))], 1))
        return m.head(F.relu(z + m.short(x)).mean(-1))

    return Of(run, neck=nn.Conv1d(3, 4, 1, bias=False), pooled=nn.Conv1d(3, 4, 1), norm=nn.BatchNorm1d(16),
              convs=nn.ModuleList(nn.Conv1d(4, 4, k, padding="same", bias=False) for k in (10, 19, 39)),
              short=nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16)), head=nn.Linear(16, 5))  # fmt: skip


def wave_unet() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        a = F.leaky_relu(m.a(x))
        b = F.leaky_relu(m.b(a[:, :, ::2]))
        up = F.interpolate(b, scale_factor=2.0, mode="linear", align_corners=True)
        return torch.tanh(m.out(torch.cat([up, a[:, :, : up.shape[2]], x[:, :, : up.shape[2]]], 1)))

    return Of(run, a=nn.Conv1d(2, 4, 15, padding=7), b=nn.Conv1d(4, 8, 5, padding=2), out=nn.Conv1d(14, 2, 1))


# ---- Operators on fields ----


class Spectral(nn.Module):
    """FNO: the lowest modes of a field, mixed by complex weights, beside a 1x1."""

    def __init__(self, c: int = 4, modes: int = 3) -> None:
        super().__init__()
        self.modes, self.lift, self.short = modes, conv(2, c, 1), conv(c, c, 1)
        self.real, self.imag = (nn.Parameter(torch.randn(2, c, c, modes, modes) / c) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        m = self.modes
        y = torch.fft.rfft2(x)
        w = torch.complex(self.real, self.imag)
        out = torch.zeros_like(y)
        out[:, :, :m, :m] = torch.einsum("nixy,ioxy->noxy", y[:, :, :m, :m], w[0])
        out[:, :, -m:, :m] = torch.einsum("nixy,ioxy->noxy", y[:, :, -m:, :m], w[1])
        return F.gelu(self.short(x) + torch.fft.irfft2(out, s=x.shape[-2:]))


class Wrapped(nn.Module):
    """A surrogate on a periodic domain, with its coordinates as channels, steps of time unrolled."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(4, 8, 5, padding=2, padding_mode="circular"), nn.GELU(),
            nn.Conv2d(8, 8, 3, padding=2, dilation=2, padding_mode="circular"), nn.GELU(), nn.Conv2d(8, 2, 1),
        )  # fmt: skip

    def forward(self, u: Tensor) -> Tensor:
        h, w = u.shape[2:]
        rows, columns = torch.linspace(0, 1, h), torch.linspace(0, 1, w)
        at = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))[None].to(u.dtype)
        found = []
        for _ in range(3):
            u = u + 0.1 * self.net(torch.cat([u, at.expand(u.shape[0], -1, -1, -1)], 1))
            found.append(u)
        return torch.stack(found, 1)


def pressure() -> nn.Module:
    """A projection: Jacobi's steps for a pressure under replicated borders, its gradient taken from a velocity."""

    def run(m: Any, x: Tensor) -> Tensor:
        u = m.net(x)
        div = (u[:, :1, 2:, 1:-1] - u[:, :1, :-2, 1:-1] + u[:, 1:, 1:-1, 2:] - u[:, 1:, 1:-1, :-2]) / 2
        p = torch.zeros_like(div)
        for _ in range(3):
            q = F.pad(p, (1, 1, 1, 1), mode="replicate")
            p = (q[:, :, 2:, 1:-1] + q[:, :, :-2, 1:-1] + q[:, :, 1:-1, 2:] + q[:, :, 1:-1, :-2] - div) / 4
        q = F.pad(p, (1, 1, 1, 1), mode="replicate")
        grad = torch.cat([q[:, :, 2:, 1:-1] - q[:, :, :-2, 1:-1], q[:, :, 1:-1, 2:] - q[:, :, 1:-1, :-2]], 1) / 2
        return u[:, :, 1:-1, 1:-1] - grad

    return Of(run, net=nn.Sequential(conv(2, 8), nn.Tanh(), conv(8, 2)))


def vnet3d() -> nn.Module:
    """V-Net with PReLU, an input repeated to as many channels, and a soft Dice loss of classes."""

    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        a = m.first(x)
        a = m.act(a + x.repeat(1, 4, 1, 1, 1))
        b = m.up(m.down(a))
        y = m.last(torch.cat([a, b], 1)).softmax(1)
        want = (x > 0).to(x.dtype)
        both = torch.cat([want, 1 - want], 1)
        inter, union = (y * both).sum((2, 3, 4)), (y**2).sum((2, 3, 4)) + (both**2).sum((2, 3, 4))
        return y, 1 - ((2 * inter + 1e-5) / (union + 1e-5)).mean()

    return Of(run, first=nn.Sequential(nn.Conv3d(1, 4, 5, padding=2), nn.BatchNorm3d(4)), act=nn.PReLU(4),
              down=nn.Sequential(nn.Conv3d(4, 8, 2, 2), nn.BatchNorm3d(8), nn.PReLU(8)),
              up=nn.ConvTranspose3d(8, 4, 2, 2), last=nn.Conv3d(8, 2, 1))  # fmt: skip


def p3d() -> nn.Module:
    """Separable in time, with squeezes and non-local means of frames."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.time(m.space(x)))
        gate = m.gate(y.mean((2, 3, 4))).sigmoid()
        y = y * gate[:, :, None, None, None]
        n, c, t, h, w = y.shape
        frames = y.permute(0, 2, 1, 3, 4).reshape(n * t, c, h, w)
        return m.frame(frames).view(n, t, -1, h // 2, w // 2).mean(1)

    return Of(
        run,
        space=nn.Conv3d(3, 8, (1, 3, 3), padding=(0, 1, 1)),
        time=nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0)),
        gate=nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8)),
        frame=conv(8, 4, 2, 2, padding=0),
    )


# fmt: off
WAVES: Mapping[str, Make] = small({
    "hifigan": (hifigan, (3, 6, 14)), "period_discriminator": (period_discriminator, (3, 1, 50)),
    "encodec": (Encodec, (3, 1, 51)), "demucs": (Demucs, (3, 2, 84)), "conv_tasnet": (ConvTasNet, (3, 1, 64)),
    "sincnet": (SincNet, (3, 1, 64)), "tcn": (tcn, (3, 4, 29)), "inception_time": (inception_time, (3, 3, 50)),
    "wave_unet": (wave_unet, (3, 2, 42)), "fno": (Spectral, (3, 2, 14, 10)), "periodic": (Wrapped, (3, 2, 14, 10)),
    "pressure": (pressure, (3, 2, 18, 14)), "vnet3d": (vnet3d, (2, 1, 8, 10, 6)), "p3d": (p3d, (2, 3, 5, 14, 10)),
})
