"""Batch norms of a network's program: groups of rows into which spec/aten/norms.py turns one call of the source.

Batch norms with their module's own parameters and buffers take fewer passes over memory (templates/runtime/norms.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod

from convgen.operations.averaged import Averaged
from convgen.operations.batch_norm import Centred, Coefficients
from convgen.operations.bound import Bound
from convgen.operations.calls import Elementwise
from convgen.operations.fused import Fused
from convgen.operations.moments import Moments
from convgen.operations.row import Operation
from convgen.operations.running import PartStatistics, RunningMoments, RunningStatistics
from convgen.program.network import Moved, Program, stored
from convgen.program.rows import PlacedRow, place


@dataclass(frozen=True, slots=True)
class Norm:
    """A batch norm whose parameters and buffers are those of one module of the source.

    Attributes:
        moments, coefficients, centred: numbers of rows; the last may be one with rows behind it.
        momentum: with which running statistics are updated; 0 where there are none.
        statistics: where statistics by parts have running ones, the number of the row that averages the parts'.
        renewed: number of the row that renews running statistics.
        counted: number of the row that counts batches.
    """

    module: str
    moments: int
    coefficients: int
    centred: int
    momentum: float
    eps: float
    statistics: int | None = None
    renewed: int | None = None
    counted: int | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of rows with collectives of their own."""
        return tuple(i for i in (self.moments, self.statistics, self.coefficients, self.centred) if i is not None)


def norms(program: Program) -> tuple[dict[int, Norm], set[int]]:
    """Batch norms by the number of their moments' row, and numbers of the other rows that they stand for."""
    found: dict[int, Norm] = {}
    gone: set[int] = set()
    groups: dict[str, dict[type[Operation], int]] = {}
    for i, row in enumerate(program.rows):
        if row.bound.norm:
            groups.setdefault(row.bound.norm, {})[_kind(row.bound.operation)] = i
    counts = counting(program)
    read = {v for row in program.rows for v in row.bound.reads} | {v for _, v in program.outputs}
    for kinds in groups.values():
        if {Moments, Coefficients, Centred} <= set(kinds) and (one := _norm(program, kinds, counts, read)) is not None:
            found[one.moments] = one
            rows = (one.moments, one.statistics, one.coefficients, one.centred, one.renewed, one.counted)
            gone |= {i for i in rows if i is not None} - {one.moments}
    return found, gone


def _kind(operation: Operation) -> type[Operation]:
    """The kind of a row's first operation; a batch norm's last row may be one with rows behind it (wide.py)."""
    return type(operation.parts[0].operation if isinstance(operation, Fused) else operation)


def _norm(
    program: Program, kinds: Mapping[type[Operation], int], counts: Mapping[str, int], read: Collection[str]
) -> Norm | None:
    """The batch norm of these rows; None if its values are not its module's own, or the module has others.

    Args:
        read: values that rows or outputs read; a buffer that is only renewed is not among them.
    """
    rows, module = program.rows, program.rows[kinds[Moments]].bound.module
    moments, coefficients = rows[kinds[Moments]].bound.operation, rows[kinds[Coefficients]].bound.operation
    assert isinstance(moments, Moments) and isinstance(coefficients, Coefficients)
    own = {"weight": coefficients.weight, "bias": coefficients.bias}
    own |= dict.fromkeys(("running_mean", "running_var"), RunningStatistics in kinds)
    wanted = tuple(f"{module}.{n}" for n in ("weight", "bias") if own[n])
    others = any(not there and f"{module}.{n}" in program.values for n, there in own.items())
    counted = f"{module}.num_batches_tracked"
    uncounted = counted in program.values and counted not in counts  # a batch norm counts one batch a step
    if rows[kinds[Coefficients]].bound.reads[1:] != wanted or others or uncounted:
        return None
    if moments.of.parts and _moves(program, kinds, moments.of):
        return None
    one = Norm(
        module, kinds[Moments], kinds[Coefficients], kinds[Centred], 0.0, coefficients.eps, kinds.get(PartStatistics),
        counted=counts.get(counted),
    )  # fmt: skip
    if RunningStatistics not in kinds:
        return one
    row, buffers = rows[kinds[RunningStatistics]], (f"{module}.running_mean", f"{module}.running_var")
    updates = {value: buffer for buffer, value in program.updates}
    renewed = tuple(updates.get(v) for v in row.bound.makes)
    shown = any(v in read for v in row.bound.makes)
    if not row.is_silent or row.bound.reads[:2] != buffers or renewed != buffers or shown:
        return None
    assert isinstance(row.bound.operation, RunningStatistics)
    return replace(one, momentum=row.bound.operation.momentum, renewed=kinds[RunningStatistics])


