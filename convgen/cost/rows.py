"""The price of a network's rows: what is moved, and what the busiest rank computes, forward and backward.

The price of a program is the sum over its steps, one after the other. Local work is a roofline, flops over the
machine's rate or bytes over its memory's, and a launch. The vjp of an operation takes as long as the operation, once
for each operand that wants a gradient: exact for products, of which convolutions are one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from convgen.algebra.blocks import most_of
from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets
from convgen.algebra.involved import NAME, one_tensor
from convgen.algebra.layout import Axes, Layout, one_of
from convgen.algebra.signature import Operand, Reduction, Signature
from convgen.algebra.space import Space
from convgen.algebra.wants import layout
from convgen.cost.busiest import Counts
from convgen.cost.local import rows_flops_per_s
from convgen.cost.machine import LocalTimes, Machine
from convgen.cost.measured_steps import Work as StepWork
from convgen.cost.moving import PICOSECONDS, Moves
from convgen.cost.network import element_bytes
from convgen.cost.routes import How
from convgen.cost.work import most_work, taken_back
from convgen.errors import InputError
from convgen.operations.row import Launch, Operation, Work
from convgen.program.biases import NONE, Biased, leaves, stays
from convgen.program.network import Program, asked
from convgen.program.rows import Chain, PlacedRow, Roles, Stored, index_sets, sides
from convgen.program.shared import shared
from convgen.program.types import RowTypes
from convgen.spec.graph import TFLOAT32
from convgen.spec.layer import DTYPE_BYTES

LONGEST = 1 << 56  # picoseconds of a step, added up in 64 bits


def held(time_ps: int) -> int:
    """The same picoseconds, which 64 bits can add up.

    Raises:
        InputError: there are more than that.
    """
    if time_ps >= LONGEST:
        fact = f"one operation may take {time_ps / PICOSECONDS / 3600:.3g} hours, more than plans add up"
        raise InputError(fact, hint="fewer samples (--batch), or a machine file with other latencies and rates")
    return time_ps


@dataclass(frozen=True, eq=False)
class Computed:
    """What is known of a grid's rows whatever the links: layouts, and what ranks compute."""

    tensors: dict[Signature, dict[str, IndexSets]] = field(default_factory=dict[Signature, dict[str, IndexSets]])
    layouts: dict[tuple[Signature, str, Roles, bool], Layout] = field(
        default_factory=dict[tuple[Signature, str, Roles, bool], Layout]
    )
    local: dict[object, int] = field(default_factory=dict[object, int])
    phases: dict[tuple[Operation, int, Roles], tuple[float | None, ...]] = field(
        default_factory=dict[tuple[Operation, int, Roles], tuple[float | None, ...]]
    )
    measured: dict[object, float | None] = field(default_factory=dict[object, float | None])
    ways: dict[tuple[Operation, float, bool], list[tuple[int, tuple[int, Roles]]]] = field(
        default_factory=dict[tuple[Operation, float, bool], list[tuple[int, tuple[int, Roles]]]]
    )


