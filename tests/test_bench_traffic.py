"""What a step moves, counted: no more than it did, less than plain torch's, and right for what is known by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scripts import bench_script
from torch import Tensor, nn


class Bottlenecks(nn.Module):
    """Of [ResNet]: a first one that projects, and a second one."""

    def __init__(self, c: int = 64) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(i, f, k, padding=k // 2, bias=False)
            for i, f, k in ((c, c, 1), (c, c, 3), (c, 4 * c, 1), (c, 4 * c, 1), (4 * c, c, 1), (c, c, 3), (c, 4 * c, 1))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(conv.out_channels) for conv in self.convs)

    def forward(self, x: Tensor) -> Tensor:
        for first in (0, 4):
            branch = [first, first + 1, first + 2]
            y = x
            for n in branch:
                y = self.norms[n](self.convs[n](y))
                if n == branch[-1]:
                    y = y + (x if first else self.norms[3](self.convs[3](x)))
                y = torch.relu(y)
            x = y
        return x


@pytest.fixture(scope="module")
def bench() -> Any:
    return bench_script("step_traffic")


def test_bytes_of_calls_are_those_by_hand(bench: Any) -> None:
    """A convolution with a norm and a rectifier behind it, forward and backward: passes over x and y in 2 bytes."""
    module = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    found = bench.plain(module, [(4, 8, 10, 10)], training=True, dtype=torch.bfloat16)
    x, y, w = 4 * 8 * 100 * 2, 4 * 16 * 100 * 2, 8 * 16 * 2
    kinds = {kind: c["moved"] for kind, c in found.kinds.items()}
    assert kinds["convolutions"] == (x + y + w) + (y + w + x) + (y + x + w)
    assert kinds["norms"] == 3 * y + 5 * y
    assert found.kinds["norms"]["launches"] == 5
    assert 4 * y < kinds["elementwise"] < 4 * y + 100  # relu; its gradient, of a result and a number that is spread
    assert found.total("least") < found.moved
    assert not found.formats


@pytest.mark.parametrize(("statistics", "most"), [("local", 0.765), ("global", 0.765)], ids=["local", "global"])
def test_a_step_moves_less_than_plain_torch(bench: Any, statistics: str, most: float) -> None:
    """Bounds may only fall."""
    shape = (8, 64, 28, 28)
    ours = bench.compiled(Bottlenecks(), [shape], {"N": 2}, statistics, "bfloat16", training=True)
    plain = bench.plain(Bottlenecks(), [(4, *shape[1:])], training=True, dtype=torch.bfloat16)
    alone = ours.moved - ours.kinds["messages"]["moved"]
    assert alone <= most * plain.moved, alone / plain.moved
    assert ours.kinds["norms"]["moved"] <= 0.66 * plain.kinds["norms"]["moved"]
    norms = sum(c["launches"] for name, c in ours.calls.items() if name.startswith("norm_"))
    # Of seven norms; a union of ranks' moments is one more. Products do what three make, and the gradients of five.
    assert norms == {"local": 6, "global": 7}[statistics] * 7 - 3 - 5
    names = ("relu", "threshold_backward", "native_batch_norm", "native_batch_norm_backward", "batch_norm_update_stats")
    assert not any(name in ours.calls for name in names)
    assert sum(ours.formats.values()) <= 1  # of the loss's gradient
    if statistics == "local":  # with what packs and adds messages, which plain torch doesn't send
        assert ours.launches <= plain.launches


def test_inference_is_a_launch_a_convolution(bench: Any) -> None:
    """Norms, sums and activations are their kernels'."""
    shape = (8, 64, 28, 28)
    ours = bench.compiled(Bottlenecks(), [shape], {"N": 2}, "global", "bfloat16", training=False)
    plain = bench.plain(Bottlenecks(), [(4, *shape[1:])], training=False, dtype=torch.bfloat16)
    assert ours.launches <= sum(isinstance(m, nn.Conv2d) for m in Bottlenecks().modules()) + 1
    assert ours.moved <= 0.41 * plain.moved and not ours.formats


class Decoder(nn.Module):
    """Residual blocks of norms by group, as decoders of images have them, and nearest rows between."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for n in (0, 2):
            y = x
            for k in (n, n + 1):
                y = self.convs[k](nn.functional.silu(self.norms[k](y)))
            x = nn.functional.interpolate((x + y) / 1.0, scale_factor=2.0)
        return x


@pytest.mark.parametrize(("grid", "most"), [({"N": 2}, 0.432), ({"H": 2, "W": 2}, 0.469)], ids=["N", "HW"])
def test_a_decoder_moves_less_than_plain_torch(bench: Any, grid: dict[str, int], most: float) -> None:
    """Bounds may only fall."""
    shape = (2 * grid.get("N", 1), 64, 32, 32)
    ours = bench.compiled(Decoder(), [shape], grid, "local", "bfloat16", training=False)
    plain = bench.plain(Decoder(), [bench.shares(shape, grid)], training=False, dtype=torch.bfloat16)
    assert ours.moved <= most * plain.moved, ours.moved / plain.moved
    assert ours.launches < plain.launches + ours.kinds["messages"]["launches"]
    assert ours.calls["norm_moments"]["launches"] == 2  # of what is no convolution's result
    assert ours.calls["norm_apply"]["launches"] == 4 and not {"silu", "native_group_norm"} & set(ours.calls)
    assert not ours.formats


def test_what_l2_has_lost_is_read_anew(bench: Any) -> None:
    kernels, big = bench.Kernels(), bench.L2_BYTES
    x, w, y = (torch.empty(n, dtype=torch.int8, device="meta") for n in (1000, big, 1000))
    forward = [("x", x), ("w", w), ("y", y)]
    assert kernels._again((132 * 3, 1), forward) == 2 * big
    assert kernels._again((132 * 3, 1), [("x", w), ("w", x), ("y", y)]) == 0
    assert kernels._again((132 * 2, 1, 1), [("y", w), ("x", y), ("w", x)]) == big + 1000
    assert kernels._again((132 * 2, 1, 4), [("y", w), ("x", y), ("w", x)]) == 0
