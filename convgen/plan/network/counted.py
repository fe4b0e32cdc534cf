"""A plan of all ranks, or of as many as pay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from convgen.algebra.grid import Grid
from convgen.cost.model import PICOSECONDS
from convgen.errors import InputError
from convgen.plan.fewer import on_fewer
from convgen.plan.network.planner import Plan, budget_of, plan_network, scouted_s
from convgen.plan.network.sample import planned_by_samples
from convgen.plan.network.setting import Setting
from convgen.spec.network import Network


def plan_counted(
    network: Network,
    setting: Setting,
    ranks: int,
    *,
    grid: Grid | None = None,
    budget_bytes: int | None = None,
    told: Callable[[int], None] = lambda _: None,
) -> Plan:
    """The best plan of these ranks; where it is faster, of a divisor of them, and copies over the others.

    Args:
        grid: this one only, all of it used.
        told: is called with each number of ranks that is planned.
    Raises:
        InputError: as of `plan_network`.
    """

    def planned(count: int) -> Plan:
        told(count)
        return plan_network(network, setting, count, grid=grid, budget_bytes=budget_bytes)

    def roughly(count: int) -> float:
        try:
            return scouted_s(network, setting, count, budget_of(setting, budget_bytes))
        except InputError:
            return float("inf")

    if grid is not None:
        return planned(ranks)
    floor = _floor(network, setting)
    count, plan = on_fewer(ranks, planned, lambda plan: plan.seconds, roughly, floor)
    return replace(plan, idle=ranks // count)


def _floor(network: Network, setting: Setting) -> Callable[[int], float]:
    """Seconds that no plan for so many ranks is below: the work of one rank shared evenly, and nothing sent."""

    @cache
    def of_one() -> tuple[float, float]:
        steps = [s for node in planned_by_samples(network, setting, 1).nodes for s in node.steps if not s.communicates]
        launches = len(steps) * setting.machine.launch_s
        return sum(s.cost.time_ps for s in steps) / PICOSECONDS - launches, launches

    def least(count: int) -> float:
        busy, launches = of_one()
        return busy / count + launches

    return least
