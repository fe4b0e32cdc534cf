"""Roles: what each grid axis does in each phase of a convolution.

An axis with role r splits index r; signatures (signature.py) say what this asks of operands. Along a spatial index
one activation is a block and the other the window of rows that this block needs. In backward_filter either may be the
block: `rows="output"` keeps dy as blocks, `rows="input"` x.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from convgen.algebra.blocks import most, most_of
from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.notation import roles_text
from convgen.algebra.space import Space
from convgen.errors import InputError, Note

ORDER = ("N", "G", "C", "F", "D", "H", "W")
Rows = Literal["output", "input"]


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of one phase: for each role, the axes that have it, outermost first."""

    nests: tuple[tuple[str, Axes], ...]
    rows: Rows = "output"

    def axes(self, role: str) -> Axes:
        for name, axes in self.nests:
            if name == role:
                return axes
        return ()

    def without(self, dropped: frozenset[str]) -> Roles:
        """The same roles where the dropped axes have one rank each."""
        nests = ((role, tuple(a for a in axes if a not in dropped)) for role, axes in self.nests)
        return Roles(tuple((role, axes) for role, axes in nests if axes), self.rows)

    def __str__(self) -> str:
        return (roles_text(self.nests) or "none") + (" rows=input" if self.rows == "input" else "")


def nest(roles: Iterable[tuple[str, str]], rows: Rows = "output") -> Roles:
    """Group `(axis, role)` pairs by role, keeping their order; role "none" is left out."""
    nests: dict[str, list[str]] = {}
    for axis, role in roles:
        if role != "none":
            nests.setdefault(role, []).append(axis)
    return Roles(tuple((r, tuple(nests[r])) for r in ORDER if r in nests), rows)


def settle_groups(conv: Conv, grid: Grid, phase: str, roles: Roles) -> Roles:
    """The roles, with G in place of C or F on axes that still split whole groups.

    Raises:
        InputError: an axis with role C or F leaves a rank with more than one group, or an axis with
            role G has no groups left to split.
    """
    sizes = grid.sizes
    splitting = list(roles.axes("G"))
    for i, axis in enumerate(splitting):
        left = most_of(conv.groups, [sizes[a] for a in splitting[:i]])
        if left == 1 and sizes[axis] > 1:
            raise InputError(
                f"role G on axis '{axis}' has nothing to split: "
                + (f"{splitting[0]} already leaves at most one group a rank" if i else "the layer has 1 group"),
                path=("roles", phase, axis),
                notes=(Note("layer", f"C={conv.channels} F={conv.filters} groups={conv.groups}", ("groups",)),),
                hint=f"role C or F on {axis}" if i else "groups above 1, or another role",
            )
    if conv.groups == 1:
        return roles
    moved: list[str] = []
    for role in ("C", "F"):
        for axis in roles.axes(role):
            before = most_of(conv.groups, [sizes[a] for a in (*splitting, *moved)])
            after = most(before, sizes[axis])
            if before == 1 or sizes[axis] == 1:
                continue
            if after > 1:
                raise InputError(
                    f"role {role} on axis '{axis}' needs at most one group a rank",
                    path=("roles", phase, axis),
                    notes=(
                        Note("layer", f"C={conv.channels} F={conv.filters} groups={conv.groups}", ("groups",)),
                        Note("axis", f"{axis}: {sizes[axis]} ranks, so {after} groups a rank", ("grid", axis)),
                    ),
                    hint=f"role G on {axis} (no communication), or {axis}: {before}",
                )
            moved.append(axis)
    nests = [(r, tuple(a for a in roles.axes(r) if a not in moved)) for r in ORDER]
    nests[1] = ("G", (*splitting, *moved))
    return Roles(tuple((r, a) for r, a in nests if a), roles.rows)


def default_nesting(
    space: Space, phase: str, roles: Mapping[str, str], stored: Mapping[str, Layout]
) -> tuple[tuple[str, str], ...]:
    """Order axes that share a role as the largest operand's storage does; axes it lacks follow in grid order."""
    conv, order = space.conv, list[str]()
    index = {"N": ("N",), "C": ("C",), "F": ("F",), "G": ("C", "F")}
    for role in ORDER:
        names = index.get(role, (role,))
        operands = [t for t in conv.largest_first("x", "w", "y") if any(d.name in names for d in conv.dims(t))]
        axes = [a for a in space.grid.names if roles.get(a, "none") == role]
        ranked: list[str] = []
        for tensor in operands:
            for d, held in zip(conv.dims(tensor), stored[tensor].axes, strict=True):
                if d.name in names:
                    ranked += [a for a in held if a in axes and a not in ranked]
        order += ranked + [a for a in axes if a not in ranked]
    return tuple((a, roles[a]) for a in order)
