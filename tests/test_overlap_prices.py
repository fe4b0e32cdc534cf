"""A layer with --overlap is priced no dearer than its module, and biases cost what ranks do for them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from networks_on_ranks import imported, package
from sampling import cases_of
from scripts import bench_script
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from convgen.algebra.grid import Grid
from convgen.cost.machines import load_machine
from convgen.cost.rows import program_cost
from convgen.cost.timeline import simulate
from convgen.network_compiler import compile_network
from convgen.verify.virtual import World

prices = bench_script("overlap_prices")


@pytest.mark.parametrize("number", cases_of(60, "test_a_layer_is_no_dearer_with_overlap"))
def test_a_layer_is_no_dearer_with_overlap(number: int, tmp_path: Path) -> None:
    draw = Random(f"no dearer {number}")
    said, machine = prices.drawn_to_price(draw), load_machine(draw.choice(("lassen", "dgx_h200", "cuda")))
    target = draw.choice((None, "cuda:sm_90"))
    overlapped, plain, schedule = prices.step_seconds(said, machine, tmp_path, target)
    assert overlapped <= plain * (1 + 1e-9), (said, machine.name, target)
    assert overlapped <= schedule * (1 + 1e-9), (said, machine.name, target)


class Biases(TorchDispatchMode):
    """Counts calls of products that add a bias, and sums of a tensor and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "convolution" and args[2] is not None:
            self.count["within"] += 1
        if name == "addmm":
            self.count["within"] += 1
        if name in ("add", "add_") and isinstance(args[1], torch.Tensor) and args[0].shape != args[1].shape:
            self.count["apart"] += 1
        return func(*args, **(kwargs or {}))


def a_tower(draw: Random) -> nn.Module:
    """Of products, most with a bias."""
    layers: list[nn.Module] = []
    for _ in range(3):
        make = draw.choice((nn.Conv2d, nn.Conv2d, nn.ConvTranspose2d))
        layers.append(make(4, 4, draw.choice((1, 3)), padding=draw.choice((0, 1)), bias=draw.random() < 0.8))
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", cases_of(10, "test_a_bias_costs_what_ranks_do"))
def test_a_bias_costs_what_ranks_do(seed: int, dtype: torch.dtype) -> None:
    """Nothing, where its product adds it; else a pass."""
    draw = Random(f"a bias costs {seed}")
    torch.manual_seed(seed)
    x, module = torch.randn(4, 4, 8, 8, dtype=dtype), a_tower(draw).to(dtype)
    y = module(x).detach()
    grid = Grid(tuple(draw.choice(({"N": 2}, {"N": 2, "H": 2}, {"F": 2}, {"C": 2}, {"N": 2, "C": 2})).items()))
    one = compile_network(imported(module, x).graph, grid)
    program, biases = one.program, sum("bias" in n for n, _ in module.named_parameters())
    with package(one.package().files) as net:

        def run(end: Any) -> Any:
            mesh = net.init_mesh("cpu", transport=end)
            model = net.Network(mesh)
            model.load_full(module.state_dict())
            with Biases() as seen:
                made = model(net.scatter("input", x, mesh))
            return net.gather("output", made, mesh), seen.count

        found = World(grid.ranks).run(run)
    assert torch.allclose(found[0][0], y, rtol=1e-4 if dtype == torch.float32 else 1e-12)
    for _, count in found:
        assert (count["within"], count["apart"]) == (len(program.riding), biases - len(program.riding))
    machine = load_machine("cpu")
    takes = {s.name: s.seconds for s in simulate(program, machine, one.dtype).spans if s.lane == "compute"}
    for i in program.products_of_biases:
        assert (takes[program.rows[i].bound.makes[0]] == 0) == (i in program.riding)
    assert program_cost(one.plain, machine, one.dtype).seconds == pytest.approx(
        simulate(one.plain, machine, one.dtype).serial_s, rel=1e-6
    )
