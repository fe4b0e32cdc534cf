"""What a row's gradients fetch once: equal conversions of one value are done once for all that read it.

| serves | with |
|---|---|
| a gradient's row | what another gradient's row fetches; where the row holds it, what it has fetched itself |
| local code's vjp | a result's gradient, as a gradient's row fetches it |

What travels in pieces or chunks is not shared.

Source: docs/design.md, Networks.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from convgen.algebra.involved import Side
from convgen.algebra.layout import Layout
from convgen.program.rows import Chain, PlacedRow, reads_of, sides

Place = tuple[int, int]  # of a gradient's row: the operand whose gradient it makes, and the number of its own operand


class Shared(NamedTuple):
    """What a row's gradients need not fetch: the fetch that serves instead, and how many of its conversions do.

    Attributes:
        rows: by place, the fetch of another gradient's row.
        held: by place, the number of the row's own operand, as forward has fetched it.
        given: by result, the fetch of its gradient that serves the vjp, too.
    """

    rows: Mapping[Place, tuple[Place, int]]
    held: Mapping[Place, tuple[int, int]]
    given: Mapping[int, tuple[Place, int]]

    def served(self, place: Place) -> int:
        """How many conversions of an operand of a gradient's row are another's."""
        return (self.rows.get(place) or self.held.get(place) or (0, 0))[1]


@lru_cache(maxsize=1 << 13)
def shared(row: PlacedRow, wanted: tuple[bool, ...]) -> Shared:
    """What a row's gradients fetch once.

    Args:
        wanted: by operand, whether its gradient is asked for.
    """
    rows: dict[Place, tuple[Place, int]] = {}
    held: dict[Place, tuple[int, int]] = {}
    given: dict[int, tuple[Place, int]] = {}
    own: dict[Hashable, int] = {}  # by beginning of a fetch of the row's own, the operand
    if row.holds and not row.is_cut:
        for n, (chain, (_, dims)) in enumerate(zip(row.fetch, sides(row.signature), strict=False)):
            own |= {("operand", n, key): n for key in beginnings(dims, moving(chain))}
    known: dict[Hashable, Place] = {}
    for k, one in reversed(row.derived):
        if not wanted[k] or one.is_cut:
            continue
        for j, source in enumerate(reads_of(row.bound.operation, one.bound.reads)):
            keys = [(*source, key) for key in beginnings(sides(one.signature)[j][1], moving(one.fetch[j]))]
            of_own, of_others = longest(keys, own), longest(keys, known)
            if of_own and of_own >= of_others:
                held[k, j] = own[keys[of_own - 1]], of_own
            elif of_others:
                rows[k, j] = known[keys[of_others - 1]], of_others
            for key in keys:
                known.setdefault(key, (k, j))
    if not row.between(wanted) and not row.is_cut:
        results = sides(row.signature)[len(row.signature.inputs) :]
        for j, (chain, (_, dims)) in enumerate(zip(row.given, results, strict=True)):
            keys = [("gradient", j, key) for key in beginnings(dims, moving(chain))]
            if n := longest(keys, known):
                given[j] = known[keys[n - 1]], n
    return Shared(rows, held, given)


def longest(keys: Sequence[Hashable], known: Container[Hashable]) -> int:
    """How many conversions the longest beginning has that is known; 0 if none is."""
    return next((n for n in range(len(keys), 0, -1) if keys[n - 1] in known), 0)


def shares(row: PlacedRow) -> bool:
    """Whether some fetch of a row's gradients serves two readers."""
    return any(shared(row, (True,) * len(row.bound.reads)))


def could_hold(row: PlacedRow) -> frozenset[Place]:
    """Places of gradients' rows that fetch what the row itself does, and could read it where the row holds it."""
    return frozenset(shared(replace(row, holds=True), (True,) * len(row.bound.reads)).held)


def in_order(row: PlacedRow, wanted: tuple[bool, ...]) -> list[tuple[int, PlacedRow]]:
    """The gradients' rows that are asked for; first those whose fetches others read."""
    own = [(k, one) for k, one in row.derived if wanted[k]]
    first = {k for (k, _), _ in shared(row, wanted).rows.values()}
    return sorted(own, key=lambda pair: (pair[0] not in first, -pair[0] if pair[0] in first else 0))


def beginnings(dims: Sequence[Side], chain: Chain) -> list[Hashable]:
    """Keys of the beginnings of a chain, each up to a further conversion; they don't depend on the tensor's name.

    Args:
        dims: the dimensions of the tensor.
    """
    steps: tuple[Hashable, ...] = ()
    found: list[Hashable] = []
    for c in chain:
        windows = tuple(side.rows for side in dims) if c.dst.has_window else ()
        steps = (*steps, (c.kind, c.over, c.reduction, c.form, _bare(c.src), _bare(c.dst), windows))
        found.append(steps)
    return found


def moving(chain: Chain) -> Chain:
    """A chain up to the last conversion that moves something, if any does."""
    return chain[: max((i for i, c in enumerate(chain, 1) if c.kind != "slice"), default=0)]


def _bare(layout: Layout) -> Hashable:
    return layout.axes, layout.windows, layout.partial
