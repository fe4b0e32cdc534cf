"""Layouts near a program's: another storage of a value, other roles of a row, another way of a gradient, or several.

The exact search (search.py) is over few candidates of each. What lies beyond is drawn at random: a draw changes some
values and rows, places again what they touch, and costs what cost/rows.py says of these rows: by sums, or by a step in
which sums of parameters' gradients travel behind what is left of backward (step_ps.py). `improved` takes draws that
cost less; `bench/adversary.py` anneals by the same draws, to find what plans miss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import exp, prod
from random import Random
from typing import NamedTuple

from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.signature import Operand
from convgen.cost.machine import Machine
from convgen.cost.rows import Price, price_on
from convgen.operations.row import Operation
from convgen.plan.program.candidates import Way, suggested, wanted
from convgen.plan.program.row_costs import Anew, Laid, RowCosts
from convgen.plan.program.step_ps import Cost, longer_ps, step_ps
from convgen.program.network import Program
from convgen.program.rows import PlacedRow, Stored, kept, place, place_gradient, serves, stored_by_name

FAR = 8  # values that a draw stores alike, at most
LONG = 16  # rows that a draw lays along a stretch, at most
NOTHING = Cost(0, 0, 0, 0)


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
        self.row_costs = RowCosts(program, self.price, self.wanted, self.learnt)
        self.costs = [self.row_costs.of(i, how) for i, how in enumerate(self.hows)]
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
        for i in touched:
            bound, now = self.bounds[i], self.hows[i]
            one = laid.get(i) or now.laid
            own = {*bound.operation.gradients}
            if bound.operation.signatures[one.way[0]].reduction != "sum" and own != {*one.gradients}:
                return None
            reads = [stored.get(v, self.stored[v]) for v in bound.reads]
            makes = [stored.get(v, self.stored[v]) if v else s for v, s in zip(bound.makes, now.makes, strict=True)]
            anew[i] = Anew(one, reads, makes)
        costs = self.row_costs.known_of(anew)
        left = sum([self._saves(i, costs.get(i, NOTHING)) for i in touched])
        left += self.longer_ps  # all that sums take may be hidden
        for i, how in anew.items():
            if cheaper and left <= 0:  # what is left to count costs nothing or more
                return None
            if i not in costs:
                costs[i] = self.row_costs.of(i, how)
                left += self._saves(i, costs[i]) - self._saves(i, NOTHING)
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
