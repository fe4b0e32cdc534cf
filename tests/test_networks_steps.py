"""Ranks run what is printed: the steps of the program's text, in its order, forward and backward."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_networks_gpu import loaded
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.program.lower import lower
from convgen.program.network_text import BACKWARD, FORWARD, steps_texts
from convgen.program.steps import Step
from convgen.spec.exported import graph_of
from convgen.verify.virtual import VirtualTransport, World

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
Ran = tuple[str, str]  # of a step its kind and its key


def example(module: str, factory: str, *shape: int) -> Callable[[], tuple[nn.Module, Tensor]]:
    return lambda: (getattr(importlib.import_module(f"examples.{module}"), factory)(), torch.randn(*shape))


EXAMPLES = {
    "resnet": example("resnet", "small_resnet", 4, 3, 16, 16),
    "unet3d": example("unet3d", "UNet3d", 2, 1, 8, 8, 8),
    "convnext": example("convnext", "small_convnext", 2, 3, 32, 32),
    "decoder": example("vae_decoder", "Decoder", 2, 4, 4, 4),
}
GRIDS = ({"N": 2}, {"H": 2}, {"C": 2}, {"N": 2, "H": 2})


def compiled(name: str, grid: dict[str, int]) -> tuple[CompiledNetwork, dict[str, Tensor], Tensor]:
    module, x = EXAMPLES[name]()
    graph, tensors = graph_of(module.train(), (x,), name=name)
    return compile_network(graph, Grid(tuple(grid.items()))), tensors, x


class Watch:
    """Of each thread what it runs, forward and backward."""

    def __init__(self, net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        runtime = sys.modules[type(net.NET).__module__]
        self.found: dict[int, list[list[Ran]]] = {}
        execute = runtime.execute

        def watched(codes: Sequence[Any], slots: list[Any]) -> None:
            ran = [(code.line.kind, code.line.key) for code in codes]
            self.found.setdefault(threading.get_ident(), []).append(ran)
            execute(codes, slots)

        monkeypatch.setattr(runtime, "execute", watched)

    def step(self, net: Any, x: Tensor, end: VirtualTransport) -> list[list[Ran]]:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model._calls = 1  # the first call looks for NaNs besides
        made = model(net.scatter(model._inputs[0], x, mesh))
        made.square().sum().backward()
        return self.found[threading.get_ident()]


def lines(text: str, section: str) -> list[str]:
    """Of a program's text."""
    _, _, rest = text.partition(f"  {section}\n")
    found: list[str] = []
    for line in rest.splitlines():
        if not line.startswith("    "):
            break
        found.append(line.strip())
    return found


def of_training(steps: Sequence[Step], read: Collection[str]) -> list[Step]:
    """Of a list, without what makes nothing that anybody reads, as a view that no other row takes.

    Args:
        read: behind it.
    """
    needed, found = set(read), list[Step]()
    for s in reversed([s for s in steps if s.when is None or s.when[1]]):
        if s.kind not in ("forward", "same", "fill") or needed & set(s.makes):
            found.append(s)
            needed |= set(s.reads)
    return found[::-1]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_ranks_run_the_steps_that_are_printed(
    name: str, grid: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, kinds and order of all that is computed, sent, waited for and added; of a step that hands something on,
    gives a gradient to autograd or renews a buffer the text has no line, or another."""
    one, tensors, x = compiled(name, grid)
    with loaded(one, tensors, tmp_path) as net:
        watch = Watch(net, monkeypatch)
        forward, backward = World(one.program.grid.ranks).run(lambda end: watch.step(net, x, end))[0]
    steps = lower(one.program, of_inputs=False)
    later = {n for s in steps.backward for n in s.reads} | {slot for _, slot, _ in steps.outputs}
    assert [ran for ran in forward if ran[0] != "update"] == [
        (s.kind, s.key) for s in of_training(steps.forward, later) if s.kind != "update"
    ]
    assert backward == [(s.kind, s.key) for s in of_training(steps.backward, ()) if s.kind != "gradient"]
    assert steps_texts(steps.forward, one.program) == lines(net.SCHEDULE, FORWARD)
    assert steps_texts(steps.backward, one.program) == lines(net.SCHEDULE, BACKWARD)
