"""Batch norms of a network's program, each a line of its package: the rows that they are made of.

Those whose parameters and buffers lie as their channels do; others are printed row by row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from convgen.operations.batch_norm import Centred, Coefficients, RunningMoments
from convgen.operations.bound import Bound
from convgen.operations.calls import Elementwise
from convgen.operations.fused import Fused
from convgen.operations.moments import Moments, RunningStatistics
from convgen.operations.part_norm import (
    PartCentred,
    PartCoefficients,
    PartMoments,
    PartRunning,
    PartStatistics,
    PartUpdate,
)
from convgen.operations.row import Operation
from convgen.program.network import Program
from convgen.program.rows import PlacedRow, place

NEAR = 5  # rows behind the moments, in which those of the same batch norm stand as spec/aten describes it


@dataclass(frozen=True, slots=True)
class Norm:
    """A batch norm whose parameters and buffers are those of one module of the source.

    Attributes:
        moments, coefficients, centred: numbers of rows; the last may be one with rows behind it.
        momentum: of running statistics; 0 where there are none.
        statistics: of statistics by parts the row that averages these, where there are running ones.
        renewed: the row of running ones.
        counted: the row of how many batches there were.
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
    """Batch norms by the number of their first row, and rows that they stand for."""
    found: dict[int, Norm] = {}
    gone: set[int] = set()
    rows = program.rows
    updates = {value: buffer for buffer, value in program.updates}
    counts = counting(program)
    for i, row in enumerate(rows):
        counted = f"{row.bound.module}.num_batches_tracked"
        if counted in program.values and counted not in counts:  # a batch norm counts one batch a step
            continue
        if isinstance(row.bound.operation, PartMoments) and (one := _of_parts(program, i, row.bound.operation)):
            parts = {
                *one.rows,
                *_updates(program, one),
                *([counts[counted]] if counted in counts else []),
            }
            found[i] = replace(one, counted=counts.get(counted))
            gone |= parts - {i}
        if not isinstance(row.bound.operation, Moments):
            continue
        (m,) = row.bound.makes
        readers = [j for j in range(i + 1, min(i + NEAR, len(rows))) if m in rows[j].bound.reads]
        kinds = {type(rows[j].bound.operation): j for j in readers}
        if Coefficients not in kinds or not set(kinds) <= {Coefficients, RunningStatistics}:
            continue
        c, module = kinds[Coefficients], row.bound.module
        (coefficients,) = rows[c].bound.makes
        operation = rows[c].bound.operation
        assert isinstance(operation, Coefficients)
        centred = next(j for j in range(c + 1, len(rows)) if coefficients in rows[j].bound.reads)
        if not _centres(rows[centred].bound.operation):
            continue
        own = {"weight": operation.weight, "bias": operation.bias}
        own |= dict.fromkeys(("running_mean", "running_var"), RunningStatistics in kinds)
        wanted = [f"{module}.{n}" for n in ("weight", "bias") if own[n]]
        others = [n for n, there in own.items() if not there and f"{module}.{n}" in program.values]
        if list(rows[c].bound.reads[1:]) != wanted or others:  # of a module that is more than a batch norm
            continue
        momentum, parts = 0.0, {i, c, centred}
        if RunningStatistics in kinds:
            running = rows[kinds[RunningStatistics]]
            assert isinstance(running.bound.operation, RunningStatistics)
            buffers = [f"{module}.running_mean", f"{module}.running_var"]
            if (
                not running.is_silent
                or list(running.bound.reads[:2]) != buffers
                or [updates.get(v) for v in running.bound.makes] != buffers
            ):
                continue
            momentum = running.bound.operation.momentum
            parts.add(kinds[RunningStatistics])
        parts |= {counts[counted]} if counted in counts else set()
        renewed = kinds.get(RunningStatistics)
        found[i] = Norm(module, i, c, centred, momentum, operation.eps, None, renewed, counts.get(counted))
        gone |= parts - {i}
    return found, gone


