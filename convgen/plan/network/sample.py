"""Pure sample parallelism, to compare a plan with."""

from __future__ import annotations

from dataclasses import dataclass

from convgen.algebra.grid import Grid
from convgen.plan.network.bounded import solve
from convgen.plan.network.graph import build
from convgen.plan.network.overlapped import overlapped
from convgen.plan.network.planner import Plan
from convgen.plan.network.setting import Setting
from convgen.spec.network import Network
from convgen.spec.text import number_of


@dataclass(frozen=True)
class SampleParallelism:
    """Pure sample parallelism on as many ranks, or why it can't be.

    Attributes:
        seconds: of a step, one operation after the other; overlapped_s: with reductions of gradients behind backward's
            computation, None where the setting takes them as hidden.
    """

    seconds: float | None
    memory_bytes: int | None
    overlapped_s: float | None = None
    why_not: str = ""


def sample_parallelism(network: Network, setting: Setting, ranks: int) -> SampleParallelism:
    """The same network with samples split over all ranks and nothing else."""
    if ranks > network.batch:
        return SampleParallelism(None, None, why_not=f"{ranks} ranks, {number_of(network.batch, 'sample')}")
    plan = planned_by_samples(network, setting, ranks)
    behind = None if setting.hide_dw else overlapped(plan).seconds
    return SampleParallelism(plan.seconds, plan.memory_bytes, behind)


def planned_by_samples(network: Network, setting: Setting, ranks: int) -> Plan:
    """The plan that splits samples and nothing else, whatever memory it takes."""
    graph = build(network, Grid((("a", ranks),)), setting, roles={"a": "N" if ranks > 1 else ""})
    found = solve(graph.problem, None)
    return Plan(graph, found.values, found.cost, found.memory, None, "one choice")
