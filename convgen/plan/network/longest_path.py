"""The heuristic of [SP] V-C, to compare with: lay out the longest path exactly, fix it, and go on with the next.

A path's length is the least seconds that its layers take, however their activations are stored, so the longest is the
most computationally intensive. The next is the longest that contains as few of the layers already laid out as possible,
until every layer has a layout.
"""

from __future__ import annotations

import numpy as np

from convgen.plan.network.eliminate import Elimination, Factor, Problem
from convgen.plan.network.graph import Graph


def longest_paths(graph: Graph) -> tuple[int, ...]:
    """Values of the problem's variables as the heuristic chooses them."""
    fixed: dict[int, int] = {}
    laid_out: set[str] = set()
    names = [node.name for node in graph.network.nodes]
    while len(laid_out) < len(names):
        path = _longest(graph, laid_out)
        variables = {v for (_, name), v in graph.variable.items() if name in path} | {
            graph.variable["split", graph.root[name]] for name in path if name in graph.root
        }
        _solve(graph, fixed, variables)
        laid_out |= set(path)
    return tuple(fixed[v] for v in range(len(graph.sizes)))


def _longest(graph: Graph, laid_out: set[str]) -> list[str]:
    """The path from input to output with the fewest layers laid out already per new one, then the longest."""
    best: dict[str, tuple[tuple[int, int], list[str]]] = {}
    for node in graph.network.nodes:
        own = 0
        if node.name in graph.convs:
            option = graph.variable["option", node.name]
            own = next(int(f.cost.min()) for f in graph.factors if option in f.scope)
        here = (0, 0) if node.name in laid_out else (1, own)
        before = [best[name] for name in node.inputs]
        # New layers first: a path without any would be no progress.
        score, path = max(before, key=lambda b: b[0]) if before else ((0, 0), [])
        best[node.name] = ((score[0] + here[0], score[1] + here[1]), [*path, node.name])
    return best[graph.network.nodes[-1].name][1]


def _solve(graph: Graph, fixed: dict[int, int], variables: set[int]) -> None:
    """Choose variables exactly, by the tables over them and those fixed before; what is fixed stays."""
    free = sorted(variables - set(fixed))
    place = {v: i for i, v in enumerate(free)}
    factors: list[Factor] = []
    for factor in graph.factors:
        if any(v not in place and v not in fixed for v in factor.scope):
            continue
        scope = tuple(v for v in factor.scope if v in place)
        if not scope:
            continue
        index = tuple(slice(None) if v in place else fixed[v] for v in factor.scope)
        factors.append(Factor(tuple(place[v] for v in scope), np.asarray(factor.cost[index])))
    if not free:
        return
    found = Elimination(Problem(tuple(graph.sizes[v] for v in free), tuple(factors)))
    fixed.update(zip(free, found.values, strict=True))
