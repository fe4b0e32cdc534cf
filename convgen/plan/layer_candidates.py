"""What a layer's search may choose: roles of its phases, and layouts of x, w and y that go with them.

Roles grow axis by axis, and the best of each length are kept. They are rated by the price of the layer with these roles
in every phase, and by each phase's price alone, over layouts near those that the phases want. Layouts of the named
algorithms are among them, so that the best rating is no more than the best named algorithm takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from math import prod
from typing import NamedTuple

import numpy as np

from convgen.algebra.algorithms import ALGORITHMS, stored_layouts
from convgen.algebra.blocks import most_of
from convgen.algebra.conv import PHASES, TENSORS
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.roles import ORDER, Roles, default_nesting, settle_groups
from convgen.algebra.signature import Signature
from convgen.cost.busiest import Counts
from convgen.cost.layer_price import LayerPrice
from convgen.errors import InputError
from convgen.operations.layer import convolution
from convgen.plan.program.candidates import Way
from convgen.program.rows import Stored

KEPT = 64  # roles of each length, from which longer ones are made
NEAREST = 3  # layouts of a tensor that are kept for each choice of roles
BALANCE = 1.1  # where bytes are the objective: the slowest rank's work over an equal share, at most
Nests = tuple[tuple[str, Axes], ...]


@dataclass(frozen=True)
class Rated:
    """Roles that all phases have alike, and their prices.

    Attributes:
        price: the whole layer's.
        phases: by phase its price alone, with its values stored as in `liked`, by tensor, which serves it best.
        stored: by tensor the layouts that serve all phases best, the best first.
    """

    roles: Nests
    price: int
    phases: Sequence[int]
    liked: Sequence[Mapping[str, Stored]]
    stored: Mapping[str, Sequence[Stored]]


class _Grown(NamedTuple):
    """Letters of the first axes, "" where an axis has no role, and their rating."""

    rank: tuple[float, int]
    letters: tuple[str, ...]
    rated: Rated


class Candidates:
    """Candidates of one layer on one grid. No searched axis leaves a rank without an element.

    Args:
        held: whether backward-filter reads what forward has gathered of x.
        given: layouts that are given.
    """

    def __init__(self, price: LayerPrice, held: bool, given: Mapping[str, Stored]) -> None:
        self.price, self.held, self.given = price, held, given
        self.space, self.conv, self.grid = price.space, price.space.conv, price.space.grid
        self.rows = tuple(convolution(self.conv, phase) for phase in PHASES)
        self.letters = ("N", "C", "F", *self.conv.letters, *(("G",) if self.conv.groups > 1 else ()))
        layouts = {t: Layout(t, given.get(t, ((),) * len(self.conv.dims(t)))) for t in TENSORS}
        # How axes that share a role nest does not depend on which they are.
        every = {r: default_nesting(self.space, "forward", dict.fromkeys(self.grid.names, r), layouts) for r in ORDER}
        self.order = {r: tuple(a for a, _ in every[r]) for r in ORDER if r in self.letters}
        self._full: dict[tuple[str, int, Axes], bool] = {}

    # ---------------------------------------------------------------- roles
    @cached_property
    def rated(self) -> list[Rated]:
        """Roles, the best first."""
        grown = [self._grown(())]
        for _ in self.grid.names:
            letters = [(*one.letters, r) for one in grown[:KEPT] for r in (*self.letters, "")]
            usable = (one for one in letters if self._is_first(one) and self._may_grow(self._nests(one)))
            grown = sorted((self._grown(one) for one in usable), key=lambda one: one.rank)  # stable
        return [one.rated for one in grown if self._has_groups(one.rated.roles)] or [self._grown(()).rated]

    def _grown(self, letters: tuple[str, ...]) -> _Grown:
        nests = self._nests(letters)
        rated = min((self._rated(nests, way) for way in self.filter_ways(nests)), key=lambda one: one.price)
        bytes_ = self.price.objective == "bytes"
        uneven = max([BALANCE, *(self.imbalance(p, (0, nests)) for p in range(len(PHASES)))]) if bytes_ else 0.0
        return _Grown((uneven, rated.price), letters, rated)

    def _is_first(self, letters: tuple[str, ...]) -> bool:
        """Whether axes that may change places have their letters in order: axes of as many ranks, on links that are
        alike, where no layout is given."""
        *before, last = letters
        sizes, names = self.grid.sizes, self.grid.names
        alike = [r for r, a in zip(before, names, strict=False) if sizes[a] == sizes[names[len(before)]]]
        place = (*self.letters, "").index
        fixed = bool(self.given) or len(self.price.machine.levels) > 1
        return not alike or fixed or place(alike[-1]) <= place(last)

    def _nests(self, letters: tuple[str, ...]) -> Nests:
        of = dict(zip(self.grid.names, letters, strict=False))
        nests = ((r, tuple(a for a in axes if of.get(a) == r)) for r, axes in self.order.items())
        return tuple((r, axes) for r, axes in nests if axes)

    def serves(self, roles: Nests) -> bool:
        """Whether a search may have these roles."""
        return self._has_groups(roles) and self._leaves_none_empty(roles)

    def _may_grow(self, roles: Nests) -> bool:
        """Whether roles that begin with these may serve: a later axis may split the groups that are left."""
        return self._leaves_none_empty(roles) if self._has_groups(roles) else True

    def _has_groups(self, roles: Nests) -> bool:
        """Whether G splits the groups first, and C and F split channels only where a rank has a single group."""
        try:
            return settle_groups(self.conv, self.grid, "forward", Roles(roles)).nests == roles
        except InputError:
            return False

    def _leaves_none_empty(self, roles: Nests) -> bool:
        signatures = [row.operation.signatures[0] for row in self.rows[:2]]
        sides = [(s, o) for s in signatures for o in (*s.inputs, *s.results)]
        return all(self._fills(o.name, tuple(p.axes for p in s.wants(o, dict(roles)).pieces)) for s, o in sides)

    def _fills(self, tensor: str, stored: Stored) -> bool:
        """Whether every rank has an element of the tensor."""
        for d, axes in enumerate(stored):
            if axes and (tensor, d, axes) not in self._full:
                lo, hi = self.space.block(tensor, d, axes)
                self._full[tensor, d, axes] = bool((hi > lo).all())
        return all(self._full[tensor, d, axes] for d, axes in enumerate(stored) if axes)

    def filter_ways(self, roles: Nests) -> tuple[int, ...]:
        """Numbers of backward-filter's ways: by blocks of y's rows; and by blocks of x's, where an axis splits rows."""
        return (0, 1) if any(r in self.conv.letters for r, _ in roles) else (0,)

    # ---------------------------------------------------------------- balance
    def imbalance(self, phase: int, way: Way) -> float:
        """The slowest rank's share of a phase's index space over an equal share: 1 where all divide evenly."""
        (number, roles), share = way, float(self.grid.ranks)
        extents = self.rows[phase].operation.signatures[number].extent
        for index, axes in roles:
            share *= most_of(extents[index], [self.grid.sizes[a] for a in axes]) / extents[index]
        return share

    @cached_property
    def _limit(self) -> float:
        """The most that `imbalance` may be: BALANCE, or what the phase needs that divides least evenly."""
        least = (min(self.imbalance(p, (0, r.roles)) for r in self.rated) for p in range(len(PHASES)))
        return max(BALANCE, *least) * (1 + 1e-9)

    def is_fair(self, phase: int, way: Way) -> bool:
        """Whether ranks share the work evenly enough: where bytes are the objective, or every rank would do it all."""
        return self.price.objective == "seconds" or self.imbalance(phase, way) <= self._limit

    # ---------------------------------------------------------------- ratings
    def _rated(self, roles: Nests, filter_way: int) -> Rated:
        rows = [*zip(self.rows, (0, 0, filter_way), strict=True)]
        signatures = [row.operation.signatures[way] for row, way in rows]
        phases = [self.price.local(row.operation, way, dict(roles)) for row, way in rows]
        total, stored = sum(phases), dict[str, Sequence[Stored]]()
        liked: list[dict[str, Stored]] = [{} for _ in PHASES]
        for t in TENSORS:
            near = self._near(t, roles, signatures)
            costs, saved = self._conversions(t, near, signatures, roles)
            whole = costs[0] + costs[1] + costs[2] - saved
            total += int(whole.min())
            stored[t] = [near[i] for i in np.argsort(whole, kind="stable")[:NEAREST]]
            for p, one in enumerate(costs):
                phases[p] += int(one.min())
                liked[p][t] = near[int(one.argmin())]
        return Rated(roles, total, phases, liked, stored)

    def _conversions(
        self, tensor: str, near: tuple[Stored, ...], signatures: Sequence[Signature], roles: Nests
    ) -> tuple[list[Counts], Counts]:
        """By phase the price of reading a tensor from each layout, or of storing it so; and what sharing saves."""
        sets, costs, reads = self.price.sets[tensor], list[Counts](), list[Layout]()
        for signature in signatures:
            here, is_read = self._wanted(tensor, signature, roles)
            reads += [here] if is_read else []
            costs.append(
                self.price.fetched(sets, near, here) if is_read else self.price.reduced(sets, here, near, "sum")
            )
        if tensor == "y" or (tensor == "x" and self.held):
            return costs, self.price.shared(sets, near, *reads)
        return costs, np.zeros(len(near), dtype=np.int64)

    def _wanted(self, tensor: str, signature: Signature, roles: Nests) -> tuple[Layout, bool]:
        """The layout in which a phase reads a tensor, or makes it; and whether it reads it."""
        (operand,) = (o for o in (*signature.inputs, *signature.results) if o.name == tensor)
        return self.price.wants(signature, operand, roles), operand in signature.inputs

    def _near(self, tensor: str, roles: Nests, signatures: Sequence[Signature]) -> tuple[Stored, ...]:
        """Layouts near to what the phases want of a tensor, and those of named algorithms."""
        if tensor in self.given:
            return (self.given[tensor],)
        found: dict[Stored, None] = {}
        for signature in signatures:
            found |= dict.fromkeys(_beside(self._wanted(tensor, signature, roles)[0]))
        letters = dict(roles)
        named = [name for name, one in ALGORITHMS.items() if {*letters} <= {*one.letters, "G"}]
        found |= dict.fromkeys(stored_layouts(name, self.conv, letters)[tensor].axes for name in named)
        copies = ((),) * len(self.conv.dims(tensor))
        return tuple(stored for stored in found if self._fills(tensor, stored)) or (copies,)

    def copies(self, stored: Stored) -> int:
        """How many ranks hold each element."""
        return self.grid.ranks // prod(self.grid.sizes[a] for axes in stored for a in axes)


def _beside(wanted: Layout) -> Iterator[Stored]:
    """The wanted blocks; these with whole rows; these with partial axes that split one of the first two dimensions."""
    yield wanted.axes
    yield tuple(axes if d < 2 else () for d, axes in enumerate(wanted.axes))
    for count in range(len(wanted.partial), 0, -1):
        for axes, d in product(combinations(wanted.partial, count), (1, 0)):
            yield tuple(own + axes if i == d else own for i, own in enumerate(wanted.axes))
