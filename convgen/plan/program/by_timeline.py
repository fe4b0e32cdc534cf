"""A plan whose step is shortest with what travels meanwhile, not one step after the other.

The search (search.py) adds up seconds, and what is hidden is not a sum. So it searches again, on the grid of the best
plan, as if links were faster, and as if sums of parameters' gradients took nothing: layouts come up that move more and
compute less. Each layout gets what its own timeline takes (overlapped.py) on the machine as it is, the shortest step
wins, and what is near it is looked at by its step, too: never longer than that of the plan by sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from convgen.cost.machine import Machine
from convgen.cost.rows import program_cost
from convgen.cost.timeline import simulate
from convgen.plan.program.overlapped import overlapped
from convgen.plan.program.ranks import NetworkPlan, StepSeconds
from convgen.program.network import Program

HIDDEN = (2.0, 4.0)  # links so many times as fast: half, and three quarters, of what moves costs nothing
SHORTER = 0.9995  # of a step: what is longer is alike


def by_timeline(
    plan: NetworkPlan,
    search: Callable[[Machine], NetworkPlan],
    near: Callable[[NetworkPlan], NetworkPlan],
    machine: Machine,
    dtype: str,
) -> NetworkPlan:
    """The best of a plan, of those that are found for other machines, and of samples alone where the plan has these
    beside it, whose sums travel behind all that is computed; or what is near that.

    Args:
        search: plans for a machine, on the plan's grid.
        near: a plan whose step is no longer by a quick count.
    """
    least = by_sums = overlapped_s(plan.program, machine, dtype)
    best = plan
    others = [with_links(machine, times) for times in HIDDEN] + [replace(machine, hides_gradients=True)]

    def found() -> Iterator[NetworkPlan]:
        yield from (search(other) for other in others)
        yield from plan.beside
        yield near(best)

    for other in found():
        if other.program in (plan.program, best.program):
            continue
        if (seconds := overlapped_s(other.program, machine, dtype)) < SHORTER * least:
            own = program_cost(other.program, machine, dtype).seconds
            # Runners-up and the heuristic are of other machines.
            best = replace(other, seconds=own, tried=plan.tried, runner_up={}, heuristic=None)
            least = seconds
    return replace(best, step=StepSeconds(least, by_sums))


def overlapped_s(program: Program, machine: Machine, dtype: str) -> float:
    """Of a step, with what travels meanwhile."""
    return simulate(overlapped(program, machine, dtype), machine, dtype, alike=True).end_s


def with_links(machine: Machine, times: float) -> Machine:
    """The same with faster links, latencies included."""
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
