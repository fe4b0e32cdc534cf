"""From a layer to its stored layouts and roles: named, given, or searched.

| the layer says | storage | roles |
|---|---|---|
| a named algorithm | the algorithm's | each letter its own, in every phase |
| a distribution | as given | as given; searched for the phases that are missing |
| `algorithm: auto` | searched | searched |

In every case backward-filter goes by output rows or by input rows, whichever is modelled cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from convgen.algebra.algorithms import letters_of, stored_layouts
from convgen.algebra.conv import PHASES, Conv
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles, default_nesting, nest, settle_groups
from convgen.algebra.space import Space
from convgen.cost.layer_price import LayerPrice, Objective
from convgen.cost.machine import Machine
from convgen.plan.layer_search import FoundLayout, LayerSearch
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
    """

    stored: dict[str, Layout]
    roles: dict[str, Roles]
    label: str
    explanation: tuple[str, ...]


def choose(layer: Layer, space: Space, machine: Machine, objective: Objective = "seconds") -> Choice:
    """Stored layouts and roles of a layer.

    Args:
        machine: what costs are modelled on.
        objective: what is minimised where there is a choice: modelled seconds, or bytes sent.
    Raises:
        InputError: roles that can't work with the layer's groups.
    """
    if layer.distribution is not None:
        label, told, stored, roles = _given(layer)
    elif layer.algorithm in (None, "auto"):
        label, told, stored, roles = "auto", "", {}, {}
    else:
        label, told, stored, roles = _named(layer.algorithm, layer, space)
    found = _searched(
        layer.conv,
        layer.grid.bare,
        space.virtual_padding,
        machine,
        layer.dtype,
        objective,
        layer.options.hold_x == "gathered",
        tuple(layout.without(layer.grid.single) for layout in stored.values()),
        tuple((phase, r.without(layer.grid.single)) for phase, r in roles.items()),
    )
    chosen = {phase: Roles(roles.get(phase, r).nests, r.rows) for phase, r in found.roles.items()}
    return Choice(stored or dict(found.stored), chosen, label, (told or _told(found, objective),))


@lru_cache(maxsize=1024)
def _searched(
    conv: Conv,
    bare: Grid,
    virtual: bool,
    machine: Machine,
    dtype: str,
    objective: Objective,
    held: bool,
    stored: tuple[Layout, ...],
    roles: tuple[tuple[str, Roles], ...],
) -> FoundLayout:
    """The cheapest layouts and roles for what is left open; cached, since many layers of a network are alike."""
    price = LayerPrice(Space(conv, bare, virtual_padding=virtual), machine, dtype, objective)
    return LayerSearch(price, held, {one.tensor: one.axes for one in stored}, dict(roles)).found()


def _told(found: FoundLayout, objective: Objective) -> str:
    """A sentence: how much the found roles save beside the best that are the same in every phase, as named ones are."""
    alike = found.alike or found.price
    if found.price >= alike:
        return f"the same roles in every phase have the fewest modelled {objective}"
    less = 100 * (1 - found.price / alike)
    return f"{less:.2g} % fewer modelled {objective} than the best with the same roles in every phase"


Laid = tuple[str, str, dict[str, Layout], dict[str, Roles]]  # label, how it was found, layouts, roles


def _named(name: str, layer: Layer, space: Space) -> Laid:
    conv, grid = layer.conv, layer.grid
    stored = stored_layouts(name, conv, letters_of(grid))
    letters = {a: a for a in grid.names}
    roles = {
        phase: settle_groups(conv, grid, phase, nest(default_nesting(space, phase, letters, stored)))
        for phase in PHASES
    }
    return name, f"{name}: each letter in its own role", stored, roles


def _given(layer: Layer) -> Laid:
    given = layer.distribution
    assert given is not None
    stored = {"x": Layout("x", given.x), "w": Layout("w", given.w), "y": Layout("y", given.y)}
    roles = {phase: settle_groups(layer.conv, layer.grid, phase, nest(pairs)) for phase, pairs in layer.roles}
    open_ = ", ".join(phase for phase in PHASES if phase not in roles)
    if not open_:
        return "given", "storage and roles as given", stored, roles
    return "given, roles searched", f"storage as given, roles searched for {open_}", stored, roles