def _moves(program: Program, kinds: Mapping[type[Operation], int], of: Averaged) -> bool:
    """Whether parts are not the ranks' blocks, or something moves for x, for moments or for y."""
    rows, sizes = program.rows, program.grid.sizes
    moments, coefficients, centred = (rows[kinds[kind]] for kind in (Moments, Coefficients, Centred))
    roles = dict(moments.roles)
    if any(prod(sizes[a] for a in roles.get(f"p{d}", ())) != blocks.count for d, blocks in of.parts):
        return True
    moved = [*coefficients.fetch, *coefficients.store, *coefficients.given, coefficients.back[0]]
    for row in (moments, centred, *(one for _, one in moments.derived)):
        moved += [*row.fetch, *row.store, *row.given, *row.back]
    if PartStatistics in kinds:
        moved += rows[kinds[PartStatistics]].fetch
    return any(moved)


def evaluated(program: Program, i: int) -> PlacedRow | None:
    """For a row of moments with running statistics, the row that reads these from the buffers in evaluation."""
    row = program.rows[i]
    if not isinstance(row.bound.operation, Moments) or not row.bound.norm:
        return None
    renewed: dict[str, str] = {}  # by what an earlier call has made of a buffer, the buffer, which evaluation reads
    for other in program.rows:
        if not isinstance(other.bound.operation, RunningStatistics):
            continue
        buffers = tuple(renewed.get(v, v) for v in other.bound.reads[:2])
        renewed |= dict(zip(other.bound.makes, buffers, strict=True))
        if other.bound.norm == row.bound.norm:
            extents, (m,) = row.bound.operation.of.extents, row.bound.makes
            bound = Bound(RunningMoments(extents), buffers, (m,), row.bound.module, row.bound.norm)
            stored, reads = program.values[m].stored, [program.values[b].stored for b in buffers]
            roles = {index: axes for (index, _), axes in zip(extents, stored[1:], strict=True)}
            return place(bound, program.grid, 0, roles, reads, [stored])
    return None


def counting(program: Program) -> dict[str, int]:
    """By buffer, the number of the row that adds one to it, as batch norms count batches."""
    updates = set(program.updates)
    return {
        row.bound.reads[0]: j
        for j, row in enumerate(program.rows)
        if isinstance(row.bound.operation, Elementwise)
        and row.bound.operation.op == "add.Tensor"
        and row.bound.operation.args[1:] == (1, 1)
        and len(row.bound.reads) == 1
        and (row.bound.reads[0], row.bound.makes[0]) in updates
    }


def summed_statistics(program: Program) -> list[Moved]:
    """All-reduces of running statistics that only the renewal of buffers waits for, in forward's order. What travels by
    chunks is not among them: it is no step of its own."""
    readers: dict[str, list[int]] = {}
    for i, row in enumerate(program.rows):
        for value in row.bound.reads:
            readers.setdefault(value, []).append(i)
    shown = {v for _, v in program.outputs}

    def only_renews(i: int) -> bool:
        row = program.rows[i]
        made = filter(None, row.bound.makes)
        unread = all(v not in readers and v not in shown for v in made)
        return isinstance(row.bound.operation, RunningStatistics) and row.is_silent and unread

    found: list[Moved] = []
    for i, row in enumerate(program.rows):
        if not isinstance(row.bound.operation, PartStatistics) or row.chunks is not None:
            continue
        moved, (value,) = [*stored(row, i)], row.bound.makes
        if len(moved) == 1 and moved[0].conversion.kind == "all_reduce" and value not in shown:
            found += moved if all(map(only_renews, readers.get(value, ()))) else []
    return found
