"""More convolutional networks as papers and their public code write them, small: detection, dense features, audio,
flows and generators, attention of many kinds, operators on fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from public_makers import Make
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from written_models import Of, Sum, conv

# ---- Detection ----


def cbs(c: int, f: int, k: int = 1, s: int = 1, **more: Any) -> nn.Sequential:
    return nn.Sequential(conv(c, f, k, s, bias=False, **more), nn.BatchNorm2d(f), nn.SiLU())


class CSP(nn.Module):
    """YOLOv8's C2f: halves, of which one goes on through bottlenecks, all kept."""

    def __init__(self, c: int, n: int = 2) -> None:
        super().__init__()
        self.one, self.two = cbs(c, c), cbs((2 + n) * (c // 2), c)
        self.blocks = nn.ModuleList(Sum(cbs(c // 2, c // 2, 3), cbs(c // 2, c // 2, 3)) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        y = [*self.one(x).chunk(2, 1)]
        y.extend(block(y[-1]) for block in self.blocks)
        return self.two(torch.cat(y, 1))


class SPPF(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.one, self.two, self.pool = cbs(c, c // 2), cbs(2 * c, c), nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = [self.one(x)]
        y.extend(self.pool(y[-1]) for _ in range(3))
        return self.two(torch.cat(y, 1))


def yolo() -> nn.Module:
    """YOLOv8: a path aggregation neck, and boxes of distributions (DFL) decoded on an anchor grid."""
    bins = 4

    def run(m: Any, x: Tensor) -> Tensor:
        a = m.first(x)
        b = m.second(a)
        p = m.up(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1))
        q = m.down(torch.cat([m.stride(p), b], 1))
        found = []
        for level, (feature, head) in enumerate(zip((p, q), m.heads, strict=True)):
            y = head(feature)
            n, _, h, w = y.shape
            box, score = y.split((4 * bins, 3), 1)
            at = torch.arange(bins, dtype=y.dtype)
            ltrb = (box.view(n, 4, bins, h * w).softmax(2) * at.view(1, 1, -1, 1)).sum(2)
            rows, columns = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
            anchor = torch.stack([columns, rows]).view(1, 2, -1).to(y.dtype)
            low, high = ltrb.chunk(2, 1)
            boxes = torch.cat([anchor - low, anchor + high], 1) * 2**level
            found.append(torch.cat([boxes, score.flatten(2).sigmoid()], 1))
        return torch.cat(found, 2)

    return Of(
        run,
        first=nn.Sequential(cbs(3, 8, 3, 2), CSP(8)),
        second=nn.Sequential(cbs(8, 16, 3, 2), CSP(16), SPPF(16)),
        up=nn.Sequential(cbs(24, 8), CSP(8)),
        stride=cbs(8, 8, 3, 2),
        down=cbs(24, 16),
        heads=nn.ModuleList(conv(c, 4 * bins + 3, 1) for c in (8, 16)),
    )


def darknet() -> nn.Module:
    """YOLOv3's head: anchors in a dimension of their own, sigmoids of some of the values."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.net(x)
        n, _, h, w = y.shape
        y = y.view(n, 2, 7, h, w).permute(0, 1, 3, 4, 2).contiguous()
        rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        grid = torch.stack((columns, rows), 2).view(1, 1, h, w, 2).to(y.dtype)
        xy = (y[..., 0:2].sigmoid() * 2 - 0.5 + grid) * 8
        wh = (y[..., 2:4].sigmoid() * 2) ** 2 * m.anchors
        return torch.cat((xy, wh, y[..., 4:].sigmoid()), 4).view(n, -1, 7)

    def leaky(c: int, f: int, s: int = 1) -> nn.Module:
        return nn.Sequential(conv(c, f, 3, s, bias=False), nn.BatchNorm2d(f), nn.LeakyReLU(0.1))

    made = Of(run, net=nn.Sequential(leaky(3, 8, 2), Sum(leaky(8, 8)), leaky(8, 16, 2), conv(16, 14, 1)))
    made.register_buffer("anchors", torch.tensor([[10.0, 13.0], [16.0, 30.0]]).view(1, 2, 1, 1, 2))
    return made


class BiFPN(nn.Module):
    """EfficientDet's fusion by learnt weights that are normalised each time."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        self.stem, self.down = conv(3, c), nn.MaxPool2d(3, 2, 1)
        self.a, self.b = (nn.Sequential(conv(c, c, groups=c, bias=False), conv(c, c, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one = self.stem(x)
        two = self.down(one)
        w = F.relu(self.w1)
        w = w / (w.sum() + 1e-4)
        p = self.a(F.silu(w[0] * one + w[1] * F.interpolate(two, size=one.shape[-2:], mode="nearest")))
        v = self.w2.softmax(0)
        return p, self.b(F.silu(v[0] * two + v[1] * self.down(p) + v[2] * self.down(one)))


def fcos() -> nn.Module:
    """A head shared by levels, each with a scale; outputs as one list of positions."""

    def run(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        p3 = m.stem(x)
        p4 = m.next(p3)
        found = []
        for feature, scale in zip((p3, p4), m.scales, strict=True):
            y = m.tower(feature)
            box = F.relu(m.box(y) * scale)
            found.append(torch.cat([m.label(y), m.centre(y), box], 1).permute(0, 2, 3, 1).flatten(1, 2))
        return torch.cat(found, 1).split((3, 1, 4), -1)

    made = Of(
        run,
        stem=nn.Sequential(conv(3, 8, 3, 2), nn.ReLU()),
        next=nn.Sequential(conv(8, 8, 3, 2), nn.ReLU()),
        tower=nn.Sequential(conv(8, 8), nn.GroupNorm(4, 8), nn.ReLU()),
        box=conv(8, 4), label=conv(8, 3), centre=conv(8, 1),
    )  # fmt: skip
    made.scales = nn.ParameterList(nn.Parameter(torch.tensor(1.0 + k)) for k in range(2))
    return made


def centernet() -> nn.Module:
    """Peaks of a heat map: where a maximum of 3x3 is the value itself."""

    def run(m: Any, x: Tensor) -> Tensor:
        heat = m.net(x).sigmoid()
        peak = F.max_pool2d(heat, 3, 1, 1)
        return heat * (peak == heat).to(heat.dtype)

    return Of(run, net=nn.Sequential(conv(3, 8, 3, 2), nn.ReLU(), conv(8, 2)))


# ---- Dense features ----


class HRNet(nn.Module):
    """Two resolutions that exchange features both ways."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem, self.low = cbs(3, c, 3, 2), cbs(c, 2 * c, 3, 2)
        self.high2low = nn.ModuleList(nn.Sequential(conv(c, 2 * c, 3, 2), nn.BatchNorm2d(2 * c)) for _ in range(2))
        self.low2high = nn.ModuleList(nn.Sequential(conv(2 * c, c, 1), nn.BatchNorm2d(c)) for _ in range(2))
        self.out = conv(3 * c, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.stem(x)
        b = self.low(a)
        for down, up in zip(self.high2low, self.low2high, strict=True):
            wide = F.interpolate(up(b), size=a.shape[-2:], mode="bilinear", align_corners=True)
            a, b = F.relu(a + wide), F.relu(b + down(a))
        return self.out(torch.cat([a, F.interpolate(b, size=a.shape[-2:], mode="bilinear", align_corners=True)], 1))


class U2Net(nn.Module):
    """Nested U-blocks, with side outputs of every depth."""

    def __init__(self) -> None:
        super().__init__()

        def step(c: int, f: int, d: int = 1) -> nn.Module:
            return nn.Sequential(conv(c, f, padding=d, dilation=d), nn.BatchNorm2d(f), nn.ReLU())

        def block(c: int, f: int) -> nn.Module:
            parts = [step(c, f), step(f, 4), step(4, 4), step(4, 4, 2), step(8, 4), step(8, f)]
            return nn.ModuleList(parts)

        self.encoders = nn.ModuleList([block(3, 8), block(8, 8)])
        self.decoder, self.sides, self.fuse = block(16, 8), nn.ModuleList(conv(8, 1) for _ in range(2)), conv(2, 1, 1)

    @staticmethod
    def inside(parts: Any, x: Tensor) -> Tensor:
        x = parts[0](x)
        a = parts[1](x)
        b = parts[2](F.max_pool2d(a, 2, stride=2, ceil_mode=True))
        b = parts[4](torch.cat([parts[3](b), b], 1))
        return parts[5](torch.cat([F.interpolate(b, size=a.shape[2:], mode="bilinear"), a], 1)) + x

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = self.inside(self.encoders[0], x)
        b = self.inside(self.encoders[1], F.max_pool2d(a, 2, stride=2, ceil_mode=True))
        up = F.interpolate(b, size=a.shape[2:], mode="bilinear")
        y = self.inside(self.decoder, torch.cat([up, a], 1))
        sides = [self.sides[0](y), F.interpolate(self.sides[1](b), size=x.shape[2:], mode="bilinear")]
        return tuple(s.sigmoid() for s in (self.fuse(torch.cat(sides, 1)), *sides))


def aspp() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = [branch(x) for branch in m.branches]
        y.append(F.interpolate(m.pool(x), size=x.shape[-2:], mode="bilinear", align_corners=False))
        return m.out(torch.cat(y, 1))

    atrous = [conv(8, 4, padding=d, dilation=d) for d in (2, 4, 6)]
    return Of(run, stem=conv(3, 8), branches=nn.ModuleList([conv(8, 4, 1), *atrous]),
              pool=nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(8, 4, 1), nn.ReLU()), out=conv(20, 3, 1))  # fmt: skip


class Carafe(nn.Module):
    """Upsampling by kernels that are computed: patches of a low resolution, a softmax a pixel of the high one."""

    def __init__(self, c: int = 8, k: int = 3, scale: int = 2) -> None:
        super().__init__()
        self.k, self.scale = k, scale
        self.stem, self.squeeze, self.kernel = conv(3, c), conv(c, 4, 1), conv(4, k * k * scale * scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, c, h, w = x.shape
        s = self.scale
        mask = F.pixel_shuffle(self.kernel(self.squeeze(x)), s).softmax(1)
        patch = F.unfold(x, self.k, padding=self.k // 2).view(n, c * self.k**2, h, w)
        patch = F.interpolate(patch, scale_factor=float(s), mode="nearest").view(n, c, self.k**2, h * s, w * s)
        return (patch * mask.unsqueeze(1)).sum(2)


def jpu() -> nn.Module:
    """Separable and dilated convolutions of levels brought to one size."""

    def run(m: Any, x: Tensor) -> Tensor:
        a = m.a(x)
        b = m.b(a)
        y = torch.cat([a, F.interpolate(b, size=a.shape[2:], mode="bilinear", align_corners=True)], 1)
        return torch.cat([d(y) for d in m.dilated], 1)

    return Of(run, a=conv(3, 4, 3, 2), b=conv(4, 8, 3, 2),
              dilated=nn.ModuleList(nn.Sequential(conv(12, 12, padding=d, dilation=d, groups=12), conv(12, 4, 1))
                                    for d in (1, 2, 4)))  # fmt: skip


# ---- Attention of many kinds ----


class NonLocal(nn.Module):
    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem, self.out = conv(3, c), nn.Sequential(conv(c // 2, c, 1), nn.BatchNorm2d(c))
        self.q, self.k, self.v = (conv(c, c // 2, 1) for _ in range(3))
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, _, h, w = x.shape
        q = self.q(x).view(n, -1, h * w).permute(0, 2, 1)
        k, v = self.pool(self.k(x)).flatten(2), self.pool(self.v(x)).flatten(2).permute(0, 2, 1)
        y = torch.matmul(torch.softmax(torch.matmul(q, k), -1), v)
        return x + self.out(y.permute(0, 2, 1).contiguous().view(n, -1, h, w))


class CrissCross(nn.Module):
    """CCNet: attention along a pixel's row and column, with minus infinity where both have it."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem, self.q, self.k, self.v = conv(3, c), conv(c, 2, 1), conv(c, 2, 1), conv(c, c, 1)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        q, k, v = self.q(x), self.k(x), self.v(x)
        h = x.shape[2]
        own = torch.diag(torch.full((h,), float("inf"), dtype=x.dtype)).view(1, h, 1, h)
        down = torch.einsum("nchw,ncgw->nhwg", q, k) - own
        across = torch.einsum("nchw,nchv->nhwv", q, k)
        both = torch.cat([down, across], 3).softmax(3)
        y = torch.einsum("nhwg,ncgw->nchw", both[..., :h], v) + torch.einsum("nhwv,nchv->nchw", both[..., h:], v)
        return x + self.gamma * y


class DualAttention(nn.Module):
    """DANet: between positions, and between channels."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem, self.q, self.k, self.v = conv(3, c), conv(c, 2, 1), conv(c, 2, 1), conv(c, c, 1)
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = torch.bmm(self.q(x).flatten(2).transpose(1, 2), self.k(x).flatten(2)).softmax(-1)
        space = torch.bmm(self.v(x).flatten(2), y.transpose(1, 2)).view(x.shape)
        z = x.flatten(2)
        energy = torch.bmm(z, z.transpose(1, 2))
        energy = (energy.max(-1, keepdim=True)[0].expand_as(energy) - energy).softmax(-1)
        return self.a * space + self.b * torch.bmm(energy, z).view(x.shape) + x


class Windows(nn.Module):
    """Swin: windows, shifted by a roll, under a mask of regions, with relative positions."""

    def __init__(self, c: int = 8, size: int = 4, heads: int = 2, shift: int = 2) -> None:
        super().__init__()
        self.c, self.size, self.heads, self.shift = c, size, heads, shift
        self.patch, self.norm = conv(3, c, 2, 2, padding=0), nn.LayerNorm(c)
        self.qkv, self.out = nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.bias = nn.Parameter(torch.zeros((2 * size - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
        off = (at[:, :, None] - at[:, None]).permute(1, 2, 0) + size - 1
        self.register_buffer("place", off[..., 0] * (2 * size - 1) + off[..., 1])

    def cut(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        s = self.size
        return x.view(n, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, c)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        s, k = self.size, self.shift
        y = F.pad(self.norm(x), (0, 0, 0, -w % s, 0, -h % s))
        hp, wp = y.shape[1:3]
        region = torch.zeros(1, hp, wp, 1)
        for i, rows in enumerate((slice(0, -s), slice(-s, -k), slice(-k, None))):
            for j, columns in enumerate((slice(0, -s), slice(-s, -k), slice(-k, None))):
                region[:, rows, columns] = 3 * i + j
        mask = self.cut(region)[..., 0]
        mask = (mask[:, None] - mask[:, :, None]).ne(0).to(x.dtype) * -100.0
        y = self.cut(torch.roll(y, (-k, -k), (1, 2)))
        q, key, v = self.qkv(y).reshape(-1, s * s, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        a = (q * (c // self.heads) ** -0.5) @ key.transpose(-2, -1)
        a = a + self.bias[self.place.view(-1)].view(s * s, s * s, -1).permute(2, 0, 1).unsqueeze(0)
        a = a.view(n, -1, self.heads, s * s, s * s) + mask[None, :, None]
        y = (a.view(-1, self.heads, s * s, s * s).softmax(-1) @ v).transpose(1, 2).reshape(-1, s * s, c)
        y = self.out(y).view(n, hp // s, wp // s, s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(n, hp, wp, c)
        return x + torch.roll(y, (k, k), (1, 2))[:, :h, :w]


class GRN(nn.Module):
    """ConvNeXt V2's response norm, of a channel's energy beside the others'."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.zeros(1, 1, 1, c)), nn.Parameter(torch.zeros(1, 1, 1, c))

    def forward(self, x: Tensor) -> Tensor:
        g = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        return self.gamma * (x * (g / (g.mean(dim=-1, keepdim=True) + 1e-6))) + self.beta + x


def convnextv2() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = m.two(m.grn(F.gelu(m.one(m.norm(m.depthwise(x).permute(0, 2, 3, 1))))))
        return x + y.permute(0, 3, 1, 2)

    return Of(run, stem=conv(3, 8, 2, 2, padding=0), depthwise=conv(8, 8, 7, groups=8), norm=nn.LayerNorm(8, 1e-6),
              one=nn.Linear(8, 16), grn=GRN(16), two=nn.Linear(16, 8))  # fmt: skip


class MetaFormer(nn.Module):
    """Pooling as a token mixer, scales of layers, and a star of two (StarReLU)."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem, self.pool = conv(3, c, 7, 4, padding=2), nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.norms = nn.ModuleList(nn.GroupNorm(1, c) for _ in range(2))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(c, 1, 1)) for _ in range(2))
        self.one, self.two = conv(c, 4 * c, 1), conv(4 * c, c, 1)
        self.a, self.b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norms[0](x)
        x = x + self.scales[0] * (self.pool(y) - y)
        y = self.two(self.a * F.relu(self.one(self.norms[1](x))) ** 2 + self.b)
        return (x + self.scales[1] * y).mean([-2, -1])


class Axial(nn.Module):
    """torch's own attention, along rows and then along columns."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem = conv(3, c, 2, 2, padding=0)
        self.rows, self.columns = (nn.MultiheadAttention(c, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        y = x.reshape(n * h, w, c)
        x = x + self.rows(y, y, y, need_weights=False)[0].view(n, h, w, c)
        y = x.transpose(1, 2).reshape(n * w, h, c)
        y = self.columns(y, y, y, need_weights=False)[0].view(n, w, h, c).transpose(1, 2)
        return (x + y).permute(0, 3, 1, 2)


def transunet() -> nn.Module:
    """Convolutions, tokens of space through torch's encoder, convolutions."""

    def run(m: Any, x: Tensor) -> Tensor:
        a = m.down(x)
        n, c, h, w = a.shape
        tokens = m.encoder(a.flatten(2).transpose(1, 2) + m.position)
        return m.up(torch.cat([a, tokens.transpose(1, 2).reshape(n, c, h, w)], 1))

    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
    made = Of(run, down=nn.Sequential(conv(3, 8, 3, 2), nn.GELU(), conv(8, 8, 3, 2)), encoder=layer,
              up=nn.Sequential(nn.ConvTranspose2d(16, 8, 4, 4), conv(8, 2)))  # fmt: skip
    made.position = nn.Parameter(torch.zeros(1, 42, 8))
    return made


# ---- Where a pixel reads elsewhere ----


def deformable() -> nn.Module:
    """A deformable convolution, modulated: each tap of each filter samples where another convolution says."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.stem(x)
        h, w = y.shape[2:]
        offset, mask = m.offset(y), m.mask(y).sigmoid() * 2
        rows, columns = torch.meshgrid(torch.arange(h, dtype=x.dtype), torch.arange(w, dtype=x.dtype), indexing="ij")
        taps = []
        for k in range(9):
            at = (columns + k % 3 - 1 + offset[:, 2 * k + 1], rows + k // 3 - 1 + offset[:, 2 * k])
            at = torch.stack([(2 * at[0] + 1) / w - 1, (2 * at[1] + 1) / h - 1], 3)
            taps.append(F.grid_sample(y, at, align_corners=False) * mask[:, k : k + 1])
        return m.conv(torch.cat(taps, 1))

    return Of(run, stem=conv(3, 4), offset=conv(4, 18), mask=conv(4, 9), conv=conv(36, 4, 1))


def warped() -> nn.Module:
    """PWC-Net: the second half of the channels, sampled where a flow points."""

    def run(m: Any, x: Tensor) -> Tensor:
        a, b = m.net(x[:, :3]), m.net(x[:, 3:])
        flow = m.flow(torch.cat([a, b], 1))
        h, w = a.shape[2:]
        rows, columns = torch.meshgrid(torch.arange(h, dtype=x.dtype), torch.arange(w, dtype=x.dtype), indexing="ij")
        at = torch.stack([columns, rows]) + flow
        at = torch.stack([2 * at[:, 0] / (w - 1) - 1, 2 * at[:, 1] / (h - 1) - 1], 3)
        return m.out(torch.cat([a, F.grid_sample(b, at, align_corners=True)], 1))

    return Of(run, net=conv(3, 4), flow=conv(8, 2), out=conv(8, 2))


def dysample() -> nn.Module:
    """Upsampling by sampling points."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        h, w = x.shape[2:]
        off = F.pixel_shuffle(m.offset(x) * 0.25, 2).permute(0, 2, 3, 1)
        rows = (torch.arange(2 * h, dtype=x.dtype) + 0.5) / h - 1
        columns = (torch.arange(2 * w, dtype=x.dtype) + 0.5) / w - 1
        base = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1)
        return F.grid_sample(x, base + off, align_corners=False, padding_mode="border")

    return Of(run, stem=conv(3, 4), offset=conv(4, 8, 1))


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
MORE_WRITTEN: Mapping[str, Make] = {
    name: lambda make=make, shape=shape: (make(), shape)
    for name, (make, shape) in {
        "yolo": (yolo, EVEN),
        "darknet": (darknet, EVEN),
        "bifpn": (BiFPN, SMALL),
        "fcos": (fcos, SMALL),
        "centernet": (centernet, SMALL),
        "hrnet": (HRNet, (3, 3, 26, 30)),
        "u2net_whole": (U2Net, (3, 3, 27, 22)),
        "aspp": (aspp, SMALL),
        "carafe": (Carafe, (3, 3, 13, 10)),
        "jpu": (jpu, SMALL),
        "non_local": (NonLocal, EVEN),
        "criss_cross": (CrissCross, (3, 3, 13, 10)),
        "dual_attention": (DualAttention, (3, 3, 13, 10)),
        "swin_block": (Windows, SMALL),
        "convnextv2_block": (convnextv2, SMALL),
        "metaformer": (MetaFormer, (3, 3, 50, 45)),
        "axial": (Axial, SMALL),
        "transunet": (transunet, (3, 3, 24, 28)),
        "deformable": (deformable, (3, 3, 13, 10)),
        "warped": (warped, (3, 6, 13, 10)),
        "dysample": (dysample, (3, 3, 13, 10)),
        "spade": (Spade, SMALL),
        "glow": (Glow, EVEN),
        "realnvp": (RealNVP, SMALL),
        "vqvae": (VQVAE, EVEN),
        "karras": (Karras, SMALL),
        "hifigan": (hifigan, (3, 6, 14)),
        "period_discriminator": (period_discriminator, (3, 1, 50)),
        "encodec": (Encodec, (3, 1, 51)),
        "demucs": (Demucs, (3, 2, 84)),
        "conv_tasnet": (ConvTasNet, (3, 1, 64)),
        "sincnet": (SincNet, (3, 1, 64)),
        "tcn": (tcn, (3, 4, 29)),
        "inception_time": (inception_time, (3, 3, 50)),
        "wave_unet": (wave_unet, (3, 2, 42)),
        "fno": (Spectral, (3, 2, 14, 10)),
        "periodic": (Wrapped, (3, 2, 14, 10)),
        "pressure": (pressure, (3, 2, 18, 14)),
        "vnet3d": (vnet3d, (2, 1, 8, 10, 6)),
        "p3d": (p3d, (2, 3, 5, 14, 10)),
        "blur_pool": (BlurPool, SMALL),
        "soft_pool": (SoftPool, SMALL),
        "frn": (FRN, SMALL),
        "shuffle_attention": (ShuffleAttention, SMALL),
        "reparametrised": (reparametrised, SMALL),
        "coordinate_attention": (coordinate_attention, SMALL),
        "eca_srm": (eca_srm, SMALL),
        "kan": (KAN, SMALL),
        "siren": (siren, (3, 3, 13, 10)),
        "ssim": (ssim, SMALL),
    }.items()
}
