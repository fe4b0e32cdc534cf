"""What people write inside of networks: volumes filled in place, loops, sorted losses, masks, points of heat maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.makers import Make, small
from zoo.written.papers import Of, conv


def stereo() -> nn.Module:
    """PSMNet's: features of two images at each disparity, a 3-D convolution, the expected disparity."""

    def run(m: Any, x: Tensor) -> Tensor:
        left, right = m.features(x[:, :3]), m.features(x[:, 3:])
        n, c, h, w = left.shape
        cost = x.new_zeros(n, 2 * c, 4, h, w)
        for d in range(4):
            cost[:, :c, d, :, d:] = left[..., d:]
            cost[:, c:, d, :, d:] = right[..., : w - d]
        share = F.softmax(m.volume(cost).squeeze(1), 1)
        return (share * torch.arange(4, dtype=x.dtype).view(1, 4, 1, 1)).sum(1)

    return Of(run, features=conv(3, 4), volume=nn.Conv3d(8, 1, 3, padding=1))


def automaton() -> nn.Module:
    """A neural cellular automaton: Sobel filters around a torus, cells that live where a neighbour does."""

    def run(m: Any, x: Tensor) -> Tensor:
        sobel = torch.tensor([[1.0, 2, 1], [0, 0, 0], [-1, -2, -1]], dtype=x.dtype) / 8
        weight = torch.stack([sobel, sobel.t()])[:, None].repeat(x.shape[1], 1, 1, 1)
        for _ in range(3):
            seen = F.conv2d(F.pad(x, (1, 1, 1, 1), "circular"), weight, groups=x.shape[1])
            step = m.out(F.relu(m.mix(torch.cat([x, seen], 1))))
            x = (x + step) * (F.max_pool2d(x[:, 2:3], 3, 1, 1) > 0.1)
        return x

    return Of(run, mix=conv(9, 8, 1), out=conv(8, 3, 1))


