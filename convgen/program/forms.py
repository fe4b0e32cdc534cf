"""Which values may lie in memory as a collective delivers or takes them: found by index sets, and checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Form
from convgen.algebra.space import Space
from convgen.program.nodes import RESULTS, Compute, Convert, Schedule, Step, is_convolution, reads
from convgen.program.rows import PlacedRow, at_rank, index_sets

LEAST_PART = 16  # channels: fewer would leave a matrix unit's step half empty
MOST_BOXES = 3  # of a rim: each costs every row of a tile a comparison


def groups_of(space: IndexSets, over: Axes) -> NDArray[np.int64]:
    """For every rank the ranks of its group, in grid order: [ranks, members]."""
    _, group = np.unique(space.grid.group_ids(over), return_inverse=True)
    return space.grid.groups(over)[group]


def parts(space: Space, whole: Layout, cut: Layout, over: Axes) -> int:
    """Channels in one of the equal parts of a layer's activation; 0 where parts are unequal, or channels in groups."""
    activation = whole.tensor in ("x", "y") and space.conv.groups == 1
    return equal_parts(space, whole, cut, over) if activation else 0


def equal_parts(space: IndexSets, whole: Layout, cut: Layout, over: Axes) -> int:
    """Channels in one part, where the members' blocks of `cut` are equal parts of `whole` along channels, in order.

    0 where they are not: other dimensions are cut too, or blocks differ in size.
    """
    same = [d for d in range(len(whole.axes)) if d != 1]
    if any(whole.axes[d] != cut.axes[d] or whole.windows[d] != cut.windows[d] for d in same):
        return 0
    members = groups_of(space, over)
    blocks, outer = space.frame(cut)[:, 1][members], space.frame(whole)[:, 1]
    size, count = int(blocks[0, 0, 1] - blocks[0, 0, 0]), space.grid.over(over)
    starts: NDArray[np.int64] = np.add(outer[:, :1], size * np.arange(count))
    fits = np.array_equal(blocks[..., 0], starts) and np.array_equal(blocks[..., 1], starts + size)
    return size if fits and np.all(outer[:, 1] - outer[:, 0] == size * count) else 0


def boxes(space: IndexSets, src: Layout, dst: Layout, over: Axes) -> NDArray[np.int64] | None:
    """How many boxes each rank receives around its block for a window; None where more than the window changes.

    The number of samples may change at run time, so a box counts though it has no samples now.
    """
    if src.axes != dst.axes or src.has_window or src.partial:
        return None
    own, need = space.held(src)[:, 2:], space.held(dst)[:, 2:]
    members = groups_of(space, over)
    lo = np.maximum(own[members][..., 0], need[:, None, :, 0])
    hi = np.minimum(own[members][..., 1], need[:, None, :, 1])
    others = members != np.arange(len(members))[:, None]
    return ((hi > lo).all(axis=-1) & others).sum(axis=1)


def rim_faults(row: PlacedRow, k: int, grid: Grid) -> Iterator[str]:
    """Why a network's row can't read operand k as a rank's own block and the boxes around it, if it can't."""
    name, chain, operation = row.signature.inputs[k].name, row.fetch[k], row.bound.operation
    if fault := _no_kernel(row, name):
        yield fault
        return
    if [(c.kind, c.reduction) for c in chain] != [("exchange", None)]:
        yield f"{name} is fetched by {[c.kind for c in chain]}, no exchange alone"
        return
    ((c,), sets) = chain, index_sets(row.signature, grid)
    if not c.dst.has_window or boxes(sets, c.src, c.dst, c.over) is None:
        yield f"more than rows change from {c.src} to {c.dst}"
        return
    for rank, held in enumerate(sets.held(c.dst)):
        at = at_rank(row, grid, rank)
        for one, way, here in operation.convolutions(row.way, at):
            of_filter = one.phase == "backward_filter" and way % 2
            if of_filter or (one.phase == "backward_data" and any(b is not None for b in row.back)):
                yield f"the kernel of the filter's gradient reads {name} as one tensor"
                return
            if one.convolved(way, here) is None:
                yield f"rank {rank}'s block cuts groups"
                return
        if not np.array_equal(np.array(at.inside[k]), held):
            yield f"rank {rank} reads {at.inside[k]} of what it has of {name}, {held.tolist()}"
            return


def _no_kernel(row: PlacedRow, name: str, *, made: bool = False) -> str | None:
    """Why no kernel takes this operand, or result, in a form, if none does; chunks may make a result in parts."""
    operation = row.bound.operation
    epilogue, masks, _ = operation.kernel_steps
    if operation.convolves is None and (masks or not epilogue):
        return f"{operation.name} reads {name} as one tensor"
    by_chunks = made and row.chunks is not None and row.chunks.result
    return f"{operation.name} is computed in pieces" if row.is_cut and not by_chunks else None


def ends(row: PlacedRow, k: int, *, made: bool) -> list[tuple[str, int]]:
    """The conversions next to a kernel's operand k, or result k, and to its gradient: the row's field, and which end of
    the chain there, 0 the first and -1 the last conversion."""
    if made:
        return [("store", 0), ("given", -1)][: 1 + any(b is not None for b in row.back)]
    return [("fetch", -1), ("back", 0)][: 1 + (row.back[k] is not None)]


