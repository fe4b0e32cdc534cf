"""`algorithm: auto`: storage and roles of least modelled cost."""

from __future__ import annotations

from dataclasses import dataclass

from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.plan.candidates import Candidates, named_problems
from convgen.plan.role_search import best_roles
from convgen.plan.roles_only import search_roles
from convgen.plan.terms import Cost, Terms


@dataclass(frozen=True, slots=True)
class Found:
    """What a search ended with."""

    cost: Cost
    stored: dict[str, Layout]
    roles: dict[str, Roles]
    explanation: tuple[str, ...]


def search(terms: Terms, candidates: Candidates) -> Found:
    """The best storage and roles found."""
    starts: list[Found] = []
    for name, stored, roles in named_problems(candidates):
        choices = {p: candidates.rows_choices(r) if p == "backward_filter" else (r,) for p, r in roles.items()}
        cost, chosen = best_roles(terms, stored, choices)
        starts.append(Found(cost, stored, chosen, (name,)))
    best = min(starts, key=lambda s: s.cost)
    cost, roles = search_roles(terms, candidates, best.stored, {})
    return Found(cost, best.stored, roles, (f"from {best.explanation[0]}",)) if cost < best.cost else best