class Price:
    """What steps cost on a machine, for values of one dtype on one grid. Remembers its answers.

    Args:
        computed: answers shared by machines that differ in links alone.
    """

    def __init__(self, grid: Grid, machine: Machine, dtype: str, computed: Computed | None = None) -> None:
        self.grid, self.machine, self.dtype = grid, machine, dtype
        self.element_bytes = DTYPE_BYTES.get(dtype) or element_bytes(dtype)
        self.moves = Moves(grid, machine, self.element_bytes)
        self.computed = own = computed or Computed()
        self._tensors, self._layouts, self._local = own.tensors, own.layouts, own.local
        self._phases, self._measured = own.phases, own.measured
        self._vectors: dict[tuple[How, IndexSets, Layout, tuple[Stored, ...]], Counts] = {}
        self._others: dict[str, Price] = {}

    def of(self, kind: str) -> Price:
        """The price for values of another type; machines may have no rate for it, as for integers.

        Args:
            kind: "" for this price's own; float32 is this one too where products take TF32.
        """
        if kind in ("", self.dtype) or (kind, self.dtype) == ("float32", TFLOAT32):
            return self
        if kind not in self._others:
            self._others[kind] = _new_price(self.grid, self.machine, kind)
        return self._others[kind]

    @cached_property
    def latencies(self) -> Price:
        """The price where links take latencies alone."""
        return price_on(self.grid, self.machine.without_bytes, self.dtype)

    @cached_property
    def processor(self) -> Price | None:
        """The price of what links take of the processor; None where that is nothing."""
        machine = self.machine.processor
        return None if machine is None else price_on(self.grid, machine, self.dtype)

    # ---------------------------------------------------------------- of a row that is placed
    def chain(self, row: PlacedRow, chain: Chain, *, parameter: bool = False) -> int:
        """Picoseconds of conversions of a row's operands or results.

        Args:
            parameter: whether it is a parameter's gradient that moves.
        """
        if parameter and self.machine.hides_gradients:
            return 0
        sets = index_sets(row.signature, self.grid)
        return sum(self.moves.conversion(sets, c) for c in chain)

    def local(
        self,
        operation: Operation,
        way: int,
        roles: Mapping[str, Axes],
        asked: Collection[int] | None = None,
        derived: Collection[int] = (),
    ) -> int:
        """Picoseconds of an operation on the busiest rank.

        Args:
            asked: price the vjp instead, for these operands.
            derived: those among them whose gradients rows of their own make.
        """
        key = operation, way, tuple(roles.items()), None if asked is None else tuple(asked), tuple(derived)
        if (known := self._local.get(key)) is None:
            known = self._local[key] = self._find_local(operation, way, roles, asked, derived)
        return known

    def _find_local(
        self,
        operation: Operation,
        way: int,
        roles: Mapping[str, Axes],
        asked: Collection[int] | None,
        derived: Collection[int],
    ) -> int:
        if (known := self.measured_s(operation, way, roles, asked, derived)) is not None:
            return held(round(known * PICOSECONDS))
        if self.machine.timed is not None and operation.convolves is not None:
            return held(self._timed(self.machine.timed, operation, operation.convolves[1], way, roles, asked))
        return held(self._by_roofline(operation, way, roles, asked, derived))

    def work(
        self,
        operation: Operation,
        way: int,
        roles: Mapping[str, Axes],
        asked: Collection[int] | None = None,
        derived: Collection[int] = (),
    ) -> StepWork:
        """What the busiest rank computes, as the key of measured work. Arguments are those of `local`."""
        signature, sizes = operation.signatures[way], self.grid.sizes
        extents = ((i, most_of(n, [sizes[a] for a in roles.get(i, ())])) for i, n in signature.extents)
        done = [*self.launches(operation, way, roles, asked, derived)]
        return StepWork(
            operation.name,
            tuple(signature.inputs[k].name for k in sorted(asked or ())),
            tuple(sorted(extents)),
            sum(n * one.work.flops for n, one in done),
            sum(n * one.work.elements for n, one in done),
            self.dtype,
        )

    def measured_s(
        self,
        operation: Operation,
        way: int,
        roles: Mapping[str, Axes],
        asked: Collection[int] | None = None,
        derived: Collection[int] = (),
    ) -> float | None:
        """Measured seconds of local work, else None. Arguments are those of `local`.

        Gradients of a product are measured one by one: several count as measured where each one is.
        """
        steps = self.machine.steps
        if not steps:
            return None
        key = operation, way, tuple(sorted(roles.items())), None if asked is None else tuple(asked), tuple(derived)
        if key not in self._measured:
            apart = [[k] for k in asked or ()] if operation.is_product and not derived else []
            each = [
                steps.seconds(self.work(operation, way, roles, one, derived))
                for one in (apart if len(apart) > 1 else [asked])
            ]
            known = [one for one in each if one is not None]
            self._measured[key] = sum(known) if len(known) == len(each) else None
        return self._measured[key]

    def _by_roofline(
        self,
        operation: Operation,
        way: int,
        roles: Mapping[str, Axes],
        asked: Collection[int] | None,
        derived: Collection[int] = (),
    ) -> int:
        return sum(n * self._of_launch(one, roles) for n, one in self.launches(operation, way, roles, asked, derived))

    def launches(
        self,
        operation: Operation,
        way: int,
        roles: Mapping[str, Axes],
        asked: Collection[int] | None = None,
        derived: Collection[int] = (),
    ) -> Iterator[tuple[int, Launch]]:
        """Each launch on the busiest rank, with how often it is taken.

        Args:
            asked: launches of the operation's vjp instead, for these operands.
            derived: those among them whose gradients rows of their own make.
        """
        sizes = self.grid.sizes
        nests = tuple((index, tuple(sizes[a] for a in axes)) for index, axes in roles.items() if axes)
        done = most_work(operation, way, nests, undone=asked is not None)
        yield from taken_back(done, asked, derived)

    def _timed(
        self,
        timed: LocalTimes,
        operation: Operation,
        conv: Conv,
        way: int,
        roles: Mapping[str, Axes],
        asked: Collection[int] | None,
    ) -> int:
        """Picoseconds as measured, phase by phase; phases that were not measured by the roofline."""
        key = (operation, way, tuple(roles.items()))
        if key not in self._phases:
            signature = operation.signatures[way]
            space = Space(conv, self.grid, virtual_padding=timed.pads_virtually)
            layouts = [
                layout(space, o.name, signature.wants(o, roles)) for o in (*signature.inputs, *signature.results)
            ]
            first, second, made = (replace(one, partial=()) for one in layouts)
            of = ((second, made, first), (first, made, second), (first, second, made))
            self._phases[key] = tuple(timed(space, operands) for operands in of)
        known = self._phases[key]
        total = 0
        for k in (-1,) if asked is None else asked:
            if (seconds := known[k]) is None:
                total += self._by_roofline(operation, way, roles, None if k == -1 else (k,))
            else:
                total += round(seconds * PICOSECONDS)
        return total

    def measured(self, operation: Operation, way: int, roles: Mapping[str, Axes], asked: Collection[int] | None) -> int:
        """How many local steps `local` has measured seconds for, with these arguments."""
        if self.measured_s(operation, way, roles, asked) is not None:
            return len(asked or (0,)) if operation.is_product else 1
        if self.machine.timed is None or operation.convolves is None:
            return 0
        self.local(operation, way, roles, asked)
        known = self._phases[operation, way, tuple(roles.items())]
        return sum(known[k] is not None for k in ((-1,) if asked is None else asked))

    def _of_launch(self, one: Launch, roles: Mapping[str, Axes]) -> int:
        return self.of_work(one.operation, one.work, roles)

    def of_work(self, operation: Operation, done: Work, roles: Mapping[str, Axes]) -> int:
        """Picoseconds of one launch."""
        rate = rows_flops_per_s(self.machine, self.dtype, operation, roles, self.grid, done.flops)
        return self.seconds_of(done, rate, rides=operation.rides)

    def seconds_of(self, done: Work, flops_per_s: float | None = None, *, rides: bool = False) -> int:
        """Picoseconds of work by the roofline.

        Args:
            flops_per_s: the rate that it reaches; by default convolutions' average.
            rides: whether it has no launch of its own.
        """
        busy = max(
            done.flops / (flops_per_s or self.machine.flops_per_s(self.dtype)),
            done.elements * self.element_bytes / self.machine.memory_bytes_per_s,
        )
        return round((busy + (0.0 if rides else self.machine.rows_launch_s)) * PICOSECONDS)

    def over_stored(self, operation: Operation, stored: Stored) -> int:
        """Picoseconds of a row over a tensor stored so, each dimension of which is an index of the row."""
        indices = (made.indices[0] for made in operation.signatures[0].results[0].dims)
        return self.local(operation, 0, {i: axes for i, axes in zip(indices, stored, strict=True) if axes})

    # ---------------------------------------------------------------- of a tensor, stored in any of several ways
    def tensors(self, signature: Signature) -> dict[str, IndexSets]:
        """Index sets of operands and results by name, one by one, so that rows with equal operands share them."""
        if (found := self._tensors.get(signature)) is None:
            found = {o.name: one_tensor(self.grid.axes, s) for o, s in sides(signature)}
            self._tensors[signature] = found
        return found

    def wants(self, signature: Signature, operand: Operand, roles: Roles) -> Layout:
        """The layout in which a row reads an operand, or makes a result, under these roles."""
        key = (signature, operand.name, roles, False)
        if (found := self._layouts.get(key)) is None:
            sets = self.tensors(signature)[operand.name]
            found = self._layouts[key] = one_of(layout(sets, NAME, signature.wants(operand, dict(roles))))
        return found

    def gradient(self, signature: Signature, operand: Operand, roles: Roles) -> Layout:
        """The layout in which a row finds an operand's gradient."""
        key = (signature, operand.name, roles, True)
        if (found := self._layouts.get(key)) is None:
            sets = self.tensors(signature)[operand.name]
            found = self._layouts[key] = one_of(layout(sets, NAME, signature.gradient(operand, dict(roles))))
        return found

    def fetched(self, sets: IndexSets, stored: tuple[Stored, ...], wanted: Layout) -> Counts:
        """By storage, picoseconds from there to what is wanted."""
        return self._vector("fetch", sets, wanted, stored)

    def reduced(
        self,
        sets: IndexSets,
        made: Layout,
        stored: tuple[Stored, ...],
        reduction: Reduction,
        *,
        parameter: bool = False,
    ) -> Counts:
        """By storage, picoseconds from a result as a row makes it to there.

        Args:
            parameter: whether the result is a parameter's gradient.
        """
        return self._vector(reduction, sets, made, stored, parameter=parameter)

    def collected(
        self, sets: IndexSets, found: Layout, stored: tuple[Stored, ...], *, parameter: bool = False
    ) -> Counts:
        """By storage, picoseconds from a gradient as a row found it to there.

        Args:
            parameter: whether the operand is a parameter.
        """
        return self._vector("collect", sets, found, stored, parameter=parameter)

    def _vector(
        self, how: How, sets: IndexSets, one: Layout, stored: tuple[Stored, ...], *, parameter: bool = False
    ) -> Counts:
        if parameter and self.machine.hides_gradients:
            return np.zeros(len(stored), dtype=np.int64)
        key = (how, sets, one, stored)
        if (found := self._vectors.get(key)) is None:
            routes = self.moves.routes.several(how, sets, one, stored)
            found = self._vectors[key] = np.array([held(self.moves.along(route)) for route in routes], dtype=np.int64)
        return found


