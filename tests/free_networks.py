"""Networks with roles and storage of their own for every row, drawn at random; packages of them on virtual ranks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import torch
from operation_cases import free_roles, free_storage

from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.signature import Signature
from convgen.cost.network import volume
from convgen.network_compiler import MEANWHILE, CompiledNetwork
from convgen.operations.bound import Bound
from convgen.passes.bucket_gradients import BucketGradients
from convgen.passes.chunk_collectives import ChunkCollectives
from convgen.passes.contract import NetworkPass
from convgen.passes.start_halos import StartHalos
from convgen.passes.widen_halos import WidenHalos
from convgen.program.network import Program, Value
from convgen.program.other_sizes import for_any_extents, program_like
from convgen.program.rows import PlacedRow, place, place_gradient, serves, stored_by_name
from convgen.program.verify.network import verify_network
from convgen.spec.aten.describe import Described
from convgen.spec.aten.sizes import for_any_sizes
from convgen.spec.graph import Graph
from convgen.verify.virtual import VirtualTransport, World

NUMBERS = count()


def some_roles(draw: Random, signature: Signature, grid: Grid) -> dict[str, Axes]:
    """Any roles whose blocks local code can take."""
    for _ in range(20):
        roles = free_roles(draw, signature, grid)
        if serves(signature, roles, grid):
            return roles
    return {}


def free_program(draw: Random, graph: Graph, described: Described, grid: Grid) -> Program:
    """Every row's way and roles, every value's storage, and which gradients have rows of their own: by chance."""
    known = {n: free_storage(draw, len(t.shape), grid) for n, t in described.tensors.items()}
    known |= {value: known[buffer] for buffer, value in graph.updates}
    rows = tuple(_free_row(draw, bound, grid, known) for bound in described.rows)
    kinds = {t.name: t.kind for t in described.tensors.values()}
    values = {n: Value(n, t.shape, t.dtype, known[n], kinds[n]) for n, t in described.tensors.items()}  # type: ignore[arg-type]
    return Program(name=graph.name, grid=grid, values=values, rows=rows, updates=graph.updates, outputs=graph.outputs)


def _free_row(draw: Random, bound: Bound, grid: Grid, known: Mapping[str, tuple[Axes, ...]]) -> PlacedRow:
    ways = [w for w, s in enumerate(bound.operation.signatures) if s.reduction != "max"]
    way = draw.choice(ways)
    signature = bound.operation.signatures[way]
    roles = some_roles(draw, signature, grid)
    reads = [known[v] for v in bound.reads]
    made = [known.get(v) or ((),) * len(r.shape) for v, r in zip(bound.makes, signature.results, strict=True)]
    names = stored_by_name(signature, reads, made)
    derived: dict[str, PlacedRow] = {}
    for name, one in bound.operation.gradients.items():
        if signature.reduction == "sum" and draw.random() < 0.5:
            continue
        other = draw.choice([w for w, s in enumerate(one.operation.signatures) if s.reduction != "max"])
        own = some_roles(draw, one.operation.signatures[other], grid)
        derived[name] = place_gradient(bound, name, grid, other, own, names)
    return place(bound, grid, way, roles, reads, made, derived)


def passes_of(draw: Random) -> list[NetworkPass]:
    """Some passes that let things travel meanwhile, with any options, in any order; some twice."""

    def one() -> NetworkPass:
        made = draw.choice(MEANWHILE)
        ways = {"gradients": ("pieces", "whole"), "count": (2, 3, 4), "mebibytes": (0, 1)}
        return replace(made, **{f.name: draw.choice(ways[f.name]) for f in fields(made) if f.name in ways})

    return [one() for _ in range(draw.randint(2, 5))]


def free_network(
    draw: Random, graph: Graph, grid: Grid, passes: Sequence[NetworkPass] | None = None
) -> CompiledNetwork:
    """
    Args:
        passes: in this order, each verified; by default some in an order that has worked.
    """
    known = for_any_sizes(graph, "cpu")
    graph, described = known.graph, known.here
    program = for_any_extents(free_program(draw, graph, described, grid), known)
    if passes is None:
        wide = [WidenHalos()] if draw.random() < 0.5 else []
        chunks = [ChunkCollectives(draw.choice([2, 3]))] if draw.random() < 0.7 else []
        halos = StartHalos(gradients=draw.choice(["pieces", "whole"]))
        passes = [*wide, *chunks, halos, BucketGradients(draw.choice([0, 1]))]
    for one in passes:
        program = one.run(program)
        verify_network(program_like(program, known.many))  # whose blocks are those that it was laid out for
    other = program_like(program, known.many)
    return CompiledNetwork(graph, described, program, program, other, known, None)


def imported(files: Mapping[str, str], folder: Path) -> ModuleType:
    """A package of these files."""
    name = f"free_network_{next(NUMBERS)}"
    path = folder / name
    path.mkdir(parents=True)
    for file, text in files.items():
        (path / file).write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path / "__init__.py", submodule_search_locations=[str(path)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Ran:
    """What a rank made: whole outputs, gradients and state, and what it sent in a step: (collective, bytes)."""

    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor | None]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    sent: list[tuple[str, int]]


def ranks_of(
    net: Any,
    grid: Grid,
    given: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    dys: Sequence[torch.Tensor],
    outputs: Sequence[str],
    *,
    train: bool = True,
    of_inputs: bool = True,
) -> list[Ran]:
    """Forward and backward on every virtual rank."""

    def program(end: VirtualTransport) -> Ran:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(state)
        model.train(train)
        batch = next(iter(given.values())).shape[0]
        sizes = {a: n for name, t in given.items() for a, n in net.NET.seen(name, t.shape).items() if a != "N"}
        blocks = {n: net.scatter(n, t, mesh) for n, t in given.items()}
        for t in blocks.values():
            t.requires_grad_(of_inputs and t.is_floating_point())
        made = model(*blocks.values(), batch=batch, sizes=sizes)
        made = list(made.values()) if isinstance(made, dict) else list(made) if isinstance(made, tuple) else [made]
        parts = [net.scatter(n, dy, mesh, sizes=sizes) for n, dy in zip(outputs, dys, strict=True)]
        torch.autograd.backward(made, parts)
        sent = [(one.collective, one.bytes) for one in end.sent]
        whole = [net.gather(n, y.detach(), mesh, batch=batch, sizes=sizes) for n, y in zip(outputs, made, strict=True)]
        grads = {n: t.grad for n, t in blocks.items()}
        dxs = [g if g is None else net.gather(n, g, mesh, batch=batch, sizes=sizes) for n, g in grads.items()]
        return Ran(whole, dxs, model.full_gradients(), model.full_state_dict(), sent)

    return World(grid.ranks).run(program)


def sent_by(program: Program, rank: int, *, of_inputs: bool) -> list[tuple[str, int]]:
    """What VOLUME says of a rank, in order."""
    found = volume(program, of_inputs=of_inputs)
    return [(s["collective"], s["bytes_sent_per_rank"][rank]) for cut in found.values() for s in cut]
