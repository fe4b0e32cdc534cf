"""The best roles for a given storage, exactly.

Backward-filter shares x's conversions with forward and dy's with backward-data; forward and backward-data
share nothing. So for every choice in backward-filter the other two are chosen on their own:

    best = min over r_filter of  cost(r_filter) + min over r_forward (cost - saved) + min over r_data (cost - saved)

and since what is saved is the common beginning of two chains of conversions, the inner minima are looked up by
beginning: the number of evaluations is that of the choices, not of their pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convgen.algebra.layout import Layout
from convgen.algebra.redistribute import Conversion
from convgen.algebra.roles import Roles
from convgen.cost.model import Chain
from convgen.plan.terms import ZERO, Cost, Terms, add, total

Beginning = tuple[Conversion, ...]


@dataclass(frozen=True, slots=True)
class _Partner:
    """The cheapest choice of a phase among those whose chain begins in one way."""

    cost: Cost
    roles: Roles


def best_roles(
    terms: Terms, stored: Mapping[str, Layout], choices: Mapping[str, Sequence[Roles]]
) -> tuple[Cost, dict[str, Roles]]:
    """The roles of least cost among the choices of each phase; of equals, the first in their order."""
    forward = _partners(terms, stored, "forward", choices["forward"], "x" if terms.hold_gathered else None)
    data = _partners(terms, stored, "backward_data", choices["backward_data"], "y")
    best: tuple[Cost, dict[str, Roles]] | None = None
    for roles in choices["backward_filter"]:
        wants = terms.wanted("backward_filter", roles)
        x, x_chain = terms.chain(stored["x"], wants["x"])
        y, y_chain = terms.chain(stored["y"], wants["y"])
        w, _ = terms.chain(wants["w"], stored["w"])
        first, first_roles = _cheapest(terms, forward, x_chain)
        second, second_roles = _cheapest(terms, data, y_chain)
        cost = total((terms.local("backward_filter", roles), x, y, w, first, second))
        if best is None or cost < best[0]:
            best = cost, {"forward": first_roles, "backward_data": second_roles, "backward_filter": roles}
    assert best is not None, "every phase has the choice that no axis has a role"
    return add(best[0], terms.bias_gradient(stored["y"])), best[1]


def _partners(
    terms: Terms, stored: Mapping[str, Layout], phase: str, choices: Sequence[Roles], shared: str | None
) -> dict[Beginning, _Partner]:
    """For every beginning of a shared tensor's chain, the cheapest choice that has it."""
    found: dict[Beginning, _Partner] = {}
    for roles in choices:
        cost = terms.local(phase, roles)
        chains = {tensor: terms.conversion(phase, tensor, layout, roles) for tensor, layout in stored.items()}
        for chain_cost, _ in chains.values():
            cost = add(cost, chain_cost)
        if phase == "forward":
            cost = add(cost, terms.bias_addition(roles, stored["y"]))
        steps: Chain = chains[shared][1] if shared else ()
        for length in range(len(steps) + 1):
            beginning = tuple(step for step, _ in steps[:length])
            if beginning not in found or cost < found[beginning].cost:
                found[beginning] = _Partner(cost, roles)
    return found


def _cheapest(terms: Terms, partners: Mapping[Beginning, _Partner], chain: Chain) -> tuple[Cost, Roles]:
    """The partner of least cost, less what sharing with this chain saves."""
    best = partners[()]
    cost, saved = best.cost, ZERO
    for length, (_, step_cost) in enumerate(chain, 1):
        saved = add(saved, terms.cost(step_cost))
        partner = partners.get(tuple(step for step, _ in chain[:length]))
        if partner is None:
            break
        less = (partner.cost[0] - saved[0], partner.cost[1] - saved[1])
        if less < cost:
            cost, best = less, partner
    return cost, best.roles