def _of_parts(program: Program, i: int, moments: PartMoments) -> Norm | None:
    """A batch norm whose parts are the ranks' blocks: nothing moves for x, moments and y."""
    rows, of = program.rows, moments.of
    (m,) = rows[i].bound.makes
    after = [j for j in range(i + 1, min(i + 6, len(rows))) if rows[j].bound.module == rows[i].bound.module]
    kinds = {type(rows[j].bound.operation): j for j in reversed(after)}
    if PartCoefficients not in kinds or PartCentred not in kinds:
        return None
    c, y, module = kinds[PartCoefficients], kinds[PartCentred], rows[i].bound.module
    operation, roles = rows[c].bound.operation, dict(rows[i].roles)
    assert isinstance(operation, PartCoefficients)
    own = {"weight": operation.weight, "bias": operation.bias}
    own |= dict.fromkeys(("running_mean", "running_var"), PartUpdate in kinds)
    wanted = (m, *(f"{module}.{n}" for n in ("weight", "bias") if own[n]))
    if any(not there and f"{module}.{n}" in program.values for n, there in own.items()):
        return None
    is_one = all(prod(program.grid.sizes[a] for a in roles.get(f"p{d}", ())) == of.of[d].count for d in of.dims)
    moved = [*rows[c].fetch, *rows[c].store, *rows[c].given, rows[c].back[0]]
    for row in (rows[i], rows[y], *(one for _, one in rows[i].derived)):
        moved += [*row.fetch, *row.store, *row.given, *row.back]
    read_by = {v: [j for j, row in enumerate(rows) if v in row.bound.reads] for v in (m, *rows[c].bound.makes)}
    alone = set(read_by[m]) <= {c, kinds.get(PartStatistics)} and read_by[rows[c].bound.makes[0]] == [y]
    if not (is_one and alone) or any(moved) or rows[c].bound.reads != wanted:
        return None
    if PartUpdate not in kinds:
        return Norm(module, i, c, y, 0.0, operation.eps)
    update, buffers = rows[kinds[PartUpdate]], (f"{module}.running_mean", f"{module}.running_var")
    updates = {value: buffer for buffer, value in program.updates}
    renewed = tuple(updates.get(v) for v in update.bound.makes)
    if not update.is_silent or update.bound.reads[:2] != buffers or renewed != buffers or PartStatistics not in kinds:
        return None
    assert isinstance(update.bound.operation, PartUpdate)
    if any(rows[kinds[PartStatistics]].fetch):
        return None
    parts = kinds[PartStatistics], kinds[PartUpdate]
    return Norm(module, i, c, y, update.bound.operation.momentum, operation.eps, *parts)


def _updates(program: Program, norm: Norm) -> list[int]:
    """Rows that make the new values of its buffers."""
    buffers = {f"{norm.module}.running_mean", f"{norm.module}.running_var"}
    made = {value for buffer, value in program.updates if buffer in buffers}
    return [j for j, row in enumerate(program.rows) if made & set(row.bound.makes)]


def _centres(operation: Operation) -> bool:
    """Whether a row begins with what a batch norm ends with; more may be one row with it (wide.py)."""
    first = operation.parts[0].operation if isinstance(operation, Fused) else operation
    return isinstance(first, Centred)


def evaluated(program: Program, moments: int) -> PlacedRow | None:
    """Of moments that have running ones, the row that stands in evaluation for theirs: of what the buffers hold."""
    row = program.rows[moments]
    (m,) = row.bound.makes
    if isinstance(row.bound.operation, PartMoments):
        return _evaluated_by_parts(program, row, row.bound.operation)
    for other in program.rows[moments + 1 :]:
        if isinstance(other.bound.operation, RunningStatistics) and m in other.bound.reads:
            channels, stored = other.bound.operation.channels, program.values[m].stored
            buffers = other.bound.reads[:2]
            bound = Bound(RunningMoments(channels), buffers, (m,), row.bound.module)
            reads = [program.values[b].stored for b in buffers]
            return place(bound, program.grid, 0, {"C": stored[1]}, reads, [stored])
    return None


def _evaluated_by_parts(program: Program, row: PlacedRow, operation: PartMoments) -> PlacedRow | None:
    for other in program.rows:
        if isinstance(other.bound.operation, PartUpdate) and other.bound.module == row.bound.module:
            bound = Bound(PartRunning(operation.of), other.bound.reads[:2], row.bound.makes, row.bound.module)
            indices = {i for i, _ in operation.of.extents}
            roles = {i: axes for i, axes in row.roles if i in indices}
            return place(bound, program.grid, 0, roles, list(other.reads[:2]), list(row.makes))
    return None


def counting(program: Program) -> dict[str, int]:
    """Rows that add one to a buffer, as batch norms count batches, by the buffer."""
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
