"""The search equals brute force, with a memory budget and without."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product

import numpy as np
import pytest
from sampling import draws

from convgen.plan.exact.bounded import DoesNotFit, solve
from convgen.plan.exact.eliminate import Elimination, Factor, Problem
from convgen.plan.exact.longest_path import Vertex, longest


def some_problem(rng: random.Random) -> Problem:
    """A small graph with branches: tables over one and two variables, some over three."""
    sizes = tuple(rng.randint(1, 4) for _ in range(rng.randint(2, 6)))
    n = len(sizes)
    scopes = [(v,) for v in range(n)]
    scopes += [tuple(sorted(rng.sample(range(n), 2))) for _ in range(rng.randint(1, n + 2))]
    scopes += [tuple(sorted(rng.sample(range(n), 3)))] if n > 2 and rng.random() < 0.3 else []

    def table(scope: tuple[int, ...], most: int) -> np.ndarray:
        shape = tuple(sizes[v] for v in scope)
        return np.array([rng.randint(0, most) for _ in range(int(np.prod(shape)))], dtype=np.int64).reshape(shape)

    return Problem(sizes, tuple(Factor(s, table(s, 50), table(s, 30) if rng.random() < 0.8 else None) for s in scopes))


def every(problem: Problem) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(*problem.total(values), values) for values in product(*map(range, problem.sizes))]


def test_elimination_is_brute_force() -> None:
    rng = random.Random(1)
    for _ in range(draws(150)):
        problem = some_problem(rng)
        totals = every(problem)
        found = Elimination(problem)
        assert found.minimum == min(cost for cost, _, _ in totals) == problem.total(found.values)[0]
        for variable, least in enumerate(found.best_with()):
            for value, total in enumerate(least):
                assert total == min(cost for cost, _, values in totals if values[variable] == value)


@pytest.mark.parametrize("scale", [1, 10**9 + 7])
def test_within_a_budget_is_brute_force(scale: int) -> None:
    """Also with numbers so large that weighted sums need more than 62 bits."""
    rng = random.Random(2)
    how: Counter[str] = Counter()
    for _ in range(draws(217)):
        small = some_problem(rng)
        memories = sorted(memory for _, memory, _ in every(small))
        budget = rng.randint(memories[0] - 3, memories[len(memories) // 3] + 1)
        allowed = [cost for cost, memory, _ in every(small) if memory <= budget]
        factors = (
            Factor(f.scope, f.cost * scale, f.memory * scale if f.memory is not None else None) for f in small.factors
        )
        problem = Problem(small.sizes, tuple(factors))
        if not allowed:
            with pytest.raises(DoesNotFit) as caught:
                solve(problem, budget * scale)
            assert caught.value.memory == memories[0] * scale == problem.total(caught.value.values)[1]
            how["nothing"] += 1
            continue
        found = solve(problem, budget * scale)
        assert found.cost == min(allowed) * scale
        assert (found.cost, found.memory) == problem.total(found.values)
        assert found.memory <= budget * scale
        how[found.how] += 1
    assert min(how[way] for way in ("elimination", "Lagrange", "HiGHS", "nothing")) >= 7


def some_layers(rng: random.Random) -> list[Vertex]:
    count = rng.randint(1, 8)
    reads = [rng.sample(range(k), rng.randint(0, min(k, 2))) for k in range(count)]
    return [Vertex(tuple(before), frozenset(), rng.randint(0, 9)) for before in reads]


def paths_to(vertices: list[Vertex], k: int) -> list[list[int]]:
    before = vertices[k].before
    return [[*path, k] for b in before for path in paths_to(vertices, b)] if before else [[k]]


def test_longest_paths_are_those_of_the_papers_heuristic() -> None:
    """[SP] V-C: first the most seconds from beginning to end; then the fewest layers that are laid out, and of these
    paths the most seconds."""
    rng = random.Random(3)
    for _ in range(draws(200)):
        layers = some_layers(rng)
        read = {b for layer in layers for b in layer.before}
        every = [path for k in range(len(layers)) if k not in read for path in paths_to(layers, k)]
        laid_out: set[int] = set()
        while len(laid_out) < len(layers):
            new = [path for path in every if not laid_out.issuperset(path)]
            scores = [(-len(laid_out & {*path}), sum(layers[k].least for k in path)) for path in new]
            found = longest(layers, laid_out)
            score = -len(laid_out & {*found}), sum(layers[k].least for k in found)
            assert score == max(scores) and sorted(found) in new
            laid_out |= {*found}
