"""A plan whose step is shortest with communication overlapped, not with one step after the other.

The search (search.py) adds up seconds, and hidden communication is no sum. So it searches again, on the grid of the
best plan, as if links were faster, and as if sums of parameters' gradients took no time: that finds layouts that move
more and compute less. The latter is tried on other numbers of ranks, too. The timeline (overlapped.py) then times each
layout's step on the machine as it is. The shortest wins, and layouts near it are timed, too. Its step is never longer
than that of the plan by sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from convgen.algebra.grid import Grid
from convgen.cost.machine import Machine
from convgen.cost.rows import program_cost
from convgen.cost.timeline import simulate
from convgen.plan.fewer import NOISE, without_idle
from convgen.plan.program.overlapped import overlapped
from convgen.plan.program.ranks import FEW, NetworkPlan, StepSeconds
from convgen.program.network import Program

AROUND = 1.25  # times the shortest step: up to here plans of networks of few rows are improved, too
HIDDEN = (2.0, 4.0)  # links so many times as fast: half, and three quarters, of what moves costs nothing
SHORTER = 0.9995  # of the step by sums: a plan whose step is no shorter than this does not replace it


def by_timeline(
    plan: NetworkPlan,
    search: Callable[[Grid, Machine], NetworkPlan],
    near: Callable[[NetworkPlan], NetworkPlan],
    roughly: Callable[[Grid, Machine], float],
    machine: Machine,
    dtype: str,
) -> NetworkPlan:
    """The plan with the shortest step: of this one, those found for other machines, those of other numbers of ranks
    that were looked at, those beside it, which split samples alone and hide their gradients' sums behind all of
    backward, and those near the best of them.

    Args:
        search: plans for a machine, on a grid.
        near: a plan near another, whose step is no longer by a quick count.
        roughly: seconds of a plan that is found with little effort, infinite where there is none.
    """
    by_sums = overlapped_s(plan.program, machine, dtype)
    found = [(by_sums, plan)]

    def look(others: Iterable[NetworkPlan]) -> None:
        for other in others:
            if all(other.program != one.program for _, one in found):
                found.append((overlapped_s(other.program, machine, dtype), other))

    grid, hiding = without_idle(plan.program.grid), replace(machine, hides_gradients=True)
    look(search(grid, other) for other in (*[with_links(machine, times) for times in HIDDEN], hiding))
    look(plan.beside)
    here = len(found)
    least = min(seconds for seconds, _ in found)
    look(search(other, hiding) for other in plan.elsewhere if roughly(other, hiding) <= NOISE * least)
    least, around = min(seconds for seconds, _ in found), AROUND if len(plan.program.rows) <= FEW else 1.0
    likely = [one for n, (seconds, one) in enumerate(found) if seconds <= (around if n < here else 1.0) * least]
    look(near(one) for one in likely)
    seconds, best = min(found, key=lambda pair: pair[0])
    if seconds >= SHORTER * by_sums:
        seconds, best = by_sums, plan
    if best is not plan:  # runners-up and the heuristic are of other machines
        own = program_cost(best.program, machine, dtype).seconds
        best = replace(best, seconds=own, tried=plan.tried, runner_up={}, heuristic=None)
    return replace(best, step=StepSeconds(seconds, by_sums))


def overlapped_s(program: Program, machine: Machine, dtype: str) -> float:
    """Seconds of a step with communication overlapped."""
    return simulate(overlapped(program, machine, dtype), machine, dtype, alike=True).end_s


def with_links(machine: Machine, times: float) -> Machine:
    """The machine with links so many times as fast, latencies included."""
    levels = tuple(
        replace(
            level,
            latency_s=level.latency_s / times,
            bytes_per_s=level.bytes_per_s * times,
            shared_bytes_per_s=None if level.shared_bytes_per_s is None else level.shared_bytes_per_s * times,
        )
        for level in machine.levels
    )
    return replace(machine, levels=levels, steps=machine.steps.faster(times))
