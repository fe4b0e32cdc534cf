"""What one rank computes goes over its activations as often as the module does, counted by calls of ATen."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from scripts import bench_script
from torch import Tensor, nn


class Rows(nn.Module):
    """[ConvNeXt]'s block: a convolution, products of channels that are moved to the end, a scale, a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.scale = nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.down(nn.functional.gelu(self.up(y))).permute(0, 3, 1, 2)
        return x + self.scale * y


class Turned(nn.Module):
    """Channels that are moved to the end and back, with a product element by element between: no copy is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(8, 8, 3, padding=1), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv((x.permute(0, 2, 3, 1) * self.scale).permute(0, 3, 1, 2))


class Sums(nn.Module):
    """A convolution whose result a sum and a rectifier change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y += x
        return torch.relu_(y)


@pytest.fixture(scope="module")
def bench() -> Any:
    return bench_script("one_rank")


COPIES = {  # of activations, that ATen makes within its calls, too
    (Rows, True): 3,  # norms' operands, of another order, and the loss's gradient, one number spread
    (Rows, False): 2,
    (Turned, True): 1,
    (Turned, False): 0,
    (Sums, True): 1,
    (Sums, False): 0,
}


@pytest.mark.parametrize("training", [True, False], ids=["step", "inference"])
@pytest.mark.parametrize("kind", [Rows, Turned, Sums])
def test_a_rank_passes_over_no_activation_that_the_module_does_not(bench: Any, kind: Any, training: bool) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Conv2d(8, 8, 1), kind(), kind()).train(training), torch.randn(4, 8, 12, 12)
    with bench.on_one_rank(module, x) as (ours, block):
        theirs, mine = bench.passes((module, ours), (x, block), training)
    assert mine - theirs == Counter(clone=COPIES[kind, training])


def test_a_rectifier_writes_over_a_sum_that_was_made_in_place(bench: Any) -> None:
    """In evaluation; such a sum keeps its type by a cast, which gives the sum itself."""
    module, x, names = Sums().eval(), torch.randn(2, 8, 6, 6), list[str]()

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with bench.on_one_rank(module, x) as (ours, block), torch.no_grad(), Names():
        made = ours(block)
    assert "relu_" in names and "relu" not in names
    torch.testing.assert_close(made, module(x))
