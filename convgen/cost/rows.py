"""The price of a network's rows: what is moved, and what the busiest rank computes, forward and backward.

The price of a program is the sum over its steps, one after the other. Local work is a roofline: flops over the
machine's rate, or elements over its memory's, and the overhead of a launch. The vjp of an operation takes what the
operation does for each operand that wants a gradient: exact for products, of which convolutions are one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets
from convgen.algebra.involved import NAME, collected, one_tensor
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Conversion
from convgen.algebra.signature import Reduction, Signature
from convgen.cost.local import rows_flops_per_s
from convgen.cost.machine import Machine
from convgen.cost.moving import PICOSECONDS, Counts, Moves
from convgen.cost.network import element_bytes
from convgen.cost.work import most_work
from convgen.operations.row import Launch, Operation, Work, repeats
from convgen.program.network import Program, asked
from convgen.program.rows import Chain, PlacedRow, Stored, index_sets, sides
from convgen.spec.layer import DTYPE_BYTES


class Price:
    """What steps cost on a machine, for values of one dtype on one grid. Remembers what it was asked."""

    def __init__(self, grid: Grid, machine: Machine, dtype: str) -> None:
        self.grid, self.machine, self.dtype = grid, machine, dtype
        self.element_bytes = DTYPE_BYTES.get(dtype) or element_bytes(dtype)
        self.moves = Moves(grid, machine, self.element_bytes)
        self._tensors: dict[Signature, dict[str, IndexSets]] = {}
        self._vectors: dict[tuple[str, IndexSets, Layout, tuple[Stored, ...]], Counts] = {}

    @cached_property
    def latencies(self) -> Price:
        """The same where links take nothing but latencies."""
        return price_on(self.grid, self.machine.without_bytes, self.dtype)

    @cached_property
    def processor(self) -> Price | None:
        """What links take of the processor; None where that is nothing."""
        machine = self.machine.processor
        return None if machine is None else price_on(self.grid, machine, self.dtype)

    # ---------------------------------------------------------------- of a row that is placed
    def chain(self, row: PlacedRow, chain: Chain) -> int:
        """Picoseconds of conversions of a row's operands or results."""
        sets = index_sets(row.signature, self.grid)
        return sum(self.moves.conversion(sets, c) for c in chain)

    def local(
        self, operation: Operation, way: int, roles: Mapping[str, Axes], asked: Collection[int] | None = None
    ) -> int:
        """Picoseconds of an operation on the busiest rank.

        Args:
            asked: of its vjp instead, for these operands.
        """
        sizes = self.grid.sizes
        nests = tuple((index, tuple(sizes[a] for a in axes)) for index, axes in roles.items() if axes)
        done = most_work(operation, way, nests)
        often = [1] * len(done) if asked is None else repeats(done, asked)
        return sum(n * self._of_launch(one, roles) for n, one in zip(often, done, strict=True))

    def _of_launch(self, one: Launch, roles: Mapping[str, Axes]) -> int:
        rate = rows_flops_per_s(self.machine, self.dtype, one.operation, roles, self.grid, one.work.flops)
        return self.seconds_of(one.work, rate, rides=one.operation.rides)

    def seconds_of(self, done: Work, flops_per_s: float | None = None, *, rides: bool = False) -> int:
        """Picoseconds.

        Args:
            flops_per_s: that it reaches; by default what a convolution does on average.
            rides: it has no launch of its own.
        """
        busy = max(
            done.flops / (flops_per_s or self.machine.flops_per_s(self.dtype)),
            done.elements * self.element_bytes / self.machine.memory_bytes_per_s,
        )
        return round((busy + (0.0 if rides else self.machine.launch_s)) * PICOSECONDS)

    # ---------------------------------------------------------------- of a tensor, stored in any of several ways
    def tensors(self, signature: Signature) -> dict[str, IndexSets]:
        """Operands and results by their names, each alone: rows whose operands are alike ask the same."""
        if (found := self._tensors.get(signature)) is None:
            found = {o.name: one_tensor(self.grid.axes, s) for o, s in sides(signature)}
            self._tensors[signature] = found
        return found

    def fetched(self, sets: IndexSets, stored: tuple[Stored, ...], wanted: Layout) -> Counts:
        """Picoseconds from each of these to what is wanted."""
        return self._vector("fetch", sets, wanted, stored, lambda s: self.moves.chain(sets, s, wanted))

    def reduced(self, sets: IndexSets, made: Layout, stored: tuple[Stored, ...], reduction: Reduction) -> Counts:
        """From a result as a row makes it to each of these."""

        def to(layout: Layout) -> int:
            if reduction == "sum" or not made.partial:
                return self.moves.chain(sets, made, layout)
            whole = replace(made, partial=())
            first = Conversion("all_gather", made.partial, made, whole, reduction)
            return self.moves.conversion(sets, first) + self.moves.chain(sets, whole, layout)

        return self._vector(reduction, sets, made, stored, to)

    def collected(self, sets: IndexSets, found: Layout, stored: tuple[Stored, ...]) -> Counts:
        """From a gradient as a row found it to each of these."""

        def to(layout: Layout) -> int:
            if not found.has_window:
                return self.moves.chain(sets, found, layout)
            (c,) = collected(sets, found, layout)
            return self.moves.conversion(sets, c)

        return self._vector("collect", sets, found, stored, to)

    def _vector(
        self, what: str, sets: IndexSets, one: Layout, stored: tuple[Stored, ...], of: Callable[[Layout], int]
    ) -> Counts:
        key = (what, sets, one, stored)
        if (found := self._vectors.get(key)) is None:
            found = np.array([of(Layout(NAME, s)) for s in stored], dtype=np.int64)
            self._vectors[key] = found
        return found


@lru_cache(maxsize=16)
def price_on(grid: Grid, machine: Machine, dtype: str) -> Price:
    """One for all searches of a grid."""
    return Price(grid, machine, dtype)


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
    price, wanted = price_on(program.grid, machine, dtype), program.differentiable(of_inputs=False)
    again = {i for s in program.again for i in range(s.start, s.stop)}
    return ProgramCost(
        tuple(row_cost(row, price, asked(row.bound, wanted), again=i in again) for i, row in enumerate(program.rows))
    )


def row_cost(row: PlacedRow, price: Price, wanted: Sequence[bool], *, again: bool = False) -> tuple[int, int]:
    """Picoseconds of a row's (computing, moving).

    Args:
        wanted: by operand, whether it wants a gradient.
        again: whether backward computes it again.
    """
    local = price.local(row.bound.operation, row.way, dict(row.roles))
    moving = sum(price.chain(row, c) for c in (*row.fetch, *row.store)) * (1 + again)
    computing = local * (1 + again)
    derived = {k for k, _ in row.derived}
    back = [k for k, chain in enumerate(row.back) if chain is not None and wanted[k] and k not in derived]
    if back:
        moving += sum(price.chain(row, c) for c, r in zip(row.given, row.signature.results, strict=True) if r.gradient)
        moving += sum(price.chain(row, row.back[k] or ()) for k in back)
        computing += price.local(row.bound.operation, row.way, dict(row.roles), back)
    for k, one in row.derived:
        if wanted[k]:
            moving += sum(price.chain(one, c) for c in (*one.fetch, *one.store))
            computing += price.local(one.bound.operation, one.way, dict(one.roles))
    return computing, moving
