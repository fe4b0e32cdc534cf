"""A network, a machine and a number of ranks: the best grid of axes, and on it the best layout.

Grids are the ways to write the ranks as a product of as many axes as a plan may have. Each is searched with few
candidates, the best of them with all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from convgen.algebra.grid import Grid
from convgen.cost.machine import Machine
from convgen.cost.moving import PICOSECONDS
from convgen.operations.bound import Bound
from convgen.plan.letters import Tensor
from convgen.plan.network.grids import MOST_AXES, NAMES, factorisations, primes
from convgen.plan.program.search import Effort, Found, Search
from convgen.program.network import Program

SCOUT = Effort(ways=2, others=4, stored=3)


@dataclass(frozen=True)
class NetworkPlan:
    """The best program found, its modelled seconds, and what the other grids came to with few candidates."""

    program: Program
    seconds: float
    tried: tuple[tuple[Grid, float], ...]


def grids_of(ranks: int, machine: Machine) -> list[Grid]:
    """Grids of the most axes; their order counts where the machine's links have levels."""
    axes = min(MOST_AXES, len(primes(ranks)))
    if axes == 0:
        return [Grid((("a", 1),))]
    sizes = [
        order
        for factors in factorisations(ranks, axes)
        for order in (sorted(set(permutations(factors)), reverse=True) if len(machine.levels) > 1 else [factors])
    ]
    return [Grid(tuple(zip(NAMES, one, strict=False))) for one in sizes]


def plan_network(
    name: str,
    tensors: Sequence[Tensor],
    rows: Sequence[Bound],
    updates: Sequence[tuple[str, str]],
    outputs: Sequence[tuple[str, str]],
    grids: Sequence[Grid],
    machine: Machine,
    dtype: str,
) -> NetworkPlan:
    """The best layout over these grids.

    Args:
        grids: all of the same number of ranks.
    """

    def search(grid: Grid, effort: Effort) -> Found:
        return Search(name, tensors, rows, updates, outputs, grid, machine, dtype, effort).run()

    scouted = [(grid, search(grid, SCOUT).time_ps) for grid in grids] if len(grids) > 1 else [(grids[0], 0)]
    best = min(scouted, key=lambda pair: pair[1])[0]
    found = search(best, Effort())
    tried = tuple((grid, ps / PICOSECONDS) for grid, ps in scouted) if len(grids) > 1 else ()
    return NetworkPlan(found.program, found.time_ps / PICOSECONDS, tried)
