"""Attention of many kinds, and pixels that read elsewhere, as papers and their public code write them, small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.makers import Make, small
from zoo.written.papers import Of, conv

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


SMALL = (3, 3, 26, 22)
EVEN = (3, 3, 24, 20)
# fmt: off
ATTENTION: Mapping[str, Make] = small({
    "non_local": (NonLocal, EVEN), "criss_cross": (CrissCross, (3, 3, 13, 10)),
    "dual_attention": (DualAttention, (3, 3, 13, 10)), "swin_block": (Windows, SMALL),
    "convnextv2_block": (convnextv2, SMALL), "metaformer": (MetaFormer, (3, 3, 50, 45)), "axial": (Axial, SMALL),
    "transunet": (transunet, (3, 3, 24, 28)), "deformable": (deformable, (3, 3, 13, 10)),
    "warped": (warped, (3, 6, 13, 10)), "dysample": (dysample, (3, 3, 13, 10)),
})
