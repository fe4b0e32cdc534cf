"""What conversions cost on a machine: the time of the busiest rank, for any tensors.

Routes (routes.py) say what moves. On a machine of several levels, or with shared links, an exchange is priced message
by message; where there are too many of these, as if all crossed the outermost level that they reach: a bound from
above.
"""

from __future__ import annotations

from typing import NamedTuple

from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Conversion, Kind
from convgen.algebra.signature import Reduction
from convgen.cost.collectives import Collectives
from convgen.cost.links import Loads, collective_seconds, direct_all_to_all, outermost, slowest
from convgen.cost.machine import Machine
from convgen.cost.measured_steps import Travel
from convgen.cost.routes import Exchange, Route, Step, routes_on

PICOSECONDS = 10**12


class Priced(NamedTuple):
    """The price of a conversion: the most elements that a rank sends, and picoseconds."""

    sent: int
    ps: int


NOTHING = Priced(0, 0)


class Moves:
    """Conversions on a grid of a machine's ranks.

    Args:
        element_bytes: bytes of an element that moves.
        collectives: the algorithms, instead of the machine's.
    """

    def __init__(
        self, grid: Grid, machine: Machine, element_bytes: int, collectives: Collectives | None = None
    ) -> None:
        self.grid, self.machine, self.element_bytes = grid, machine, element_bytes
        self.collectives = collectives or machine.collectives
        self.routes = routes_on(grid, machine.levels)
        self._known: dict[Route, int] = {}
        self._conversions: dict[tuple[IndexSets, Conversion], int] = {}
        self._lines: dict[Loads, tuple[float, float]] = {}

    def conversion(self, sets: IndexSets, c: Conversion) -> int:
        """Picoseconds of a conversion; a slice takes none."""
        if c.kind == "slice":
            return 0
        if (found := self._conversions.get((sets, c))) is None:
            found = self._conversions[sets, c] = self.moved(sets, c).ps
        return found

    def moved(self, sets: IndexSets, c: Conversion) -> Priced:
        """The price of a conversion, and what it sends."""
        step = self.routes.step(sets, c)
        return NOTHING if step is None else self._priced(step)

    def chain(self, sets: IndexSets, src: Layout, dst: Layout) -> int:
        """Picoseconds from one layout to another."""
        return self.along(self.routes.direct(sets, src, dst))

    def collected(self, sets: IndexSets, found: Layout, stored: Layout) -> int:
        """Picoseconds of bringing a gradient from where a row found it to where the operand is stored."""
        return self.along(self.routes.collecting(sets, found, stored))

    def reduced(self, sets: IndexSets, made: Layout, stored: Layout, reduction: Reduction) -> int:
        """Picoseconds of bringing a result from where a row makes it to where it is stored."""
        return self.along(self.routes.reducing(sets, made, stored, reduction))

    def along(self, route: Route) -> int:
        """Picoseconds of a route."""
        if (found := self._known.get(route)) is None:
            found = self._known[route] = sum([self._priced(step).ps for step in route.steps])
        return found

    def _priced(self, step: Step) -> Priced:
        if isinstance(step, Exchange):
            return self._measured("exchange", step.over, step.sent, self._exchange(step))
        kind, over, sent, busy = step
        return self._measured(kind, over, sent, self._collective(kind, over, busy * self.element_bytes))

    def _measured(self, kind: Kind, over: Axes, sent: int, modelled_s: float) -> Priced:
        """The measured price of a collective; or the modelled one, times how far the machine was measured to be off."""
        if (known := self.measured(kind, over, sent)) is not None:
            return Priced(sent, round(known * PICOSECONDS))
        off = self.machine.over_model(kind, self.grid.over(over), sent * self.element_bytes)
        return Priced(sent, round(modelled_s * off * PICOSECONDS))

    def travel(self, kind: Kind, over: Axes, sent: int) -> Travel:
        """The key by which a measured collective that sends so many elements is known."""
        level = self.machine.levels[outermost(self.grid, self.machine.levels, over)]
        return Travel(kind, self.grid.over(over), level.name, sent * self.element_bytes)

    def measured(self, kind: Kind, over: Axes, sent: int) -> float | None:
        """Seconds of a collective that sends so many elements, where it was measured."""
        steps = self.machine.steps
        return steps.seconds(self.travel(kind, over, sent)) if steps else None

    def _collective(self, kind: Kind, over: Axes, sent_bytes: int) -> float:
        machine = self.machine
        algorithm = self.collectives.of(kind)
        if kind == "all_to_all" and algorithm == "direct":
            start, each = direct_all_to_all(self.grid, machine.levels, over)  # linear in the bytes
            return start + sent_bytes * each
        what = (self.grid, machine.levels, kind, over, sent_bytes, machine.add_s_per_byte, algorithm)
        return collective_seconds(*what)[0]

    def _exchange(self, step: Exchange) -> float:
        """Seconds of an exchange."""
        levels = self.machine.levels
        if step.loads is not None:
            if (line := self._lines.get(step.loads)) is None:
                line = self._lines[step.loads] = step.loads.line(levels, self.element_bytes)
            return line[0] + step.times * line[1]
        count = step.busy * self.element_bytes
        if self.routes.plain:
            return step.peers * levels[0].latency_s + count / levels[0].bytes_per_s
        return step.peers * max(one.latency_s for one in levels) + count * slowest(self.grid, levels, step.over)
