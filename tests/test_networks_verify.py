"""The verifier of networks finds nothing in programs that are right, and every mistake that is planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from free_networks import free_program
from operation_cases import a_grid
from sampling import cases_of
from test_networks_free import Branches, a_network

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.program.network import Program
from convgen.program.rows import PlacedRow, place
from convgen.program.verify.network import faults
from convgen.spec.aten.describe import describe
from convgen.spec.exported import graph_of

GRID = Grid((("N", 2), ("H", 2)))


@pytest.mark.parametrize("seed", cases_of(6, "test_any_program_that_is_lowered_is_right"))
def test_any_program_that_is_lowered_is_right(seed: int) -> None:
    draw = Random(f"verify {seed}")
    module, x = a_network(draw)
    graph, _ = graph_of(module, (x.float(),), name="net")
    for _ in range(3):
        program = free_program(draw, graph, describe(graph.at(graph.batch)), a_grid(draw))
        assert list(faults(program)) == []


def _changed(program: Program, change: Callable[[PlacedRow], PlacedRow | None]) -> Program:
    """With the first row changed that can be."""
    rows = list(program.rows)
    for i, row in enumerate(rows):
        if (new := change(row)) is not None:
            rows[i] = new
            return replace(program, rows=tuple(rows))
    raise AssertionError("no row to change")


def _no_fetch(row: PlacedRow) -> PlacedRow | None:
    some = [k for k, c in enumerate(row.fetch) if any(s.kind == "exchange" for s in c)]
    return replace(row, fetch=tuple(() if k in some else c for k, c in enumerate(row.fetch))) if some else None


def _no_sum(row: PlacedRow) -> PlacedRow | None:
    if not any(b for b in row.back):
        return None
    return replace(row, back=tuple(None if b is None else () for b in row.back))


def _not_merged(row: PlacedRow) -> PlacedRow | None:
    return replace(row, store=((),) * len(row.store)) if any(row.store) else None


def _fewer_axes(row: PlacedRow) -> PlacedRow | None:
    for k, chain in enumerate(row.back):
        if chain and len(chain[0].over) > 1:
            short = replace(chain[0], over=chain[0].over[:1])
            return replace(row, back=tuple((short, *chain[1:]) if j == k else b for j, b in enumerate(row.back)))
    return None


def _two_roles(row: PlacedRow) -> PlacedRow | None:
    indices = [i for i, n in row.signature.extents if n > 1]
    if len(row.roles) != 1 or len(indices) < 2:
        return None
    (_, axes), *_ = row.roles
    return replace(row, roles=tuple((i, axes) for i in indices[:2]))


def _elsewhere(row: PlacedRow) -> PlacedRow | None:
    split = [any(s) for s in row.reads]
    if not any(split):
        return None
    return replace(row, reads=tuple(((),) * len(s) for s in row.reads))


def _a_part_of_one(row: PlacedRow) -> PlacedRow | None:
    """The one group of a convolution is a rank's, and its channels are split."""
    if row.signature.extent.get("G") != 1:
        return None
    return place(row.bound, GRID, 0, {"G": ("H",)}, row.reads, row.makes)


PLANTED = {
    f.__name__: f for f in (_no_fetch, _no_sum, _not_merged, _fewer_axes, _two_roles, _elsewhere, _a_part_of_one)
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found(mistake: str) -> None:
    graph, _ = graph_of(Branches(Random("planted"), 3), (torch.zeros(4, 3, 12, 12),), name="net")
    program = compile_network(graph, GRID).program
    assert list(faults(program)) == []
    assert list(faults(_changed(program, PLANTED[mistake])))


def test_a_buffer_of_another_layout_is_found() -> None:
    graph, _ = graph_of(torch.nn.BatchNorm2d(4), (torch.zeros(4, 4, 6, 6),), name="net")
    program = compile_network(graph, Grid((("C", 2),))).program
    values = dict(program.values)
    values["running_mean"] = replace(values["running_mean"], stored=((),))
    assert any("stored" in fault for fault in faults(replace(program, values=values)))
