"""The best storage and roles of one axis while all other axes keep theirs.

Given the roles of the three phases, each tensor's storage is chosen on its own (see terms.py). So for one axis
all storages and all roles are tried together: a table per tensor over (storage, forward, backward-data,
backward-filter), its minimum over storage, and the minimum of the tables' sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.conv import PHASES, TENSORS
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.errors import InputError
from convgen.plan.balance import balanced, unevenness
from convgen.plan.candidates import Candidates
from convgen.plan.terms import Cost, Terms

Table = NDArray[np.int64]
MOST = 1 << 58  # picoseconds, or bytes, of one step: three days; of sums of a few an int64 has room


def _counts(costs: Any) -> Table:
    """Raises InputError: a cost is out of what can be added."""
    try:
        found = np.array(costs, dtype=np.int64)
    except OverflowError:
        found = np.array([MOST])
    if found.size and found.max() >= MOST:
        fact = "by this machine's figures a step takes more than three days, or sends 2**58 bytes"
        raise InputError(fact, hint="the machine's rates and seconds, or a smaller layer")
    return found


@dataclass(frozen=True, slots=True)
class Plan:
    """Storage and roles, without axes of one rank, and what they cost."""

    cost: Cost
    stored: dict[str, Layout]
    roles: dict[str, Roles]


def key(terms: Terms, candidates: Candidates, plan: Plan) -> tuple[float, ...]:
    """What plans are ordered by: cost, then copies of x, then of y; first of all evenness where bytes are counted."""
    first, second = plan.cost
    copies = candidates.copies(plan.stored["x"]), candidates.copies(plan.stored["y"])
    if terms.objective == "seconds":
        return (first, *copies, second)
    return (unevenness(candidates, plan.roles), first, second, *copies)


class Moves:
    """Finds the best place of one axis; answers are kept by what the other axes do."""

    def __init__(
        self, terms: Terms, candidates: Candidates, fixed: Mapping[str, Sequence[Roles]] | None = None
    ) -> None:
        self.terms, self.candidates = terms, candidates
        self.fixed = fixed
        self._found: dict[object, Plan] = {}

    def best(self, plan: Plan, axis: str) -> Plan:
        """The best plan that differs from this one by what one axis does."""
        storages = {
            tensor: (layout,) if self.fixed is not None else self.candidates.storage_moves(layout, axis)
            for tensor, layout in plan.stored.items()
        }
        roles = {phase: self._roles(phase, plan.roles[phase], axis) for phase in PHASES}
        known = (tuple(storages.values()), tuple(roles.values()))
        if (found := self._found.get(known)) is None:
            found = self._found[known] = self._best(storages, roles)
        return found

    def _roles(self, phase: str, roles: Roles, axis: str) -> tuple[Roles, ...]:
        if self.fixed is not None and phase in self.fixed:
            return tuple(self.fixed[phase])
        return balanced(self.terms, self.candidates, phase, self.candidates.role_moves(phase, roles, axis))

    def _best(self, storages: Mapping[str, Sequence[Layout]], roles: Mapping[str, tuple[Roles, ...]]) -> Plan:
        local = [_counts([self.terms.local(phase, r) for r in roles[phase]]) for phase in PHASES]
        total = local[0][:, None, None] + local[1][None, :, None] + local[2][None, None, :]
        chosen: dict[str, Table] = {}
        for tensor in TENSORS:
            table = self._table(tensor, storages[tensor], roles)
            chosen[tensor] = least = self._least(table)
            total += np.take_along_axis(table, least[None, ..., None], axis=0)[0]
        flat = total.reshape(-1, 2)
        ties = np.flatnonzero(flat[:, 0] == flat[:, 0].min())
        plans = (self._plan(flat[i], np.unravel_index(i, total.shape[:3]), storages, roles, chosen) for i in ties)
        return min(plans, key=lambda plan: key(self.terms, self.candidates, plan))

    def _plan(
        self,
        cost: NDArray[np.int64],
        index: tuple[np.intp, ...],
        storages: Mapping[str, Sequence[Layout]],
        roles: Mapping[str, tuple[Roles, ...]],
        chosen: Mapping[str, Table],
    ) -> Plan:
        stored = {tensor: storages[tensor][int(chosen[tensor][index])] for tensor in TENSORS}
        return Plan(
            (int(cost[0]), int(cost[1])),
            stored,
            {phase: roles[phase][int(i)] for phase, i in zip(PHASES, index, strict=True)},
        )

    def _least(self, table: Table) -> Table:
        """The storage of least cost for every choice of roles; of equals the first, which has fewest copies."""
        first = table[..., 0]
        if self.terms.objective == "seconds":
            return first.argmin(axis=0)
        return np.where(first == first.min(axis=0), table[..., 1], np.iinfo(np.int64).max).argmin(axis=0)

    def _table(self, tensor: str, storages: Sequence[Layout], roles: Mapping[str, tuple[Roles, ...]]) -> Table:
        """Costs [storage, forward, backward-data, backward-filter, 2] of one tensor's conversions."""
        terms = self.terms
        sizes = tuple(len(roles[phase]) for phase in PHASES)
        table = np.zeros((len(storages), *sizes, 2), dtype=np.int64)
        for s, stored in enumerate(storages):
            read = [[terms.conversion(phase, tensor, stored, r) for r in roles[phase]] for phase in PHASES]
            costs = [_counts([cost for cost, _ in one]) for one in read]
            if tensor == "y" and terms.bias:
                costs[0] += _counts([terms.bias_addition(r, stored) for r in roles["forward"]])
                costs[0] += _counts(terms.bias_gradient(stored))
            table[s] = costs[0][:, None, None] + costs[1][None, :, None] + costs[2][None, None, :]
            # What backward-filter reads of x is shared with forward, of dy with backward-data.
            shared = {"x": 0 if terms.hold_gathered else None, "y": 1}.get(tensor)
            if shared is None:
                continue
            saved = _counts([[terms.saved(a, b) for _, b in read[2]] for _, a in read[shared]])
            table[s] -= saved[:, None] if shared == 0 else saved[None]
        return table
