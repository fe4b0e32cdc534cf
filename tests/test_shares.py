"""Axes whose ranks get shares of one's own: files, texts, plans, refusals, and the same numbers as one device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_networks import ResNet, seeded
from test_networks_training import imported, on_ranks
from torch import Tensor, nn

import convgen
from convgen.algebra.blocks import axis_size
from convgen.algebra.grid import Grid
from convgen.compiler import compile_layer
from convgen.errors import InputError
from convgen.network_compiler import compile_network, compile_text
from convgen.plan.program.edited import read_text
from convgen.program.network_text import show as show_network
from convgen.program.text import parse, show
from convgen.spec.build import layer_from_dict
from convgen.spec.exported import graph_of
from convgen.spec.text import parse_grid
from convgen.spec.write import layer_to_dict
from convgen.verify.check import check
from convgen.verify.network import check_network
from convgen.verify.processes import spawn

LAYER: dict[str, Any] = {
    "name": "cut", "layer": "conv2d", "input": [4, 6, 16, 12], "out_channels": 8, "kernel_size": 3, "padding": 1,
}  # fmt: skip


def laid_out(h: Any, grid: Any = None, **changes: Any) -> dict[str, Any]:
    """A layer whose rows of x lie as a mesh has them."""
    held = {"x": ["N", "*", h, "*"], "w": ["*", "*"], "y": ["N", "*", "H", "*"]} | changes
    return {**LAYER, "grid": grid or {"N": 2, "H": 3}, "distribution": held}


def test_sizes_of_a_distribution_are_the_blocks_that_ranks_hold() -> None:
    layer = layer_from_dict(laid_out({"H": [3, 8, 5]}))
    assert layer.grid == Grid((("N", 2), ("H", axis_size((3, 8, 5)))))
    compiled = compile_layer(layer)
    rows = compiled.space.held(dict(compiled.schedule.stored)["x"])[:3, 2]
    assert rows.tolist() == [[0, 3], [3, 11], [11, 16]]
    assert check(compiled).ok
    again = layer_from_dict(layer_to_dict(layer))
    assert again == layer and layer_to_dict(layer)["grid"] == {"N": 2, "H": [3, 8, 5]}
    assert parse(show(compiled.schedule)) == compiled.schedule
    assert "on grid(N=2, H=3:8:5) {" in show(compiled.schedule)


def test_a_strided_layer_has_both_sizes_where_they_are_of_one_proportion() -> None:
    given = laid_out({"H": [4, 8, 4]}, y=["N", "*", {"H": [2, 4, 2]}, "*"]) | {"stride": [2, 1]}
    assert check(compile_layer(layer_from_dict(given))).ok


def test_weights_of_the_number_of_samples_that_may_be_another() -> None:
    layer = layer_from_dict(laid_out("H", x=[{"N": [3, 1]}, "*", "H", "*"], y=[{"N": [6, 2]}, "*", "H", "*"]))
    assert layer.grid.sizes["N"] == axis_size((3, 1))


@pytest.mark.parametrize(
    ("h", "changes", "said"),
    [
        ({"H": [3, 8]}, {}, "2 sizes of blocks over axis 'H' of 3 ranks"),
        ({"H": [3, 8, 4]}, {}, r"blocks of \[3, 8, 4\] over axis 'H', of H with 16 elements(?s:.*)\[3, 9, 4\]"),
        ({"H": [0, 0, 0]}, {}, "not all 0"),
        ({"H": [3, -8, 5]}, {}, "distribution.x"),
        ({"H": [3, 8.5, 5]}, {}, "distribution.x"),
        ({"V": [3, 8, 5]}, {}, "V"),
        ({"H": [3, 8, 5]}, {"y": ["N", "*", {"H": [8, 3, 5]}, "*"]}, "distribution.x splits over it as 3:8:5"),
        ({"H": [3, 8, 5]}, {"y": [{"N": [1, 1]}, "*", {"H": [3, 8, 4]}, "*"]}, r"blocks of \[3, 8, 4\]"),
    ],
)
def test_sizes_that_cannot_be(h: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        layer_from_dict(laid_out(h, **changes))
    assert re.search(said, str(refused.value)), refused.value


def test_a_grid_and_its_distribution_say_one_thing() -> None:
    layer_from_dict(laid_out({"H": [6, 16, 10]}, {"N": 2, "H": [3, 8, 5]}) | {"input": [4, 6, 32, 12]})
    with pytest.raises(InputError, match="grid splits over it as 5:8:3"):
        layer_from_dict(laid_out({"H": [3, 8, 5]}, {"N": 2, "H": [5, 8, 3]}))


@pytest.mark.parametrize("text", ["H=3:", "H=:3", "H=0:0", "H=-1:2", "H=3:5:", "H=3:x", f"H=1:{2**31}"])
def test_grids_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InputError, match="cannot read"):
        parse_grid(text)


@pytest.mark.parametrize("shares", [[], [0, 0], [1, -1], [1.5, 2], "3:5", [True, 2], {"H": 1}, 0, -1, None, 2.0])
def test_shares_that_are_none(shares: Any) -> None:
    with pytest.raises(InputError, match="can't have"):
        convgen.from_torch(nn.Conv2d(2, 2, 3), (torch.zeros(2, 2, 8, 8),), grid={"H": shares})


def test_a_network_trains_as_on_one_device(tmp_path: Path) -> None:
    """Ranks of other shares of space and samples, another number of samples, a text that is read back."""
    seeded()
    module, x = ResNet(0.0).double(), torch.randn(5, 3, 16, 16, dtype=torch.float64)
    graph, _ = graph_of(module, (x[:4],), name="net")
    grid = Grid(tuple(parse_grid("N=1:3,H=5:2").items()))
    compiled = compile_network(graph, grid)
    text = show_network(compiled.program)
    assert text.startswith("network net on grid(N=1:3, H=5:2) {")
    assert show_network(compile_text(graph, read_text(text, "net.txt")).program) == text
    net: Any = imported(compiled.package().files, tmp_path)
    assert net.SPEC["grid"] == {"N": [1, 3], "H": [5, 2]} and net.NET.grid == {"N": 2, "H": 2}
    y = module(x)
    y.square().sum().backward()
    wanted = {n: p.grad for n, p in module.named_parameters()}

    def program(model: Any, mesh: Any) -> Any:
        made = net.gather("output", model(net.scatter("x", x, mesh), batch=5), mesh, batch=5)
        made.square().sum().backward()
        torch.testing.assert_close(made, y, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(model.full_gradients(), wanted, rtol=1e-9, atol=1e-10)
        return net.region("x", mesh, batch=5)

    own = on_ranks(net, program, dict(module.state_dict()))
    assert [(r[0], r[2]) for r in own] == [
        (samples, rows) for samples in (slice(0, 1), slice(1, 5)) for rows in (slice(0, 11), slice(11, 16))
    ]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x)


def meshes(rank: int) -> list[list[int]]:
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    module, x = Small(), torch.randn(2, 2, 8, 8)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("H",))
    found: list[list[int]] = []
    for shares in (None, {"H": (1, 3)}, {"H": [3, 1]}):
        model: Any = convgen.parallelize(module, (x,), mesh, "spatial", shares=shares)
        torch.testing.assert_close(model(x), module(x))
        rows = model.region("x")[2]
        found.append([rows.start, rows.stop])
    try:
        convgen.parallelize(module, (x,), mesh, "spatial", shares={"H": [1, 2, 1]})
    except InputError as error:
        assert "3 of axis H, and the axes are H=2" in str(error)
    else:
        raise AssertionError("three shares of two ranks")
    return found


def test_an_axis_with_shares_behind_one_that_leaves_a_group_each() -> None:
    """It splits filters, as the layers behind have them, and not groups."""
    seeded()
    module = nn.Sequential(nn.Conv2d(3, 9, 3, groups=3), nn.ReLU(), nn.Conv2d(9, 2, 1)).double()
    graph, _ = graph_of(module, (torch.randn(2, 3, 5, 8, dtype=torch.float64),))
    made = compile_network(graph, Grid((("C", 3), ("F", axis_size((2, 1))))))
    assert check_network(made, module.state_dict()).ok


def test_packages_of_other_shares_are_kept_apart() -> None:
    assert spawn(meshes, 2) == [[[0, 4], [0, 2], [0, 6]], [[4, 8], [2, 8], [6, 8]]]


@pytest.mark.parametrize("statistics", ["spatial", "local"])
def test_statistics_of_parts_of_these_shares(statistics: str) -> None:
    seeded()
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, 2), nn.BatchNorm2d(4))
    graph, tensors = graph_of(module.double(), (torch.randn(8, 2, 14, 12, dtype=torch.float64),), name="net")
    grid = Grid(tuple(parse_grid("N=1:3,H=5:2").items()))
    assert check_network(compile_network(graph, grid, statistics=statistics), tensors).ok
