"""Storage for roles that are given, exactly: each tensor's on its own (see terms.py), where it has few layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import permutations, product

from convgen.algebra.conv import PHASES, TENSORS
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.roles import Roles
from convgen.plan.candidates import Candidates
from convgen.plan.terms import Cost, Terms

MOST_AXES = 3  # over four dimensions they have 193 layouts, four would have 1569


def best_storage(terms: Terms, candidates: Candidates, roles: Mapping[str, Roles]) -> dict[str, Layout]:
    """The layouts of x, w and y that cost least with these roles; of equals those with fewest copies."""
    three = tuple(roles[phase] for phase in PHASES)
    best: dict[str, Layout] = {}
    for tensor in TENSORS:
        least: tuple[Cost, Layout] | None = None
        for axes in arrangements(candidates.axes, len(candidates.conv.dims(tensor))):
            layout = Layout(tensor, axes)
            if not candidates.stores(layout):
                continue
            cost = terms.term(tensor, layout, *three)
            primary = cost if terms.objective == "bytes" else (cost[0], 0)
            if least is None or primary < least[0]:
                least = primary, layout
        assert least is not None, "copies everywhere leave no rank empty"
        best[tensor] = least[1]
    return best


@cache
def arrangements(axes: Axes, dims: int) -> tuple[tuple[Axes, ...], ...]:
    """Every way to split dimensions by some of the axes, in every order; first those that use most axes."""
    return tuple(sorted(_arrangements(axes, dims), key=lambda a: -sum(map(len, a))))


def _arrangements(axes: Axes, dims: int) -> Iterator[tuple[Axes, ...]]:
    for places in product((*range(dims), None), repeat=len(axes)):
        nests = [tuple(a for a, p in zip(axes, places, strict=True) if p == d) for d in range(dims)]
        yield from product(*(permutations(nest) for nest in nests))
