"""The exact optimum under a budget: least cost with memory of at most so much.

1. Minimise cost without the budget; if that fits, it is the answer. Minimise memory; if that doesn't fit, nothing does.
2. Lagrange: cost + lambda * memory is minimised by elimination like cost. Each lambda bounds the optimum from below,
   and each assignment that fits bounds it from above; lambda goes to the best lower bound along the convex hull.
3. A value whose best weighted total is above the upper bound is in no better assignment, and is dropped. This
   leaves most variables one value and the others few.
4. What is left is a mixed-integer program, which HiGHS solves (scipy.optimize.milp): binary values, the tables' cells
   with marginals that agree, one row for the budget.

Source: Geoffrion, Lagrangean relaxation for integer programming (1974), for 2 and 3; Huangfu & Hall (2018), HiGHS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.errors import InternalError
from convgen.plan.exact.eliminate import Elimination, Factor, Problem, Table

FREE = "elimination"  # `how` of an assignment that elimination alone has found, without a look at the budget
CLEAR = 1e-5  # share of the budget that is kept free where HiGHS, which counts in float64, went beyond it


@dataclass(frozen=True)
class Bounded:
    """The best assignment within the budget, its cost and memory, and how it was found."""

    values: tuple[int, ...]
    cost: int
    memory: int
    how: str


@dataclass(frozen=True)
class DoesNotFit(Exception):
    """No assignment is within the budget; `values` takes the least memory of all."""

    values: tuple[int, ...]
    memory: int


def solve(problem: Problem, budget: int | None) -> Bounded:
    """The assignment of least cost within the budget.

    Raises:
        DoesNotFit: there is none.
    """
    free = _at(problem, 1, 0)
    if budget is None or free.memory <= budget:
        return free
    least = _at(problem, 0, 1)
    if least.memory > budget:
        raise DoesNotFit(least.values, least.memory)
    # Along the convex hull of (memory, cost) from both ends.
    above, below = free, least
    while True:
        down, across = below.cost - above.cost, above.memory - below.memory
        weighted = _at(problem, across, down)
        corner = across * weighted.cost + down * weighted.memory
        if corner >= across * above.cost + down * above.memory or down == 0:
            break
        above, below = (above, weighted) if weighted.memory <= budget else (weighted, below)
    best = replace(below, how="Lagrange")
    # Costs are integers, so nothing is better once the bound, less what shifting tables may lose, is above best - 1.
    lost = len(problem.factors) << _shift(_tables(problem, across, down))
    bound = Fraction(across * above.cost + down * (above.memory - budget) - lost, across)
    if bound > best.cost - 1:
        return best
    return _within(problem, budget, best, across, down)


def _tables(problem: Problem, cost: int, memory: int) -> list[Any]:
    """cost * costs + memory * memories, exactly."""
    return [
        cost * f.cost.astype(object) + (memory * f.memory.astype(object) if f.memory is not None else 0)
        for f in problem.factors
    ]


def _shift(tables: list[Any]) -> int:
    """By how many bits to shift the tables right, so that one cell of each sums to less than 2**61."""
    return max(0, sum(int(abs(t).max()) for t in tables).bit_length() - 61)


def _scaled(tables: list[Any]) -> list[Table]:
    shift = _shift(tables)
    return [(t >> shift).astype(np.int64) for t in tables]


def _at(problem: Problem, cost: int, memory: int) -> Bounded:
    """The assignment of the least weighted sum; of cost or of memory alone, equals are decided by the other."""
    tables = _tables(problem, cost, memory)
    if memory == 0 or cost == 0:
        # The other stands in the digits below, as many as its sum needs: it decides between equals and nothing else.
        other = _tables(problem, int(cost == 0), int(memory == 0))
        unit = 1 << sum(int(abs(t).max()) for t in other).bit_length()
        exact = [unit * t + o for t, o in zip(tables, other, strict=True)]
        tables = exact if len(exact) << _shift(exact) < unit else tables
    found = Elimination(problem, _scaled(tables))
    return Bounded(found.values, *problem.total(found.values), FREE)


def _within(problem: Problem, budget: int, best: Bounded, across: int, down: int) -> Bounded:
    """Drop the values that can't be in a better assignment, and hand the rest to HiGHS."""
    tables = _tables(problem, across, down)
    # Shifting each cell rounds sums down, never up: a value too many may stay, and none is dropped that matters.
    ceiling = (across * best.cost + down * budget) >> _shift(tables)
    keep = [np.flatnonzero(least <= ceiling) for least in Elimination(problem, _scaled(tables)).best_with()]
    keep = [k if len(k) else np.array([v]) for k, v in zip(keep, best.values, strict=True)]
    small = Problem(
        tuple(len(k) for k in keep),
        tuple(
            Factor(
                f.scope,
                f.cost[np.ix_(*(keep[v] for v in f.scope))],
                f.memory[np.ix_(*(keep[v] for v in f.scope))] if f.memory is not None else None,
            )
            for f in problem.factors
        ),
    )
    memory = budget
    for room in (budget, budget - math.ceil(budget * CLEAR)):
        values = _milp(small, room)
        if values is None:
            return best
        chosen = tuple(int(keep[v][i]) for v, i in enumerate(values))
        cost, memory = problem.total(chosen)
        if memory <= budget:
            return Bounded(chosen, cost, memory, "HiGHS") if cost < best.cost else best
    raise InternalError(f"the mixed-integer program left the budget: {memory} > {budget}")