def skeleton() -> nn.Module:
    """clDice's soft skeleton of a volume: erosions and dilations by pooling."""

    def erode(y: Tensor) -> Tensor:
        parts = [-F.max_pool3d(-y, k, 1, [n // 2 for n in k]) for k in ((3, 1, 1), (1, 3, 1), (1, 1, 3))]
        return torch.min(torch.min(parts[0], parts[1]), parts[2])

    def run(m: Any, x: Tensor) -> Tensor:
        y = torch.sigmoid(m.net(x))
        found = torch.zeros_like(y)
        for _ in range(3):
            edge = F.relu(y - F.max_pool3d(erode(y), 3, 1, 1))
            found, y = found + F.relu(edge - found * edge), erode(y)
        return found

    return Of(run, net=nn.Conv3d(1, 2, 3, padding=1))


def vlad() -> nn.Module:
    """NetVLAD."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = F.normalize(m.net(x), dim=1)
        share = F.softmax(m.assign(y), 1).flatten(2)
        apart = y.flatten(2)[:, None] - m.centres.weight[None, :, :, None]
        return F.normalize(F.normalize((apart * share[:, :, None]).sum(-1), dim=2).flatten(1), dim=1)

    return Of(run, net=conv(3, 4), assign=conv(4, 5, 1), centres=nn.Embedding(5, 4))


def sinkhorn() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.net(x).flatten(2)
        k = y.transpose(1, 2) @ y / 4
        for _ in range(3):
            k = k - torch.logsumexp(k, 2, True)
            k = k - torch.logsumexp(k, 1, True)
        return (k.exp() @ y.transpose(1, 2)).transpose(1, 2).view(x.shape[0], 4, *x.shape[2:])

    return Of(run, net=conv(3, 4))


def rotations() -> nn.Module:
    """A group's convolution: one filter in four rotations."""

    def run(m: Any, x: Tensor) -> Tensor:
        weight = torch.cat([torch.rot90(m.net.weight, k, (2, 3)) for k in range(4)])
        return m.out(F.conv2d(x, weight, padding=1).view(x.shape[0], 4, 4, *x.shape[2:]).max(1)[0])

    return Of(run, net=conv(3, 4), out=conv(4, 3))


def selective() -> nn.Module:
    """Mamba's scan, written as a loop."""

    def run(m: Any, x: Tensor) -> Tensor:
        y, step = m.net(x), F.softplus(m.step(x))
        b, c = m.both(x).chunk(2, 1)
        held, made = x.new_zeros(*y.shape[:2], 3), list[Tensor]()
        for t in range(y.shape[-1]):
            held = torch.exp(-step[..., t, None] * m.decay.weight.exp()) * held
            held = held + (step * y)[..., t, None] * b[:, None, :, t]
            made.append((held * c[:, None, :, t]).sum(-1))
        return torch.stack(made, -1) * F.silu(y)

    return Of(
        run,
        net=nn.Conv1d(3, 4, 3, padding=1),
        step=nn.Conv1d(3, 4, 1),
        both=nn.Conv1d(3, 6, 1),
        decay=nn.Embedding(4, 3),
    )


def points() -> nn.Module:
    """Expected places of heat maps, and Gaussians there."""

    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.net(x)
        share = F.softmax(y.flatten(2) * 3, -1).view_as(y)
        rows, columns = (torch.linspace(-1, 1, n, dtype=x.dtype) for n in y.shape[2:])
        v, u = torch.meshgrid(rows, columns, indexing="ij")
        at = torch.stack([(share * u).sum((2, 3)), (share * v).sum((2, 3))], -1)
        drawn = torch.exp(-((u - at[..., 0, None, None]) ** 2 + (v - at[..., 1, None, None]) ** 2) / 0.1)
        return at, m.out(drawn)

    return Of(run, net=conv(3, 4), out=conv(4, 3))


def in_place() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, :, ::2, 1::2] = m.net(x)[:, :, ::2, 1::2]
        y[:, 1] += y[:, 0]
        y[..., 0] *= 2
        y[:, [0, 2]] = y[:, [2, 0]]
        return m.net(y)

    return Of(run, net=conv(3, 3))


def sizes() -> nn.Module:
    """Down by pools whose last window is partial, up to whatever was there, in every mode of interpolation."""

    def run(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        y, each = m.net(x), list[Tensor]()
        for _ in range(3):
            each.append(y)
            y = F.avg_pool2d(y, 2, ceil_mode=True, count_include_pad=False)
        for one in reversed(each):
            y = F.interpolate(y, size=one.shape[-2:], mode="bicubic") + one
        modes = [F.interpolate(y, size=(5, 7), mode=mode) for mode in ("area", "nearest-exact")]
        return (F.interpolate(y, scale_factor=1.5, mode="bilinear", antialias=True), *modes)

    return Of(run, net=conv(3, 4))


def lovasz() -> nn.Module:
    """Lovasz's hinge: errors of all pixels, sorted."""

    def run(m: Any, x: Tensor) -> Tensor:
        y, truth = m.net(x).flatten(), (x[:, 0] > 0).to(x.dtype).flatten()
        errors, order = torch.sort(1 - y * (2 * truth - 1), descending=True)
        truth = truth[order]
        both = truth.sum() - truth.cumsum(0)
        jaccard = 1 - both / (truth.sum() + (1 - truth).cumsum(0))
        return F.relu(errors) @ torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])

    return Of(run, net=conv(3, 1))


def hue() -> nn.Module:
    """A colour transform with masks, and a loss of what one picks."""

    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.net(x)
        most, least = y.max(1)[0], y.min(1)[0]
        h = torch.zeros_like(most)
        for k, (i, j) in enumerate(((1, 2), (2, 0), (0, 1))):
            h[y[:, k] == most] = 2.0 * k + ((y[:, i] - y[:, j]) / (most - least))[y[:, k] == most]
        seen = most > 0.2
        return m.out(torch.stack([h / 6, most, least], 1)), F.mse_loss(h[seen], x[:, 0][seen])

    return Of(run, net=conv(3, 3), out=conv(3, 3))


SHAPE = (3, 3, 13, 10)
# fmt: off
IDIOMS: Mapping[str, Make] = small({
    "stereo": (stereo, (2, 6, 13, 14)), "automaton": (automaton, SHAPE), "skeleton": (skeleton, (2, 1, 6, 9, 7)),
    "vlad": (vlad, SHAPE), "sinkhorn": (sinkhorn, (2, 3, 7, 5)), "rotations": (rotations, SHAPE),
    "selective": (selective, (3, 3, 9)), "points": (points, SHAPE), "in_place": (in_place, SHAPE),
    "sizes": (sizes, SHAPE), "lovasz": (lovasz, SHAPE), "hue": (hue, SHAPE),
})
