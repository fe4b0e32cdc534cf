"""What a search may choose: roles of a phase, places of an axis, named algorithms under every assignment.

A searched axis splits an index only if no rank is left empty, by the block rule, in every tensor that has the
index. Axes of one rank take no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations_with_replacement, product
from math import prod

from convgen.algebra.algorithms import ALGORITHMS, stored_layouts
from convgen.algebra.conv import PHASES, TENSORS
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.roles import ORDER, Roles, default_nesting, nest, settle_groups
from convgen.algebra.space import Space
from convgen.errors import InputError

MOST_ROLES = 700


class Candidates:
    """Questions about one convolution on one grid. Answers are cached."""

    def __init__(self, space: Space) -> None:
        self.space, self.conv, self.grid = space, space.conv, space.grid
        self.axes = tuple(name for name, size in space.grid.axes if size > 1)
        self.letters = ("N", "C", "F", *self.conv.letters, *(("G",) if self.conv.groups > 1 else ()))
        # Few enough that all roles of a phase are tried: two axes, three, or four of a layer in one dimension.
        self.few_roles = (len(self.letters) + 1) ** len(self.axes) <= MOST_ROLES
        self._full: dict[tuple[str, int, Axes], bool] = {}
        self._legal: dict[tuple[str, Roles], Roles | None] = {}
        self._index = {r: tuple(self._dims_of(r)) for r in self.letters}

    def _dims_of(self, role: str) -> Iterator[tuple[str, int]]:
        """Dimensions of the tensors that have a role's index."""
        names = ("C", "F") if role == "G" else (role,)
        for tensor in TENSORS:
            for i, d in enumerate(self.conv.dims(tensor)):
                if d.name in names and not (role == "G" and (tensor, i) == ("w", 1)):
                    yield tensor, i

    def leaves_none_empty(self, tensor: str, dim: int, axes: Axes) -> bool:
        """Whether every rank has some of a dimension that these axes split."""
        key = (tensor, dim, axes)
        if (found := self._full.get(key)) is None:
            lo, hi = self.space.block(tensor, dim, axes)
            found = self._full[key] = bool((hi > lo).all())
        return found

    def stores(self, layout: Layout) -> bool:
        """Whether a layout leaves no rank without an element."""
        return all(self.leaves_none_empty(layout.tensor, i, axes) for i, axes in enumerate(layout.axes) if axes)

    def settled(self, phase: str, roles: Roles) -> Roles | None:
        """The roles with C and F on whole groups read as G; None if they can't work or leave a rank empty."""
        key = (phase, roles)
        if key not in self._legal:
            self._legal[key] = self._settle(phase, roles)
        return self._legal[key]

    def _settle(self, phase: str, roles: Roles) -> Roles | None:
        try:
            roles = settle_groups(self.conv, self.grid, phase, roles)
        except InputError:
            return None
        group = roles.axes("G")
        for role, axes in roles.nests:
            before = group if role in "CF" else ()
            for tensor, dim in self._index[role]:
                # Inside groups: w's C dimension has no groups to split.
                held = axes if (tensor, dim) == ("w", 1) else before + axes
                if not self.leaves_none_empty(tensor, dim, held):
                    return None
        return roles

    def rows_choices(self, roles: Roles) -> tuple[Roles, ...]:
        """Backward-filter by output rows or by input rows, where a spatial dimension is split."""
        if not any(roles.axes(letter) for letter in self.conv.letters):
            return (Roles(roles.nests),)
        return Roles(roles.nests), Roles(roles.nests, "input")

    def all_roles(self, phase: str, stored: Mapping[str, Layout]) -> tuple[Roles, ...]:
        """Every assignment of roles to axes, nested as the storage is, in a fixed order, without repeats."""
        # How axes that share a role nest does not depend on which they are.
        order = {
            role: tuple(a for a, _ in default_nesting(self.space, phase, dict.fromkeys(self.axes, role), stored))
            for role in self.letters
        }
        found: dict[Roles, None] = {}
        for letters in product((*self.letters, "none"), repeat=len(self.axes)):
            given = dict(zip(self.axes, letters, strict=True))
            pairs = [(a, role) for role in self.letters for a in order[role] if given[a] == role]
            if (roles := self.settled(phase, nest(pairs))) is not None:
                found |= dict.fromkeys(self.rows_choices(roles) if phase == "backward_filter" else (roles,))
        return tuple(found)

    def role_moves(self, phase: str, roles: Roles, axis: str) -> tuple[Roles, ...]:
        """The roles with one axis given every role, as the outermost and as the innermost of its nest."""
        rest = tuple((r, tuple(a for a in axes if a != axis)) for r, axes in roles.nests)
        others = {r: axes for r, axes in rest if axes}
        found: dict[Roles, None] = {}
        for role in self.letters:
            axes = others.get(role, ())
            for nested in ((axis, *axes), (*axes, axis)) if axes else ((axis,),):
                moved = others | {role: nested}
                settled = self.settled(phase, Roles(tuple((r, moved[r]) for r in ORDER if r in moved)))
                if settled is not None:
                    found[settled] = None
        if (settled := self.settled(phase, Roles(tuple(others.items())))) is not None:
            found[settled] = None
        if phase == "backward_filter":
            return tuple(r for settled in found for r in self.rows_choices(settled))
        return tuple(found)

    def storage_moves(self, layout: Layout, axis: str) -> tuple[Layout, ...]:
        """The layout with one axis on every dimension, outermost and innermost there, and lastly on none."""
        rest = tuple(tuple(a for a in axes if a != axis) for axes in layout.axes)
        found: list[Layout] = []
        for d, axes in enumerate(rest):
            nests = ((axis, *axes), (*axes, axis)) if axes else ((axis,),)
            full = [nest for nest in nests if self.leaves_none_empty(layout.tensor, d, nest)]
            found += [layout.with_axes((*rest[:d], nest, *rest[d + 1 :])) for nest in full]
        return (*found, layout.with_axes(rest))

    def copies(self, layout: Layout) -> int:
        """On how many ranks each element of a layout is."""
        return prod(self.grid.sizes[a] for a in self.axes if a not in layout.used)

    def imbalance(self, phase: str, roles: Roles) -> float:
        """The slowest rank's share of a phase's index space over an equal share: 1 where all divide evenly.

        Rows are those of the activation that is held in blocks.
        """
        rows = "x" if phase == "backward_data" or roles.rows == "input" else "y"
        share = 1.0
        for role, axes in roles.nests:
            tensor, dim = self._index[role][0]
            if role in self.conv.letters:
                tensor = rows
            before = roles.axes("G") if role in "CF" else ()
            if (tensor, dim) == ("w", 1):
                before = ()
            all_, outer = (self._largest(tensor, dim, a) for a in (before + axes, before))
            share *= all_ / outer
        return share * prod(self.grid.sizes[a] for a in self.axes)

    def _largest(self, tensor: str, dim: int, axes: Axes) -> int:
        lo, hi = self.space.block(tensor, dim, axes)
        return int((hi - lo).max())


