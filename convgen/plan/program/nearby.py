"""Layouts near a program's: another storage of a value, other roles of a row, another way of a gradient, or several.

The exact search (search.py) is over few candidates of each. What lies beyond is drawn at random: a draw changes some
values and rows, places again what they touch, and costs what `row_cost` says of these rows: by sums, or by a step in
which sums of parameters' gradients travel behind what is left of backward (step_ps.py). `improved` takes draws that
cost less; `bench/adversary.py` anneals by the same draws, to find what plans miss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import exp, prod
from random import Random
from typing import NamedTuple

from convgen.algebra.grid import Grid
from convgen.algebra.involved import NAME
from convgen.algebra.layout import Axes, Layout
from convgen.cost.links import collective_seconds
from convgen.cost.machine import Machine
from convgen.cost.moving import PICOSECONDS
from convgen.cost.rows import Price, moving_ps, price_on, row_cost
from convgen.operations.row import Operation
from convgen.passes.bucket_gradients import MEBIBYTE
from convgen.plan.program.candidates import Way, suggested, wanted
from convgen.plan.program.step_ps import Cost, at_least_ps, step_ps
from convgen.program.biases import NONE
from convgen.program.network import Program, asked
from convgen.program.rows import Chain, PlacedRow, Stored, kept, place, place_gradient, serves, stored_by_name
from convgen.program.types import RowTypes

BUCKET = 5 * MEBIBYTE  # bytes after which sums are no longer packed together, as overlapped.py tries it
FAR = 8  # values that a draw stores alike, at most
NOTHING = Cost(0, 0, 0, 0)


class Laid(NamedTuple):
    """A row's way, and those of gradients with rows of their own, by operand."""

    way: Way
    gradients: Mapping[str, Way]


class Anew(NamedTuple):
    """How a row is placed: its ways, and the storage of what it reads and makes."""

    laid: Laid
    reads: list[Stored]
    makes: list[Stored]


class Change(NamedTuple):
    """Rows that a draw places anew, with their costs; values that it stores otherwise; and picoseconds that it adds."""

    rows: Mapping[int, tuple[Anew, Cost]]
    stored: Mapping[str, Stored]
    more_ps: int


class Layouts(NamedTuple):
    """How all rows and values are laid out at one time, and what they cost."""

    rows: Sequence[PlacedRow]
    stored: Mapping[str, Stored]
    costs: Sequence[Cost]
    time_ps: int


