"""Operations on ranks by brute force, from signatures alone: the oracle of the algebra.

It knows boxes, two conversions and no operation. `fetch`: every element from one fixed owner; `collect`: addends of
the ranks that differ along some axes, reduced into stored blocks. Each is the other's adjoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch

from convgen.algebra.blocks import span
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.signature import Operand, Signature, Wanted
from convgen.operations.row import At, Operation

Part = tuple[int, int, int]  # begin and end in the tensor, begin in the window
Window = tuple[tuple[Part, ...], ...]  # of each dimension


def block(grid: Grid, rank: int, extent: int, groups: int, axes: Axes) -> tuple[int, int]:
    at = grid.at(rank)
    return span(extent, groups, tuple(grid.sizes[a] for a in axes), tuple(at[a] for a in axes), 0)


def whole(shape: Sequence[int]) -> Window:
    return tuple(((0, n, 0),) for n in shape)


def extents(window: Window) -> list[int]:
    return [sum(hi - lo for lo, hi, _ in parts) for parts in window]


def places(window: Window) -> Iterable[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Boxes of a window: where in the tensor, and where in the rank's buffer, parts one behind the other."""
    sides: list[list[tuple[slice, slice]]] = []
    for parts in window:
        found, start = [], 0
        for lo, hi, _ in parts:
            found.append((slice(lo, hi), slice(start, start + hi - lo)))
            start += hi - lo
        sides.append(found)
    for box in itertools.product(*sides):
        yield tuple(t for t, _ in box), tuple(b for _, b in box)


@dataclass
class Value:
    """A tensor in its stored layout: a block a rank, copies over axes that no dimension uses."""

    grid: Grid
    shape: tuple[int, ...]
    groups: tuple[int, ...]
    axes: tuple[Axes, ...]
    parts: list[torch.Tensor]

    @property
    def windows(self) -> list[Window]:
        return [
            tuple(
                ((*block(self.grid, r, n, g, a), 0),)
                for n, g, a in zip(self.shape, self.groups, self.axes, strict=True)
            )
            for r in range(self.grid.ranks)
        ]


def scatter(tensor: torch.Tensor, grid: Grid, groups: tuple[int, ...], axes: tuple[Axes, ...]) -> Value:
    v = Value(grid, tuple(tensor.shape), groups, axes, [])
    for window in v.windows:
        ((there, _),) = places(window)
        v.parts.append(tensor[there].clone())
    return v


def gather(v: Value) -> torch.Tensor:
    """The whole tensor; every copy has to be equal."""
    found = fetch(v, [whole(v.shape)] * v.grid.ranks)
    for part in found:
        assert torch.equal(part.nan_to_num(), found[0].nan_to_num()), "copies differ"
    for window, part in zip(v.windows, v.parts, strict=True):
        ((there, _),) = places(window)
        assert torch.allclose(part, found[0][there], rtol=1e-11, atol=1e-11), "copies differ"
    return found[0]


def fetch(v: Value, windows: Sequence[Window]) -> list[torch.Tensor]:
    """Each rank's window, every element from the one rank that differs in block axes only and owns it."""
    moving, found = {a for axes in v.axes for a in axes}, []
    for r, window in enumerate(windows):
        t = torch.full(extents(window), torch.nan, dtype=v.parts[r].dtype)
        count = torch.zeros(extents(window), dtype=torch.int64)
        for s in v.grid.group(r, moving):
            ((own, _),) = places(v.windows[s])
            for there, here in places(window):
                lo = [max(a.start, b.start) for a, b in zip(there, own, strict=True)]
                hi = [max(f, min(a.stop, b.stop)) for f, a, b in zip(lo, there, own, strict=True)]
                to = tuple(
                    slice(f - a.start + b.start, h - a.start + b.start)
                    for f, h, a, b in zip(lo, hi, there, here, strict=True)
                )
                of = tuple(slice(f - o.start, h - o.start) for f, h, o in zip(lo, hi, own, strict=True))
                t[to] = v.parts[s][of]
                count[to] += 1
        assert bool((count == 1).all()), "an element has no owner, or two"
        found.append(t)
    return found


def collect(
    grid: Grid,
    parts: Sequence[torch.Tensor],
    windows: Sequence[Window],
    over: Iterable[str],
    to: Value,
    how: str = "sum",
) -> Value:
    """Addends of the ranks that differ along `over`, reduced into blocks stored as `to` says."""
    over = set(over)
    identity = {"sum": 0.0, "max": -inf}[how]
    out = Value(grid, to.shape, to.groups, to.axes, [])
    for r, (window,) in enumerate(zip(out.windows, strict=True)):
        ((own, _),) = places(window)
        full = torch.full(tuple(to.shape), identity, dtype=parts[r].dtype)
        for s in grid.group(r, over):
            for there, here in places(windows[s]):
                mine = parts[s][here]
                full[there] = full[there] + mine if how == "sum" else torch.maximum(full[there], mine)
        out.parts.append(full[own].clone())
    return out