def _milp(problem: Problem, budget: int) -> tuple[int, ...] | None:
    """The best assignment by HiGHS, None if it finds none within the budget."""
    from importlib import import_module

    optimize: Any = import_module("scipy.optimize")  # it ships no types
    sparse: Any = import_module("scipy.sparse")
    start = np.concatenate([[0], np.cumsum(problem.sizes)])
    columns = int(start[-1])
    costs: list[NDArray[Any]] = [np.zeros(columns)]
    memories: list[NDArray[Any]] = [np.zeros(columns)]
    rows: list[int] = []
    cols: list[int] = []
    data: list[float] = []
    equal: list[float] = []
    for v, size in enumerate(problem.sizes):
        rows += [len(equal)] * size
        cols += list(range(start[v], start[v] + size))
        data += [1.0] * size
        equal.append(1.0)
    for factor in problem.factors:
        memory = factor.memory if factor.memory is not None else np.zeros_like(factor.cost)
        free = [v for v in factor.scope if problem.sizes[v] > 1]
        if len(free) <= 1:
            v = free[0] if free else factor.scope[0]
            at = slice(start[v], start[v] + problem.sizes[v])
            costs[0][at] += factor.cost.ravel()
            memories[0][at] += memory.ravel()
            continue
        cells = np.arange(factor.cost.size).reshape(factor.cost.shape) + columns
        for i, v in enumerate(factor.scope):
            for value in range(problem.sizes[v]):
                inside = np.take(cells, value, axis=i).ravel()
                rows += [len(equal)] * (len(inside) + 1)
                cols += [*map(int, inside), int(start[v]) + value]
                data += [1.0] * len(inside) + [-1.0]
                equal.append(0.0)
        costs.append(factor.cost.ravel().astype(np.float64))
        memories.append(memory.ravel().astype(np.float64))
        columns += factor.cost.size
    cost, memory = np.concatenate(costs), np.concatenate(memories)
    integral = np.zeros(columns)
    integral[: start[-1]] = 1
    matrix = sparse.coo_array((data, (rows, cols)), shape=(len(equal), columns)).tocsr()
    # The solver's tolerances (1e-6 and less) are meant for numbers near 1: costs are scaled to 1e4 at most.
    scale = max(float(np.abs(cost).max()) / 1e4, 1.0)
    row = optimize.LinearConstraint(memory[None, :] / budget, -np.inf, 1.0)
    found: Any = optimize.milp(
        cost / scale,
        integrality=integral,
        bounds=optimize.Bounds(0, 1),
        constraints=[optimize.LinearConstraint(matrix, equal, equal), row],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    return tuple(int(np.argmax(found.x[start[v] : start[v + 1]])) for v in range(len(problem.sizes)))
