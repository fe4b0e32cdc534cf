"""Buffers that networks change: in which order, without gradients, and stored as they were."""

from __future__ import annotations

import pytest
import torch
from networks_on_ranks import check, imported
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("doubles")


class Changes(nn.Module):
    """Reads old values after the new ones are made, new ones through a gradient, and exchanges two buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.register_buffer("last", torch.randn(2, 3, 6, 5))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("average", torch.randn(4, 3, 3, 3))
        self.register_buffer("one", torch.randn(4))
        self.register_buffer("other", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x + self.last.mean()
            self.last.copy_(x)
            self.average.mul_(0.9).add_(self.w, alpha=0.1)
            old = self.one.clone()
            self.one.copy_(self.other)
            self.other.copy_(old)
        z = nn.functional.conv2d(y + x, self.w + self.average, padding=1)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(z.mean((0, 2, 3)))
        return z * (self.mean + self.one)[:, None, None]


@pytest.mark.parametrize("grid", [{"N": 2, "C": 2}, {"H": 2, "W": 2}])
def test_new_values_when_the_old_ones_were_read(grid: dict[str, int]) -> None:
    found = check(imported(Changes(), torch.randn(2, 3, 6, 5)), grid, steps=2)
    assert found.right, found


class WantsOld(nn.Module):
    """Wants old values behind new ones: as outputs, by views that it has made before, and for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer("scale", torch.randn(4))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("square", torch.randn(5, 5))
        self.register_buffer("count", torch.randn(2))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mean, padded = self.mean.view(1, 4, 1, 1), nn.functional.pad(self.count, (0, 0))
        y = self.conv(x) * self.scale.clone().view(1, 4, 1, 1)
        new = 0.9 * self.mean + 0.1 * y.mean((0, 2, 3)).detach()
        z = nn.functional.batch_norm(y - mean, self.norm.running_mean.clone(), self.norm.running_var.clone())
        z = z + self.norm(y)
        self.mean.copy_(new)
        self.scale.mul_(0.9)
        self.square.copy_(self.square.t().clone())
        self.count.add_(1)
        return z, padded


@pytest.mark.parametrize("grid", [{"N": 2, "C": 2}, {"H": 2, "W": 2}])
def test_old_values_that_are_wanted_once_there_are_new_ones(grid: dict[str, int]) -> None:
    found = check(imported(WantsOld(), torch.randn(2, 3, 6, 5)), grid, steps=2)
    assert found.right, found


@pytest.mark.parametrize("grid", [{"N": 2, "C": 2}, {"H": 3}])
def test_running_statistics_of_instance_norms(grid: dict[str, int]) -> None:
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True, momentum=0.3, track_running_stats=True)
    )
    found = check(imported(module, torch.randn(3, 2, 7, 6)), grid, steps=2)
    assert found.right, found


@pytest.mark.parametrize("grid", [{"F": 3, "N": 2}, {"C": 3, "H": 2}])
@pytest.mark.parametrize("train", [True, False])
def test_batch_norms_of_fewer_channels_than_ranks(grid: dict[str, int], train: bool) -> None:
    """A rank without channels joins in the moments of none."""
    module = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Tanh(), nn.Conv2d(2, 6, 3))
    found = check(imported(module, torch.randn(4, 3, 7, 6), train=train), grid, steps=2)
    assert found.right, found


class Lasts(nn.Module):
    """Old values that are read behind the new ones, or for a gradient: by a product, as a view, as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))
        self.register_buffer("scale", torch.rand(4) + 0.5)
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("turn", torch.randn(4, 4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        scale, seen = self.scale[:, None, None], self.seen.clone()
        left, right = self.shift.chunk(2)
        y = torch.einsum("nchw,cd->ndhw", x * self.w[:, None, None], self.turn.clone())
        z = (y * scale + torch.cat([right, left])[:, None, None]).sin()
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean((0, 2, 3))
            self.shift = torch.cat([right, left])
            self.turn = self.turn.t()
            self.seen += 1
        return z * scale, left * 2, right + 1, seen


@pytest.mark.parametrize("grid", [{"N": 2, "C": 2}, {"H": 2, "W": 2}])
def test_old_values_last_behind_the_new_ones(grid: dict[str, int]) -> None:
    module = Lasts()
    given = imported(module, torch.randn(2, 4, 6, 5))
    assert given.graph.modes == ("train", "eval")
    found = check(given, grid, steps=2)
    assert found.right, found
    module.eval()
    assert check(given, grid).right
