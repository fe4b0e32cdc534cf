"""Operations on ranks by brute force, from signatures alone: the oracle of the algebra.

It knows boxes, two conversions and no operation. `fetch`: every element from one fixed owner; `collect`: addends of
the ranks that differ along some axes, reduced into stored blocks. Each is the other's adjoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod

import torch

from convgen.algebra.blocks import span
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.signature import Operand, Signature, Wanted
from convgen.operations.row import At, Interval, Operation

Part = tuple[int, int, int]  # begin and end in the tensor, begin in the window
Window = tuple[tuple[Part, ...], ...]  # of each dimension
Tensors = tuple[torch.Tensor, ...]
NOWHERE = 2**62  # a number of something, where there is nothing


# ---------------------------------------------------------------- blocks, windows, boxes
@lru_cache(maxsize=65536)
def block(grid: Grid, rank: int, extent: int, axes: Axes) -> Interval:
    at = grid.at(rank)
    return span(extent, 1, tuple(grid.sizes[a] for a in axes), tuple(at[a] for a in axes), 0)


def nest(blocks: Sequence[Interval], extents: Sequence[int]) -> Interval:
    """Flat numbers of a nest of blocks, outermost first."""
    start, count = 0, 1
    for (lo, hi), n in zip(blocks, extents, strict=True):
        start, count = start * n + lo, count * (hi - lo)
    return start, start + count


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


# ---------------------------------------------------------------- values and the two conversions
@dataclass
class Value:
    """A tensor as it is stored: a block a rank, copies over axes that no dimension uses."""

    grid: Grid
    shape: tuple[int, ...]
    axes: tuple[Axes, ...]
    parts: list[torch.Tensor]

    def window(self, rank: int) -> Window:
        return tuple(((*block(self.grid, rank, n, a), 0),) for n, a in zip(self.shape, self.axes, strict=True))

    def cut(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        ((there, _),) = places(self.window(rank))
        return tensor[there].clone()


def scatter(tensor: torch.Tensor, grid: Grid, axes: tuple[Axes, ...]) -> Value:
    v = Value(grid, tuple(tensor.shape), axes, [])
    v.parts = [v.cut(tensor, r) for r in range(grid.ranks)]
    return v


def gather(v: Value) -> torch.Tensor:
    """The whole tensor; every copy has to be equal."""
    whole: Window = tuple(((0, n, 0),) for n in v.shape)
    found = fetch(v, [whole] * v.grid.ranks)[0]
    for r, part in enumerate(v.parts):
        mine = v.cut(found, r)
        assert torch.allclose(part, mine, rtol=1e-11, atol=1e-11, equal_nan=True), "copies differ"
    return found


def fetch(v: Value, windows: Sequence[Window]) -> list[torch.Tensor]:
    """Each rank's window, every element from the one rank that differs in block axes only and owns it."""
    moving, found = {a for axes in v.axes for a in axes}, list[torch.Tensor]()
    owned = [next(iter(places(v.window(s))))[0] for s in range(v.grid.ranks)]
    for r, window in enumerate(windows):
        t = torch.full(extents(window), -NOWHERE, dtype=v.parts[r].dtype)
        count = torch.zeros(extents(window), dtype=torch.int64)
        for s, (there, here) in itertools.product(v.grid.group(r, moving), places(window)):
            lo = [max(a.start, b.start) for a, b in zip(there, owned[s], strict=True)]
            hi = [min(a.stop, b.stop) for a, b in zip(there, owned[s], strict=True)]
            if any(f >= h for f, h in zip(lo, hi, strict=True)):
                continue
            to = tuple(
                slice(f - a.start + b.start, h - a.start + b.start)
                for f, h, a, b in zip(lo, hi, there, here, strict=True)
            )
            of = tuple(slice(f - o.start, h - o.start) for f, h, o in zip(lo, hi, owned[s], strict=True))
            t[to] = v.parts[s][of]
            count[to] += 1
        assert bool((count == 1).all()), "an element has no owner, or two"
        found.append(t)
    return found


