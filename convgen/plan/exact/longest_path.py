"""The heuristic of [SP] V-C, to compare with: lay out the longest path exactly, fix it, and go on with the next.

A path's length is the least seconds that its layers take, however their activations are stored, so the longest is the
most computationally intensive. The next is the longest of those that contain as few of the layers already laid out as
possible, until every layer has a layout.
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


class _Path(NamedTuple):
    """A path to a layer.

    Attributes:
        is_new: whether some layer of it is not laid out yet.
        used: how many are laid out, as a negative number; `least`: the sum of its layers' least costs.
        before: the path without its last layer; None for an empty path.
    """

    is_new: bool
    used: int
    least: int
    before: _Path | None
    last: int


_EMPTY = _Path(False, 0, 0, None, -1)


def longest_paths(problem: Problem, vertices: Sequence[Vertex]) -> tuple[int, ...]:
    """Values of the problem's variables as the heuristic chooses them.

    Args:
        vertices: each behind those that it reads.
    """
    fixed: dict[int, int] = {}
    laid_out: set[int] = set()
    while len(laid_out) < len(vertices):
        path = longest(vertices, laid_out)
        _solve(problem, fixed, {v for k in path for v in vertices[k].variables})
        laid_out |= {*path}
    _solve(problem, fixed, {*range(len(problem.sizes))})  # variables of no layer
    return tuple(fixed[v] for v in range(len(problem.sizes)))


def longest(vertices: Sequence[Vertex], laid_out: Collection[int]) -> list[int]:
    """The longest path, from a layer that reads no other to one that no other reads, of those with a layer that is not
    laid out yet and as few as possible that are."""
    best: list[dict[bool, _Path]] = []  # by layer the best path to it with, and without, one that is not laid out yet
    for k, vertex in enumerate(vertices):
        is_old, found = k in laid_out, dict[bool, _Path]()
        for one in [known for b in vertex.before for known in best[b].values()] or [_EMPTY]:
            longer = _Path(one.is_new or not is_old, one.used - is_old, one.least + vertex.least, one, k)
            found[longer.is_new] = max(found.get(longer.is_new, longer), longer, key=_length)
        best.append(found)
    read = {b for vertex in vertices for b in vertex.before}
    at = max((found[True] for k, found in enumerate(best) if k not in read and True in found), key=_length)
    path: list[int] = []
    while at.before is not None:
        path.append(at.last)
        at = at.before
    return path


def _length(path: _Path) -> tuple[int, int]:
    return path.used, path.least


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
