"""Networks from PyTorch modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from convgen.errors import InputError
from convgen.spec.from_torch import network_from_module


class Residual(nn.Module):
    """A residual block, a depthwise convolution, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.depthwise = nn.Conv2d(8, 8, 3, padding="same", groups=8)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(self.depthwise(x) + x)
        x = self.pool(torch.cat([x, x * 1 if False else functional.relu(x)], dim=1))
        x = functional.adaptive_avg_pool2d(x, 1)
        return self.head(functional.dropout(x.flatten(1), 0.5, training=self.training))


def test_residual_depthwise_and_linear() -> None:
    network = network_from_module(Residual(), (torch.zeros(4, 3, 16, 16),), name="res")
    assert [(n.name, n.kind, n.inputs, n.shape) for n in network.nodes] == [
        ("input", "input", (), (4, 3, 16, 16)),
        ("stem_0", "conv", ("input",), (4, 8, 8, 8)),
        ("stem_1", "batch_norm", ("stem_0",), (4, 8, 8, 8)),
        ("stem_2", "relu", ("stem_1",), (4, 8, 8, 8)),
        ("depthwise", "conv", ("stem_2",), (4, 8, 8, 8)),
        ("add", "add", ("depthwise", "stem_2"), (4, 8, 8, 8)),
        ("relu_1", "relu", ("add",), (4, 8, 8, 8)),
        ("relu_2", "relu", ("relu_1",), (4, 8, 8, 8)),
        ("cat", "concat", ("relu_1", "relu_2"), (4, 16, 8, 8)),
        ("pool", "max_pool", ("cat",), (4, 16, 4, 4)),
        ("adaptive_avg_pool2d", "global_avg_pool", ("pool",), (4, 16, 1, 1)),
        ("flatten", "flatten", ("adaptive_avg_pool2d",), (4, 16)),
        ("dropout", "dropout", ("flatten",), (4, 16)),
        ("head", "linear", ("dropout",), (4, 5)),
    ]
    conv = network.node["depthwise"].conv
    assert conv is not None
    assert (conv.groups, conv.bias, conv.spatial[0].pad_lo) == (8, True, 1)
    assert sum(node.weights for node in network.nodes) == sum(p.numel() for p in Residual().parameters())


def test_three_dimensions() -> None:
    module = nn.Sequential(
        nn.Conv3d(2, 6, (3, 3, 1), stride=(1, 2, 1), padding=(1, 1, 0), dilation=(1, 1, 1), groups=2),
        nn.BatchNorm3d(6),
        nn.ReLU(inplace=True),
        nn.AvgPool3d((2, 2, 1)),
        nn.Conv3d(6, 4, 1),
    )
    network = network_from_module(module.bfloat16(), (torch.zeros(2, 2, 6, 8, 5, dtype=torch.bfloat16),))
    assert network.dtype == "bfloat16"
    assert [n.shape for n in network.nodes[1:]] == [(2, 6, 6, 4, 5)] * 3 + [(2, 6, 3, 2, 5), (2, 4, 3, 2, 5)]


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)
        self.up = nn.Upsample(scale_factor=2)
        self.scale = nn.Parameter(torch.ones(1, 4, 8, 8))
        self.pool = nn.MaxPool2d(2, ceil_mode=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.up(torch.sigmoid(self.norm(x + self.scale) + 1)))


def test_all_that_is_not_understood_in_one_error() -> None:
    with pytest.raises(InputError) as caught:
        network_from_module(Strange().to(torch.float32), (torch.zeros(1, 4, 8, 8),))
    said = str(caught.value)
    assert "Strange has 6 operators that a network can't say" in said
    for part in (
        "group_norm.default",
        "at norm",
        "upsample_nearest2d",
        "at up",
        "sigmoid",
        "with a parameter",
        "ceil_mode",
    ):
        assert part in said
    assert "of one tensor and a number" in said


def test_what_torch_cannot_trace() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(InputError, match="can't trace Branch"):
        network_from_module(Branch(), (torch.zeros(1, 4, 8, 8),))
    with pytest.raises(InputError, match="one input"):
        network_from_module(Branch(), (torch.zeros(1), torch.zeros(1)))


class Calls(nn.Module):
    """A convolution from 3 channels to 3, a linear layer on its last dimension, and what a function does with them."""

    def __init__(self, call: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.call, self.conv, self.linear = call, nn.Conv2d(3, 3, 3, padding=1), nn.Linear(1, 7)

    def forward(self, x: Tensor) -> Any:
        return self.call(self, x)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m, x: m.conv(m.conv(x)), "with the weights of conv, which a network would count twice; at conv_2"),
        (lambda m, x: functional.conv2d(x, m.conv.weight * 2), "with weights that are computed"),
        (lambda m, x: functional.conv2d(m.conv.weight, x, padding=4), "with weights that are computed"),
        (lambda m, x: m.linear(x.mean((2, 3), keepdim=True)), "of [2, 3, 1, 1], not of samples and features"),
        (lambda m, x: m.conv(x).mean(dim=None), "over dimensions [0, 1, 2, 3], not over space"),
        (lambda m, x: functional.batch_norm(m.conv(x), None, None, training=True), "without scale and shift"),
        (lambda m, x: (y := m.conv(x)) + y, "of a tensor and itself"),
        (lambda m, x: (y := m.conv(x), torch.relu(y)), "2 of them, conv, relu; a network has one"),
    ],
)
def test_what_would_be_counted_wrongly(call: Callable[[Any, Tensor], Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        network_from_module(Calls(call), (torch.zeros(2, 3, 9, 9),))
    assert said in str(caught.value)
    assert "Calls has 1 operator that" in str(caught.value)
