"""`algorithm: auto`: storage and roles of least modelled cost.

Every named algorithm is scored under every assignment of its letters to the grid's axes, each letter in its
own role. From the best of them the search goes on, axis by axis: all storages and all roles of one axis are
tried together while the other axes keep theirs, until no axis finds better; then two axes change places, all
storage is chosen anew for the roles so found, and all roles for the storage, where these are few. A step is
taken only if it is better, so the answer is never worse than the best named one.

Better is: less modelled cost; fewer copies of x; fewer copies of y; and of equals the first that was met, in
an order that depends on nothing but the layer and the grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, combinations

from convgen.algebra.conv import PHASES, TENSORS
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.roles import Roles
from convgen.plan.balance import balanced
from convgen.plan.candidates import Candidates, named_problems
from convgen.plan.moves import Moves, Plan, key
from convgen.plan.role_search import best_roles
from convgen.plan.roles_only import descend, search_roles
from convgen.plan.storage_only import MOST_AXES, best_storage
from convgen.plan.terms import Terms

STARTS = 2  # how many of the named algorithms the search goes on from


@dataclass(frozen=True, slots=True)
class Found:
    """What a search ended with, and from which named algorithm it set out."""

    plan: Plan
    start: str
    start_plan: Plan


def search(terms: Terms, candidates: Candidates) -> Found:
    """The best storage and roles found."""
    moves = Moves(terms, candidates)

    def order(found: Found) -> tuple[float, ...]:
        return key(terms, candidates, found.plan)

    starts = sorted((Found(plan, name, plan) for name, plan in scored(terms, candidates)), key=order)
    ends = [Found(improve(moves, f.plan), f.start, f.start_plan) for f in starts[:STARTS]]
    return min(ends, key=order)


def scored(terms: Terms, candidates: Candidates) -> Iterator[tuple[str, Plan]]:
    """Every named algorithm that applies, with its own roles, and everything on every rank."""
    for name, stored, roles in named_problems(candidates):
        yield name, named_plan(terms, candidates, stored, roles)
    # Where nothing can be split, every rank does everything.
    copies = {t: Layout(t, ((),) * len(candidates.conv.dims(t))) for t in TENSORS}
    nothing = {phase: Roles(()) for phase in PHASES}
    yield "copies", named_plan(terms, candidates, copies, nothing)


def named_plan(terms: Terms, candidates: Candidates, stored: dict[str, Layout], roles: dict[str, Roles]) -> Plan:
    """A plan with the roles given, backward-filter by the cheaper rows."""
    choices = {p: candidates.rows_choices(r) if p == "backward_filter" else (r,) for p, r in roles.items()}
    cost, chosen = best_roles(terms, stored, choices)
    return Plan(cost, stored, chosen)


def improve(moves: Moves, plan: Plan) -> Plan:
    """The plan that no change of one axis betters, nor two axes exchanged, nor all storage or roles chosen anew."""
    terms, candidates = moves.terms, moves.candidates
    while True:
        plan = descend(moves, plan)
        for found in chain(_exchanged(terms, candidates, plan), _chosen_anew(terms, candidates, plan)):
            if key(terms, candidates, found) < key(terms, candidates, plan):
                plan = found
                break
        else:
            return plan


def _exchanged(terms: Terms, candidates: Candidates, plan: Plan) -> Iterator[Plan]:
    """Two axes of different size in each other's place."""
    for one, other in combinations(candidates.axes, 2):
        if candidates.grid.sizes[one] == candidates.grid.sizes[other]:
            continue
        names = {one: other, other: one}
        stored = {tensor: layout.with_axes(_renamed(layout.axes, names)) for tensor, layout in plan.stored.items()}
        roles: dict[str, Roles] = {}
        for phase, r in plan.roles.items():
            nests = zip((role for role, _ in r.nests), _renamed((axes for _, axes in r.nests), names), strict=True)
            settled = candidates.settled(phase, Roles(tuple(nests), r.rows))
            if settled is not None and settled in balanced(terms, candidates, phase, (plan.roles[phase], settled)):
                roles[phase] = settled
        if len(roles) == len(plan.roles) and all(candidates.stores(layout) for layout in stored.values()):
            yield Plan(terms.total(stored, roles), stored, roles)


def _renamed(nests: Iterable[Axes], names: Mapping[str, str]) -> tuple[Axes, ...]:
    return tuple(tuple(names.get(a, a) for a in axes) for axes in nests)


def _chosen_anew(terms: Terms, candidates: Candidates, plan: Plan) -> Iterator[Plan]:
    """All storage for these roles, all roles for this storage; where there are few to try."""
    if len(candidates.axes) <= MOST_AXES:
        stored = best_storage(terms, candidates, plan.roles)
        yield Plan(terms.total(stored, plan.roles), stored, plan.roles)
    if candidates.few_roles:
        cost, roles = search_roles(terms, candidates, plan.stored, {})
        yield Plan(cost, plan.stored, roles)
