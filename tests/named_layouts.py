"""The named algorithms' layouts and roles of a layer, for comparisons with what a search finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product

from convgen.algebra.algorithms import ALGORITHMS, stored_layouts
from convgen.algebra.conv import PHASES, Conv
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles, default_nesting, nest, settle_groups
from convgen.algebra.space import Space
from convgen.errors import InputError


def named_layouts(conv: Conv, grid: Grid) -> Iterator[tuple[str, dict[str, Layout], dict[str, Roles]]]:
    """Every named algorithm under every assignment of its letters to the grid's axes."""
    space = Space(conv, grid)
    for name, algorithm in ALGORITHMS.items():
        letters = [a for a in algorithm.letters if a not in "DHW" or a in conv.letters]
        letters += ["G"] if conv.groups > 1 else []
        for assigned in product(letters, repeat=len(grid.names)):
            of = dict(zip(grid.names, assigned, strict=True))
            stored = stored_layouts(name, conv, {r: tuple(a for a in of if of[a] == r) for r in letters})
            with suppress(InputError):
                nests = nest(default_nesting(space, "forward", of, stored))
                yield name, stored, {phase: settle_groups(conv, grid, phase, nests) for phase in PHASES}
