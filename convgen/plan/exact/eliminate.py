"""Exact minimisation of a sum of tables over few variables each, by eliminating one variable after the other.

A problem is a graph of variables with finite domains, and tables over one, two or three of them. Eliminating a
variable replaces the tables that it is in by their sum's minimum over it (dynamic programming; [SP] V-C's shortest
path is the case of a line). The work is exponential in the graph's treewidth only, which for networks of residual
blocks is small. All numbers are integers, so the optimum is exact and equals brute force.

Source: Bertele & Brioschi, Nonserial Dynamic Programming (1972); Dechter, Bucket elimination (1999) for the
way back down, which gives every value's best total.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from convgen.errors import InputError

Table = NDArray[np.int64]
Belief = tuple[tuple[int, ...], Table]  # variables, ascending, and for all of their values a least total
MAX_CELLS = 1 << 26  # of one table: 512 MiB


@dataclass(frozen=True, eq=False)
class Factor:
    """A table over variables, whose numbers `scope` has, ascending: what a cell costs, and perhaps its bytes."""

    scope: tuple[int, ...]
    cost: Table
    memory: Table | None = None


@dataclass(frozen=True, eq=False)
class Problem:
    """Variables by number with the size of each domain, and the tables whose sum is minimised."""

    sizes: tuple[int, ...]
    factors: tuple[Factor, ...]

    def total(self, values: Sequence[int]) -> tuple[int, int]:
        """(cost, memory) of an assignment of a value to each variable."""
        cost = memory = 0
        for factor in self.factors:
            index = tuple(values[v] for v in factor.scope)
            cost += int(factor.cost[index])
            memory += int(factor.memory[index]) if factor.memory is not None else 0
        return cost, memory


@dataclass(eq=False)
class _Bucket:
    variable: int
    scope: tuple[int, ...]  # ascending, the variable among them
    table: Table  # the sum of the tables that the variable is in, messages included
    message: Table  # its minimum over the variable
    sources: list[int]  # buckets whose messages came here
    parent: int = -1

    @property
    def separator(self) -> tuple[int, ...]:
        return tuple(v for v in self.scope if v != self.variable)


class Elimination:
    """The minimum of a weighted sum, an assignment that has it, and each value's best total."""

    def __init__(self, problem: Problem, tables: Sequence[Table] | None = None) -> None:
        """
        Args:
            tables: for each factor, instead of its costs (a Lagrangian's weighted sum, say).
        """
        self.problem = problem
        given = tables if tables is not None else [f.cost for f in problem.factors]
        self._buckets = _run(problem, given)
        self.minimum = sum(int(b.message) for b in self._buckets if not b.separator)
        self.values = self._best()

    def _best(self) -> tuple[int, ...]:
        """The best values; of equal assignments the first, variables that are eliminated last compared first."""
        values = [0] * len(self.problem.sizes)
        for bucket in reversed(self._buckets):
            index = tuple(slice(None) if v == bucket.variable else values[v] for v in bucket.scope)
            values[bucket.variable] = int(bucket.table[index].argmin())
        return tuple(values)

    def best_with(self) -> list[Table]:
        """For every variable and each of its values, the minimum over all assignments that have it."""
        found: list[Table] = [np.zeros(0, dtype=np.int64)] * len(self.problem.sizes)
        for variable, (scope, belief) in self.beliefs():
            found[variable] = _least(belief, scope, (variable,))
        return found

    def beliefs(self) -> Iterator[tuple[int, Belief]]:
        """For each variable the variables of its bucket, itself among them, and for all values of these the minimum
        over all assignments that have them."""
        down: dict[int, Table] = {}
        roots = {i: int(b.message) for i, b in enumerate(self._buckets) if not b.separator}
        above = dict.fromkeys(range(len(self._buckets)), 0)
        for i in range(len(self._buckets) - 1, -1, -1):
            bucket = self._buckets[i]
            if i in roots:
                above[i] = self.minimum - roots[i]
            belief = bucket.table + _spread(down[i], bucket.separator, bucket.scope) if i in down else bucket.table
            yield bucket.variable, (bucket.scope, belief + above[i])
            for source in bucket.sources:
                child = self._buckets[source]
                above[source] = above[i]
                without = belief - _spread(child.message, child.separator, bucket.scope)
                down[source] = _least(without, bucket.scope, child.separator)


def _run(problem: Problem, given: Sequence[Table]) -> list[_Bucket]:
    tables: dict[int, tuple[tuple[int, ...], Table, int]] = {}  # scope, table, the bucket that it comes from
    of: list[set[int]] = [set() for _ in problem.sizes]
    number = 0

    def put(scope: tuple[int, ...], table: Table, source: int) -> None:
        nonlocal number
        tables[number] = scope, table, source
        for v in scope:
            of[v].add(number)
        number += 1

    for factor, table in zip(problem.factors, given, strict=True):
        put(factor.scope, table, -1)

    def neighbours(v: int) -> tuple[int, ...]:
        return tuple(sorted({v}.union(*(tables[t][0] for t in of[v]))))

    def weight(v: int) -> int:
        return prod(problem.sizes[u] for u in neighbours(v))

    queue = [(weight(v), v) for v in range(len(problem.sizes))]
    heapq.heapify(queue)
    buckets: list[_Bucket] = []
    done: set[int] = set()
    while queue:
        cells, v = heapq.heappop(queue)
        if v in done:
            continue
        if cells != (now := weight(v)):
            heapq.heappush(queue, (now, v))
            continue
        if cells > MAX_CELLS:
            fact = f"exact search needs a table of {cells} entries, more than {MAX_CELLS}: too many branches meet"
            raise InputError(fact, hint="fewer ranks or a grid of fewer axes (--grid)")
        scope = neighbours(v)
        total = np.zeros(tuple(problem.sizes[u] for u in scope), dtype=np.int64)
        sources: list[int] = []
        for t in sorted(of[v]):
            held, table, source = tables.pop(t)
            total = total + _spread(table, held, scope)
            if source >= 0:
                sources.append(source)
                buckets[source].parent = len(buckets)
            for u in held:
                if u != v:
                    of[u].discard(t)
        of[v].clear()
        message = total.min(axis=scope.index(v))
        buckets.append(_Bucket(v, scope, total, message, sources))
        done.add(v)
        if len(scope) > 1:
            rest = tuple(u for u in scope if u != v)
            put(rest, message, len(buckets) - 1)
            for u in rest:
                heapq.heappush(queue, (weight(u), u))
    return buckets


def _spread(table: Table, scope: tuple[int, ...], over: tuple[int, ...]) -> Table:
    """A table with dimensions of extent 1 for the variables of `over` that it lacks; both ascend."""
    sizes = dict(zip(scope, table.shape, strict=True))
    return table.reshape(tuple(sizes.get(v, 1) for v in over))


def _least(table: Table, scope: tuple[int, ...], kept: tuple[int, ...]) -> Table:
    """The minimum over all variables but those kept."""
    return table.min(axis=tuple(i for i, v in enumerate(scope) if v not in kept))