def collect(
    parts: Sequence[Tensors],
    windows: Sequence[Sequence[Window]],
    over: Iterable[str],
    to: Sequence[Value],
    how: str = "sum",
) -> list[Value]:
    """Addends of the ranks that differ along `over`, reduced into blocks stored as `to` says.

    `parts` and `windows` are of each rank and tensor; what is no sum is reduced for all tensors together.
    """
    grid, over, made = to[0].grid, set(over), dict[tuple[int, ...], Tensors]()
    out = [Value(grid, v.shape, v.axes, []) for v in to]
    for r in range(grid.ranks):
        ranks = grid.group(r, over)
        if ranks not in made:
            made[ranks] = REDUCE[how]([spread(parts[s], windows[s], to, how) for s in ranks])
        for v, whole in zip(out, made[ranks], strict=True):
            v.parts.append(v.cut(whole, r))
    return out


def spread(parts: Tensors, windows: Sequence[Window], to: Sequence[Value], how: str) -> Tensors:
    """One rank's addends in tensors as large as the whole, what leaves others as they are elsewhere."""
    found: list[torch.Tensor] = []
    for part, window, v in zip(parts, windows, to, strict=True):
        whole = blank(v.shape, part.dtype, how)
        for there, here in places(window):
            whole[there] = whole[there] + part[here] if how == "sum" else part[here]
        found.append(whole)
    return tuple(found)


def blank(shape: Sequence[int], dtype: torch.dtype, how: str) -> torch.Tensor:
    return torch.full(tuple(shape), 0 if how != "max" else -inf if dtype.is_floating_point else NOWHERE, dtype=dtype)


def _sum(addends: Sequence[Tensors]) -> Tensors:
    return tuple(torch.stack(t).sum(0) for t in zip(*addends, strict=True))


def _max(addends: Sequence[Tensors]) -> Tensors:
    """The largest, and of those equal to it the one whose number is smallest."""
    best = addends[0]
    for other in addends[1:]:
        better = (other[0] > best[0]) | ((other[0] == best[0]) & (other[1] < best[1]))
        best = tuple(torch.where(better, o, b) for o, b in zip(other, best, strict=True))
    return best


def _merge(addends: Sequence[Tensors]) -> Tensors:
    """Moments [count, mean, M2] of the union of disjoint parts."""
    n, mean, m2 = (torch.stack([t[k] for (t,) in addends]) for k in range(3))
    whole = (n * mean).sum(0) / n.sum(0).clamp(min=1)
    return (torch.stack([n.sum(0), whole, (m2 + n * (mean - whole) ** 2).sum(0)]),)


REDUCE: Mapping[str, Callable[[Sequence[Tensors]], Tensors]] = {"sum": _sum, "max": _max, "merge": _merge}


# ---------------------------------------------------------------- rows
@dataclass
class Stand:
    """Where a rank stands in a row: what local code is told, windows of operands, blocks of results."""

    at: At
    reads: list[Window]
    makes: list[Window]


def stand(grid: Grid, rank: int, signature: Signature, roles: Mapping[str, Axes]) -> Stand:
    blocks = {index: block(grid, rank, n, roles.get(index, ())) for index, n in signature.extents}

    def side(operand: Operand, d: int) -> tuple[Interval, tuple[Part, ...]]:
        """Rows wished for, and where they lie."""
        made, n = operand.dims[d], operand.shape[d]
        if made.relation is None:
            lo, hi = (0, n)
            if made.indices:
                lo, hi = nest([blocks[i] for i in made.indices], [signature.extent[i] for i in made.indices])
            return (lo, hi), ((lo, hi, 0),)
        lo, hi = made.relation.window(*blocks[made.indices[0]])
        first = min(max(lo, 0), n)
        return (lo, hi), ((first, max(min(hi, n), first), first - lo),)

    def sides(operand: Operand) -> list[tuple[Interval, tuple[Part, ...]]]:
        return [side(operand, d) for d in range(len(operand.shape))]

    read, made = [sides(o) for o in signature.inputs], [sides(o) for o in signature.results]
    at = At(
        blocks,
        tuple(tuple(wished for wished, _ in operand) for operand in read),
        tuple(tuple(_inside(wished, parts) for wished, parts in operand) for operand in read),
    )
    return Stand(at, *([tuple(parts for _, parts in o) for o in operands] for operands in (read, made)))


