"""Layouts near a program's: another storage of a value, other roles of a row, another way of a gradient, or several.

The exact search (search.py) is over few candidates of each. What lies beyond is drawn at random: a draw changes some
values and rows, places again what they touch, and costs what cost/rows.py says of these rows: by sums, or by a step in
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
from convgen.algebra.signature import Operand
from convgen.cost.links import collective_seconds
from convgen.cost.machine import Machine
from convgen.cost.moving import PICOSECONDS
from convgen.cost.rows import Price, backward_ps, forward_ps, moving_ps, price_on
from convgen.operations.row import Operation
from convgen.passes.bucket_gradients import MEBIBYTE
from convgen.plan.program.candidates import Way, suggested, wanted
from convgen.plan.program.step_ps import Cost, Sum, longer_ps, step_ps
from convgen.program.biases import NONE
from convgen.program.network import Program, asked
from convgen.program.rows import Chain, PlacedRow, Stored, kept, place, place_gradient, serves, stored_by_name
from convgen.program.types import RowTypes

FAR = 8  # values that a draw stores alike, at most
LONG = 16  # rows that a draw lays along a stretch, at most
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

    hows: Sequence[Anew]
    rows: Sequence[PlacedRow | None]
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
        self.bounds, self.stored = [row.bound for row in program.rows], {n: v.stored for n, v in program.values.items()}
        self.hows = [
            Anew(Laid((row.way, row.roles), gradients_of(row)), [*row.reads], [*row.makes]) for row in program.rows
        ]
        self.rows: list[PlacedRow | None] = [*program.rows]  # None: to be placed where a program is asked for
        self.alike_in = [self._alike_in(i) for i in range(len(self.rows))]
        self.known = _known_on(self.price)  # costs of rows, by all that they depend on
        self.costs = [self._cost(i, row) for i, row in enumerate(program.rows)]
        self.time_ps = step_ps(self.costs) if by_step else self.in_order_ps
        self.longer_ps = longer_ps(self.costs) if by_step else 0
        self.with_: dict[str, str] = {}  # buffers and what they become lie alike
        for buffer, value in program.updates:
            self.with_ |= {buffer: value, value: buffer}
        self.touching: dict[str, list[int]] = {}
        self.alike: dict[Operation, list[int]] = {}
        for i, bound in enumerate(self.bounds):
            self.alike.setdefault(bound.operation, []).append(i)
            for v in dict.fromkeys((*bound.reads, *bound.makes)):
                if v:
                    self.touching.setdefault(v, []).append(i)
        fixed = {n for n, v in program.values.items() if v.kind in ("input", "constant")} | {*frozen}
        self.free = [v for v in self.touching if v not in fixed and self.with_.get(v) not in fixed]
        self.are_free = frozenset(self.free)

    def price_of(self, i: int) -> Price:
        """Prices in the type of a row's local work."""
        return self.price.of(self.start.row_types[i].local)

    @property
    def program(self) -> Program:
        values = {n: replace(v, stored=self.stored[n]) for n, v in self.start.values.items()}
        rows = [
            self._placed(i, how) if row is None else row
            for i, (row, how) in enumerate(zip(self.rows, self.hows, strict=True))
        ]
        self.rows = [*rows]
        return replace(self.start, rows=tuple(rows), values=values)

    @property
    def in_order_ps(self) -> int:
        """Picoseconds with one step after the other."""
        return sum(cost.in_order for cost in self.costs)

    def take(self, change: Change) -> None:
        """Apply a change to the program."""
        for i, (how, cost) in change.rows.items():
            self.hows[i], self.rows[i], self.costs[i] = how, None, cost
        self.stored.update(change.stored)
        self.time_ps += change.more_ps
        self.longer_ps = longer_ps(self.costs) if self.by_step else 0

    def kept(self) -> Layouts:
        """The layout as it is now, for `go_back`."""
        return Layouts([*self.hows], [*self.rows], {**self.stored}, [*self.costs], self.time_ps)

    def go_back(self, to: Layouts) -> None:
        """Restore what `kept` has handed out."""
        self.hows, self.rows, self.stored = [*to.hows], [*to.rows], {**to.stored}
        self.costs, self.time_ps = [*to.costs], to.time_ps
        self.longer_ps = longer_ps(self.costs) if self.by_step else 0

    def draw(self, draw: Random, *, far: bool = False, cheaper: bool = False) -> Change | None:
        """A random change; None where what was drawn can't be.

        Args:
            far: also whole stretches of the network, which seldom are better at once.
            cheaper: also None where it costs as much or more, which is often known before all of it is placed.
        """
        stored: dict[str, Stored] = {}
        laid: dict[int, Laid] = {}
        kind = draw.choice(("value", "values", "row", "row and values", "gradient", *["stretch"] * far))
        if kind in ("value", "values") and self.free:
            self._store(draw, stored, laid, FAR if kind == "values" else 1)
        elif kind == "stretch" and self.free:
            self._store_along(draw, stored, laid)
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
            for bound in [self.bounds[i] for i in self.touching[v]]:
                if bound.operation.is_product:
                    continue
                waiting += [
                    o
                    for o in (*bound.reads, *bound.makes)
                    if o in self.are_free and self.start.values[o].shape == shape
                ]
        if draw.random() < 0.8:
            for i in {i for v in stored for i in self.touching[v]}:
                if not self.bounds[i].operation.is_product or draw.random() < 0.3:
                    self._as_suggested(draw, i, stored, laid)

    def _store_along(self, draw: Random, stored: dict[str, Stored], laid: dict[int, Laid]) -> None:
        """A value stored otherwise, rows beside it as that suggests, what these read and make as they want it, and so
        on: a stretch of the network takes an axis in, or leaves one out."""
        waiting, most = [draw.choice(self.free)], draw.randint(2, LONG)
        stored[waiting[0]] = self._some_storage(draw, waiting[0])
        while waiting and len(laid) < most:
            for i in self.touching[waiting.pop(0)]:
                if i not in laid:
                    self._as_suggested(draw, i, stored, laid)
                    if i in laid:
                        beside = self._stored_for(draw, i, laid[i].way, stored)
                        waiting += [v for v in beside if v not in self.learnt]
                        stored.update(beside)

    def _stored_for(self, draw: Random, i: int, way: Way, but: Collection[str] = ()) -> dict[str, Stored]:
        """Most of the values that row i reads and makes, as such a way would have them stored.

        Args:
            but: values that stay as they are.
        """
        found: dict[str, Stored] = {}
        for operand, v in self._sides(i, way[0]):
            if v in self.are_free and v not in but and draw.random() < 0.8:
                found[v] = self._wanted(operand, v, i, way)
                if (other := self.with_.get(v)) is not None:
                    found[other] = found[v]
        return found

    def _as_suggested(self, draw: Random, i: int, stored: Mapping[str, Stored], laid: dict[int, Laid]) -> None:
        bound = self.bounds[i]
        reads = [stored.get(v) for v in bound.reads]
        makes = [stored.get(v) if v else None for v in bound.makes]
        ways = [w for w in suggested(bound.operation, reads, makes) if self._serves(bound.operation, w)]
        if ways:
            laid[i] = Laid(draw.choice(ways), self.hows[i].laid.gradients)

    def _some_storage(self, draw: Random, value: str) -> Stored:
        """A storage that a row of the value would have, or a random one."""
        shape = self.start.values[value].shape
        i = draw.choice(self.touching[value])
        if draw.random() < 0.6:
            (_, roles), gradients = self.hows[i].laid
            if draw.random() < 0.5 and gradients:
                _, roles = draw.choice([*gradients.values()])
            return self.liked(value, i, roles)
        found: list[Axes] = [()] * len(shape)
        for axis in draw.sample(self.grid.names, len(self.grid.names)):
            d = draw.randrange(len(shape) + 1)
            if d < len(shape) and prod(self.grid.sizes[a] for a in (*found[d], axis)) <= shape[d]:
                found[d] = (*found[d], axis)
        return tuple(found)

    def liked(self, value: str, i: int, roles: Iterable[tuple[str, Axes]]) -> Stored:
        """How row i with such roles would have a value stored that it reads or makes."""
        number, _ = self.hows[i].laid.way
        operand = next(o for o, v in self._sides(i, number) if v == value)
        return self._wanted(operand, value, i, (number, tuple(roles)))

    def _sides(self, i: int, number: int) -> Iterator[tuple[Operand, str]]:
        """Operands and results of a signature of row i, with the values that it reads and makes."""
        bound = self.bounds[i]
        signature = bound.operation.signatures[number]
        for one, v in zip((*signature.inputs, *signature.results), (*bound.reads, *bound.makes), strict=True):
            if v:
                yield one, v

    def _wanted(self, operand: Operand, value: str, i: int, way: Way) -> Stored:
        """How row i would have an operand's value stored, if its way were this one."""
        signature = self.bounds[i].operation.signatures[way[0]]
        roles = {k: axes for k, axes in way[1] if k in signature.extent}
        return (kept if value in self.learnt else wanted)(operand, signature, roles)

    def _lay(self, draw: Random, i: int, kind: str, stored: dict[str, Stored], laid: dict[int, Laid]) -> None:
        bound, (own, now) = self.bounds[i], self.hows[i].laid
        operation, gradients = bound.operation, dict(now)
        if kind == "gradient":
            names = [*operation.gradients]
            if not names:
                return
            name = draw.choice(names)
            if name in gradients and operation.signatures[own[0]].reduction == "sum" and draw.random() < 0.3:
                del gradients[name]
            elif (way := self._some_way(draw, operation.gradients[name].operation)) is not None:
                gradients[name] = way
            laid[i] = Laid(own, gradients)
            return
        if (way := self._some_way(draw, operation, self.alike[operation])) is None:
            return
        laid[i] = Laid(way, gradients)
        if kind == "row and values":
            stored.update(self._stored_for(draw, i, way))

    def _some_way(self, draw: Random, operation: Operation, like: Collection[int] = ()) -> Way | None:
        """A way that a row like this one has, or a random one."""
        if like and draw.random() < 0.4:
            return self.hows[draw.choice([*like])].laid.way
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
            bound, now = self.bounds[i], self.hows[i]
            one = laid.get(i) or now.laid
            own = {*bound.operation.gradients}
            if bound.operation.signatures[one.way[0]].reduction != "sum" and own != {*one.gradients}:
                return None
            reads = [stored.get(v, self.stored[v]) for v in bound.reads]
            makes = [stored.get(v, self.stored[v]) if v else s for v, s in zip(bound.makes, now.makes, strict=True)]
            anew[i] = Anew(one, reads, makes)
            keys[i] = (self.alike_in[i], one.way, tuple(one.gradients.items()), *reads, *makes)
        costs = {i: self.known[key] for i, key in keys.items() if key in self.known}
        left = sum([self._saves(i, costs.get(i, NOTHING)) for i in touched])
        left += self.longer_ps  # all that sums take may be hidden
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
            there = [*self.costs]
            for i, cost in costs.items():
                there[i] = cost
            more_ps += longer_ps(there)
        if cheaper and more_ps >= 0:
            return None
        return Change({i: (how, costs[i]) for i, how in anew.items()}, stored, more_ps)

    def _saves(self, i: int, cost: Cost) -> int:
        """Picoseconds saved where a row costs so; of a step, without those of sums."""
        own = self.costs[i]
        return own.base - cost.base if self.by_step else own.in_order - cost.in_order

    def _placed(self, i: int, how: Anew) -> PlacedRow:
        bound, ((number, roles), gradients) = self.bounds[i], how.laid
        names = stored_by_name(bound.operation.signatures[0], how.reads, how.makes)
        derived = {
            name: place_gradient(bound, name, self.grid, way, dict(own), names)
            for name, (way, own) in gradients.items()
        }
        return place(bound, self.grid, number, dict(roles), how.reads, how.makes, derived)

    def _by_vjp(self, i: int, how: Anew) -> Cost:
        """What `_cost` would say of the row with all gradients by the vjp, without placing it."""
        bound, types, (number, roles) = self.bounds[i], self.start.row_types[i], how.laid.way
        operation, price = bound.operation, self.price
        signature, nests = operation.signatures[number], dict(roles)
        tensors, here = price.tensors(signature), price.of(types.local)
        wanted = asked(bound, self.wanted)
        back = [k for k, o in enumerate(signature.inputs) if o.gradient and wanted[k]]
        computing = here.local(operation, number, nests, back) if back else 0
        forward, before, behind, waiting, sums = 0, 0, 0, 0, list[Sum]()
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
                    sums += _summed(there, found.partial, taken, least)
                else:
                    behind, waiting = behind + taken - min(least, taken), waiting + min(least, taken)
        for j, (result, axes) in enumerate(zip(signature.results, how.makes, strict=True)):
            sets, stored = tensors[result.name], Layout(NAME, axes)
            makes = price.wants(signature, result, roles)
            moves[1] |= stored != makes
            forward += price.of(types.store[j]).moves.reduced(sets, makes, stored, signature.reduction)
            if back and result.gradient:
                there = price.of(types.given[j])
                taken, least = (p.moves.chain(sets, stored, makes.summed) for p in (there, there.latencies))
                before, waiting = before + taken - min(least, taken), waiting + min(least, taken)
        bias = self.start.biased[i] if price.machine.adds_biases else NONE
        if bias.behind is not None and moves[1]:
            forward += here.over_stored(bias.behind, how.makes[0])
        if not (bias.is_bias and not any(moves)):
            forward += here.local(operation, number, nests)
        return Cost(forward, before, computing + waiting, behind, tuple(sums))

    def _alike_in(self, i: int) -> object:
        """A key: rows that have it in common cost the same where they are placed alike."""
        bound = self.bounds[i]
        learnt = tuple(v in self.learnt for v in bound.reads)
        several = tuple(bound.reads.index(v) for v in bound.reads), tuple(bool(v) for v in bound.makes)
        types, bias = self.start.row_types[i], self.start.biased[i]
        return bound.operation, types, bias, tuple(asked(bound, self.wanted)), learnt, several

    def _cost(self, i: int, row: PlacedRow) -> Cost:
        types, bias, wanted = self.start.row_types[i], self.start.biased[i], asked(row.bound, self.wanted)
        forward, before, behind = moving_ps(row, self.price, types, wanted, self.learnt)
        forward += forward_ps(row, self.price, types, bias)
        _, soon, late = moving_ps(row, self.price.latencies, types, wanted, self.learnt)
        sums: list[Sum] = []
        for k, one, chain, kind in _collected(row, types):
            if wanted[k] and row.bound.reads[k] in self.learnt and [c.kind for c in chain] == ["all_reduce"]:
                there = self.price.of(kind)
                taken, alone = (p.chain(one, chain, parameter=True) for p in (there, there.latencies))
                sums += _summed(there, chain[0].over, taken, alone)
                behind, late = behind - taken, late - alone
        soon, late = min(soon, before), min(late, behind)
        alone = backward_ps(row, self.price, types, wanted) + soon + late
        return Cost(forward, before - soon, alone, behind - late, tuple(sums))


def _collected(row: PlacedRow, types: RowTypes) -> Iterator[tuple[int, PlacedRow, Chain, str]]:
    """For each operand with a gradient: its number, the row that makes the gradient, the chain that stores it, and in
    which type this travels."""
    own = dict(row.derived)
    for k, chain in enumerate(row.back):
        if (one := own.get(k)) is not None:
            yield k, one, one.store[0], types.of(row.signature.inputs[k].name).store
        elif chain:
            yield k, row, chain, types.on_the_way_back(row, k)


def _summed(price: Price, over: Axes, taken: int, latency: int) -> list[Sum]:
    """What a sum of a gradient takes, and its bytes; nothing over axes of one rank."""
    if not taken:
        return []
    ps = taken - min(latency, taken)
    return [Sum(over, ps, taken - ps, MEBIBYTE * ps // _mebibyte_ps(price, over))]


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
        change = near.draw(draw, far=warm > 0, cheaper=not warm)
        if change is not None and (change.more_ps <= 0 or draw.random() < exp(-change.more_ps / heat)):
            near.take(change)
            yield
