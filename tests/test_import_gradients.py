"""What a module does to gradients and to buffers where torch.export records less than it does: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks_on_ranks import check, draw_parameters, imported, random_input
from torch import Tensor, nn

from convgen.errors import InputError
from convgen.spec.exported import graph_of


class Net(nn.Module):
    """What `of` makes of the module and the input."""

    def __init__(self, of: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.instances = nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True)
        self.register_buffer("mean", torch.ones(4))
        self.of = of

    def forward(self, x: Tensor) -> Any:
        return self.of(self, x)


def net(of: Callable[[Any, Tensor], Any]) -> Net:
    module = Net(of).double()
    draw_parameters(module)
    return module


def right(of: Callable[[Any, Tensor], Any]) -> None:
    found = check(imported(net(of), random_input((4, 3, 6, 5))), {"N": 2, "H": 2}, steps=2)
    assert found.right, found


def refused(of: Callable[[Any, Tensor], Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        graph_of(net(of).train(), (random_input((4, 3, 6, 5)),))


# ---- Regions with autocast of their own ----


def changes_in_region(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    with torch.autocast("cpu", enabled=False):
        z = m.instances(m.norm(y))
        if m.training:
            m.mean.mul_(0.5).add_(z.detach().mean((0, 2, 3)))
    return z + y


def test_buffers_that_change_within_autocast() -> None:
    """Running statistics, and what a line changes in place."""
    right(changes_in_region)
    graph, _ = graph_of(net(changes_in_region).train(), (random_input((4, 3, 6, 5)),))
    statistics = {f"{norm}.running_{one}" for norm in ("norm", "instances") for one in ("mean", "var")}
    assert {name for name, _ in graph.updates} >= statistics | {"mean"}