def _inside(wished: Interval, parts: tuple[Part, ...]) -> Interval:
    """Rows that there are of those wished for, in their own numbering."""
    if not any(hi > lo for lo, hi, _ in parts):
        return wished[0], wished[0]
    some = [(wished[0] + begin, wished[0] + begin + hi - lo) for lo, hi, begin in parts if hi > lo]
    return some[0][0], some[-1][1]


@dataclass
class Run:
    """A row on all ranks: where each stood, what it read and made."""

    operation: Operation
    way: int
    roles: Mapping[str, Axes]
    stands: list[Stand]
    leaves: list[list[torch.Tensor]]
    outs: list[Tensors]

    @property
    def signature(self) -> Signature:
        return self.operation.signatures[self.way]


def run(operation: Operation, way: int, roles: Mapping[str, Axes], values: Sequence[Value]) -> Run:
    signature, grid = operation.signatures[way], values[0].grid
    stands = [stand(grid, r, signature, roles) for r in range(grid.ranks)]
    read = [fetch(v, [s.reads[k] for s in stands]) for k, v in enumerate(values)]
    leaves: list[list[torch.Tensor]] = []
    outs: list[Tensors] = []
    for r, s in enumerate(stands):
        mine = [t[r].requires_grad_(o.gradient) for t, o in zip(read, signature.inputs, strict=True)]
        shapes = [extents(m) for m in s.makes]
        idle = not any(map(prod, shapes)) or (not signature.runs_empty and any(not t.numel() for t in mine))
        with torch.enable_grad():
            out = _blanks(signature, shapes) if idle else operation.local(way, s.at, *mine)
        assert [list(o.shape) for o in out] == shapes, (operation, s.at, [o.shape for o in out], shapes)
        leaves.append(mine)
        outs.append(out)
    return Run(operation, way, roles, stands, leaves, outs)


def _blanks(signature: Signature, shapes: Sequence[Sequence[int]]) -> Tensors:
    return tuple(
        blank(s, torch.int64 if o.integer else torch.float64, signature.reduction)
        for s, o in zip(shapes, signature.results, strict=True)
    )


def results(done: Run, stored: Sequence[Value]) -> list[Value]:
    """The row's results, stored: what is partial is reduced, what is equal is taken."""
    over = {a for r in done.signature.results for a in _axes(done.signature.wants(r, done.roles))}
    parts = [tuple(o.detach() for o in out) for out in done.outs]
    return collect(parts, [s.makes for s in done.stands], over, stored, done.signature.reduction)


def gradients(done: Run, given: Sequence[Value | None], stored: Sequence[Value]) -> list[Value]:
    """Of every operand, from those of the results: torch's vjp of local code, and `Signature.gradient`'s type."""
    dys = [g and fetch(g, [s.makes[k] for s in done.stands]) for k, g in enumerate(given)]
    found: list[Tensors] = []
    for r, (leaves, outs) in enumerate(zip(done.leaves, done.outs, strict=True)):
        pairs = [(o, dy[r]) for o, dy in zip(outs, dys, strict=True) if dy is not None and o.requires_grad]
        grads = [torch.zeros_like(t) for t in leaves]
        some = [k for k, t in enumerate(leaves) if t.requires_grad]
        if pairs and some:
            wrt = [leaves[k] for k in some]
            asked = torch.autograd.grad([o for o, _ in pairs], wrt, [g for _, g in pairs], allow_unused=True)
            for k, g in zip(some, asked, strict=True):
                grads[k] = grads[k] if g is None else g
        found.append(tuple(grads))
    values: list[Value] = []
    for k, (operand, to) in enumerate(zip(done.signature.inputs, stored, strict=True)):
        over = _axes(done.signature.gradient(operand, done.roles))
        values += collect([(f[k],) for f in found], [(s.reads[k],) for s in done.stands], over, [to])
    return values


def _axes(wanted: Wanted) -> set[str]:
    """Along which ranks have addends, or parts that overlap."""
    return {*wanted.partial, *wanted.split_by}