class Nearby:
    """A program, and what its rows cost.

    Args:
        frozen: values whose storage stays; inputs' does anyway, as nobody knows what reading more of them costs.
        of_inputs: whether inputs want gradients, too.
        by_step: costs are of a step with communication overlapped, not sums.
    """

    def __init__(
        self,
        program: Program,
        machine: Machine,
        dtype: str,
        frozen: Collection[str] = (),
        *,
        of_inputs: bool = False,
        by_step: bool = False,
    ) -> None:
        self.start, self.by_step = program, by_step
        self.grid = Grid(tuple((a, n) for a, n in program.grid.axes if n > 1))
        self.price = price_on(self.grid, machine, dtype)
        self.wanted = program.differentiable(of_inputs=of_inputs)
        self.learnt = {n for n, v in program.values.items() if v.kind == "parameter"}
        self.rows, self.stored = [*program.rows], {n: v.stored for n, v in program.values.items()}
        self.alike_in = [self._alike_in(i, row) for i, row in enumerate(self.rows)]
        self.known = _known_on(self.price)  # costs of rows, by all that they depend on
        self.costs = [self._cost(i, row) for i, row in enumerate(self.rows)]
        self.time_ps = step_ps(self.costs) if by_step else sum(map(sum, self.costs))
        self.with_: dict[str, str] = {}  # buffers and what they become lie alike
        for buffer, value in program.updates:
            self.with_ |= {buffer: value, value: buffer}
        self.touching: dict[str, list[int]] = {}
        self.alike: dict[Operation, list[int]] = {}
        for i, row in enumerate(self.rows):
            self.alike.setdefault(row.bound.operation, []).append(i)
            for v in dict.fromkeys((*row.bound.reads, *row.bound.makes)):
                if v:
                    self.touching.setdefault(v, []).append(i)
        fixed = {n for n, v in program.values.items() if v.kind in ("input", "constant")} | {*frozen}
        self.free = [v for v in self.touching if v not in fixed and self.with_.get(v) not in fixed]

    def price_of(self, i: int) -> Price:
        """Prices in the type of a row's local work."""
        return self.price.of(self.start.row_types[i].local)

    @property
    def program(self) -> Program:
        values = {n: replace(v, stored=self.stored[n]) for n, v in self.start.values.items()}
        return replace(self.start, rows=tuple(self.rows), values=values)

    def take(self, change: Change) -> None:
        """Apply a change to the program."""
        for i, (how, cost) in change.rows.items():
            self.rows[i], self.costs[i] = self._placed(i, how), cost
        self.stored.update(change.stored)
        self.time_ps += change.more_ps

    def kept(self) -> Layouts:
        """The layout as it is now, for `go_back`."""
        return Layouts([*self.rows], {**self.stored}, [*self.costs], self.time_ps)

    def go_back(self, to: Layouts) -> None:
        """Restore what `kept` has handed out."""
        self.rows, self.stored, self.costs, self.time_ps = [*to.rows], {**to.stored}, [*to.costs], to.time_ps

    def draw(self, draw: Random, *, cheaper: bool = False) -> Change | None:
        """A random change; None where what was drawn can't be.

        Args:
            cheaper: also None where it costs as much or more, which is often known before all of it is placed.
        """
        stored: dict[str, Stored] = {}
        laid: dict[int, Laid] = {}
        kind = draw.choice(("value", "values", "row", "row and values", "gradient"))
        if kind in ("value", "values") and self.free:
            self._store(draw, stored, laid, FAR if kind == "values" else 1)
        else:
            i = draw.randrange(len(self.rows))
            self._lay(draw, i, kind, stored, laid)
        if any(self.stored[v] == s for v, s in stored.items()):
            stored = {v: s for v, s in stored.items() if self.stored[v] != s}
        return self.changed(stored, laid, cheaper=cheaper) if stored or laid else None

    # ---------------------------------------------------------------- what is drawn
    def _store(self, draw: Random, stored: dict[str, Stored], laid: dict[int, Laid], most: int) -> None:
        """A value stored otherwise, and with it others of its shape that lie beside it; rows as that suggests."""
        first = draw.choice(self.free)
        shape = self.start.values[first].shape
        there = self._some_storage(draw, first)
        waiting = [first]
        while waiting and len(stored) < most:
            v = waiting.pop(0)
            if v in stored:
                continue
            stored[v] = there
            if (other := self.with_.get(v)) is not None:
                stored[other] = there
            for i in self.touching[v]:
                row = self.rows[i]
                if row.bound.operation.is_product:
                    continue
                waiting += [
                    o
                    for o in (*row.bound.reads, *row.bound.makes)
                    if o and o in self.touching and self.start.values[o].shape == shape and o in self.free
                ]
        if draw.random() < 0.8:
            for i in {i for v in stored for i in self.touching[v]}:
                row = self.rows[i]
                if not row.bound.operation.is_product or draw.random() < 0.3:
                    self._as_suggested(draw, i, stored, laid)

    def _as_suggested(self, draw: Random, i: int, stored: Mapping[str, Stored], laid: dict[int, Laid]) -> None:
        row = self.rows[i]
        reads = [stored.get(v) for v in row.bound.reads]
        makes = [stored.get(v) if v else None for v in row.bound.makes]
        ways = [w for w in suggested(row.bound.operation, reads, makes) if self._serves(row.bound.operation, w)]
        if ways:
            laid[i] = Laid(draw.choice(ways), gradients_of(row))

    def _some_storage(self, draw: Random, value: str) -> Stored:
        """A storage that a row of the value would have, or a random one."""
        shape = self.start.values[value].shape
        row = self.rows[draw.choice(self.touching[value])]
        if draw.random() < 0.6:
            roles = row.roles
            if draw.random() < 0.5 and row.derived:
                roles = draw.choice(row.derived)[1].roles
            return self.liked(value, row, roles)
        found: list[Axes] = [()] * len(shape)
        for axis in draw.sample(self.grid.names, len(self.grid.names)):
            d = draw.randrange(len(shape) + 1)
            if d < len(shape) and prod(self.grid.sizes[a] for a in (*found[d], axis)) <= shape[d]:
                found[d] = (*found[d], axis)
        return tuple(found)

    def liked(self, value: str, row: PlacedRow, roles: Iterable[tuple[str, Axes]]) -> Stored:
        """How a row with such roles would have a value stored that it reads or makes."""
        signature = row.bound.operation.signatures[row.way]
        sides = [*zip(signature.inputs, row.bound.reads, strict=True)]
        sides += [*zip(signature.results, row.bound.makes, strict=True)]
        operand = next(o for o, v in sides if v == value)
        own = {k: axes for k, axes in roles if k in signature.extent}
        return (kept if self.start.values[value].kind == "parameter" else wanted)(operand, signature, own)

    def _lay(self, draw: Random, i: int, kind: str, stored: dict[str, Stored], laid: dict[int, Laid]) -> None:
        row = self.rows[i]
        operation, gradients = row.bound.operation, dict(gradients_of(row))
        if kind == "gradient":
            names = [*operation.gradients]
            if not names:
                return
            name = draw.choice(names)
            if name in gradients and row.signature.reduction == "sum" and draw.random() < 0.3:
                del gradients[name]
            elif (way := self._some_way(draw, operation.gradients[name].operation)) is not None:
                gradients[name] = way
            laid[i] = Laid((row.way, row.roles), gradients)
            return
        if (way := self._some_way(draw, operation, self.alike[operation])) is None:
            return
        laid[i] = Laid(way, gradients)
        if kind == "row and values":
            signature, roles = operation.signatures[way[0]], dict(way[1])
            sides = [*zip(signature.inputs, row.bound.reads, strict=True)]
            sides += [*zip(signature.results, row.bound.makes, strict=True)]
            for operand, v in sides:
                if v and v in self.free and draw.random() < 0.8:
                    learnt = self.start.values[v].kind == "parameter"
                    stored[v] = (kept if learnt else wanted)(operand, signature, roles)
                    if (other := self.with_.get(v)) is not None:
                        stored[other] = stored[v]

    def _some_way(self, draw: Random, operation: Operation, like: Collection[int] = ()) -> Way | None:
        """A way that a row like this one has, or a random one."""
        if like and draw.random() < 0.4:
            other = self.rows[draw.choice([*like])]
            return other.way, other.roles
        number = draw.randrange(len(operation.signatures))
        signature = operation.signatures[number]
        several = [i for i, n in signature.extents if n > 1]
        if signature.reduction == "max" or not several:
            return None
        roles: dict[str, Axes] = {}
        for axis in self.grid.names:
            if draw.random() < 0.85:
                index = draw.choice(several)
                roles[index] = (*roles.get(index, ()), axis)
        way = number, tuple((i, roles[i]) for i, _ in signature.extents if i in roles)
        return way if self._serves(operation, way) else None

    def _serves(self, operation: Operation, way: Way) -> bool:
        signature = operation.signatures[way[0]]
        return signature.reduction != "max" and serves(signature, dict(way[1]), self.grid)

    # ---------------------------------------------------------------- what it costs
    def changed(
        self, stored: Mapping[str, Stored], laid: Mapping[int, Laid], *, cheaper: bool = False
    ) -> Change | None:
        """The change that stores these values and lays these rows so; None where it can't be.

        Args:
            cheaper: also None where it costs as much or more, which is often known before all of it is placed.
        """
        touched = {i for v in stored for i in self.touching.get(v, ())} | {*laid}
        anew: dict[int, Anew] = {}
        keys: dict[int, object] = {}
        for i in touched:
            row = self.rows[i]
            one = laid.get(i) or Laid((row.way, row.roles), gradients_of(row))
            own = {*row.bound.operation.gradients}
            if row.bound.operation.signatures[one.way[0]].reduction != "sum" and own != {*one.gradients}:
                return None
            reads = [stored.get(v, self.stored[v]) for v in row.bound.reads]
            makes = [stored.get(v, self.stored[v]) if v else s for v, s in zip(row.bound.makes, row.makes, strict=True)]
            anew[i] = Anew(one, reads, makes)
            keys[i] = (self.alike_in[i], one.way, tuple(one.gradients.items()), *reads, *makes)
        costs = {i: self.known[key] for i, key in keys.items() if key in self.known}
        left = sum([self._saves(i, costs.get(i, NOTHING)) for i in touched])
        for i, how in anew.items():
            if cheaper and left <= 0:  # what is left to place costs nothing or more
                return None
            if i in costs:
                continue
            if (cost := self.known.get(keys[i])) is None:
                cost = self._cost(i, self._placed(i, how)) if how.laid.gradients else self._by_vjp(i, how)
                self.known[keys[i]] = cost
            costs[i] = cost
            left += self._saves(i, cost) - self._saves(i, NOTHING)
        more_ps = -left
        if self.by_step and not (cheaper and left <= 0):
            more_ps = step_ps([costs.get(i, cost) for i, cost in enumerate(self.costs)]) - self.time_ps
        if cheaper and more_ps >= 0:
            return None
        return Change({i: (how, costs[i]) for i, how in anew.items()}, stored, more_ps)

    def _saves(self, i: int, cost: Cost) -> int:
        """Picoseconds saved where a row costs so; of a step, an upper bound of them."""
        return -at_least_ps(self.costs[i], cost) if self.by_step else sum(self.costs[i]) - sum(cost)

    def _placed(self, i: int, how: Anew) -> PlacedRow:
        bound, ((number, roles), gradients) = self.rows[i].bound, how.laid
        names = stored_by_name(bound.operation.signatures[0], how.reads, how.makes)
        derived = {
            name: place_gradient(bound, name, self.grid, way, dict(own), names)
            for name, (way, own) in gradients.items()
        }
        return place(bound, self.grid, number, dict(roles), how.reads, how.makes, derived)

    def _by_vjp(self, i: int, how: Anew) -> Cost:
        """What `_cost` would say of the row with all gradients by the vjp, without placing it."""
        bound, types, (number, roles) = self.rows[i].bound, self.start.row_types[i], how.laid.way
        operation, price = bound.operation, self.price
        signature, nests = operation.signatures[number], dict(roles)
        tensors, here = price.tensors(signature), price.of(types.local)
        wanted = asked(bound, self.wanted)
        back = [k for k, o in enumerate(signature.inputs) if o.gradient and wanted[k]]
        computing = here.local(operation, number, nests, back) if back else 0
        forward, moving, waiting, sums, latency = 0, 0, 0, 0, 0
        moves = [False, False]  # whether operands move, and results
        for k, (operand, axes) in enumerate(zip(signature.inputs, how.reads, strict=True)):
            sets, stored = tensors[operand.name], Layout(NAME, axes)
            wants = price.wants(signature, operand, roles)
            moves[0] |= stored != wants
            forward += price.of(types.fetch[k]).moves.chain(sets, stored, wants)
            if k in back and not (price.machine.hides_gradients and bound.reads[k] in self.learnt):
                found = price.gradient(signature, operand, roles)
                there = price.of((types.back if stored != wants else types.back_here)[k])
                taken, least = (p.moves.collected(sets, found, stored) for p in (there, there.latencies))
                if bound.reads[k] in self.learnt and found.summed == stored:
                    rest = _rest_of_latency(there, found.partial, min(least, taken), taken)
                    sums, latency = sums + taken - rest, latency + rest
                else:
                    moving, waiting = moving + taken, waiting + min(least, taken)
        for j, (result, axes) in enumerate(zip(signature.results, how.makes, strict=True)):
            sets, stored = tensors[result.name], Layout(NAME, axes)
            makes = price.wants(signature, result, roles)
            moves[1] |= stored != makes
            forward += price.of(types.store[j]).moves.reduced(sets, makes, stored, signature.reduction)
            if back and result.gradient:
                there = price.of(types.given[j])
                taken, least = (p.moves.chain(sets, stored, makes.summed) for p in (there, there.latencies))
                moving, waiting = moving + taken, waiting + min(least, taken)
        bias = self.start.biased[i] if price.machine.adds_biases else NONE
        if bias.behind is not None and moves[1]:
            forward += here.over_stored(bias.behind, how.makes[0])
        if not (bias.is_bias and not any(moves)):
            forward += here.local(operation, number, nests)
        return Cost(forward, computing + waiting, moving - waiting, sums, latency)

    def _alike_in(self, i: int, row: PlacedRow) -> object:
        """A key: rows that have it in common cost the same where they are placed alike."""
        bound = row.bound
        learnt = tuple(v in self.learnt for v in bound.reads)
        several = tuple(bound.reads.index(v) for v in bound.reads), tuple(bool(v) for v in bound.makes)
        types, bias = self.start.row_types[i], self.start.biased[i]
        return bound.operation, types, bias, tuple(asked(bound, self.wanted)), learnt, several

    def _cost(self, i: int, row: PlacedRow) -> Cost:
        types, bias, wanted = self.start.row_types[i], self.start.biased[i], asked(row.bound, self.wanted)
        forward = row_cost(row, self.price, types, [False] * len(wanted), bias)
        computing, moving = row_cost(row, self.price, types, wanted, bias, learnt=self.learnt)
        least = sum(moving_ps(row, self.price.latencies, types, wanted, self.learnt)[1:])
        sums = latency = 0
        for k, one, chain, kind in _collected(row, types):
            if wanted[k] and row.bound.reads[k] in self.learnt and [c.kind for c in chain] == ["all_reduce"]:
                there = self.price.of(kind)
                taken, alone = (p.chain(one, chain, parameter=True) for p in (there, there.latencies))
                rest = _rest_of_latency(there, chain[0].over, min(alone, taken), taken)
                sums, latency, least = sums + taken - rest, latency + rest, least - alone
        moving -= forward[1] + sums + latency
        waiting = min(least, moving)
        alone = computing - forward[0] + waiting
        return Cost(sum(forward), alone, moving - waiting, sums, latency)


