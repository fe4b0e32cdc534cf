"""A layer's layout: the network's search on the three rows of its training, which share how x, w and y are stored.

    y = conv_forward(x, w)      dx = conv_backward_data(dy, w)      dw = conv_backward_filter(dy, x)

dx is stored as x, dy as y, dw as w. A row's way is a variable too, because two rows that read one value share the
conversions with which both begin: backward-data and backward-filter those of dy, and forward and backward-filter those
of x where it is held gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from convgen.algebra.conv import PHASES, TENSORS
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.cost.layer_price import LayerPrice
from convgen.operations.bound import Bound
from convgen.plan.exact.eliminate import Factor
from convgen.plan.layer_candidates import Candidates
from convgen.plan.parts import Parts, Tensor
from convgen.plan.program.candidates import Way
from convgen.plan.program.search import Effort, Search, Tables
from convgen.plan.program.tables import Choice, Question
from convgen.program.rows import Stored

ALIKE = 8  # roles that every phase may have
OWN = 6  # roles that one phase may have
OWN_STORED = 40  # the same where layouts are given
STORED = 14  # layouts of a tensor


@dataclass(frozen=True)
class FoundLayout:
    """The best layouts and roles found, without axes of one rank.

    Attributes:
        price: as `LayerPrice` counts it.
        alike: the least price with the same roles in every phase; None where nothing was searched.
    """

    stored: Mapping[str, Layout]
    roles: Mapping[str, Roles]
    price: int
    alike: int | None


class LayerSearch(Search):
    """The search over a layer's three rows.

    Args:
        held: whether backward-filter reads what forward has gathered of x.
        stored, roles: what is given, by tensor and by phase, without axes of one rank.
    """

    def __init__(self, price: LayerPrice, held: bool, stored: Mapping[str, Stored], roles: Mapping[str, Roles]) -> None:
        self.candidates, self.roles = Candidates(price, held, stored), roles
        self.layer_price = price
        tensors = [Tensor(t, tuple(d.extent for d in price.space.dims(t)), "float32", "input") for t in TENSORS]
        bounds = [
            Bound(row.operation, tuple(v.removeprefix("d") for v in row.reads), (row.makes.removeprefix("d"),))
            for row in self.candidates.rows
        ]
        parts = Parts("", tensors, bounds, (), ())
        super().__init__(parts, price.grid, price.machine, price.dtype, Effort(apart=False), price=price)

    def found(self) -> FoundLayout:
        """The best of all that may be chosen.

        Raises:
            InputError: prices are more than 64 bits hold.
        """
        tables, values, _ = self._best()
        stored = {t: Layout(t, self.domains[t][values[self.number[t]] if t in self.number else 0]) for t in TENSORS}
        roles: dict[str, Roles] = {}
        for i, phase in enumerate(PHASES):
            number, nests = _way(tables.of[i][values[tables.which[i]] if i in tables.which else 0])
            roles[phase] = Roles(nests, "input" if number else "output")
        return FoundLayout(stored, roles, tables.constant + tables.problem.total(values)[0], self.alike)

    # ---------------------------------------------------------------- candidates
    def _domains(self) -> dict[str, tuple[Stored, ...]]:
        """Candidate layouts of each tensor; and, in `ways`, candidate ways of each row."""
        of, is_open = self.candidates, len(self.roles) < len(PHASES) or len(self.candidates.given) < len(TENSORS)
        rated = of.rated if is_open else []
        self.alike = rated[0].price if rated else None
        every = [r for r in rated if all(of.is_fair(p, (0, r.roles)) for p in range(len(PHASES)))][:ALIKE]
        liked = [(t, stored) for r in every for t, some in r.stored.items() for stored in some]
        most = OWN_STORED if len(of.given) == len(TENSORS) else OWN
        self.ways = {}
        for p, phase in enumerate(PHASES):
            if phase in self.roles:
                nests = [self.roles[phase].nests]
            else:
                fair = (r for r in sorted(rated, key=lambda r, p=p: r.phases[p]) if of.is_fair(p, (0, r.roles)))
                own = [*islice(fair, most)]
                nests = [r.roles for r in (*every, *own)]
                liked += [item for r in own for item in r.liked[p].items()]
            ways = [(w, roles) for roles in nests for w in (of.filter_ways(roles) if p == 2 else (0,))]
            is_given = phase in self.roles
            self.ways[p] = tuple(dict.fromkeys(w for w in ways if is_given or w[0] == 0 or of.is_fair(p, w)))
        found: dict[str, tuple[Stored, ...]] = {}
        for t in TENSORS:
            near = [*dict.fromkeys(stored for name, stored in liked if name == t)][:STORED]
            some = [of.given[t]] if t in of.given else [*near, ((),) * len(self.tensors[t].shape)]
            found[t] = tuple(sorted(dict.fromkeys(some), key=of.copies))
        return found

    # ---------------------------------------------------------------- tables
    def _choices(self, question: Question, short: bool) -> list[Choice]:
        answer = self._answer(question)
        return [Choice(answer, np.full(answer.costs.shape[1:], k)) for k in range(len(question.options))]

    def _tables(self, *, short: bool) -> Tables:
        found = super()._tables(short=short)
        pairs = [("y", 1, 2), *([("x", 0, 2)] if self.candidates.held else [])]
        shared = [self._shared(found, *pair) for pair in pairs]
        found.constant += sum(int(f.cost) for f in shared if not f.scope)
        found.problem = replace(found.problem, factors=(*found.problem.factors, *(f for f in shared if f.scope)))
        return found

    def _shared(self, tables: Tables, tensor: str, one: int, other: int) -> Factor:
        """The price of what two readers of a tensor share, as negative costs over its layouts and the rows' ways."""
        price, domain = self.layer_price, self.domains[tensor]

        def wants(i: int) -> list[Layout]:
            ways = [_way(choice) for choice in tables.of[i]]
            sides = [(self.rows[i].operation.signatures[number], roles) for number, roles in ways]
            return [price.wants(s, next(o for o in s.inputs if o.name == tensor), roles) for s, roles in sides]

        first, second = wants(one), wants(other)
        sets = price.sets[tensor]
        known = {(a, b): price.shared(sets, domain, a, b) for a in {*first} for b in {*second}}
        costs = np.stack([np.stack([-known[a, b] for b in second], -1) for a in first], -2)
        scope = self.number.get(tensor), tables.which.get(one), tables.which.get(other)
        cells = costs[tuple(0 if v is None else slice(None) for v in scope)]
        return Factor(tuple(v for v in scope if v is not None), cells)


def _way(choice: Choice) -> Way:
    """The way of a choice that is the same for every layout."""
    return choice.answer.question.options[int(choice.option.flat[0])].way