def ended(row: PlacedRow, k: int, form: Form, *, made: bool) -> PlacedRow:
    """The row with operand k, or result k, and its gradient in a form; the gradient of a rim travels as a tensor."""
    for side, n in ends(row, k, made=made)[: 1 if form == "rim" else None]:
        chains = [*getattr(row, side)]
        if chains[k]:
            i = n % len(chains[k])
            chains[k] = (*chains[k][:i], replace(chains[k][i], form=form), *chains[k][i + 1 :])
        row = replace(row, **{side: tuple(chains)})
    return row


def part_faults(row: PlacedRow, k: int, grid: Grid, *, made: bool) -> Iterator[str]:
    """Why operand k of a network's row, or its result k, can't lie in equal parts of its channels, if it can't."""
    signature, sets, operation = row.signature, index_sets(row.signature, grid), row.bound.operation
    name = (signature.results if made else signature.inputs)[k].name
    if fault := _no_kernel(row, name, made=made):
        yield fault
        return
    counts = set[int]()
    for side, n in ends(row, k, made=made):
        chain, kind = getattr(row, side)[k], "all_gather" if n else "reduce_scatter"
        if not chain or (chain[n].kind, chain[n].reduction) != (kind, None):
            yield f"{name} or its gradient travels by {[c.kind for c in chain]}, no {kind} at that end"
            return
        whole, cut = (chain[n].dst, chain[n].src) if n else (chain[n].src, chain[n].dst)
        counts.add(grid.over(chain[n].over) if equal_parts(sets, whole, cut, chain[n].over) else 0)
    if len(counts) > 1 or not min(counts):
        yield f"channels of {name} are not in equal parts, the same for its gradient"
        return
    for rank in range(grid.ranks):
        at = replace(at_rank(row, grid, rank), parts={name: min(counts)})
        found = [(conv, here.parts) for conv, _, here in operation.convolutions(row.way, at)]
        if not any({"x", "y"} & parts.keys() for _, parts in found):
            yield f"{operation.name} takes {name} as one tensor"
            return
        if any(conv.conv.groups > 1 for conv, _ in found):
            yield f"channels of {name} come in groups"
            return
        if not made and not np.array_equal(np.array(at.inside[k]), held := sets.held(row.fetch[k][-1].dst)[rank]):
            yield f"rank {rank} reads {at.inside[k]} of what it has of {name}, {held.tolist()}"
            return


def form_faults(row: PlacedRow, grid: Grid) -> Iterator[str]:
    """What comes or goes in a form and can't, or has a form that nothing reads."""
    plain = row
    for k, chain in enumerate(row.fetch):
        if chain and chain[-1].form == "rim":
            plain = ended(plain, k, "whole", made=False)
            yield from (f"a rim: {fault}" for fault in rim_faults(row, k, grid))
    for made, operands in ((False, row.signature.inputs), (True, row.signature.results)):
        for k, operand in enumerate(operands):
            forms = {getattr(row, side)[k][n].form for side, n in ends(row, k, made=made) if getattr(row, side)[k]}
            if forms == {"parts"}:
                plain = ended(plain, k, "whole", made=made)
                yield from (f"parts: {fault}" for fault in part_faults(row, k, grid, made=made))
            elif "parts" in forms:
                yield f"{operand.name} comes in parts, or its gradient, and the other does not"
    for chain in (*plain.fetch, *plain.store, *plain.given, *(b or () for b in plain.back)):
        for c in chain:
            if c.form != "whole":
                yield f"what {c.kind} makes comes as {c.form}, which nothing reads"


def check_forms(schedule: Schedule, space: Space) -> Iterator[tuple[Step | None, str]]:
    """A value in a form really has it, and only steps that know how read it; results of a module are whole tensors."""
    types, made = schedule.types(), {s.result: s for _, s in schedule.steps()}
    forms = schedule.forms()
    for _, step in schedule.steps():
        if step.form != "whole" and not space.virtual_padding:
            yield step, f"%{step.result} comes as {step.form}: local convolutions that pad as ATen does take tensors"
        for value in reads(step):
            form = forms.get(value, "whole")
            takes = isinstance(step, Convert) and step.kind == "reduce_scatter" and is_convolution(made.get(value))
            if form != "whole" and not (is_convolution(step) or (form == "parts" and takes)):
                yield step, f"%{value} comes as {form}, which it can't read"
            if (
                takes
                and form == "parts"
                and isinstance(step, Convert)
                and not parts(space, types[value], step.type, step.over)
            ):
                yield step, f"%{value} is not in equal parts of {step.type}"
        if is_convolution(step):
            rims = [made[v] for v in step.inputs if forms.get(v) == "rim"]
            if tuple(s.source for s in rims if isinstance(s, Convert)) != step.own:
                yield step, f"reads rims of {[s.result for s in rims]} around {list(step.own)}"
            if rims and step.phase == "backward_filter" and step.by_fine_rows:
                yield step, f"reads {step.inputs[step.transposed]} from a block and its rim"
        elif isinstance(step, Compute) and step.own:
            yield step, f"reads no rim around {list(step.own)}"
        if step.form != "whole" and not _delivers(step, types, space):
            yield step, f"its result does not come as {step.form}"


def _delivers(step: Step, types: dict[str, Layout], space: Space) -> bool:
    """Whether a step's result has the form that it says; whoever reads a convolution's parts is checked for that."""
    if step.result in RESULTS:
        return False
    if not isinstance(step, Convert):
        return step.form == "parts" and is_convolution(step)
    if step.form == "parts":
        return step.kind == "all_gather" and parts(space, step.type, types[step.source], step.over) > 0
    return step.kind == "exchange" and boxes(space, types[step.source], step.type, step.over) is not None