def stand(
    grid: Grid, rank: int, signature: Signature, roles: Mapping[str, Axes]
) -> tuple[At, list[Window], list[Window]]:
    """Where a rank's part of a row stands, the windows of its operands, and the blocks of its results."""
    blocks: dict[str, tuple[int, int]] = {}
    for index, n in signature.extents:
        blocks[index] = block(grid, rank, n, 1, roles.get(index, ()))
    wished: list[tuple[tuple[int, int], ...]] = []
    inside: list[tuple[tuple[int, int], ...]] = []
    windows: list[Window] = []
    for operand in signature.inputs:
        found = [_side(grid, rank, signature, operand, d, roles, blocks) for d in range(len(operand.shape))]
        wished.append(tuple(w for w, _ in found))
        windows.append(tuple(p for _, p in found))
        inside.append(
            tuple((p[0][2] + w[0], p[-1][2] + w[0] + p[-1][1] - p[-1][0]) if p else (w[0], w[0]) for w, p in found)
        )
    made = [
        tuple(_side(grid, rank, signature, result, d, roles, blocks)[1] for d in range(len(result.shape)))
        for result in signature.results
    ]
    return At(blocks, tuple(wished), tuple(inside)), windows, made


def _side(
    grid: Grid, rank: int, signature: Signature, operand: Operand, d: int, roles: Mapping[str, Axes], blocks: Any
) -> tuple[tuple[int, int], tuple[Part, ...]]:
    made, n = operand.dims[d], operand.shape[d]
    if not made.indices:
        return (0, n), ((0, n, 0),)
    if made.relation is None:
        groups = prod(signature.extent[i] for i in made.indices[:-1])
        lo, hi = block(grid, rank, n, groups, tuple(a for i in made.indices for a in roles.get(i, ())))
        return (lo, hi), ((lo, hi, 0),)
    lo, hi = blocks[made.indices[0]]
    if lo == hi:
        return (0, 0), ((0, 0, 0),)
    lo, hi = made.relation.window(lo, hi)
    return (lo, hi), tuple(p for p in made.relation.fold(lo, hi, n))


@dataclass
class Run:
    """A row on all ranks: what each rank stood at, read and made."""

    operation: Operation
    way: int
    grid: Grid
    roles: Mapping[str, Axes]
    stands: list[tuple[At, list[Window], list[Window]]]
    leaves: list[list[torch.Tensor]]
    outs: list[tuple[torch.Tensor, ...]]


def run(operation: Operation, way: int, grid: Grid, roles: Mapping[str, Axes], values: Sequence[Value]) -> Run:
    signature = operation.signatures[way]
    stands = [stand(grid, r, signature, roles) for r in range(grid.ranks)]
    read = [fetch(v, [s[1][k] for s in stands]) for k, v in enumerate(values)]
    leaves: list[list[torch.Tensor]] = []
    outs: list[tuple[torch.Tensor, ...]] = []
    for r, (at, _, made) in enumerate(stands):
        mine = [t[r].requires_grad_(t[r].is_floating_point()) for t in read]
        shapes = [extents(m) for m in made]
        empty = not any(prod(s) for s in shapes) or (not signature.runs_empty and any(not t.numel() for t in mine))
        blank = {"sum": 0.0, "max": -inf, "merge": 0.0}[signature.reduction]
        with torch.enable_grad():
            out = (
                tuple(torch.full(s, blank, dtype=torch.float64) for s in shapes)
                if empty
                else operation.local(way, at, *mine)
            )
        assert [list(o.shape) for o in out] == shapes, (operation, at, [o.shape for o in out], shapes)
        leaves.append(mine)
        outs.append(out)
    return Run(operation, way, grid, roles, stands, leaves, outs)


def results(done: Run, stored: Sequence[Value]) -> list[Value]:
    """The row's results, stored: what is partial is reduced over its axes, what is equal is taken."""
    signature = done.operation.signatures[done.way]
    over = signature.roles(done.roles)
    return [
        collect(
            done.grid, [o[k].detach() for o in done.outs], [s[2][k] for s in done.stands], over, to, signature.reduction
        )
        for k, to in enumerate(stored)
    ]


def gradients(done: Run, given: Sequence[Value], stored: Sequence[Value]) -> list[Value]:
    """Of every operand, from those of the results: torch's vjp of local code, and `Signature.gradient`'s type."""
    signature = done.operation.signatures[done.way]
    dys = [fetch(g, [s[2][k] for s in done.stands]) for k, g in enumerate(given)]
    found: list[list[torch.Tensor]] = []
    for r, (leaves, outs) in enumerate(zip(done.leaves, done.outs, strict=True)):
        pairs = [(o, dys[k][r]) for k, o in enumerate(outs) if o.requires_grad]
        some = [t for t in leaves if t.requires_grad]
        grads = (
            torch.autograd.grad([o for o, _ in pairs], some, [g for _, g in pairs], allow_unused=True)
            if pairs
            else [None] * len(some)
        )
        by = dict(zip(map(id, some), grads, strict=True))
        found.append([torch.zeros_like(t) if by.get(id(t)) is None else by[id(t)] for t in leaves])
    values: list[Value] = []
    for k, (operand, to) in enumerate(zip(signature.inputs, stored, strict=True)):
        wanted: Wanted = signature.gradient(operand, done.roles)
        over = {*wanted.partial, *wanted.split_by}
        values.append(collect(done.grid, [f[k] for f in found], [s[1][k] for s in done.stands], over, to))
    return values
