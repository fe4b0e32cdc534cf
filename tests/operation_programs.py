"""Random operations as networks of one row each, many in a package: roles, storage and gradients' own rows by chance,
lowered, emitted and run as any network is, on virtual ranks or on processes, against their references."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from free_networks import free_program, imported
from operation_cases import CASES, close, few, reference_gradients

from convgen.algebra.grid import Grid
from convgen.network_compiler import CompiledNetwork
from convgen.operations.bound import Bound
from convgen.spec.aten.describe import Described
from convgen.spec.aten.reader import Tensor as Known
from convgen.spec.aten.sizes import AnySizes
from convgen.spec.graph import Graph, Value
from convgen.verify.processes import spawn
from convgen.verify.virtual import World

Tensor = torch.Tensor
OF_LAYERS = ("bias of a convolution",)  # rows of single layers' modules, which no network has
KINDS = tuple(kind for kind in CASES if kind not in OF_LAYERS)


@dataclass
class One:
    """An operation: its kind, operands, results of its reference, gradients of results and of operands."""

    kind: str
    bound: Bound
    given: list[Tensor]
    made: list[Tensor]
    dys: list[Tensor | None]
    dxs: list[Tensor | None]


def some(draw: Random, kinds: Sequence[str], count: int) -> list[One]:
    """`count` operations of these kinds in turn."""
    found: list[One] = []
    while len(found) < count:
        kind = kinds[len(found) % len(kinds)]
        operation, given = CASES[kind](draw)
        if all(s.reduction == "max" for s in operation.signatures):
            continue  # on ranks these are parts of another operation's
        signature, k = operation.signatures[0], len(found)
        for t, operand in zip(given, signature.inputs, strict=True):
            t.requires_grad_(operand.gradient and t.is_floating_point())
        made = list(operation.reference(*given))
        dys = [few(draw, y.shape, 9).to(y.dtype) - 4 if y.requires_grad else None for y in made]
        reads = tuple(f"x{k}_{j}" for j in range(len(given)))
        makes = tuple(f"y{k}_{j}" for j in range(len(made)))
        bound = Bound(operation, reads, makes)
        found.append(One(kind, bound, given, made, dys, reference_gradients(given, made, dys)))
    return found


def compiled(draw: Random, grid: Grid, ones: Sequence[One]) -> CompiledNetwork:
    """A network of them all, side by side."""

    def name(t: Tensor) -> str:
        return str(t.dtype).removeprefix("torch.")

    tensors: dict[str, Known] = {}
    for one in ones:
        for names, ts, kind in ((one.bound.reads, one.given, "input"), (one.bound.makes, one.made, "made")):
            tensors |= {n: Known(n, tuple(t.shape), name(t), kind) for n, t in zip(names, ts, strict=True)}
    inputs = tuple(Value(name=n, shape=t.shape, dtype=t.dtype) for n, t in tensors.items() if t.kind == "input")
    outputs = tuple((n, n) for n, t in tensors.items() if t.kind == "made")
    graph = Graph(
        name="operations", source="", modes=("train",), batch=1, inputs=inputs, parameters=(), buffers=(), constants=(),
        calls=(), updates=(), outputs=outputs, aliases=(),
    )  # fmt: skip
    rows = tuple(one.bound for one in ones)
    described = Described(tensors, rows, tuple(range(len(rows))), ())
    program = free_program(draw, graph, described, grid)
    alone = AnySizes(graph, described, described, (), (graph.sizes,), ())
    return CompiledNetwork(graph, described, program, program, program, alone, None)


def wrong(draw: Random, kinds: Sequence[str], count: int, grid: Grid, *, processes: bool = False) -> list[str]:
    """What differs from references on some rank: results, or gradients of operands."""
    ones = some(draw, kinds, count)
    files = compiled(draw, grid, ones).package().files
    with tempfile.TemporaryDirectory() as folder:
        net = imported(files, Path(folder))
        run = _program(net, ones)
        if processes:
            ranks = spawn(lambda _: run(net.init_mesh("cpu")), grid.ranks)
        else:
            ranks = World(grid.ranks).run(lambda end: run(net.init_mesh("cpu", transport=end)))
    return list(dict.fromkeys(text for rank in ranks for text in rank))


def _program(net: Any, ones: Sequence[One]) -> Callable[[Any], list[str]]:
    """A rank's run; what differs, as texts."""

    def run(mesh: Any) -> list[str]:
        model = net.Network(mesh)
        given = {n: t.detach() for one in ones for n, t in zip(one.bound.reads, one.given, strict=True)}
        smooth = {n for one in ones for n, t in zip(one.bound.reads, one.given, strict=True) if t.requires_grad}
        blocks = {n: net.scatter(n, t, mesh).requires_grad_(n in smooth) for n, t in given.items()}
        made = model(*blocks.values(), batch=1)
        made = made.values() if isinstance(made, dict) else made if isinstance(made, tuple) else (made,)
        ys = dict(zip((n for one in ones for n in one.bound.makes), made, strict=True))
        dys = {n: dy for one in ones for n, dy in zip(one.bound.makes, one.dys, strict=True) if dy is not None}
        smooth_ys = [n for n in dys if ys[n].requires_grad]
        torch.autograd.backward([ys[n] for n in smooth_ys], [net.scatter(n, dys[n], mesh) for n in smooth_ys])
        found: list[str] = []
        for one in ones:
            for n, right in zip(one.bound.makes, one.made, strict=True):
                if not close(net.gather(n, ys[n].detach(), mesh, batch=1), right.detach()):
                    found.append(f"{one.kind}: {n} of {one.bound.operation}")
            for n, right in zip(one.bound.reads, one.dxs, strict=True):
                if right is not None:
                    block = blocks[n].grad
                    whole = net.gather(n, torch.zeros_like(blocks[n]) if block is None else block, mesh, batch=1)
                    if not close(whole, right):
                        off = float((whole - right).abs().max())
                        found.append(f"{one.kind}: gradient of {n} of {one.bound.operation}, {off:.1e} off")
        return found

    return run
