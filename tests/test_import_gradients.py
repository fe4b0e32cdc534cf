"""What modules do to gradients and buffers, and numbers that they draw, of which torch.export records less: right, or
refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
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


# ---- Regions without gradients ----


def without_in_region(m: Any, x: Tensor) -> Tensor:
    """A target without gradients, within autocast; and autocast in a region without gradients."""
    with torch.autocast("cpu", enabled=False):
        y = m.a(x)
        with torch.no_grad():
            target = m.norm(m.b(y))
            target.relu_()
        y = y * 2
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        scale = m.b(y).relu_().mean()
    return y * target + scale


def test_no_gradients_within_autocast() -> None:
    right(without_in_region)


def of_complex_numbers(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    spectrum = torch.fft.fft2(y)
    with torch.no_grad():
        scale = spectrum.abs().mean()
    return y * scale


def test_no_gradients_of_complex_numbers() -> None:
    right(of_complex_numbers)


def written_within(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y = m.a(x)
        with torch.no_grad():
            y[:, 0].zero_()
    return y + 1


def test_a_tensor_written_without_gradients_within_autocast_is_refused() -> None:
    refused(written_within, "changes a tensor without gradients")


def region(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    with torch.no_grad():
        z = m.b(y)
    return y * z


def test_no_gradients_where_the_import_is_without_them() -> None:
    found = graph_of(net(region), (random_input((4, 3, 6, 5)),))[0]
    with torch.no_grad():
        assert graph_of(net(region), (random_input((4, 3, 6, 5)),))[0].calls == found.calls
    assert "detach" in {call.op for call in found.calls}


# ---- Detached values ----


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    z = y.detach()
    z += 1
    return z.tanh() + y


def by_view(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y.detach()[:, 0].zero_()
    return y.tanh()


def of_a_part(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    first, _ = y.split(2, 1)
    first.data.mul_(2)
    return y + 1


def copied(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    z, w = y.detach().clone(), m.b(y).detach()
    z += 1
    w[:, 0] = 0
    return z.tanh() + y + w


@pytest.mark.parametrize("of", [in_place, by_view, of_a_part])
def test_a_detached_value_that_changes_in_place_is_refused(of: Any) -> None:
    """Its source has the new numbers and the old gradient, which one program of functions has not."""
    refused(of, "changes a tensor without gradients")


def test_copies_of_detached_values_change_in_place() -> None:
    right(copied)


# ---- Words of which torch.export records nothing ----


def data(m: Any, x: Tensor) -> Tensor:
    """Rounding passed straight through, a norm of weights, and running numbers, by `.data`."""
    y = m.a(x)
    if m.training:
        m.mean.data = m.mean * 0.5 + y.mean((0, 2, 3)) * 0.5
    return (y.round() - y).data + y / m.a.weight.data.norm()


def test_data_is_what_detach_gives() -> None:
    right(data)


def hooked(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    if y.requires_grad:
        y.register_hook(lambda g: g * 0.5)
    return y.tanh()


def detached_itself(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y.detach_()
    return m.b(y)


def frozen_meanwhile(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    m.b.requires_grad_(False)
    z = m.b(y)
    m.b.requires_grad_(True)
    return z


def drawn_by_python(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x)) if random.random() < 0.5 else m.a(x)


def drawn_by_numpy(m: Any, x: Tensor) -> Tensor:
    return m.a(x) * float(np.random.rand())  # noqa: NPY002


def counted(m: Any, x: Tensor) -> Tensor:
    m.a.calls = getattr(m.a, "calls", 0) + 1
    return m.a(x) * min(1.0, m.a.calls / 4)


LOST = {
    "counts": (counted, r"Net: forward changes a\.calls in each call(.|\n)*register_buffer\('calls'"),
    "python": (drawn_by_python, r"Net: forward draws random numbers of Python's or numpy's(.|\n)*torch\.rand"),
    "numpy": (drawn_by_numpy, r"Net: forward draws random numbers of Python's or numpy's(.|\n)*torch\.rand"),
    "hook": (hooked, r"Net: a hook on a gradient is lost(.|\n)*y\.register_hook\((.|\n)*y \* s \+"),
    "detach_": (detached_itself, r"Net: detach_\(\) is lost(.|\n)*y\.detach_\(\)(.|\n)*y = y\.detach\(\)"),
    "frozen": (frozen_meanwhile, r"Net: what a parameter's requires_grad is made(.|\n)*m\.b\.requires_grad_\(False\)"),
}


@pytest.mark.parametrize("kind", LOST)
def test_what_would_be_lost_is_refused(kind: str) -> None:
    refused(*LOST[kind])


def test_a_number_that_forward_keeps_of_a_size_is_no_count() -> None:
    def keeps(m: Any, x: Tensor) -> Tensor:
        m.a.size = max(getattr(m.a, "size", 0), x.shape[-1])
        return m.b(m.a(x)) / m.a.size

    x = random_input((4, 3, 6, 5))
    graph = graph_of(net(keeps), (x,))[0]
    assert [call.op for call in graph.calls].count("div.Tensor") == 1


def test_hooks_on_gradients_are_refused() -> None:
    def plain(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x))

    x = (random_input((4, 3, 6, 5)),)
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        module = net(plain)
        handle = getattr(module.b, register)(lambda *_: None)
        with pytest.raises(InputError, match=r"Net: b \(Conv2d\) has hooks on its gradients"):
            graph_of(module, x)
        handle.remove()
        graph_of(module, x)
    module = net(plain)
    module.b.weight.register_hook(lambda g: g * 0.5)
    with pytest.raises(InputError, match=r"Net: b\.weight has hooks on its gradient"):
        graph_of(module, x)


# ---- Functions with gradients of their own ----


class Scaled(torch.autograd.Function):
    """A gradient that is no derivative, of complex numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Tensor:
        return dys[0] * (0.3 - 0.5j)


class Straight(torch.autograd.Function):
    """A clamp whose gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-3, 3)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Tensor:
        return dys[0]


def of_complex(m: Any, x: Tensor) -> Tensor:
    return torch.fft.ifft2(Scaled.apply(torch.fft.fft2(m.a(x)))).real


def of_infinite(m: Any, x: Tensor) -> Tensor:
    return Straight.apply(m.a(x).masked_fill(x[:, :1] > 1, float("inf")))


@pytest.mark.parametrize("of", [of_complex, of_infinite])
def test_gradients_of_ones_own(of: Any) -> None:
    right(of)
