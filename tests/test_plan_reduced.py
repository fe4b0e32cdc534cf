"""Costs on the axes that matter are the costs on all ranks."""

from __future__ import annotations

import random

import pytest

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.algebra.space import Space
from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.operations.layer import wanted
from convgen.plan.candidates import Candidates
from convgen.plan.network.reduced import ReducedModel, ReducedSpace

ONE_LEVEL, LEVELS = load_machine("cpu"), load_machine("lassen")


def some_conv(rng: random.Random, *, transposed: bool = False) -> Conv:
    groups = rng.choice([1, 1, 2, 4])
    kernel = rng.choice([1, 3, 4, 5])
    spatial = tuple(
        Spatial(name, rng.randint(5, 17), kernel, rng.randint(1, 2), rng.randint(0, 2), rng.randint(0, 2))
        for name in ("H", "W")
    )
    if transposed:
        spatial = tuple(s.transposed(s.extent // 2 + 2, rng.randrange(s.stride)) for s in spatial)
    channels, filters = (groups * rng.randint(1, 5) for _ in range(2))
    return Conv(rng.randint(1, 9), channels, filters, spatial, groups, bias=True, transposed=transposed)


def some_layout(rng: random.Random, tensor: str, dims: int, axes: list[str]) -> Layout:
    nests: list[list[str]] = [[] for _ in range(dims + 1)]
    for axis in rng.sample(axes, len(axes)):
        nests[rng.randrange(dims + 1)].append(axis)
    return Layout(tensor, tuple(map(tuple, nests[:dims])))


@pytest.mark.parametrize(("virtual", "machine"), [(False, ONE_LEVEL), (True, LEVELS)], ids=["cpu", "lassen"])
def test_every_step_costs_the_same(virtual: bool, machine: Machine) -> None:
    rng = random.Random(5)
    compared = 0
    for i in range(24):
        conv, grid = (
            some_conv(rng, transposed=i >= 18),
            Grid((("p", rng.choice([2, 3])), ("q", 2), ("r", rng.choice([2, 4])))),
        )
        space = Space(conv, grid, virtual_padding=virtual)
        model = Model(space, machine, "float32")
        small = ReducedModel(ReducedSpace(conv, grid, virtual_padding=virtual), machine, "float32")
        candidates = Candidates(space)
        for phase in ("forward", "backward_data", "backward_filter"):
            stored = {t: some_layout(rng, t, len(conv.dims(t)), ["p", "q", "r"]) for t in ("x", "w", "y")}
            roles: tuple[Roles, ...] = candidates.all_roles(phase, stored)
            for r in rng.sample(roles, min(4, len(roles))):
                layouts = wanted(space, phase, r)
                assert layouts == wanted(small.space, phase, r)
                assert small.convolution(layouts) == model.convolution(layouts)
                first, second, out = layouts
                for src, dst in (
                    (stored[first.tensor], first),
                    (stored[second.tensor], second),
                    (out, stored[out.tensor]),
                ):
                    # Where nothing happens to move, an exchange is a slice; both take no time.
                    found = [(s, c) for s, c in small.chain(src, dst) if c.time_ps]
                    exact = [(s, c) for s, c in model.chain(src, dst) if c.time_ps]
                    assert [(s.kind, s.dst, c.elements) for s, c in found] == [
                        (s.kind, s.dst, c.elements) for s, c in exact
                    ]
                    # A picosecond may be lost where a time is rounded.
                    assert all(abs(a.time_ps - b.time_ps) <= 1 for (_, a), (_, b) in zip(found, exact, strict=True))
                    compared += bool(found)
            assert small.add_bias(stored["y"]) == model.add_bias(stored["y"])
            assert small.sum_bias(stored["y"]) == model.sum_bias(stored["y"])
    assert compared > 250
