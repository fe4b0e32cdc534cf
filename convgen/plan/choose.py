"""From a layer to its stored layouts and roles: named, given, or searched.

| the layer says | storage | roles |
|---|---|---|
| a named algorithm | the algorithm's | each letter its own, in every phase |
| a distribution | as given | as given; searched for the phases that are missing |
| `algorithm: auto` | searched | searched |

In every case backward-filter goes by output rows or by input rows, whichever is modelled cheaper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from convgen.algebra.algorithms import letters_of, stored_layouts
from convgen.algebra.conv import PHASES, Conv
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles, default_nesting, nest, settle_groups
from convgen.algebra.space import Space
from convgen.cost.machine import Machine
from convgen.cost.model import PICOSECONDS, Model
from convgen.passes.drop_single_rank import without
from convgen.plan.auto import Found, search
from convgen.plan.candidates import Candidates
from convgen.plan.role_search import best_roles
from convgen.plan.roles_only import search_roles
from convgen.plan.terms import Cost, Objective, Terms
from convgen.spec.layer import Layer

__all__ = ["Choice", "Objective", "choose"]


@dataclass(frozen=True)
class Choice:
    """How a layer is laid out and why.

    Attributes:
        stored: layouts of x, w and y.
        roles: settled roles of each phase.
        label: "stationary-x", "given", "given, roles searched", or "auto".
        explanation: sentences on how it was found.
        seconds, sent_bytes: modelled, as `schedule_cost` of the shared schedule has them.
    """

    stored: dict[str, Layout]
    roles: dict[str, Roles]
    label: str
    explanation: tuple[str, ...]
    seconds: float
    sent_bytes: int


def choose(layer: Layer, space: Space, machine: Machine, objective: Objective = "seconds") -> Choice:
    """Stored layouts and roles of a layer.

    Args:
        machine: what costs are modelled on.
        objective: what is minimised where there is a choice: modelled seconds, or bytes sent.
    Raises:
        InputError: roles that can't work with the layer's groups.
    """
    gathered = layer.options.hold_x == "gathered"
    if layer.distribution is None and layer.algorithm in (None, "auto"):
        found = _searched(layer.conv, layer.grid, space.virtual_padding, machine, layer.dtype, objective, gathered)
        return _choice(found.plan.stored, found.plan.roles, "auto", _told(found), found.plan.cost, objective)
    terms = Terms(Model(space, machine, layer.dtype), objective, hold_gathered=gathered, bias=layer.conv.bias)
    return _given(layer, terms) if layer.distribution is not None else _named(layer.algorithm or "", layer, terms)


@lru_cache(maxsize=1024)
def _searched(
    conv: Conv, grid: Grid, virtual: bool, machine: Machine, dtype: str, objective: Objective, gathered: bool
) -> Found:
    """What `auto` finds; networks have many layers alike."""
    space = Space(conv, grid, virtual_padding=virtual)
    terms = Terms(Model(space, machine, dtype), objective, hold_gathered=gathered, bias=conv.bias)
    return search(terms, Candidates(space))


def _told(found: Found) -> tuple[str, ...]:
    """How the search went, in words."""
    start = f"{found.start} as {' '.join(str(layout) for layout in found.start_plan.stored.values())}"
    if found.plan == found.start_plan:
        return (f"the best found is {start}",)
    return (f"found from {start}",)


def _named(name: str, layer: Layer, terms: Terms) -> Choice:
    conv, grid = layer.conv, layer.grid
    stored = stored_layouts(name, conv, letters_of(grid))
    letters = {a: a for a in grid.names}
    roles = {
        phase: settle_groups(conv, grid, phase, nest(default_nesting(terms.space, phase, letters, stored)))
        for phase in PHASES
    }
    cost, chosen = _best(terms, stored, {phase: (r,) for phase, r in roles.items()})
    rows = chosen["backward_filter"].rows
    roles["backward_filter"] = Roles(roles["backward_filter"].nests, rows)
    return _choice(stored, roles, name, (f"{name}: each letter in its own role",), cost, terms.objective)


def _given(layer: Layer, terms: Terms) -> Choice:
    given = layer.distribution
    assert given is not None
    stored = {"x": Layout("x", given.x), "w": Layout("w", given.w), "y": Layout("y", given.y)}
    written = {phase: settle_groups(layer.conv, layer.grid, phase, nest(pairs)) for phase, pairs in layer.roles}
    choices = {phase: (roles,) for phase, roles in written.items()}
    if len(written) == len(PHASES):
        cost, roles = _best(terms, stored, choices)
        rows = roles["backward_filter"].rows
        written["backward_filter"] = Roles(written["backward_filter"].nests, rows)
        return _choice(stored, written, "given", ("storage and roles as given",), cost, terms.objective)
    single = _single(layer)
    bare = {tensor: layout.without(single) for tensor, layout in stored.items()}
    candidates = Candidates(terms.space)
    fixed = {phase: _rows(candidates, phase, without(r[0], single)) for phase, r in choices.items()}
    cost, roles = search_roles(terms, candidates, bare, fixed)
    chosen = {phase: written.get(phase, roles[phase]) for phase in PHASES}
    chosen["backward_filter"] = Roles(chosen["backward_filter"].nests, roles["backward_filter"].rows)
    searched = ", ".join(phase for phase in PHASES if phase not in written)
    return _choice(
        stored,
        chosen,
        "given, roles searched",
        (f"storage as given, roles searched for {searched}",),
        cost,
        terms.objective,
    )


def _best(
    terms: Terms, stored: Mapping[str, Layout], roles: Mapping[str, Sequence[Roles]]
) -> tuple[Cost, dict[str, Roles]]:
    """The cheaper rows for roles that are otherwise fixed, axes of one rank left out as the passes do."""
    candidates = Candidates(terms.space)
    single = frozenset(name for name, size in terms.space.grid.axes if size == 1)
    bare = {tensor: layout.without(single) for tensor, layout in stored.items()}
    fixed = {phase: _rows(candidates, phase, without(r[0], single)) for phase, r in roles.items()}
    return best_roles(terms, bare, fixed)


def _rows(candidates: Candidates, phase: str, roles: Roles) -> tuple[Roles, ...]:
    return candidates.rows_choices(roles) if phase == "backward_filter" else (roles,)


def _single(layer: Layer) -> frozenset[str]:
    return frozenset(name for name, size in layer.grid.axes if size == 1)


def _choice(
    stored: Mapping[str, Layout],
    roles: Mapping[str, Roles],
    label: str,
    explanation: tuple[str, ...],
    cost: Cost,
    objective: Objective,
) -> Choice:
    time_ps, sent = cost if objective == "seconds" else cost[::-1]
    ordered = {phase: roles[phase] for phase in PHASES}
    return Choice(dict(stored), ordered, label, explanation, time_ps / PICOSECONDS, sent)
