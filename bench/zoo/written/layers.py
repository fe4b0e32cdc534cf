"""Generators, flows and unusual layers, as papers and their public code write them, small."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import weight_norm

from zoo.makers import Make, small
from zoo.written.papers import Of, conv

# ---- Generators and flows ----


class Spade(nn.Module):
    """Normalised by what a segmentation says at each pixel; AdaIN of a style beside it."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem, self.shared = conv(3, c), nn.Sequential(conv(3, 8), nn.ReLU())
        self.gamma, self.beta, self.style = conv(8, c), conv(8, c), nn.Linear(3, 2 * c)
        self.norm, self.out = nn.InstanceNorm2d(c), conv(c, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        label = self.shared(F.interpolate(x, size=y.shape[2:], mode="nearest"))
        y = F.leaky_relu(self.norm(y) * (1 + self.gamma(label)) + self.beta(label), 0.2)
        scale, shift = self.style(x.mean((2, 3))).chunk(2, 1)
        mean, std = y.mean((2, 3), keepdim=True), y.std((2, 3), keepdim=True)
        return torch.tanh(self.out((y - mean) / (std + 1e-5) * scale[..., None, None] + shift[..., None, None]))


class Glow(nn.Module):
    """A step of a flow: squeeze, actnorm, an invertible 1x1 of an LU decomposition, an affine coupling, its logdet."""

    def __init__(self, c: int = 12) -> None:
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(1, c, 1, 1)), nn.Parameter(torch.ones(1, c, 1, 1))
        p, lower, upper = torch.linalg.lu(torch.linalg.qr(torch.randn(c, c))[0])
        for name, t in {"p": p, "mask": torch.triu(torch.ones(c, c), 1), "sign": upper.diag().sign()}.items():
            self.register_buffer(name, t)
        self.lower, self.upper = nn.Parameter(lower), nn.Parameter(upper.triu(1))
        self.size = nn.Parameter(upper.diag().abs().log())
        self.net = nn.Sequential(conv(c // 2, 8), nn.ReLU(), conv(8, 8, 1), nn.ReLU(), conv(8, c))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n, c, h, w = x.shape
        x = x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(n, 4 * c, h // 2, w // 2)
        area = h * w // 4
        logdet = area * self.scale.abs().log().sum()
        x = self.scale * (x + self.loc)
        eye = torch.eye(4 * c, dtype=x.dtype)
        lower, upper = self.lower * self.mask.T + eye, self.upper * self.mask + (self.sign * self.size.exp()).diag()
        x = F.conv2d(x, (self.p @ lower @ upper)[:, :, None, None])
        a, b = x.chunk(2, 1)
        s, t = self.net(a).chunk(2, 1)
        s = torch.sigmoid(s + 2)
        return torch.cat([a, (b + t) * s], 1), logdet + area * self.size.sum() + s.log().flatten(1).sum(1)


class RealNVP(nn.Module):
    """A coupling under a checkerboard."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(weight_norm(conv(3, 8)), nn.ReLU(), weight_norm(conv(8, 6)))
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, w = x.shape[2:]
        board = (torch.arange(h)[:, None] + torch.arange(w)) % 2
        board = board.to(x.dtype)[None, None]
        s, t = self.net(x * board).chunk(2, 1)
        s = self.scale * torch.tanh(s) * (1 - board)
        return x * torch.exp(s) + t * (1 - board), s.sum((1, 2, 3))


class VQVAE(nn.Module):
    """Nearest codes, straight through, with both losses, and a moving average of how often each is used."""

    def __init__(self, c: int = 4, codes: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Sequential(conv(3, 8, 4, 2, padding=1), nn.ReLU(), conv(8, c, 1))
        self.decoder = nn.Sequential(nn.ConvTranspose2d(c, 8, 4, 2, 1), nn.ReLU(), conv(8, 3))
        self.codes = nn.Embedding(codes, c)
        self.register_buffer("used", torch.zeros(codes))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, z.shape[-1])
        far = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes.weight.t() + self.codes.weight.pow(2).sum(1)
        place = far.argmin(1)
        one = F.one_hot(place, self.codes.num_embeddings).to(z.dtype)
        if self.training:
            self.used.mul_(0.99).add_(one.detach().sum(0), alpha=0.01)
        q = self.codes(place).view(z.shape)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return self.decoder((z + (q - z).detach()).permute(0, 3, 1, 2)), loss


class Karras(nn.Module):
    """EDM's magnitude-preserving layers: weights normalised a filter, sums and joins that keep their size."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(c, 4, 3, 3)), nn.Parameter(torch.randn(c, c, 3, 3))
        self.w3, self.gain = nn.Parameter(torch.randn(3, 2 * c, 1, 1)), nn.Parameter(torch.ones([]))

    @staticmethod
    def normed(x: Tensor, dims: list[int]) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True)
        return x / torch.add(1e-4, norm, alpha=math.sqrt(norm.numel() / x.numel())).to(x.dtype)

    def weight(self, w: Tensor) -> Tensor:
        return self.normed(w, [1, 2, 3]) / math.sqrt(w[0].numel())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        a = F.conv2d(x, self.weight(self.w1), padding=1)
        b = F.conv2d(F.silu(self.normed(a, [1])) / 0.596, self.weight(self.w2), padding=1)
        y = a.lerp(b, 0.3) / math.sqrt(0.7**2 + 0.3**2)
        return F.conv2d(torch.cat([y, a], 1), self.weight(self.w3)) * self.gain


# ---- Layers of their own ----


class BlurPool(nn.Module):
    """Zhang's: a fixed binomial filter of each channel, under reflection."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        a = torch.tensor([1.0, 3.0, 3.0, 1.0])
        self.stem, self.pad = conv(3, c), nn.ReflectionPad2d((1, 2, 1, 2))
        self.register_buffer("filt", ((a[:, None] * a) / 64)[None, None].repeat(c, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 2, 1)
        return F.conv2d(self.pad(x), self.filt, stride=2, groups=x.shape[1])


class SoftPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gem = conv(3, 8), nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        e = torch.exp(x - x.amax((2, 3), keepdim=True))
        y = F.avg_pool2d(x * e, 2) / (F.avg_pool2d(e, 2) + 1e-6)
        pooled = F.avg_pool2d(y.clamp(min=1e-3).pow(self.gem), y.shape[-2:]).pow(1 / self.gem)
        return F.normalize(pooled.flatten(1), dim=1)


class FRN(nn.Module):
    """Filter response normalisation with a learnt threshold; a mean of squares written out."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem = conv(3, c)
        self.gamma, self.beta, self.tau = (nn.Parameter(torch.ones(1, c, 1, 1) * v) for v in (1.0, 0.0, -1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        nu2 = x.pow(2).mean(dim=[2, 3], keepdim=True)
        return torch.max(self.gamma * (x * torch.rsqrt(nu2 + 1e-6)) + self.beta, self.tau)


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = w - w.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, w / (w.std((1, 2, 3), keepdim=True) + 1e-5), self.bias, self.stride, self.padding)


class ShuffleAttention(nn.Module):
    """SA-Net: groups, halves, channels shuffled."""

    def __init__(self, c: int = 16, groups: int = 4) -> None:
        super().__init__()
        self.groups, k = groups, c // (2 * groups)
        self.stem, self.norm = Standardised(3, c, 3, padding=1), nn.GroupNorm(k, k)
        made = (nn.Parameter(torch.full((1, k, 1, 1), v)) for v in (0.5, 1.0, 0.5, 1.0))
        self.cw, self.cb, self.sw, self.sb = made

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, _, h, w = x.shape
        a, b = x.reshape(n * self.groups, -1, h, w).chunk(2, 1)
        a = a * torch.sigmoid(self.cw * a.mean((2, 3), keepdim=True) + self.cb)
        b = b * torch.sigmoid(self.sw * self.norm(b) + self.sb)
        y = torch.cat([a, b], 1).reshape(n, -1, h, w)
        return y.reshape(n, 2, -1, h, w).permute(0, 2, 1, 3, 4).reshape(n, -1, h, w)


def reparametrised() -> nn.Module:
    """RepVGG's branches, and ACNet's: 3x3, 1x1, 1x3 and 3x1, an identity."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return F.relu(sum(b(x) for b in m.branches))

    def branch(*k: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, k, padding=tuple(i // 2 for i in k), bias=False), nn.BatchNorm2d(8))

    return Of(run, stem=conv(3, 8), branches=nn.ModuleList(
        [branch(3, 3), branch(1, 1), branch(1, 3), branch(3, 1), nn.BatchNorm2d(8)]))  # fmt: skip


def coordinate_attention() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        _, _, h, w = x.shape
        y = torch.cat([m.rows(x), m.columns(x).permute(0, 1, 3, 2)], 2)
        a, b = torch.split(F.hardswish(m.mid(y)), [h, w], 2)
        return x * m.a(a).sigmoid() * m.b(b.permute(0, 1, 3, 2)).sigmoid()

    return Of(run, stem=conv(3, 8), rows=nn.AdaptiveAvgPool2d((None, 1)), columns=nn.AdaptiveAvgPool2d((1, None)),
              mid=nn.Sequential(conv(8, 8, 1), nn.BatchNorm2d(8)), a=conv(8, 8, 1), b=conv(8, 8, 1))  # fmt: skip


def eca_srm() -> nn.Module:
    """Attention of channels by a 1-D convolution over them, and by their deviation."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = F.adaptive_avg_pool2d(x, 1)
        x = x * m.over(y.squeeze(-1).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-1).sigmoid()
        n, c = x.shape[:2]
        flat = x.reshape(n, c, -1)
        u = torch.stack([flat.mean(-1), flat.std(-1)], -1)
        return x * torch.sigmoid(m.norm(m.of(u).squeeze(-1))).view(n, c, 1, 1)

    return Of(run, stem=conv(3, 8), over=nn.Conv1d(1, 1, 3, padding=1, bias=False), norm=nn.BatchNorm1d(8),
              of=nn.Conv1d(8, 8, 2, groups=8, bias=False))  # fmt: skip


class KAN(nn.Module):
    """A convolution of bases of each pixel: Chebyshev's polynomials of tanh."""

    def __init__(self, degree: int = 3) -> None:
        super().__init__()
        self.degree, self.mix = degree, nn.Conv2d(3 * (degree + 1), 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.tanh(x).clamp(-1 + 1e-6, 1 - 1e-6)
        y = torch.acos(t).unsqueeze(2) * torch.arange(self.degree + 1, dtype=x.dtype).view(1, 1, -1, 1, 1)
        return self.mix(y.cos().flatten(1, 2))


def siren() -> nn.Module:
    """A local implicit function: features of the nearest cells and offsets to them, through a small network."""

    def run(m: Any, x: Tensor) -> Tensor:
        f = m.stem(x)
        y = torch.cat(
            [F.pad(f, (1, 1, 1, 1))[:, :, i : i + f.shape[2], j : j + f.shape[3]] for i in (0, 2) for j in (0, 2)], 1
        )
        y = F.interpolate(y, scale_factor=2.0, mode="nearest-exact").permute(0, 2, 3, 1)
        h, w = y.shape[1:3]
        at = torch.stack(torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij"), -1)
        y = torch.cat([y, at.to(y.dtype).expand(y.shape[0], -1, -1, -1)], -1)
        return torch.sin(30 * m.one(y)) @ m.two

    made = Of(run, stem=conv(3, 4), one=nn.Linear(18, 8))
    made.two = nn.Parameter(torch.randn(8, 3))
    return made


def ssim() -> nn.Module:
    """A network and the similarity of what it makes: Gaussian windows, a loss in a few lines."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.net(x).sigmoid()
        x = x.sigmoid()
        g = torch.exp(-((torch.arange(5, dtype=x.dtype) - 2) ** 2) / 4.5)
        k = ((g[:, None] * g) / g.sum() ** 2).expand(3, 1, 5, 5)

        def mean(t: Tensor) -> Tensor:
            return F.conv2d(t, k, groups=3)

        a, b = mean(x), mean(y)
        va, vb, c = mean(x * x) - a**2, mean(y * y) - b**2, mean(x * y) - a * b
        found = (2 * a * b + 1e-4) * (2 * c + 9e-4) / ((a**2 + b**2 + 1e-4) * (va + vb + 9e-4))
        tv = (y[..., 1:, :] - y[..., :-1, :]).abs().mean() + (y[..., 1:] - y[..., :-1]).abs().mean()
        return 1 - found.mean() + 0.1 * tv + (x - y).abs().mean()

    return Of(run, net=conv(3, 3))


SMALL = (3, 3, 26, 22)
EVEN = (3, 3, 24, 20)
# fmt: off
LAYERS: Mapping[str, Make] = small({
    "spade": (Spade, SMALL), "glow": (Glow, EVEN), "realnvp": (RealNVP, SMALL), "vqvae": (VQVAE, EVEN),
    "karras": (Karras, SMALL), "blur_pool": (BlurPool, SMALL), "soft_pool": (SoftPool, SMALL), "frn": (FRN, SMALL),
    "shuffle_attention": (ShuffleAttention, SMALL), "reparametrised": (reparametrised, SMALL),
    "coordinate_attention": (coordinate_attention, SMALL), "eca_srm": (eca_srm, SMALL), "kan": (KAN, SMALL),
    "siren": (siren, (3, 3, 13, 10)), "ssim": (ssim, SMALL),
})
