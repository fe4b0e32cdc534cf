"""A network, a machine and a number of ranks: the best grid of axes, and on it the best layout.

Grids are the ways to write the ranks as a product of as many axes as a plan may have. Each is searched with few
candidates, the best of them with all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convgen.algebra.grid import Grid
from convgen.cost.machine import Machine
from convgen.cost.moving import PICOSECONDS
from convgen.errors import InputError
from convgen.operations.bound import Bound
from convgen.plan.letters import Tensor
from convgen.plan.network.grids import MOST_AXES, NAMES, factorisations, primes
from convgen.plan.program.candidates import Way
from convgen.plan.program.search import Effort, Found, Search
from convgen.program.network import Program

SCOUT = Effort(ways=2, others=4, stored=3)


@dataclass(frozen=True)
class NetworkPlan:
    """The best program found, its modelled seconds, and the bytes that the fullest rank keeps.

    Attributes:
        tried: seconds on the other grids, with few candidates.
        runner_up: by row, the best roles of a product but those that it has, and the seconds that the best plan with
            them takes more; none where memory decided on the plan.
    """

    program: Program
    seconds: float
    memory_bytes: int
    tried: tuple[tuple[Grid, float], ...]
    runner_up: Mapping[int, tuple[Way, float]]


def grids_of(ranks: int, machine: Machine) -> list[Grid]:
    """Grids of the most axes, largest first; last, whose groups are nearest, the largest that a node holds."""
    axes = min(MOST_AXES, len(primes(ranks)))
    if axes == 0:
        return [Grid((("a", 1),))]
    return [
        Grid(tuple(zip(NAMES, _ordered(factors, machine.ranks_per_node), strict=False)))
        for factors in factorisations(ranks, axes)
    ]


def _ordered(factors: Sequence[int], node: int) -> tuple[int, ...]:
    inside = [n for n in factors if n <= node]
    if not inside:
        return tuple(factors)
    rest = list(factors)
    rest.remove(inside[0])  # factors descend
    return (*rest, inside[0])


def plan_network(
    name: str,
    tensors: Sequence[Tensor],
    rows: Sequence[Bound],
    updates: Sequence[tuple[str, str]],
    outputs: Sequence[tuple[str, str]],
    grids: Sequence[Grid],
    machine: Machine,
    dtype: str,
    memory_bytes: int | None = None,
) -> NetworkPlan:
    """The best layout over these grids.

    Args:
        grids: all of the same number of ranks.
        memory_bytes: of a rank; by default no bound.
    Raises:
        InputError: no layout takes so little.
    """

    def search(grid: Grid, effort: Effort) -> Found:
        return Search(name, tensors, rows, updates, outputs, grid, machine, dtype, effort, memory_bytes).run()

    scouted: list[tuple[Grid, int]] = []
    refused: InputError | None = None
    for grid in grids if len(grids) > 1 else ():
        try:
            scouted.append((grid, search(grid, SCOUT).time_ps))
        except InputError as error:  # with few candidates it does not fit
            refused = error
    if refused is not None and not scouted:
        raise refused
    best = min(scouted, key=lambda pair: pair[1])[0] if scouted else grids[0]
    found = search(best, Effort())
    tried = tuple((grid, ps / PICOSECONDS) for grid, ps in scouted)
    second = {i: (way, more / PICOSECONDS) for i, (way, more) in found.runner_up.items()}
    return NetworkPlan(found.program, found.time_ps / PICOSECONDS, found.memory_bytes, tried, second)
