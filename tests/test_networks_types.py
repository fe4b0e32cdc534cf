"""Modules whose parameters have several types: on ranks all values have the types that torch gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks_on_ranks import draw_parameters, package
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.spec.exported import graph_of
from convgen.verify.network import check_network, report_text
from convgen.verify.virtual import World

GRIDS = ({}, {"N": 2}, {"H": 2}, {"C": 2}, {"N": 2, "H": 2})


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


class Norms(nn.Module):
    """Of bfloat16, with norms of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(6, 6)
        self.bfloat16()
        self.batch, self.group, self.layer, self.rms = (
            nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.LayerNorm(6), nn.RMSNorm(6),
        )  # fmt: skip
        self.instance = nn.InstanceNorm2d(8, affine=True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = torch.relu(self.batch(self.first(x)))
        y = self.second(self.group(x))
        return self.head(self.layer(y)), self.rms(y), self.instance(y), y.mean((2, 3)), F.max_pool2d(self.layer(y), 2)


class Scaled(nn.Module):
    """Of float32, with a number and a vector of float64, of which one decides the type."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("shift", numbers(8, 1, 1, dtype=torch.float64))
        self.slope = nn.Parameter(numbers(8, 1, 1, dtype=torch.float16))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.norm(self.conv(x)) * self.scale
        z = y + self.shift
        return y, z, (y * self.slope).softmax(1), z.square().mean(), F.avg_pool2d(z, 2), F.layer_norm(z, (6,))


class Embedded(nn.Module):
    """A table of float16, and the rest of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(11, 8).half(), nn.Parameter(numbers(6, 8, dtype=torch.float16))
        self.attend, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.table(x) + self.places
        z = self.norm(y.float())
        z = z + self.attend(z, z, z, need_weights=False)[0]
        return y, z, z * y, F.cross_entropy(z.flatten(0, 1), x.flatten() % 8)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "norms": (Norms, lambda: numbers(4, 3, 6, 6, dtype=torch.bfloat16)),
    "scaled": (Scaled, lambda: numbers(4, 3, 6, 6, dtype=torch.float32)),
    "embedded": (Embedded, lambda: torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(1))),
}


def drawn(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, x = MODULES[name]
    module = make()
    draw_parameters(module)
    return module, x()


def types_of(model: nn.Module, x: Tensor, call: Callable[[Tensor], Any]) -> dict[str, torch.dtype]:
    """Of outputs, gradients, parameters and buffers, after a step of training."""
    x = x.clone()
    if x.is_floating_point():
        x.requires_grad_()
    made: list[Tensor] = tree_flatten(call(x))[0]
    sum(y.double().square().sum() for y in made).backward()  # type: ignore[union-attr]
    found = {f"output {k}": y.dtype for k, y in enumerate(made)} | ({} if x.grad is None else {"x": x.grad.dtype})
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        found |= {name: p.dtype, f"gradient of {name}": p.grad.dtype}
    return found | {name: b.dtype for name, b in model.named_buffers()}


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_values_have_torchs_types_and_numbers(name: str, grid: dict[str, int]) -> None:
    module, x = drawn(name)
    graph, constants = graph_of(module, (x,), name="net")
    compiled = compile_network(graph, Grid(tuple((grid or {"N": 1}).items())))
    state = {n: t.detach().clone() for n, t in module.state_dict().items()}
    report = check_network(compiled, state | constants)
    assert report.ok, report_text(report)
    expected = types_of(module, x, module)
    with package(compiled.package().files) as net:

        def program(end: Any) -> dict[str, torch.dtype]:
            mesh = net.init_mesh("cpu", transport=end)
            model = net.Network(mesh)
            model.load_full(state)
            full = model.full_state_dict()
            assert {n: t.dtype for n, t in full.items()} == {n: t.dtype for n, t in state.items()}
            assert all(torch.equal(full[n], t) for n, t in state.items())
            return types_of(model, net.scatter("x", x, mesh), model)

        for found in World(compiled.program.grid.ranks).run(program):
            assert found == expected