def named_problems(
    candidates: Candidates, *, allow_empty: bool = False
) -> Iterator[tuple[str, dict[str, Layout], dict[str, Roles]]]:
    """Every named algorithm under every assignment of its letters to the grid's axes that applies.

    Axes of equal size are interchangeable, so each multiset of letters comes once; axes that share a letter
    nest in grid order.

    Args:
        allow_empty: also those that leave some rank without an element.
    Yields:
        name, stored layouts, roles of each phase (rows by output).
    """
    space, conv = candidates.space, candidates.conv
    seen: set[tuple[Layout, ...]] = set()
    for name, algorithm in ALGORITHMS.items():
        letters = [a for a in algorithm.letters if a not in "DHW" or a in conv.letters]
        letters += ["G"] if conv.groups > 1 else []
        for assigned in assignments(candidates, letters):
            axes_of = {r: tuple(a for a in candidates.axes if assigned[a] == r) for r in letters}
            stored = stored_layouts(name, conv, axes_of)
            if (key := tuple(stored.values())) in seen:
                continue
            if not allow_empty and not all(candidates.stores(layout) for layout in stored.values()):
                continue
            roles: dict[str, Roles] = {}
            for phase in PHASES:
                own = nest(default_nesting(space, phase, assigned, stored))
                if allow_empty:
                    try:
                        roles[phase] = settle_groups(conv, space.grid, phase, own)
                    except InputError:
                        break
                elif (settled := candidates.settled(phase, own)) is not None:
                    roles[phase] = settled
            if len(roles) == len(PHASES):
                seen.add(key)
                yield name, stored, roles


def assignments(candidates: Candidates, letters: Iterable[str]) -> Iterator[dict[str, str]]:
    """Letters for the grid's axes; axes of equal size take a multiset of letters."""
    classes: dict[int, list[str]] = {}
    for axis in candidates.axes:
        classes.setdefault(candidates.grid.sizes[axis], []).append(axis)
    letters = sorted(letters, key=ORDER.index)
    choices = [combinations_with_replacement(letters, len(axes)) for axes in classes.values()]
    for picked in product(*choices):
        yield {
            axis: letter
            for axes, taken in zip(classes.values(), picked, strict=True)
            for axis, letter in zip(axes, taken, strict=True)
        }
