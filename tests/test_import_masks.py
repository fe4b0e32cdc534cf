"""What seems to depend on data: elements picked by masks, numbers that modules hold as buffers, checks of arguments."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks_on_ranks import check, draw_parameters, imported, random_input
from torch import Tensor, nn

from convgen.errors import InputError
from convgen.spec.aten.describe import describe

GRIDS: tuple[dict[str, int], ...] = ({"H": 2, "W": 2}, {"N": 2, "C": 2}, {"H": 3}, {"C": 2, "W": 2})


class Masked(nn.Module):
    """What `of` makes of a convolution's result, the input and a mask of their shape."""

    def __init__(self, of: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.of = nn.Conv2d(3, 3, 3, padding=1), of

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.of(y, x, y > 0.1)


def hue(y: Tensor, x: Tensor, m: Tensor) -> Tensor:
    """As colour transforms have it: the mask is computed twice."""
    most, least = y.max(1)[0], y.min(1)[0]
    h = torch.zeros_like(most)
    h[y[:, 2] == most] = 4.0 + ((y[:, 0] - y[:, 1]) / (most - least))[y[:, 2] == most]
    h[y[:, 1] == most] = 2.0 + ((y[:, 2] - y[:, 0]) / (most - least))[y[:, 1] == most]
    h[y[:, 0] == most] = ((y[:, 1] - y[:, 2]) / (most - least))[y[:, 0] == most] % 6
    h[y.min(1)[0] == most] = 0.0
    return h / 6


def put(x: Tensor, m: Tensor, value: Tensor) -> Tensor:
    x = x.clone()
    x[m] = value
    return x


def rows(y: Tensor, x: Tensor, m: Tensor) -> Tensor:
    """A mask of the first dimensions; the others are picked whole."""
    return y.permute(0, 2, 3, 1)[m[:, 0]].square().mean() + put(
        x.permute(0, 2, 3, 1), m[:, 0], y.permute(0, 2, 3, 1)[m[:, 0]]
    )


PICKED: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "hue": hue,
    "rows": rows,
    "mean": lambda y, x, m: ((y[m] - x[m]) ** 2).mean(),
    "loss": lambda y, x, m: F.mse_loss(y[m], x[m]),
    "sum of a loss": lambda y, x, m: F.smooth_l1_loss(y[m], x[m], reduction="sum"),
    "each of a loss": lambda y, x, m: F.l1_loss(y[m], x[m], reduction="none").exp().mean(),
    "of classes": lambda y, x, m: F.binary_cross_entropy_with_logits(y[m], (x[m] > 0).to(y.dtype)),
    "selected": lambda y, x, m: torch.masked_select(y, m).abs().mean() / m.sum(),
    "in place": lambda y, x, m: put(y, ~m, -y[~m]),
    "no derivative elsewhere": lambda y, x, m: put(y, m, torch.log(y[m]) + torch.sqrt(y[m] - 0.1)) + (1 / y[m]).sum(),
    "another mask": lambda y, x, m: put(y, y > 0.1, y[m] * 2),
}


@pytest.mark.parametrize("kind", PICKED)
def test_what_masks_pick(kind: str) -> None:
    module = Masked(PICKED[kind]).double()
    draw_parameters(module, seed=3)
    given = imported(module, random_input((3, 3, 5, 6)))
    assert not describe(given.graph.at(3)).whole
    for grid in Random(kind).sample(GRIDS, 2):
        found = check(given, grid)
        assert found.right, (grid, found)


REFUSED: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "as it is": lambda y, x, m: y[m],
    "the largest": lambda y, x, m: y[m].max(),
    "put by another mask": lambda y, x, m: put(y, m, x[x > 0][:1]),
    "elsewhere": lambda y, x, m: put(y, m, y.flip(0)[y.flip(0) > 0.1]),
    "with a tensor": lambda y, x, m: (y[m] * y[0, 0, 0, 0]).sum(),
    "drawn": lambda y, x, m: put(y, torch.rand_like(y) > 0.5, y[torch.rand_like(y) > 0.5]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_depends_on_how_many_are_picked_is_refused(kind: str) -> None:
    with pytest.raises(InputError, match=r"depends on data|data-dependent|checks|can't be imported|can't trace"):
        imported(Masked(REFUSED[kind]).double(), random_input((3, 3, 5, 6)))


class Strided(nn.Module):
    """Pads as far as its buffers say."""

    kernel: Tensor
    stride: Tensor

    def __init__(self, kernel: int, stride: int, *, persistent: bool = False, counts: bool = False) -> None:
        super().__init__()
        self.conv, self.counts = nn.Conv1d(2, 4, kernel, stride), counts
        self.register_buffer("kernel", torch.tensor(kernel), persistent=persistent)
        self.register_buffer("stride", torch.tensor(stride), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel, self.stride
        if self.counts:
            stride.add_(1)
        frames = torch.ceil((x.shape[-1] - kernel) / stride + 1).to(torch.int64)
        return self.conv(F.pad(x, (0, int((frames - 1) * stride + kernel - x.shape[-1]))))


@pytest.mark.parametrize("seed", range(3))
def test_numbers_that_a_module_holds_are_settings(seed: int) -> None:
    draw = Random(seed)
    stride = draw.randint(2, 4)
    module = nn.Sequential(Strided(stride + draw.randint(0, 3), stride), nn.ReLU()).double()
    draw_parameters(module, seed)
    kind, buffers = type(module[0]), dict(module.named_buffers())
    given = imported(module, random_input((3, 2, draw.randint(13, 19)), seed))
    assert type(module[0]) is kind
    assert all(b is buffers[n] for n, b in module.named_buffers()) and len(buffers) == 2
    assert given.graph.inputs[0].shape[0] != 3  # open
    for grid in ({"W": 2}, {"W": 3}, {"N": 2, "C": 2}):
        assert check(given, grid).right


@pytest.mark.parametrize("given", [{"persistent": True}, {"counts": True}])
def test_numbers_that_change_are_no_settings(given: dict[str, bool]) -> None:
    with pytest.raises(InputError, match="data-dependent"):
        imported(Strided(5, 2, **given).double(), random_input((3, 2, 14)))


def test_distributions_are_made_without_asking_for_values() -> None:
    def loss(y: Tensor, x: Tensor, m: Tensor) -> Any:
        q = torch.distributions.Normal(y, F.softplus(x) + 0.1)
        p = torch.distributions.Normal(torch.zeros_like(y), torch.ones_like(y))
        return q.mean, torch.distributions.kl_divergence(q, p).sum(), q.log_prob(x).mean()

    checks = torch.distributions.Distribution._validate_args
    module = Masked(loss).double()
    draw_parameters(module)
    given = imported(module, random_input((3, 3, 5, 6)))
    assert torch.distributions.Distribution._validate_args is checks
    for grid in GRIDS[:2]:
        assert check(given, grid).right


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_gaussian_losses_do_not_look_for_variances_below_zero(reduction: str) -> None:
    def loss(y: Tensor, x: Tensor, m: Tensor) -> Tensor:
        return F.gaussian_nll_loss(y, x, y.square(), full=reduction == "sum", eps=0.05, reduction=reduction)

    module = Masked(loss).double()
    draw_parameters(module)
    given = imported(module, random_input((3, 3, 5, 6)))
    for grid in GRIDS[:2]:
        assert check(given, grid).right


def test_a_module_that_fails_by_itself_is_said_to() -> None:
    with pytest.raises(InputError, match=r"fails on these inputs: .*Kernel size"):
        imported(nn.Conv2d(3, 4, 9), random_input((2, 3, 4, 4)).float())
