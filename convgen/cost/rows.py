"""The price of a network's rows: what is moved, and what the busiest rank computes, forward and backward.

The price of a program is the sum over its steps, one after the other. Local work is a roofline: flops over the
machine's rate, or elements over its memory's, and the overhead of a launch. The vjp of an operation takes what the
operation does for each operand that wants a gradient: exact for products, of which convolutions are one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import Spans
from convgen.algebra.layout import Axes
from convgen.algebra.redistribute import Conversion
from convgen.algebra.signature import Made
from convgen.algebra.tensors import Dim
from convgen.cost.links import Links
from convgen.cost.machine import Machine
from convgen.cost.moving import PICOSECONDS, Counts, moving_ps
from convgen.cost.network import element_bytes
from convgen.operations.row import At, Operation, Work
from convgen.program.network import Program
from convgen.program.rows import Chain, PlacedRow, index_sets
from convgen.spec.layer import DTYPE_BYTES


@dataclass(frozen=True)
class Price:
    """What steps cost on a machine, for values of one dtype on one grid."""

    grid: Grid
    machine: Machine
    dtype: str

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES.get(self.dtype) or element_bytes(self.dtype)

    def chain(self, row: PlacedRow, chain: Chain) -> int:
        """Picoseconds of conversions of a row's operands or results."""
        return sum(self.conversion(row.bound.operation, row.way, c) for c in chain)

    def conversion(self, operation: Operation, way: int, c: Conversion) -> int:
        return _conversion(self, operation, way, c)

    def local(self, operation: Operation, way: int, roles: Mapping[str, Axes]) -> int:
        """Picoseconds of an operation on the busiest rank."""
        return self.seconds_of(work(operation, way, tuple(sorted(roles.items())), self.grid))

    def seconds_of(self, done: Work) -> int:
        busy = max(
            done.flops / self.machine.flops_per_s(self.dtype),
            done.elements * self.element_bytes / self.machine.memory_bytes_per_s,
        )
        return round((busy + self.machine.launch_s) * PICOSECONDS)


@lru_cache(maxsize=1 << 16)
def _conversion(price: Price, operation: Operation, way: int, c: Conversion) -> int:
    sets = index_sets(operation.signatures[way], price.grid)
    return moving_ps(sets, c, price.machine, _links(price.grid, price.machine), price.element_bytes)


@lru_cache(maxsize=64)
def _links(grid: Grid, machine: Machine) -> Links:
    return Links(grid, machine.levels)


@lru_cache(maxsize=1 << 14)
def work(operation: Operation, way: int, roles: tuple[tuple[str, Axes], ...], grid: Grid) -> Work:
    """Flops and elements of the rank that has most of each."""
    done = work_by_rank(operation, way, roles, grid)
    return Work(int(np.max(done.flops)), int(np.max(done.elements)))


def work_by_rank(operation: Operation, way: int, roles: tuple[tuple[str, Axes], ...], grid: Grid) -> Work:
    """Flops and elements, arrays over ranks."""
    signature, nests = operation.signatures[way], dict(roles)
    sets = index_sets(signature, grid)
    zero = np.zeros(grid.ranks, dtype=np.int64)
    blocks: dict[str, Spans] = {}
    for index, extent in signature.extents:
        blocks[index] = sets.split(Dim(index, extent), nests.get(index, ()))
    inside = tuple(
        tuple(_side(made, n, blocks, zero) for made, n in zip(o.dims, o.shape, strict=True)) for o in signature.inputs
    )
    where: Any = (blocks, inside, inside)  # arrays over ranks, where a rank has numbers
    at = At(*where)
    return operation.work(way, at)


def _side(made: Made, extent: int, blocks: Mapping[str, Spans], zero: Counts) -> Spans:
    """How much of a dimension each rank has; where it begins is no matter but to relations."""
    if made.relation is not None:
        return made.relation.hull(*made.relation.window(*blocks[made.indices[0]]), extent)
    if not made.indices:
        return zero, zero + extent
    count = zero + 1
    for i in made.indices:
        count = count * (blocks[i][1] - blocks[i][0])
    return zero, count


@dataclass(frozen=True)
class ProgramCost:
    """A training step, forward and backward, one step after the other.

    Attributes:
        rows: of each row, picoseconds of (computing, moving).
    """

    rows: tuple[tuple[int, int], ...]

    @property
    def time_ps(self) -> int:
        return sum(a + b for a, b in self.rows)

    @property
    def seconds(self) -> float:
        return self.time_ps / PICOSECONDS


def program_cost(program: Program, machine: Machine, dtype: str) -> ProgramCost:
    """What a program costs on a machine."""
    price, wanted = Price(program.grid, machine, dtype), program.differentiable(of_inputs=False)
    return ProgramCost(tuple(row_cost(row, price, [v in wanted for v in row.bound.reads]) for row in program.rows))


def row_cost(row: PlacedRow, price: Price, wanted: Collection[bool]) -> tuple[int, int]:
    """Picoseconds of a row's (computing, moving).

    Args:
        wanted: by operand, whether it wants a gradient.
    """
    asked = list(wanted)
    moving = sum(price.chain(row, c) for c in (*row.fetch, *row.store))
    local = price.local(row.bound.operation, row.way, dict(row.roles))
    computing = local
    derived = {k for k, _ in row.derived}
    back = [k for k, chain in enumerate(row.back) if chain is not None and asked[k] and k not in derived]
    if back:
        moving += sum(price.chain(row, c) for c, r in zip(row.given, row.signature.results, strict=True) if r.gradient)
        moving += sum(price.chain(row, row.back[k] or ()) for k in back)
        computing += local * len(back)
    for k, one in row.derived:
        if asked[k]:
            moving += sum(price.chain(one, c) for c in (*one.fetch, *one.store))
            computing += price.local(one.bound.operation, one.way, dict(one.roles))
    return computing, moving
