"""Detection and dense features, as papers and their public code write them, small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.makers import Make, small
from zoo.written.papers import Of, Sum, conv

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


SMALL = (3, 3, 26, 22)
EVEN = (3, 3, 24, 20)
# fmt: off
DETECTION: Mapping[str, Make] = small({
    "yolo": (yolo, EVEN), "darknet": (darknet, EVEN), "bifpn": (BiFPN, SMALL), "fcos": (fcos, SMALL),
    "centernet": (centernet, SMALL), "hrnet": (HRNet, (3, 3, 26, 30)), "u2net_whole": (U2Net, (3, 3, 27, 22)),
    "aspp": (aspp, SMALL), "carafe": (Carafe, (3, 3, 13, 10)), "jpu": (jpu, SMALL),
})