@lru_cache(maxsize=32)
def price_on(grid: Grid, machine: Machine, dtype: str) -> Price:
    """The price that all searches on a grid share."""
    return _new_price(grid, machine, dtype)


def _new_price(grid: Grid, machine: Machine, dtype: str) -> Price:
    return Price(grid, machine, dtype, computed_on(grid, machine.computing, dtype))


@lru_cache(maxsize=32)
def computed_on(_grid: Grid, _computing: Machine, _dtype: str) -> Computed:
    """What machines that compute alike have in common."""
    return Computed()


@dataclass(frozen=True)
class ProgramCost:
    """The cost of a training step, forward and backward, one step after the other.

    Attributes:
        rows: for each row, picoseconds of (computing, moving).
    """

    rows: tuple[tuple[int, int], ...]

    @property
    def time_ps(self) -> int:
        return sum(a + b for a, b in self.rows)

    @property
    def seconds(self) -> float:
        return self.time_ps / PICOSECONDS


def program_cost(program: Program, machine: Machine, dtype: str, *, of_inputs: bool = False) -> ProgramCost:
    """What a program costs on a machine.

    Args:
        of_inputs: whether inputs want gradients, too.
    """
    price = price_on(program.grid, machine, dtype)
    wanted = program.differentiable(of_inputs=of_inputs)
    again = {i for s in program.again for i in range(s.start, s.stop)}
    rows = enumerate(zip(program.rows, program.row_types, program.biased, strict=True))
    learnt = {name for name, value in program.values.items() if value.kind == "parameter"}
    return ProgramCost(
        tuple(
            row_cost(row, price, types, asked(row.bound, wanted), bias, again=i in again, learnt=learnt)
            for i, (row, types, bias) in rows
        )
    )


