"""A plan whose step is shortest with what travels meanwhile, not one step after the other.

The search (search.py) adds up seconds, and what is hidden is not a sum. So it searches again, on the grid of the best
plan, as if links were faster, and as if sums of parameters' gradients took nothing: layouts come up that move more and
compute less. Each layout gets what its own timeline takes (overlapped.py) on the machine as it is, the shortest step
wins, and what is near it is looked at by its step, too: never longer than that of the plan by sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from convgen.cost.machine import Machine
from convgen.cost.rows import program_cost
from convgen.cost.timeline import simulate
from convgen.plan.program.overlapped import overlapped
from convgen.plan.program.ranks import FEW, NetworkPlan, StepSeconds
from convgen.program.network import Program

AROUND = 1.25  # times the shortest step: what is near such plans is looked at, too, of networks of few rows
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
    by_sums = overlapped_s(plan.program, machine, dtype)
    found = [(by_sums, plan)]

    def look(others: Iterable[NetworkPlan]) -> None:
        for other in others:
            if all(other.program != one.program for _, one in found):
                found.append((overlapped_s(other.program, machine, dtype), other))

    machines = [with_links(machine, times) for times in HIDDEN] + [replace(machine, hides_gradients=True)]
    look(search(other) for other in machines)
    look(plan.beside)
    least = min(seconds for seconds, _ in found)
    likely = [one for seconds, one in found if seconds <= (AROUND if len(plan.program.rows) <= FEW else 1.0) * least]
    look(near(one) for one in likely)
    seconds, best = min(found, key=lambda pair: pair[0])
    if seconds >= SHORTER * by_sums:
        seconds, best = by_sums, plan
    if best is not plan:  # runners-up and the heuristic are of other machines
        own = program_cost(best.program, machine, dtype).seconds
        best = replace(best, seconds=own, tried=plan.tried, runner_up={}, heuristic=None)
    return replace(best, step=StepSeconds(seconds, by_sums))


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
