"""Convolutional networks as papers and their public code write them, small, in torch alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from zoo.makers import Make, small


def conv(c: int, f: int, k: int = 3, s: int = 1, **more: Any) -> nn.Conv2d:
    return nn.Conv2d(c, f, k, s, more.pop("padding", k // 2), **more)


class Sum(nn.Module):
    """x plus `scale` times what a branch makes of it."""

    def __init__(self, *branch: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.branch, self.scale = nn.Sequential(*branch), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.branch(x)


class Of(nn.Module):
    """A function of modules."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


class Gate(nn.Module):
    """Channel attention of means (RCAN, SE)."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(c, 2, 1), nn.ReLU(), conv(2, c, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)


# ---- Restoration ----


def edsr() -> nn.Module:
    blocks = [Sum(conv(8, 8), nn.ReLU(), conv(8, 8), scale=0.1) for _ in range(2)]
    return nn.Sequential(conv(3, 8), Sum(*blocks, conv(8, 8)), conv(8, 32), nn.PixelShuffle(2), conv(8, 3))


def rcan() -> nn.Module:
    group = [Sum(*(Sum(conv(8, 8), nn.ReLU(), conv(8, 8), Gate(8)) for _ in range(2)), conv(8, 8)) for _ in range(2)]
    return nn.Sequential(conv(3, 8), Sum(*group), conv(8, 72), nn.PixelShuffle(3), conv(8, 3))


class Dense(nn.Module):
    """ESRGAN's dense block."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(conv(8 + 4 * i, 4 if i < 3 else 8) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.convs[:-1]:
            found.append(F.leaky_relu(layer(torch.cat(found, 1)), 0.2))
        return x + 0.2 * self.convs[-1](torch.cat(found, 1))


def esrgan() -> nn.Module:
    up = [nn.Upsample(scale_factor=2, mode="nearest"), conv(8, 8), nn.LeakyReLU(0.2)]
    return nn.Sequential(conv(3, 8), Sum(Dense(), Dense(), conv(8, 8)), *up, conv(8, 3))


def dncnn() -> nn.Module:
    inner = [m for _ in range(3) for m in (conv(8, 8, bias=False), nn.BatchNorm2d(8), nn.ReLU())]
    return Of(lambda m, x: x - m.noise(x), noise=nn.Sequential(conv(3, 8), nn.ReLU(), *inner, conv(8, 3)))


