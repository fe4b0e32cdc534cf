"""The verifier of networks misses no planted mistake: of a row, a value, a conversion, a start or a wait."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from random import Random

import pytest
import torch
from free_networks import free_network, imported
from network_mutants import PROGRAMS, as_exchanges, flights
from sampling import cases_of
from test_networks_free import Branches, a_network, compare

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.program.flow import backward, forward
from convgen.program.network import Program
from convgen.program.verify.flights import order_faults
from convgen.program.verify.network import faults
from convgen.spec.exported import graph_of
from examples.convnext import small_convnext
from examples.resnet import small_resnet
from examples.unet3d import UNet3d

NETWORKS = {
    "resnet": (small_resnet, (8, 3, 32, 32), (("H", 2), ("N", 2))),
    "resnet by channels": (small_resnet, (8, 3, 32, 32), (("C", 2), ("H", 2))),
    "convnext": (small_convnext, (4, 3, 32, 32), (("C", 2), ("N", 2))),
    "unet": (UNet3d, (2, 1, 16, 16, 16), (("D", 2), ("C", 2))),
}


@lru_cache(maxsize=1)
def program_of(name: str) -> Program:
    make, shape, axes = NETWORKS[name]
    graph, _ = graph_of(make(), (torch.zeros(shape),), name="net")
    return compile_network(graph, Grid(axes)).program


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in NETWORKS for kind in PROGRAMS])
def test_no_mistake_is_missed(name: str, kind: str) -> None:
    program = program_of(name)
    assert list(faults(program)) == []
    planted = list(PROGRAMS[kind](program))
    missed = [i for i, mutant in enumerate(planted) if next(iter(faults(mutant)), None) is None]
    assert planted or not program.updates, "nothing of this kind is planted"
    assert not missed, f"{kind}: {len(missed)} of {len(planted)} are missed: {missed[:9]}"


@pytest.mark.parametrize("seed", cases_of(4, "test_no_mistake_in_any_program_is_missed"))
def test_no_mistake_in_any_program_is_missed(seed: int) -> None:
    """Roles and storage drawn at random, early halos, chunks and buckets."""
    draw = Random(f"mutants {seed}")
    module, x = a_network(draw)
    graph, _ = graph_of(module, (x.float(),), name="net")
    program = free_network(draw, graph, Grid((("a", 2), ("b", 2)))).other
    assert list(faults(program)) == []
    for kind, plant in PROGRAMS.items():
        missed = [i for i, mutant in enumerate(plant(program)) if next(iter(faults(mutant)), None) is None]
        assert not missed, (kind, missed)
    for steps in (list(forward(program)), list(backward(program)), list(backward(program, of_inputs=True))):
        assert list(order_faults(program, steps)) == []
        for what, mutant in flights(steps):
            assert list(order_faults(program, mutant)), what


def test_an_exchange_moves_what_another_conversion_does(tmp_path: Path) -> None:
    """The one change of a conversion's kind that the verifier takes is right."""
    module, x = Branches(Random("exchanges"), 3).double(), torch.randn(4, 3, 12, 12, dtype=torch.float64)
    graph, _ = graph_of(module, (x,), name="net")
    compiled = compile_network(graph, Grid((("C", 2), ("H", 2))))
    program, other, changed = compiled.program, compiled.other, 0
    while (found := next(as_exchanges(program), None)) is not None:
        program, other, changed = found, next(as_exchanges(other)), changed + 1
        assert list(faults(program)) == []
    assert changed > 3
    net = imported(replace(compiled, program=program, other=other).package().files, tmp_path)
    compare(module, x, net, program.grid, program)
