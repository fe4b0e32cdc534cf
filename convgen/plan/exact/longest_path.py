"""The heuristic of [SP] V-C, to compare with: lay out the longest path exactly, fix it, and go on with the next.

A path's length is the least seconds that its layers take, however their activations are stored, so the longest is the
most computationally intensive. The next is the longest that contains as few of the layers already laid out as possible,
until every layer has a layout.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from convgen.plan.exact.eliminate import Elimination, Factor, Problem


class Vertex(NamedTuple):
    """A layer.

    Attributes:
        before: numbers of the layers that it reads.
        variables: numbers of the variables that say how it is laid out.
        least: its least cost, whichever values its variables have.
    """

    before: tuple[int, ...]
    variables: frozenset[int]
    least: int


def longest_paths(problem: Problem, vertices: Sequence[Vertex]) -> tuple[int, ...]:
    """Values of the problem's variables as the heuristic chooses them.

    Args:
        vertices: each behind those that it reads.
    """
    fixed: dict[int, int] = {}
    laid_out: set[int] = set()
    while len(laid_out) < len(vertices):
        path = _longest(vertices, laid_out)
        _solve(problem, fixed, {v for k in path for v in vertices[k].variables})
        laid_out |= {*path}
    _solve(problem, fixed, {*range(len(problem.sizes))})  # variables of no layer
    return tuple(fixed[v] for v in range(len(problem.sizes)))


def _longest(vertices: Sequence[Vertex], laid_out: Collection[int]) -> list[int]:
    """The path with the most layers that are not laid out yet; of equals the one whose layers cost most."""
    scores: list[tuple[int, int]] = []
    last: list[int | None] = []
    for k, vertex in enumerate(vertices):
        here = (0, 0) if k in laid_out else (1, vertex.least)
        # New layers first: a path without any would be no progress.
        best = max(vertex.before, key=lambda b: scores[b], default=None)
        before = (0, 0) if best is None else scores[best]
        scores.append((before[0] + here[0], before[1] + here[1]))
        last.append(best)
    at: int | None = max(range(len(vertices)), key=lambda k: (scores[k], k))
    path: list[int] = []
    while at is not None:
        path.append(at)
        at = last[at]
    return path


def _solve(problem: Problem, fixed: dict[int, int], variables: set[int]) -> None:
    """Choose variables exactly, by the tables over them and those fixed before; what is fixed stays."""
    free = sorted(variables - set(fixed))
    place = {v: i for i, v in enumerate(free)}
    factors: list[Factor] = []
    for factor in problem.factors:
        if any(v not in place and v not in fixed for v in factor.scope):
            continue
        scope = tuple(v for v in factor.scope if v in place)
        if not scope:
            continue
        index = tuple(slice(None) if v in place else fixed[v] for v in factor.scope)
        factors.append(Factor(tuple(place[v] for v in scope), np.asarray(factor.cost[index])))
    if not free:
        return
    found = Elimination(Problem(tuple(problem.sizes[v] for v in free), tuple(factors)))
    fixed.update(zip(free, found.values, strict=True))
