"""What rows cost by their ways and storage alone, without being placed.

The same picoseconds as cost/rows.py has of a placed row, apart as a step with communication overlapped asks for them
(step_ps.py). What gradients' rows fetch of one value is fetched once (program/shared.py).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from convgen.algebra.involved import NAME
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.signature import Signature
from convgen.cost.links import collective_seconds
from convgen.cost.moving import PICOSECONDS
from convgen.cost.rows import Price
from convgen.operations.bound import Bound
from convgen.passes.bucket_gradients import MEBIBYTE
from convgen.plan.program.candidates import Way
from convgen.plan.program.step_ps import Cost, Sum
from convgen.program.biases import NONE, Biased
from convgen.program.network import Program, asked
from convgen.program.rows import Roles, Stored, converted, reads_of, sides, stored_by_name
from convgen.program.shared import beginnings, longest, moving
from convgen.program.types import RowTypes


class Laid(NamedTuple):
    """A row's way, and those of gradients with rows of their own, by operand."""

    way: Way
    gradients: Mapping[str, Way]


class Anew(NamedTuple):
    """How a row is placed: its ways, and the storage of what it reads and makes."""

    laid: Laid
    reads: Sequence[Stored]
    makes: Sequence[Stored]


class Brought(NamedTuple):
    """An operand's conversions to what a row wants: picoseconds of each, those of latencies, and keys of beginnings."""

    ps: Sequence[int]
    latencies: Sequence[int]
    keys: Sequence[Hashable]


class RowCosts:
    """Costs of a program's rows on a grid.

    Args:
        price: on the grid's axes.
        wanted: values that want gradients; `learnt`: parameters.
    """

    def __init__(self, program: Program, price: Price, wanted: Collection[str], learnt: Collection[str]) -> None:
        self.price, self.learnt = price, learnt
        self.known, self.brought = _known_on(price)
        self.rows = [
            (row.bound, types, bias, asked(row.bound, wanted))
            for row, types, bias in zip(program.rows, program.row_types, program.biased, strict=True)
        ]
        self.alike_in = [self._alike_in(*row) for row in self.rows]

    def key(self, i: int, how: Anew) -> Hashable:
        """All that a row's cost depends on."""
        return self.alike_in[i], how.laid.way, tuple(how.laid.gradients.items()), *how.reads, *how.makes

    def known_of(self, hows: Mapping[int, Anew]) -> dict[int, Cost]:
        """What those rows cost of which that is known."""
        keys = {i: self.key(i, how) for i, how in hows.items()}
        return {i: self.known[key] for i, key in keys.items() if key in self.known}

    def of(self, i: int, how: Anew) -> Cost:
        """What row i costs."""
        if (found := self.known.get(key := self.key(i, how))) is None:
            found = self.known[key] = self._cost(i, how)
        return found

    def _alike_in(self, bound: Bound, types: RowTypes, bias: Biased, wanted: Sequence[bool]) -> Hashable:
        """A key: rows that have it in common cost the same where they are placed alike."""
        learnt = tuple(v in self.learnt for v in bound.reads)
        several = tuple(bound.reads.index(v) for v in bound.reads), tuple(bool(v) for v in bound.makes)
        return bound.operation, types, bias, tuple(wanted), learnt, several

    def _cost(self, i: int, how: Anew) -> Cost:
        (bound, types, bias, wanted), ((number, roles), gradients) = self.rows[i], how.laid
        operation, price = bound.operation, self.price
        signature, nests = operation.signatures[number], dict(roles)
        tensors, here = price.tensors(signature), price.of(types.local)
        numbers = {o.name: k for k, o in enumerate(signature.inputs)}
        own = [(numbers[name], name, way) for name, way in gradients.items() if wanted[numbers[name]]]
        back = [k for k, o in enumerate(signature.inputs) if o.gradient and wanted[k] and o.name not in gradients]
        between = [k for k, *_ in own] if operation.has_between else []
        counted = _Counted(self.learnt, hides=price.machine.hides_gradients)
        if back or between:
            counted.alone += here.local(operation, number, nests, [*back, *between], between)
        fetched: set[Hashable] = set()
        names = stored_by_name(operation.signatures[0], how.reads, how.makes) if own else {}
        for k, name, (which, nested) in reversed(own):
            one, kinds = operation.gradients[name], types.of(name)
            its, (result,) = one.operation.signatures[which], one.operation.signatures[which].results
            for j, source in enumerate(reads_of(operation, one.reads)):
                brought = self._brought(kinds.fetch[j], its, j, nested, names[one.reads[j]])
                counted.fetch(brought, source, fetched)
            counted.alone += price.of(kinds.local).local(one.operation, which, dict(nested))
            made, stored = price.wants(its, result, nested), Layout(NAME, names[name])
            sets, there = price.tensors(its)[result.name], price.of(kinds.store)
            both = (p.moves.reduced(sets, made, stored, its.reduction) for p in (there, there.latencies))
            counted.leave(there, bound.reads[k], made, stored, *both)
        moves = [False, False]  # whether operands move, and results
        for k, (operand, axes) in enumerate(zip(signature.inputs, how.reads, strict=True)):
            sets, stored = tensors[operand.name], Layout(NAME, axes)
            wants = price.wants(signature, operand, roles)
            moves[0] |= stored != wants
            counted.forward += price.of(types.fetch[k]).moves.chain(sets, stored, wants)
            if k in back:
                found = price.gradient(signature, operand, roles)
                there = price.of((types.back if stored != wants else types.back_here)[k])
                both = (p.moves.collected(sets, found, stored) for p in (there, there.latencies))
                counted.leave(there, bound.reads[k], found, stored, *both)
        for j, (result, axes) in enumerate(zip(signature.results, how.makes, strict=True)):
            sets, stored = tensors[result.name], Layout(NAME, axes)
            makes = price.wants(signature, result, roles)
            moves[1] |= stored != makes
            counted.forward += price.of(types.store[j]).moves.reduced(sets, makes, stored, signature.reduction)
            if back and result.gradient:
                brought = self._brought(types.given[j], signature, len(signature.inputs) + j, roles, axes)
                counted.fetch(brought, ("gradient", j), fetched if not between else set())
        bias = bias if price.machine.adds_biases else NONE
        if bias.behind is not None and moves[1]:
            counted.forward += here.over_stored(bias.behind, how.makes[0])
        if not (bias.is_bias and not any(moves)):
            counted.forward += here.local(operation, number, nests)
        return counted.cost

    def _brought(self, kind: str, signature: Signature, number: int, roles: Roles, stored: Stored) -> Brought:
        """How an operand, or a result's gradient, is brought from where it is stored.

        Args:
            kind: the type in which it moves.
            number: of the operand; results are counted behind operands.
        """
        if (found := self.brought.get(key := (kind, signature, number, roles, stored))) is None:
            operand, dims = sides(signature)[number]
            sets, there = self.price.tensors(signature)[operand.name], self.price.of(kind)
            chain = converted(sets, Layout(NAME, stored), self.price.wants(signature, operand, roles).summed)
            taken, latencies = ([p.moves.conversion(sets, c) for c in chain] for p in (there, there.latencies))
            found = self.brought[key] = Brought(taken, latencies, beginnings(dims, moving(chain)))
        return found