class NafBlock(nn.Module):
    """NAFNet: a norm over channels, gates by halves, no activation."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c), nn.LayerNorm(c)
        self.conv1, self.conv2, self.conv3 = conv(c, 2 * c, 1), conv(2 * c, 2 * c, groups=2 * c), conv(c, c, 1)
        self.sca, self.conv4, self.conv5 = conv(c, c, 1), conv(c, 2 * c, 1), conv(c, c, 1)
        self.beta, self.gamma = nn.Parameter(torch.zeros(1, c, 1, 1)), nn.Parameter(torch.zeros(1, c, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        a, b = self.conv2(self.conv1(y)).chunk(2, 1)
        y = a * b
        y = self.conv3(y * self.sca(y.mean((2, 3), keepdim=True)))
        x = x + y * self.beta
        a, b = self.conv4(self.norm2(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).chunk(2, 1)
        return x + self.conv5(a * b) * self.gamma


def nafnet() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        h, w = x.shape[2:]
        padded = F.pad(x, (0, -w % 4, 0, -h % 4))
        y = m.intro(padded)
        z = m.up(m.middle(m.down(m.encode(y)))) + y
        return (m.end(m.decode(z)) + padded)[:, :, :h, :w]

    up = nn.Sequential(conv(16, 32, 1, bias=False), nn.PixelShuffle(2))
    return Of(run, intro=conv(3, 8), encode=NafBlock(), down=nn.Conv2d(8, 16, 2, 2), middle=NafBlock(16), up=up,
              decode=NafBlock(), end=conv(8, 3))  # fmt: skip


class Restormer(nn.Module):
    """Attention over channels, and a gated feed forward."""

    def __init__(self, c: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.temperature = heads, nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv, self.deep, self.out = conv(c, 3 * c, 1), conv(3 * c, 3 * c, groups=3 * c), conv(c, c, 1)
        self.grow, self.mix, self.shrink = conv(c, 4 * c, 1), conv(4 * c, 4 * c, groups=4 * c), conv(2 * c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        q, k, v = (t.reshape(n, self.heads, c // self.heads, h * w) for t in self.deep(self.qkv(x)).chunk(3, 1))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        found = ((q @ k.transpose(-2, -1)) * self.temperature).softmax(-1) @ v
        x = x + self.out(found.reshape(n, c, h, w))
        a, b = self.mix(self.grow(x)).chunk(2, 1)
        return x + self.shrink(F.gelu(a) * b)


def restormer() -> nn.Module:
    return nn.Sequential(conv(3, 8), Restormer(), nn.PixelUnshuffle(2), conv(32, 8), Restormer(), conv(8, 3))


# ---- Generators and discriminators ----


class Pix2Pix(nn.Module):
    def __init__(self, c: int, f: int, inner: nn.Module | None) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.LeakyReLU(0.2), nn.Conv2d(c, f, 4, 2, 1, bias=False), nn.BatchNorm2d(f))
        self.inner = inner
        self.up = nn.Sequential(
            nn.ReLU(), nn.ConvTranspose2d(2 * f if inner else f, c, 4, 2, 1, bias=False), nn.BatchNorm2d(c)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        return torch.cat([x, self.up(self.inner(y) if self.inner else y)], 1)


def pix2pix() -> nn.Module:
    inner = Pix2Pix(4, 8, Pix2Pix(8, 8, None))
    return nn.Sequential(nn.Conv2d(3, 4, 4, 2, 1), inner, nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh())


def cyclegan() -> nn.Module:
    def block() -> nn.Module:
        half = [nn.ReflectionPad2d(1), conv(16, 16, padding=0), nn.InstanceNorm2d(16)]
        return Sum(*half, nn.ReLU(), nn.ReflectionPad2d(1), conv(16, 16, padding=0), nn.InstanceNorm2d(16))

    return nn.Sequential(
        nn.ReflectionPad2d(3), nn.Conv2d(3, 8, 7), nn.InstanceNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1), nn.InstanceNorm2d(16), nn.ReLU(), block(), block(),
        nn.ConvTranspose2d(16, 8, 3, 2, 1, 1), nn.InstanceNorm2d(8), nn.ReLU(),
        nn.ReflectionPad2d(3), nn.Conv2d(8, 3, 7), nn.Tanh(),
    )  # fmt: skip


def wgan_critic() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2)]
    layers += [nn.Conv2d(8, 16, 4, 2, 1), nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(16, 1, 4, 1, 0), nn.Flatten(), nn.Linear(91, 1))


def dcgan() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (12, 1, 1)), nn.ConvTranspose2d(12, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def spectral(evaluated: bool = False) -> nn.Module:
    norm = parametrizations.spectral_norm
    return nn.Sequential(
        norm(conv(3, 8)), nn.LeakyReLU(0.1), norm(nn.Conv2d(8, 16, 4, 2, 1)), nn.LeakyReLU(0.1), nn.Flatten(2),
        Of(lambda m, x: m.head(x.sum(2)), head=norm(nn.Linear(16, 1))),
    )  # fmt: skip


def weight_normed() -> nn.Module:
    other = parametrizations.weight_norm(nn.Conv2d(8, 8, 3, padding=1))
    return nn.Sequential(weight_norm(conv(3, 8)), nn.ELU(), other, nn.ELU(), weight_norm(conv(8, 3, 5)))


class Modulated(nn.Module):
    """StyleGAN2: every sample has filters of its own; groups are samples."""

    def __init__(self, c: int, f: int, style: int = 6) -> None:
        super().__init__()
        self.weight, self.affine = nn.Parameter(torch.randn(f, c, 3, 3)), nn.Linear(style, c)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        n, c, h, w = x.shape
        weight = self.weight[None] * self.affine(style)[:, None, :, None, None]
        weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        y = F.conv2d(x.reshape(1, n * c, h, w), weight.flatten(0, 1), padding=1, groups=n)
        return y.reshape(n, -1, h, w)


def stylegan() -> nn.Module:
    def run(m: Any, z: Tensor) -> Tensor:
        style = m.mapping(z)
        x = m.const.expand(z.shape[0], -1, -1, -1)
        x = F.leaky_relu(m.one(x, style), 0.2)
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        return m.rgb(F.leaky_relu(m.two(x, style), 0.2))

    made = Of(run, mapping=nn.Sequential(nn.Linear(6, 6), nn.LeakyReLU(0.2), nn.Linear(6, 6)), one=Modulated(8, 8),
              two=Modulated(8, 8), rgb=conv(8, 3, 1))  # fmt: skip
    made.const = nn.Parameter(torch.randn(1, 8, 4, 6))
    return made


# ---- Autoregressive, causal, sequences ----


class Masked(nn.Conv2d):
    def __init__(self, c: int, f: int, k: int, kind: str) -> None:
        super().__init__(c, f, k, padding=k // 2)
        mask = torch.ones_like(self.weight)
        mask[:, :, k // 2, k // 2 + (kind == "B") :] = 0
        mask[:, :, k // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight * self.mask, self.bias)


def pixelcnn() -> nn.Module:
    return nn.Sequential(Masked(3, 8, 7, "A"), nn.ReLU(), Sum(Masked(8, 8, 3, "B"), nn.ReLU()), Masked(8, 3, 1, "B"))


def gated_pixelcnn() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        v = F.pad(m.vertical(F.pad(x, (1, 1, 2, 0))), (0, 0, 1, 0))[:, :, :-1]
        h = m.horizontal(F.pad(x, (2, 0, 0, 0)))[:, :, :, : x.shape[3]]
        a, b = (h + m.link(v[:, :, : x.shape[2]])).chunk(2, 1)
        return m.out(torch.tanh(a) * torch.sigmoid(b))

    return Of(run, vertical=nn.Conv2d(3, 16, (2, 3)), horizontal=nn.Conv2d(3, 16, (1, 2)), link=nn.Conv2d(16, 16, 1),
              out=nn.Conv2d(8, 3, 1))  # fmt: skip


class Wave(nn.Module):
    """WaveNet: dilated causal 1-D convolutions, gated, with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 8, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(4))
        self.skips, self.rest = (nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(4)) for _ in range(2))
        self.last = nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), None
        for i in range(4):
            a, b = self.dilated[i](F.pad(x, (2**i, 0))).chunk(2, 1)
            y = torch.tanh(a) * torch.sigmoid(b)
            skip = self.skips[i](y)
            total, x = skip if total is None else total + skip, x + self.rest[i](y)
        return self.last(F.relu(total))


class ConvLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates, self.head = conv(3 + 6, 24), conv(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _, h, w = x.shape
        state = cell = x.new_zeros(n, 6, h, w)
        found = []
        for k in range(t):
            i, f, o, g = self.gates(torch.cat([x[:, k], state], 1)).chunk(4, 1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            state = torch.sigmoid(o) * torch.tanh(cell)
            found.append(self.head(state))
        return torch.stack(found, 1)


class ConvGRU(nn.Module):
    """RAFT's separable one."""

    def __init__(self) -> None:
        super().__init__()
        self.zr1, self.q1 = nn.Conv2d(11, 16, (1, 5), padding=(0, 2)), nn.Conv2d(11, 8, (1, 5), padding=(0, 2))
        self.zr2, self.q2 = nn.Conv2d(11, 16, (5, 1), padding=(2, 0)), nn.Conv2d(11, 8, (5, 1), padding=(2, 0))
        self.first = conv(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for _ in range(2):
            for zr, q in ((self.zr1, self.q1), (self.zr2, self.q2)):
                z, r = torch.sigmoid(zr(torch.cat([h, x], 1))).chunk(2, 1)
                h = (1 - z) * h + z * torch.tanh(q(torch.cat([r * h, x], 1)))
        return h


# ---- Segmentation and dense prediction ----


class SegNet(nn.Module):
    """Unpools to the places that maxima came from."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = conv(3, 8), conv(8, 8), conv(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, places = F.max_pool2d(F.relu(self.down(x)), 2, 2, return_indices=True)
        return self.up(F.max_unpool2d(self.middle(y), places, 2, 2))


def u2_block() -> nn.Module:
    """U^2-Net's: pools with ceil_mode, upsamples to a size that it reads."""

    def run(m: Any, x: Tensor) -> Tensor:
        a = m.one(x)
        b = m.two(F.max_pool2d(a, 2, 2, ceil_mode=True))
        c = m.three(F.max_pool2d(b, 2, 2, ceil_mode=True))
        d = m.four(c)
        c = m.up3(torch.cat([d, c], 1))
        b = m.up2(torch.cat([F.interpolate(c, size=b.shape[2:], mode="bilinear", align_corners=False), b], 1))
        return a + m.up1(torch.cat([F.interpolate(b, size=a.shape[2:], mode="bilinear", align_corners=False), a], 1))

    def step(c: int, f: int = 8, d: int = 1) -> nn.Module:
        return nn.Sequential(nn.Conv2d(c, f, 3, 1, d, d), nn.BatchNorm2d(f), nn.ReLU())

    return Of(run, one=step(3), two=step(8), three=step(8), four=step(8, d=2), up3=step(16), up2=step(16), up1=step(16))


def psp() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.stem(x)
        parts = [
            F.interpolate(one(F.adaptive_avg_pool2d(y, n)), y.shape[2:], mode="bilinear", align_corners=True)
            for n, one in zip((1, 2, 3, 6), m.parts, strict=True)
        ]
        return F.interpolate(m.head(torch.cat([y, *parts], 1)), x.shape[2:], mode="bicubic", align_corners=False)

    parts = nn.ModuleList(conv(8, 2, 1) for _ in range(4))
    return Of(run, stem=nn.Sequential(conv(3, 8, 3, 2), nn.ReLU()), parts=parts, head=conv(16, 4))


def hourglass(depth: int = 2) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        inner = m.inner(m.before(F.max_pool2d(x, 2)))
        return m.skip(x) + F.interpolate(m.after(inner), size=x.shape[2:], mode="nearest")

    inner = hourglass(depth - 1) if depth else conv(8, 8)
    return Of(run, skip=Sum(conv(8, 8), nn.ReLU()), before=Sum(conv(8, 8)), inner=inner, after=Sum(conv(8, 8)))


def msdnet() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        found = [x]
        for layer in m.layers:
            found.append(F.relu(layer(torch.cat(found, 1))))
        return m.last(torch.cat(found, 1))

    layers = nn.ModuleList(
        nn.Conv2d(1 + 2 * i, 2, 3, padding=d, dilation=d, padding_mode="reflect") for i, d in enumerate((1, 2, 3, 5, 8))
    )
    return Of(run, layers=layers, last=nn.Conv2d(11, 2, 1))


class Cbam(nn.Module):
    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.dense, self.space = nn.Sequential(nn.Linear(c, 4), nn.ReLU(), nn.Linear(4, c)), conv(2, 1, 7)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.dense(x.mean((2, 3))) + self.dense(x.amax((2, 3))))
        x = x * gate[:, :, None, None]
        found = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True).values], 1)
        return x * torch.sigmoid(self.space(found))