def _collected(row: PlacedRow, types: RowTypes) -> Iterator[tuple[int, PlacedRow, Chain, str]]:
    """For each operand with a gradient: its number, the row that makes the gradient, the chain that stores it, and in
    which type this travels."""
    own = dict(row.derived)
    for k, chain in enumerate(row.back):
        if (one := own.get(k)) is not None:
            yield k, one, one.store[0], types.of(row.signature.inputs[k].name).store
        elif chain:
            yield k, row, chain, types.on_the_way_back(row, k)


def _rest_of_latency(price: Price, over: Axes, latency: int, taken: int) -> int:
    """Picoseconds of a sum's latency that other sums of its bucket take, too."""
    if not latency:  # as over axes of one rank
        return 0
    full = _bucket_ps(price, over)
    return latency - latency * min(taken - latency, full) // full


@lru_cache(maxsize=1 << 10)
def _bucket_ps(price: Price, over: Axes) -> int:
    """Picoseconds of a bucket's bytes in an all-reduce over these axes, without its latency."""
    machine, how, p = price.machine, price.machine.collectives.of("all_reduce"), price.grid.over(over)
    none, full = (
        collective_seconds(price.grid, machine.levels, "all_reduce", over, n, machine.add_s_per_byte, how)[0]
        for n in (0, 2 * (p - 1) / p * BUCKET)
    )
    return max(round((full - none) * PICOSECONDS), 1)


@lru_cache(maxsize=2)
def _known_on(_: Price) -> dict[object, Cost]:
    """Costs of rows that all searches near programs share, by price."""
    return {}


def gradients_of(row: PlacedRow) -> dict[str, Way]:
    """Ways of a row's gradients that are rows of their own, by operand."""
    return {row.signature.inputs[k].name: (one.way, one.roles) for k, one in row.derived}


def anneal(near: Nearby, draws: int, draw: Random, warm: float) -> Iterator[None]:
    """Simulated annealing over so many draws: takes better layouts, ever fewer worse ones; yields after each it takes.

    Args:
        warm: by what share of the start's picoseconds a layout may be worse at first; 0: only better ones are taken.
    """
    start = near.time_ps
    for n in range(draws):
        heat = warm * start * (1 - n / draws) ** 2
        change = near.draw(draw, cheaper=not warm)
        if change is not None and (change.more_ps <= 0 or draw.random() < exp(-change.more_ps / heat)):
            near.take(change)
            yield
