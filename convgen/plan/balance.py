"""Where bytes are the objective, work must be shared out, or the best plan would be that every rank does it all.

The slowest rank may do at most BALANCE times an equal share of a phase, or, where no choice is as even as
that, as little as can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from convgen.algebra.roles import Roles
from convgen.plan.candidates import Candidates
from convgen.plan.terms import Terms

BALANCE = 1.1


def balanced(terms: Terms, candidates: Candidates, phase: str, roles: Sequence[Roles]) -> tuple[Roles, ...]:
    """Those roles that share out the work evenly enough for the objective."""
    if terms.objective == "seconds":
        return tuple(roles)
    uneven = {r: candidates.imbalance(phase, r) for r in roles}
    limit = max(BALANCE, min(uneven.values()))
    return tuple(r for r in roles if uneven[r] <= limit)


def unevenness(candidates: Candidates, roles: Mapping[str, Roles]) -> float:
    """The worst phase's imbalance; BALANCE for all that is even enough."""
    return max(BALANCE, *(candidates.imbalance(phase, r) for phase, r in roles.items()))
