"""Roles for a storage that is given: exactly where they are few, else axis by axis.

Where bytes are the objective, work must be shared out evenly, or the best answer would be that every rank
computes everything: the slowest rank may do at most BALANCE times an equal share, or, where no choice is as
even as that, as little as possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from convgen.algebra.conv import PHASES
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.plan.candidates import BALANCE, Candidates
from convgen.plan.role_search import best_roles
from convgen.plan.terms import Cost, Terms

MOST_ROLES = 400  # choices of a phase that are all tried: two axes and three, seven roles


def search_roles(
    terms: Terms, candidates: Candidates, stored: Mapping[str, Layout], fixed: Mapping[str, Sequence[Roles]]
) -> tuple[Cost, dict[str, Roles]]:
    """The best roles of the phases that are not fixed, and what they cost with those that are."""
    choices = {
        phase: fixed.get(phase) or balanced(terms, candidates, phase, candidates.all_roles(phase, stored))
        for phase in PHASES
    }
    return best_roles(terms, stored, choices)


def balanced(terms: Terms, candidates: Candidates, phase: str, roles: Sequence[Roles]) -> tuple[Roles, ...]:
    """Those roles that share out the work evenly enough for the objective."""
    if terms.objective == "seconds":
        return tuple(roles)
    uneven = {r: candidates.imbalance(phase, r) for r in roles}
    limit = max(BALANCE, min(uneven.values()))
    return tuple(r for r in roles if uneven[r] <= limit)