def cbam() -> nn.Module:
    return nn.Sequential(conv(3, 8), Cbam(), nn.ReLU(), conv(8, 8), Cbam(), nn.AdaptiveMaxPool2d(3), nn.Flatten(1))


def coordconv() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        rows = torch.linspace(-1, 1, h, dtype=x.dtype)[None, None, :, None].expand(n, 1, h, w)
        columns = torch.linspace(-1, 1, w, dtype=x.dtype)[None, None, None].expand(n, 1, h, w)
        return m.out(F.relu(m.one(torch.cat([x, rows, columns], 1))))

    return Of(run, one=conv(5, 8), out=conv(8, 3))


class Octave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hh, self.hl, self.lh, self.ll = conv(8, 8), conv(8, 4), conv(4, 8), conv(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        high, low = x, F.avg_pool2d(x[:, :4], 2)
        y = self.hh(high) + F.interpolate(self.lh(low), scale_factor=2)
        z = self.ll(low) + self.hl(F.avg_pool2d(high, 2))
        return torch.cat([y, F.interpolate(z, scale_factor=2)], 1)


class Involution(nn.Module):
    """A filter for every place, from what stands there."""

    def __init__(self, c: int = 8, k: int = 3, groups: int = 2) -> None:
        super().__init__()
        self.k, self.groups, self.weight = (
            k,
            groups,
            nn.Sequential(conv(c, 4, 1), nn.ReLU(), conv(4, groups * k * k, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        weight = self.weight(x).view(n, self.groups, 1, self.k**2, h, w)
        patches = F.unfold(x, self.k, padding=self.k // 2).view(n, self.groups, c // self.groups, self.k**2, h, w)
        return (weight * patches).sum(3).view(n, c, h, w)


def dynamic_conv() -> nn.Module:
    """CondConv's mixture of filters by sample."""

    def run(m: Any, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        mix = torch.softmax(m.route(x.mean((2, 3))), 1)
        weight = (mix @ m.bank.flatten(1)).view(n * 6, c, 3, 3)
        return F.conv2d(x.reshape(1, n * c, h, w), weight, padding=1, groups=n).view(n, 6, h, w)

    made = Of(run, route=nn.Linear(3, 4))
    made.bank = nn.Parameter(torch.randn(4, 6, 3, 3, 3))
    return made


class Ghost(nn.Module):
    """Shifts of channels by a place each way (ShiftNet, TSM in space)."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = conv(3, 10, 1), conv(10, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d, e = self.one(x).chunk(5, 1)
        shifted = [torch.roll(a, 1, 2), torch.roll(b, -1, 2), torch.roll(c, 1, 3), torch.roll(d, -1, 3), e]
        return self.two(F.relu(torch.cat(shifted, 1)))


def stn() -> nn.Module:
    """A spatial transformer: a grid that is computed."""

    def run(m: Any, x: Tensor) -> Tensor:
        theta = m.where(x.mean((2, 3))).view(-1, 2, 3)
        return m.out(F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False))

    return Of(run, where=nn.Linear(3, 6), out=conv(3, 4))


def correlation() -> nn.Module:
    """FlowNet's cost volume, of two halves of the channels, as shifts and products."""

    def run(m: Any, x: Tensor) -> Tensor:
        a, b = m.features(x[:, :3]), m.features(x[:, 3:])
        b, (h, w) = F.pad(b, (2, 2, 2, 2)), a.shape[2:]
        costs = [(a * b[:, :, i : i + h, j : j + w]).mean(1, keepdim=True) for i in range(5) for j in range(5)]
        return m.flow(torch.cat(costs, 1))

    return Of(run, features=nn.Sequential(conv(3, 8, 3, 2), nn.LeakyReLU(0.1)), flow=conv(25, 2))


# ---- Simulation data ----


def surrogate() -> nn.Module:
    """A time stepper on a torus."""
    layers = [m for _ in range(2) for m in (nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"), nn.GELU())]
    return Sum(nn.Conv2d(3, 8, 5, padding=2, padding_mode="circular"), nn.GELU(), *layers, conv(8, 3, 1), scale=0.1)


class Stencils(nn.Module):
    """PDE-Net: derivatives by fixed stencils, their products by learnt ones, three steps."""

    def __init__(self) -> None:
        super().__init__()
        dx = torch.tensor([[0.0, 0, 0], [-0.5, 0, 0.5], [0, 0, 0]])
        laplace = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]])
        self.register_buffer("stencils", torch.stack([dx, dx.T, laplace])[:, None], persistent=False)
        self.mix = nn.Conv2d(10, 2, 1)

    def forward(self, u: Tensor) -> Tensor:
        for _ in range(3):
            padded = F.pad(u, (1, 1, 1, 1), mode="circular")
            found = F.conv2d(padded, self.stencils.repeat(2, 1, 1, 1), groups=2)
            u = u + 0.01 * self.mix(torch.cat([found, u * found[:, :2], u.pow(2)], 1))
        return u


def divergence_free() -> nn.Module:
    """Velocities as the curl of what is predicted: central differences with replicated borders."""

    def run(m: Any, x: Tensor) -> Tensor:
        a = F.pad(m.net(x), (1, 1, 1, 1), mode="replicate")
        u = (a[:, :, 2:, 1:-1] - a[:, :, :-2, 1:-1]) / 2
        v = -(a[:, :, 1:-1, 2:] - a[:, :, 1:-1, :-2]) / 2
        return torch.cat([u, v], 1)

    return Of(run, net=nn.Sequential(conv(3, 8), nn.SiLU(), conv(8, 1)))


def cosmoflow() -> nn.Module:
    layers = [m for c, f in ((1, 4), (4, 8)) for m in (nn.Conv3d(c, f, 3, padding=1), nn.LeakyReLU(), nn.MaxPool3d(2))]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 4 * 5 * 3, 16), nn.LeakyReLU(), nn.Linear(16, 4))


def turbulence() -> nn.Module:
    """3-D super-resolution on a periodic box."""
    block = [nn.Conv3d(8, 8, 3, padding=1, padding_mode="circular"), nn.LeakyReLU(0.2)]
    up = [nn.Upsample(scale_factor=2, mode="trilinear"), nn.Conv3d(8, 3, 3, padding=1, padding_mode="circular")]
    return nn.Sequential(nn.Conv3d(3, 8, 3, padding=1, padding_mode="circular"), Sum(*block), *up)


def slowfast() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        slow, fast = m.slow(x[:, :, ::2]), m.fast(x)
        return m.head(torch.cat([slow, m.lateral(fast)], 1).mean((2, 3, 4)))

    return Of(run, slow=nn.Conv3d(3, 8, (1, 3, 3), (1, 2, 2), (0, 1, 1)), fast=nn.Conv3d(3, 4, 3, (1, 2, 2), 1),
              lateral=nn.Conv3d(4, 8, (5, 1, 1), (2, 1, 1), (2, 0, 0)), head=nn.Linear(16, 5))  # fmt: skip


def tsm() -> nn.Module:
    """Temporal shift: frames among the samples."""

    def run(m: Any, x: Tensor) -> Tensor:
        n, t, _, h, w = x.shape
        y = m.one(x.flatten(0, 1))
        y = y.view(n, t, 8, *y.shape[2:])
        moved = torch.cat(
            [F.pad(y[:, 1:, :2], (0,) * 7 + (1,)), F.pad(y[:, :-1, 2:4], (0,) * 6 + (1, 0)), y[:, :, 4:]], 2
        )
        return m.two(moved.flatten(0, 1)).view(n, t, 4, h, w).mean(1)

    return Of(run, one=conv(3, 8), two=conv(8, 4))


def capsules() -> nn.Module:
    """Primary capsules, squashed, and a vote."""

    def run(m: Any, x: Tensor) -> Tensor:
        u = m.primary(F.relu(m.first(x)))
        u = u.view(u.shape[0], 4, 4, -1).permute(0, 3, 1, 2).flatten(1, 2)
        norm = u.norm(dim=-1, keepdim=True)
        u = norm / (1 + norm**2) * u
        return torch.einsum("nic,cjd->njd", u, m.votes)

    made = Of(run, first=conv(3, 8, 5, 2), primary=conv(8, 16, 3, 2))
    made.votes = nn.Parameter(torch.randn(4, 3, 6))
    return made


def ibn() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        a, b = torch.split(y, 4, 1)
        return F.relu(torch.cat([m.instance(a), m.batch(b)], 1))

    return Of(run, conv=conv(3, 8), instance=nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
              batch=nn.BatchNorm2d(4))  # fmt: skip


def vgg_perceptual() -> nn.Module:
    """A style loss: Gram matrices of features."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.features(x).flatten(2)
        return (y @ y.transpose(1, 2)) / y.shape[2]

    return Of(run, features=nn.Sequential(conv(3, 8), nn.ReLU(), nn.MaxPool2d(2), conv(8, 8), nn.ReLU()))


def maxout() -> nn.Module:
    return Of(
        lambda m, x: m.out(m.one(x).unflatten(1, (4, 3)).max(2).values), one=conv(3, 12), out=conv(4, 4, groups=2)
    )


def local_response() -> nn.Module:
    return nn.Sequential(conv(3, 8), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2), conv(8, 4))


def odd_activations() -> nn.Module:
    made = (nn.PReLU(8), nn.CELU(), nn.Softplus(), nn.Hardswish(), nn.Mish(), nn.GLU(1), nn.Softsign(), nn.Tanhshrink())
    return nn.Sequential(conv(3, 8), *made, nn.LPPool2d(2, 2), nn.ReLU6(), nn.Softmax2d())


def laplacian_pyramid() -> nn.Module:
    def run(m: Any, x: Tensor) -> Any:
        found = []
        for layer in m.layers:
            small = F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True)
            found.append(layer(x - F.interpolate(small, size=x.shape[2:], mode="bilinear")))
            x = small
        return (*found, x)

    return Of(run, layers=nn.ModuleList(conv(3, 3) for _ in range(2)))


def wavelet() -> nn.Module:
    """MWCNN: Haar's transform by strided slices, and back."""

    def run(m: Any, x: Tensor) -> Tensor:
        a, b, c, d = x[:, :, ::2, ::2], x[:, :, 1::2, ::2], x[:, :, ::2, 1::2], x[:, :, 1::2, 1::2]
        y = m.net(torch.cat([a + b + c + d, b + d - a - c, c + d - a - b, a + d - b - c], 1) / 2)
        n, f, h, w = y.shape
        p, q, r, s = y.chunk(4, 1)
        out = y.new_zeros(n, f // 4, 2 * h, 2 * w)
        out[:, :, ::2, ::2] = p - q - r + s
        out[:, :, 1::2, ::2] = p + q - r - s
        out[:, :, ::2, 1::2] = p - q + r - s
        out[:, :, 1::2, 1::2] = p + q + r + s
        return out / 2

    return Of(run, net=nn.Sequential(conv(12, 16), nn.ReLU(), conv(16, 12)))


SMALL = (3, 3, 26, 22)
EVEN = (3, 3, 24, 20)
# fmt: off
PAPERS: Mapping[str, Make] = small({
    "edsr": (edsr, SMALL), "rcan": (rcan, SMALL), "esrgan": (esrgan, SMALL), "dncnn": (dncnn, SMALL),
    "nafnet": (nafnet, (3, 3, 25, 22)), "restormer": (restormer, EVEN), "pix2pix": (pix2pix, (3, 3, 32, 24)),
    "cyclegan": (cyclegan, EVEN), "wgan_critic": (wgan_critic, (3, 3, 40, 64)), "dcgan": (dcgan, (3, 12)),
    "spectral_norm": (spectral, SMALL), "weight_norm": (weight_normed, SMALL), "stylegan": (stylegan, (3, 6)),
    "pixelcnn": (pixelcnn, SMALL), "gated_pixelcnn": (gated_pixelcnn, SMALL), "wavenet": (Wave, (3, 1, 50)),
    "convlstm": (ConvLSTM, (3, 3, 3, 14, 10)), "convgru": (ConvGRU, SMALL), "segnet": (SegNet, EVEN),
    "u2net": (u2_block, (3, 3, 27, 22)), "pspnet": (psp, SMALL),
    "hourglass": (lambda: nn.Sequential(conv(3, 8), hourglass()), EVEN), "msdnet": (msdnet, (3, 1, 26, 22)),
    "cbam": (cbam, SMALL), "coordconv": (coordconv, SMALL),
    "octave": (lambda: nn.Sequential(conv(3, 8), Octave(), nn.ReLU(), conv(12, 3)), EVEN),
    "involution": (lambda: nn.Sequential(conv(3, 8), Involution(), conv(8, 3)), SMALL),
    "dynamic_conv": (dynamic_conv, SMALL), "shift": (Ghost, SMALL), "spatial_transformer": (stn, SMALL),
    "correlation": (correlation, (3, 6, 26, 22)), "surrogate": (surrogate, SMALL),
    "stencils": (Stencils, (3, 2, 26, 22)), "divergence_free": (divergence_free, SMALL),
    "cosmoflow": (cosmoflow, (3, 1, 16, 20, 12)), "turbulence": (turbulence, (2, 3, 8, 10, 6)),
    "slowfast": (slowfast, (2, 3, 8, 18, 14)), "tsm": (tsm, (2, 4, 3, 14, 10)), "capsules": (capsules, SMALL),
    "ibn": (ibn, SMALL), "gram": (vgg_perceptual, SMALL), "maxout": (maxout, SMALL),
    "local_response": (local_response, SMALL), "odd_activations": (odd_activations, SMALL),
    "laplacian_pyramid": (laplacian_pyramid, EVEN), "wavelet": (wavelet, EVEN),
})