class _Counted:
    """A row's cost, as it is added up.

    Args:
        hides: whether sums of parameters' gradients cost nothing.
    """

    def __init__(self, learnt: Collection[str], *, hides: bool) -> None:
        self.learnt, self.hides = learnt, hides
        self.forward = self.before = self.alone = self.behind = 0
        self.sums: list[Sum] = []

    @property
    def cost(self) -> Cost:
        return Cost(self.forward, self.before, self.alone, self.behind, tuple(self.sums))

    def fetch(self, brought: Brought, source: tuple[str, int], fetched: set[Hashable]) -> None:
        """What backward is brought before it computes, but for what has been fetched already."""
        keys = [(*source, key) for key in brought.keys]
        n = longest(keys, fetched)
        fetched.update(keys)
        taken = sum(brought.ps[n:])
        waits = min(sum(brought.latencies[n:]), taken)
        self.before, self.alone = self.before + taken - waits, self.alone + waits

    def leave(self, price: Price, value: str, found: Layout, stored: Layout, taken: int, latency: int) -> None:
        """A gradient goes to where its value is stored: as a sum that may travel in a bucket, or behind computing."""
        waits = min(latency, taken)
        if self.hides and value in self.learnt:
            return
        if value not in self.learnt or found.summed != stored:
            self.behind, self.alone = self.behind + taken - waits, self.alone + waits
        elif taken:
            size = MEBIBYTE * (taken - waits) // _mebibyte_ps(price, found.partial)
            self.sums.append(Sum(found.partial, taken - waits, waits, size))


@lru_cache(maxsize=1 << 10)
def _mebibyte_ps(price: Price, over: Axes) -> int:
    """Picoseconds of a mebibyte in an all-reduce over these axes, without its latency."""
    machine, how, p = price.machine, price.machine.collectives.of("all_reduce"), price.grid.over(over)
    none, full = (
        collective_seconds(price.grid, machine.levels, "all_reduce", over, n, machine.add_s_per_byte, how)[0]
        for n in (0, 2 * (p - 1) / p * MEBIBYTE)
    )
    return max(round((full - none) * PICOSECONDS), 1)


@lru_cache(maxsize=2)
def _known_on(_: Price) -> tuple[dict[Hashable, Cost], dict[Hashable, Brought]]:
    """What all searches near programs share, by price: costs of rows, and how operands are brought."""
    return {}, {}
