"""Rows behind norms of images and volumes that a GPU's kernels of these norms do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from convgen.operations.batch_norm import IMAGES, Centred, steps_behind
from convgen.operations.group_norms import is_by_group, rows_behind
from convgen.operations.moments import Normalise
from convgen.operations.row import Operation
from convgen.program.network import Program
from convgen.program.rows import PlacedRow

Steps = Sequence[tuple[int, Operation, int]]  # rows, each with its operation and the operand that it has from before


def behind_norms(program: Program) -> Iterator[tuple[Sequence[int], Steps]]:
    """Of each norm the rows behind it that scale and shift what is normalised, and the steps behind these."""
    readers: dict[str, list[int]] = {}
    for i, row in enumerate(program.rows):
        for value in dict.fromkeys(row.bound.reads):
            readers.setdefault(value, []).append(i)

    def reader(value: str) -> tuple[int, Operation, Sequence[str], str] | None:
        there = readers.get(value, [])
        if len(there) != 1:
            return None
        bound = program.rows[there[0]].bound
        return there[0], bound.operation, bound.reads, bound.makes[0]

    by_group = {row.bound.makes[0] for _, row in norms_by_group(program)}
    for row in program.rows:
        operation = row.bound.operation
        if isinstance(operation, Normalise) and row.bound.makes[0] in by_group:
            behind = rows_behind(operation.of, row.bound.makes[0], reader)
            yield [i for i, _ in behind.vectors], [] if behind.activation is None else [(*behind.activation, 0)]
        if isinstance(operation, Centred) and len(operation.of.shape) in IMAGES:
            yield [], steps_behind(row.bound.makes[0], reader)


def norms_by_group(program: Program) -> Iterator[tuple[PlacedRow, PlacedRow]]:
    """Rows of moments of each sample's groups of channels, each with that of what is normalised by them."""
    makers = {value: row for row in program.rows for value in row.bound.makes}
    for row in program.rows:
        moments = makers.get(row.bound.reads[1]) if isinstance(row.bound.operation, Normalise) else None
        if moments is not None and is_by_group(moments.bound.operation, row.bound.operation):
            yield moments, row
