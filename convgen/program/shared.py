"""What a row's gradients fetch, once: equal conversions of one value are one.

| serves | is |
|---|---|
| a gradient's row | what another gradient's row fetches; where the row holds it, what it has fetched itself |
| local code's vjp | as a result's gradient, what a gradient's row fetches of it |

What travels in pieces is nobody else's.

Source: docs/design.md, Networks.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from convgen.algebra.layout import Layout
from convgen.program.rows import Chain, PlacedRow, reads_of, sides

Place = tuple[int, int]  # the operand whose gradient's row it is, and the number of that row's operand


class Shared(NamedTuple):
    """What a row's gradients need not fetch, with what serves instead, and of how many conversions that is.

    Attributes:
        rows: of a gradient's row, what another one fetches.
        held: of a gradient's row, an operand as the row itself has fetched it.
        given: a result's gradient for the vjp.
    """

    rows: Mapping[Place, tuple[Place, int]]
    held: Mapping[Place, tuple[int, int]]
    given: Mapping[int, tuple[Place, int]]

    def served(self, place: Place) -> int:
        """How many conversions of a gradient's row's operand are another's."""
        return (self.rows.get(place) or self.held.get(place) or (0, 0))[1]


@lru_cache(maxsize=1 << 13)
def shared(row: PlacedRow, wanted: tuple[bool, ...]) -> Shared:
    """What is fetched once.

    Args:
        wanted: by operand, whether its gradient is asked for.
    """
    rows: dict[Place, tuple[Place, int]] = {}
    held: dict[Place, tuple[int, int]] = {}
    given: dict[int, tuple[Place, int]] = {}
    own: dict[Hashable, int] = {}  # what begins as the row's own fetch
    if row.holds and not row.is_cut:
        own = {("operand", n, key): n for n, chain in enumerate(row.fetch) for key in _keys(row, n, chain)}
    known: dict[Hashable, Place] = {}
    for k, one in reversed(row.derived):
        if not wanted[k] or one.is_cut:
            continue
        for j, source in enumerate(reads_of(row.bound.operation, one.bound.reads)):
            keys = [(*source, key) for key in _keys(one, j, one.fetch[j])]
            of_own, of_others = _longest(keys, own), _longest(keys, known)
            if of_own and of_own >= of_others:
                held[k, j] = own[keys[of_own - 1]], of_own
            elif of_others:
                rows[k, j] = known[keys[of_others - 1]], of_others
            for key in keys:
                known.setdefault(key, (k, j))
    if not row.between(wanted) and not row.is_cut:
        for j, chain in enumerate(row.given):
            keys = [("gradient", j, key) for key in _keys(row, len(row.signature.inputs) + j, chain)]
            if n := _longest(keys, known):
                given[j] = known[keys[n - 1]], n
    return Shared(rows, held, given)


def _longest(keys: Sequence[Hashable], known: Container[Hashable]) -> int:
    """Of how many conversions the longest beginning is that is known; 0 if none is."""
    return next((n for n in range(len(keys), 0, -1) if keys[n - 1] in known), 0)


def shares(row: PlacedRow) -> bool:
    """Whether anything of it is fetched once for two readers."""
    return any(shared(row, (True,) * len(row.bound.reads)))


def could_hold(row: PlacedRow) -> frozenset[Place]:
    """What gradients' rows fetch as the row itself does."""
    return frozenset(shared(replace(row, holds=True), (True,) * len(row.bound.reads)).held)


def in_order(row: PlacedRow, wanted: tuple[bool, ...]) -> list[tuple[int, PlacedRow]]:
    """Gradients' rows that are asked for: before others those that fetch what others read."""
    own = [(k, one) for k, one in row.derived if wanted[k]]
    first = {k for (k, _), _ in shared(row, wanted).rows.values()}
    return sorted(own, key=lambda pair: (pair[0] not in first, -pair[0] if pair[0] in first else 0))


def _keys(row: PlacedRow, number: int, chain: Chain) -> list[Hashable]:
    """Of conversions of an operand, or of a result behind them, how each begins up to its last that moves something,
    whatever the tensor is called."""
    _, dims = sides(row.signature)[number]
    steps: tuple[Hashable, ...] = ()
    found: list[Hashable] = []
    last = max((i for i, c in enumerate(chain, 1) if c.kind != "slice"), default=0)
    for c in chain[:last]:
        windows = tuple(side.rows for side in dims) if c.dst.has_window else ()
        steps = (*steps, (c.kind, c.over, c.reduction, c.form, _bare(c.src), _bare(c.dst), windows))
        found.append(steps)
    return found


def _bare(layout: Layout) -> Hashable:
    return layout.axes, layout.windows, layout.partial
