"""Random networks with random delays: no number depends on who is late. `python bench/delays.py` draws many."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import torch
from free_networks import free_network, imported, passes_of
from in_order import InOrder
from operation_cases import a_grid
from test_networks_free import a_network

from convgen.network_compiler import CompiledNetwork
from convgen.passes.contract import NetworkPass
from convgen.program.flow import Start, backward, forward
from convgen.spec.exported import graph_of
from convgen.verify.processes import spawn
from convgen.verify.virtual import World

MOST_S = 0.02
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange")


def network_of(draw: Random) -> tuple[CompiledNetwork, torch.Tensor, list[NetworkPass]]:
    while True:
        module, x = a_network(draw)
        try:
            module(x)
        except RuntimeError:  # a kernel may be larger than what is drawn for it
            continue
        break
    graph, _ = graph_of(module, (x.float(),), name="net")
    grid, passes = a_grid(draw), passes_of(draw)
    return free_network(draw, graph, grid, passes), x.float(), passes


def late_before(end: Any, names: Any, draw: Random) -> Any:
    """An end of a rank that sleeps before some of its collectives."""

    class Late:
        def __getattr__(self, name: str) -> Any:
            found = getattr(end, name)
            if name not in names:
                return found

            def late(*what: Any) -> Any:
                time.sleep(draw.choice((0, 0, 0, draw.random())) * MOST_S)
                return found(*what)

            return late

    return Late()


def late_transport(runtime: Any, seed: int, *, lands: bool) -> type[Any]:
    """The package's transport over torch.distributed, late by chance.

    Args:
        lands: what is started is over: a stream that runs what is posted, in its order.
    """

    class Late(runtime.TorchTransport):
        def _sleep(self) -> None:
            if not hasattr(self, "draw"):
                self.draw = Random(f"{seed} {self.rank}")
            time.sleep(self.draw.choice((0, 0, 0, self.draw.random())) * MOST_S)

    for kind in KINDS:

        def collective(self: Any, *what: Any, kind: str = kind) -> Any:
            self._sleep()
            return getattr(super(Late, self), kind)(*what)

        setattr(Late, kind, collective)
    if lands:

        def start(self: Any, kind: str, tensor: Any, splits: Any, group: Any, lane: str) -> Any:
            return runtime.Landed(getattr(self, kind)(tensor, splits, group))

        Late.start = start  # type: ignore[attr-defined]
    return Late


def step_on(net: Any, x: torch.Tensor, end: Any) -> list[torch.Tensor]:
    mesh = net.init_mesh("cpu", transport=end)
    model = net.Network(mesh)
    block = net.scatter("x", x, mesh).requires_grad_()
    y = model(block)
    y.square().sum().backward()
    return [y.detach(), block.grad, *model.full_gradients().values()]


def equal(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for r, q in zip(one, other, strict=True) for a, b in zip(r, q, strict=True))


def check(seed: int, folder: Path, *, processes: bool) -> Counter[str]:
    """Run a step prompt, late, in order, and perhaps in processes; what travelled, by lane.

    Raises AssertionError: two of them differ in a bit.
    """
    draw = Random(f"delays of networks {seed}")
    compiled, x, passes = network_of(draw)
    program, grid = compiled.program, compiled.program.grid
    net = imported(compiled.package().files, folder / str(seed))
    runtime = sys.modules[type(net.NET).__module__]
    prompt = World(grid.ranks).run(lambda end: step_on(net, x, end))

    def late(end: Any) -> Any:
        return step_on(net, x, late_before(end, (*KINDS, "start"), Random(f"{seed} {end.rank}")))

    where = f"network {seed} on {grid} after {', '.join(map(str, passes))}"
    assert equal(prompt, World(grid.ranks).run(late)), f"{where}: delays"
    posted = InOrder(runtime, grid.ranks, streams="one", transport=late_transport(runtime, seed, lands=True))
    assert equal(prompt, posted.run(lambda end: step_on(net, x, end))), f"{where}: in order"
    if processes:
        kind = late_transport(runtime, seed, lands=False)
        found = spawn(lambda _: step_on(net, x, kind(None)), grid.ranks, 120)
        assert equal(prompt, found), f"{where}: processes"
    steps = [*forward(program), *backward(program, of_inputs=True)]
    return Counter(s.lane for s in steps if isinstance(s, Start))