def row_cost(
    row: PlacedRow,
    price: Price,
    types: RowTypes,
    wanted: Sequence[bool],
    bias: Biased = NONE,
    *,
    again: bool = False,
    learnt: Collection[str] = (),
) -> tuple[int, int]:
    """Picoseconds of a row's (computing, moving).

    Args:
        price: in the network's type; types: in which the row moves and makes values.
        wanted: by operand, whether it wants a gradient.
        bias: what the row has to do with a bias.
        again: whether backward computes the row again.
        learnt: values that are parameters.
    """
    forward, *backward = moving_ps(row, price, types, wanted, learnt)
    computing = forward_ps(row, price, types, bias) * (1 + again) + backward_ps(row, price, types, wanted)
    return computing, forward * (1 + again) + sum(backward)


def forward_ps(row: PlacedRow, price: Price, types: RowTypes, bias: Biased = NONE) -> int:
    """Picoseconds that a row computes in forward. Arguments are those of `row_cost`."""
    here = price.of(types.local)
    return own_ps(row, here, bias) + pass_ps(row, here, bias)


def backward_ps(row: PlacedRow, price: Price, types: RowTypes, wanted: Sequence[bool]) -> int:
    """Picoseconds that a row computes in backward. Arguments are those of `row_cost`."""
    computing, back = 0, _by_vjp(row, wanted)
    between = row.between(wanted)
    if back or between:
        here = price.of(types.local)
        computing += here.local(row.bound.operation, row.way, dict(row.roles), [*back, *between], between)
    for k, one in row.derived:
        if wanted[k]:
            own = types.of(row.signature.inputs[k].name)
            computing += price.of(own.local).local(one.bound.operation, one.way, dict(one.roles))
    return computing


