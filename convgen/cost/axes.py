"""What each axis of a grid splits of a program: the work of rows, the values that they make, and parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from convgen.cost.network import element_bytes
from convgen.program.network import Program, Value


@dataclass(frozen=True, slots=True)
class Splits:
    """What an axis splits.

    Attributes:
        rows: how many rows' work it splits.
        activations: of the bytes that rows make, the share that lies in blocks over the axis; 0 to 1.
        parameters: share of parameters' bytes, likewise.
        little: whether all that it splits is rows that make a few numbers a channel, and buffers.
    """

    ranks: int
    rows: int
    activations: float
    parameters: float
    little: bool = True

    @property
    def idle(self) -> bool:
        """Whether ranks that differ in this axis alone hold and compute the same, but for numbers by channel."""
        return self.ranks > 1 and self.little and not self.parameters


def split_shares(program: Program) -> dict[str, Splits]:
    """What each axis splits, by name, in the grid's order.

    Example:
        >>> from convgen.algebra.grid import Grid
        >>> split_shares(Program(name="none", grid=Grid((("N", 2),)), values={}, rows=(), updates=(), outputs=()))
        {'N': Splits(ranks=2, rows=0, activations=0.0, parameters=0.0, little=True)}
    """
    values = [replace(v, dtype=program.types[n]) for n, v in program.values.items()]
    made, held = ([v for v in values if v.kind == kind] for kind in ("made", "parameter"))
    renewed = {value for _, value in program.updates}
    others = [v for v in made if v.name not in renewed]
    found: dict[str, Splits] = {}
    for axis, ranks in program.grid.axes:
        rows = [row for row in program.rows if any(axis in axes for _, axes in row.roles)]
        little = all(row.bound.operation.rides for row in rows) and not _share(axis, others)
        found[axis] = Splits(ranks, len(rows), _share(axis, made), _share(axis, held), little)
    return found


def _share(axis: str, values: Iterable[Value]) -> float:
    both = [(prod(v.shape) * element_bytes(v.dtype), any(axis in axes for axes in v.stored)) for v in values]
    return sum(n for n, split in both if split) / max(sum(n for n, _ in both), 1)
