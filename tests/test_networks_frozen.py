"""Frozen parameters stay as they are: none of their gradients is made, sent or counted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks_on_ranks import check, imported, package
from sampling import cases_of
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.spec.graph_file import read_graph, write_graph
from convgen.verify.network import check_network
from convgen.verify.virtual import World

GRIDS = ({"N": 2}, {"H": 2, "W": 2}, {"C": 2}, {"N": 2, "C": 2})


def backbone(rng: random.Random) -> tuple[nn.Module, Tensor]:
    """Convolutions, norms and a head, some of whose parameters are frozen; and an input."""
    torch.manual_seed(rng.randrange(1000))
    layers: list[nn.Module] = []
    channels = 3
    for filters in (rng.choice((4, 6)), 6):
        layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.BatchNorm2d(filters), nn.ReLU()]
        channels = filters
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5)).double()
    names = [name for name, _ in module.named_parameters()]
    for name in rng.sample(names, rng.randint(1, len(names) - 1)):
        module.get_parameter(name).requires_grad_(False)
    return module, torch.randn(4, 3, 8, 8, dtype=torch.float64)


@pytest.mark.parametrize("seed", cases_of(10, "test_training_leaves_them"))
def test_training_leaves_them(seed: int, tmp_path: Path) -> None:
    """Outputs, gradients, bytes and three steps of training are one device's, by the checker and by the module."""
    rng = random.Random(seed)
    module, x = backbone(rng)
    given = imported(module, x)
    frozen = {n for n, p in module.named_parameters() if not p.requires_grad}
    assert {v.name for v in given.graph.parameters if v.frozen} == frozen
    path = tmp_path / "net.yaml"
    path.write_text(write_graph(given.graph))
    assert read_graph(path).parameters == given.graph.parameters
    grid = rng.choice(GRIDS)
    found = check(given, grid, steps=2)
    assert found.right, found
    report = check_network(compile_network(given.graph, Grid(tuple(grid.items()))), given.constants)
    assert report.ok, report


def test_what_was_compiled_frozen_is_refused_where_it_is_to_learn() -> None:
    """There are no steps that make its gradient; without gradients it runs."""
    module, x = backbone(random.Random(0))
    frozen = next(n for n, p in module.named_parameters() if not p.requires_grad)
    one = compile_network(imported(module, x).graph, Grid((("N", 2),)))

    with package(one.package().files) as net:

        def program(end: Any) -> None:
            mesh = net.init_mesh("cpu", transport=end)
            model = net.Network(mesh)
            block = net.scatter("input", x, mesh)
            model.get_parameter(frozen).requires_grad_(True)
            with pytest.raises(RuntimeError, match=f"{frozen} requires a gradient, which no step makes"):
                model(block)
            with torch.no_grad():
                model(block)
            model.get_parameter(frozen).requires_grad_(False)
            model(block).sum().backward()

        World(2).run(program)


class Measured(nn.Module):
    """A loss, and numbers beside it that have no gradient, or none by what wants one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.still = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.conv(x)
        still = y.detach().sum((2, 3)), self.still(x.detach()), y.argmax(1)
        return y.square().mean(), (y > 0).double().mean(), *still, F.adaptive_max_pool2d(y, 3)


@pytest.mark.parametrize("grid", GRIDS)
def test_what_has_no_gradient_says_so(grid: dict[str, int]) -> None:
    """`requires_grad` of each output is the module's, as `check` compares."""
    found = check(imported(Measured().double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)), grid)
    assert found.right, found


def test_backward_of_one_output_leaves_the_others_steps() -> None:
    """Also those that read what backward fetches of forward's values, as the places of maxima."""
    module, x = Measured().double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    module(x)[0].backward()
    with package(compile_network(imported(module, x).graph, Grid((("H", 2),))).package().files) as net:

        def program(end: Any) -> None:
            mesh = net.init_mesh("cpu", transport=end)
            model = net.Network(mesh)
            model.load_full(module.state_dict())
            model(net.scatter("x", x, mesh))[0].backward()
            for name, gradient in model.full_gradients().items():
                assert torch.allclose(gradient, module.get_parameter(name).grad), name

        World(2).run(program)


def test_what_is_frozen_is_true_or_false(tmp_path: Path) -> None:
    module, x = backbone(random.Random(0))
    text = write_graph(imported(module, x).graph)
    path = tmp_path / "net.yaml"
    path.write_text(text.replace("frozen: true", "frozen: maybe", 1))
    with pytest.raises(InputError, match="frozen can't be 'maybe'"):
        read_graph(path)
