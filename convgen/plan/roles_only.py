"""Roles for a storage that is given: all together where they are few, else axis by axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from convgen.algebra.conv import PHASES
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles, nest
from convgen.plan.balance import balanced
from convgen.plan.candidates import Candidates
from convgen.plan.moves import Moves, Plan, key
from convgen.plan.role_search import best_roles
from convgen.plan.terms import Cost, Terms

Fixed = Mapping[str, Sequence[Roles]]


def search_roles(
    terms: Terms, candidates: Candidates, stored: Mapping[str, Layout], fixed: Fixed
) -> tuple[Cost, dict[str, Roles]]:
    """The best roles of the phases that are not fixed, and what they cost with those that are."""
    if candidates.few_roles:
        choices = {
            phase: fixed.get(phase) or balanced(terms, candidates, phase, candidates.all_roles(phase, stored))
            for phase in PHASES
        }
        return best_roles(terms, stored, choices)
    moves = Moves(terms, candidates, fixed)
    plans = [descend(moves, plan) for plan in _starts(terms, candidates, stored, fixed)]
    best = min(plans, key=lambda plan: key(terms, candidates, plan))
    return best.cost, best.roles


def descend(moves: Moves, plan: Plan) -> Plan:
    """The plan that no change of one axis betters."""
    axes = moves.candidates.axes
    since = 0  # axes tried since the last change for the better
    while since < len(axes):
        for axis in axes:
            found = moves.best(plan, axis)
            if key(moves.terms, moves.candidates, found) < key(moves.terms, moves.candidates, plan):
                plan, since = found, 0
            elif (since := since + 1) == len(axes):
                break
    return plan


def _starts(terms: Terms, candidates: Candidates, stored: Mapping[str, Layout], fixed: Fixed) -> Iterator[Plan]:
    """No roles at all; and each axis with the role that x's, w's or y's storage gives it, where that can be."""
    conv = candidates.conv
    guesses: list[list[tuple[str, str]]] = [[]]
    for tensor, layout in stored.items():
        dims = zip(conv.dims(tensor), layout.axes, strict=True)
        guesses.append([(a, d.name) for d, axes in dims for a in axes if a in candidates.axes])
    for guess in guesses:
        choices: dict[str, Sequence[Roles]] = {}
        for phase in PHASES:
            settled = candidates.settled(phase, nest(guess))
            choices[phase] = fixed.get(phase) or ((settled,) if settled is not None else (Roles(()),))
        cost, roles = best_roles(terms, stored, choices)
        yield Plan(cost, dict(stored), roles)