def _by_vjp(row: PlacedRow, wanted: Sequence[bool]) -> list[int]:
    """Numbers of the operands whose gradients the row's vjp makes."""
    derived = {k for k, _ in row.derived}
    return [k for k, chain in enumerate(row.back) if chain is not None and wanted[k] and k not in derived]


def moving_ps(
    row: PlacedRow, price: Price, types: RowTypes, wanted: Sequence[bool], learnt: Collection[str] = ()
) -> tuple[int, int, int]:
    """Picoseconds of what a row moves in forward, and in backward before and behind what it computes there. Arguments
    are those of `row_cost`."""
    sides = ((row.fetch, types.fetch), (row.store, types.store))
    forward = sum(price.of(t).chain(row, c) for chains, kinds in sides for c, t in zip(chains, kinds, strict=True))
    back = _by_vjp(row, wanted)
    once, before, behind = shared(row, tuple(wanted)), 0, 0
    if back:
        for j, (chain, result) in enumerate(zip(row.given, row.signature.results, strict=True)):
            rest = chain[once.given[j][1] if j in once.given else 0 :]
            before += price.of(types.given[j]).chain(row, rest) if result.gradient else 0
        for k in back:
            there = price.of(types.on_the_way_back(row, k))
            behind += there.chain(row, row.back[k] or (), parameter=row.bound.reads[k] in learnt)
    for k, one in row.derived:
        if wanted[k]:
            own = types.of(row.signature.inputs[k].name)
            for j, (chain, kind) in enumerate(zip(one.fetch, own.fetch, strict=True)):
                before += price.of(kind).chain(one, chain[once.served((k, j)) :])
            (store,) = one.store
            behind += price.of(own.store).chain(one, store, parameter=row.bound.reads[k] in learnt)
    return forward, before, behind


def own_ps(row: PlacedRow, price: Price, bias: Biased = NONE) -> int:
    """Picoseconds of forward's local work: none for a bias that reads the sum where its product has made it.

    Args:
        price: in the type in which the row computes; bias: what the row has to do with a bias.
    """
    rides = bias.is_bias and price.machine.adds_biases and stays(row)
    return 0 if rides else price.local(row.bound.operation, row.way, dict(row.roles))


def pass_ps(row: PlacedRow, price: Price, bias: Biased = NONE) -> int:
    """Picoseconds of the pass over memory that a product's bias takes where the product's result moves."""
    if bias.behind is None or not price.machine.adds_biases or leaves(row):
        return 0
    return price.over_stored(bias.behind, row.makes[0])
