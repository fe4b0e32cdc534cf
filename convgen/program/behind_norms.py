"""Rows behind norms: those that scale and shift what is normalised, and what a GPU's kernels of norms of images do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from convgen.operations.batch_norm import IMAGES, Centred, steps_behind
from convgen.operations.group_norms import is_by_group, rows_behind
from convgen.operations.moments import Normalise
from convgen.operations.pointwise import Pointwise
from convgen.operations.row import Operation
from convgen.program.network import Program
from convgen.program.rows import PlacedRow

Steps = Sequence[tuple[int, Operation, int]]  # number of a row, its operation, the operand that the row before makes


def behind_norms(program: Program) -> Iterator[tuple[Sequence[int], Steps]]:
    """For each norm the rows behind it that scale and shift what it normalises, and the steps behind these."""
    reader = _only_reader(program)
    by_group = {row.bound.makes[0] for _, row in norms_by_group(program)}
    of_batches = {row.bound.makes[0]: steps for row, steps in behind_batch_norms(program)}
    for row in program.rows:
        operation, made = row.bound.operation, row.bound.makes[0]
        if isinstance(operation, Normalise) and made in by_group:
            behind = rows_behind(operation.of, made, reader)
            yield [i for i, _ in behind.vectors], [] if behind.activation is None else [(*behind.activation, 0)]
        if made in of_batches:
            yield [], of_batches[made]


def behind_batch_norms(program: Program) -> Iterator[tuple[PlacedRow, Steps]]:
    """For each batch norm of images or volumes the row that normalises, and the steps behind it."""
    reader = _only_reader(program)
    for row in program.rows:
        operation = row.bound.operation
        if isinstance(operation, Centred) and len(operation.of.shape) in IMAGES:
            yield row, steps_behind(row.bound.makes[0], reader)


def _only_reader(program: Program) -> Callable[[str], tuple[int, Operation, Sequence[str], str] | None]:
    """A function that gives the only row that reads a value; None where there are several."""
    readers = readers_of(program)

    def reader(value: str) -> tuple[int, Operation, Sequence[str], str] | None:
        there = readers.get(value, [])
        if len(there) != 1:
            return None
        bound = program.rows[there[0]].bound
        return there[0], bound.operation, bound.reads, bound.makes[0]

    return reader


def norms_by_group(program: Program) -> Iterator[tuple[PlacedRow, PlacedRow]]:
    """Rows that take moments of each sample's groups of channels, each with the row that normalises by them."""
    makers = {value: row for row in program.rows for value in row.bound.makes}
    for row in program.rows:
        moments = makers.get(row.bound.reads[1]) if isinstance(row.bound.operation, Normalise) else None
        if moments is not None and is_by_group(moments.bound.operation, row.bound.operation):
            yield moments, row


def readers_of(program: Program) -> dict[str, list[int]]:
    """By value the rows that read it."""
    found: dict[str, list[int]] = {}
    for i, row in enumerate(program.rows):
        for value in dict.fromkeys(row.bound.reads):
            found.setdefault(value, []).append(i)
    return found


def vectors_behind(program: Program, i: int, readers: Mapping[str, Sequence[int]]) -> list[int]:
    """Rows that scale, shift or both what row i normalises, where nothing moves between them."""
    outputs, operation = {v for _, v in program.outputs}, program.rows[i].bound.operation
    assert isinstance(operation, Normalise)
    lines, vectors, each = [i], "", False
    while len(there := readers.get(made := program.rows[lines[-1]].bound.makes[0], [])) == 1:
        more, by_channel = _vectors(program.rows[there[0]], made, operation)
        follows = bool(more) and vectors + more in ("w", "b", "wb") and (not vectors or by_channel == each)
        if made in outputs or not follows:
            break
        lines, vectors, each = [*lines, there[0]], vectors + more, by_channel
    return lines[1:]


def _vectors(row: PlacedRow, x: str, norm: Normalise) -> tuple[str, bool]:
    operation = row.bound.operation
    moved = any((row.fetch[0], row.back[0], *row.store, *row.given)) or row.early is not None or row.chunks is not None
    if not isinstance(operation, Pointwise) or moved or row.bound.reads[0] != x or x in row.bound.reads[1:]:
        return "", False
    return operation.vectors_of(norm.of)
