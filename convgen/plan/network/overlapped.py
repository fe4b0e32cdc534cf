"""A plan's step with the reductions of gradients run behind backward's computation, as [SP] V-B has it."""

from __future__ import annotations

from collections.abc import Iterator

from convgen.cost.overlap import LayerTasks, NetworkTime, Overlap, Task, TaskKind, network_time
from convgen.plan.network.node_step import NodeStep
from convgen.plan.network.planner import NodePlan, Plan

REDUCED = ("dw", "db")  # what a step's text begins with


def overlapped(plan: Plan) -> NetworkTime:
    """One training step: nodes in the network's order, backward in reverse, one reduction at a time (cost/overlap.py).

    Halos are waited for. Gradients of scales and shifts are reduced behind as well where normalisation is local; with
    global statistics dx waits for the same sums.
    """
    local = plan.setting.statistics == "local"
    layers = [LayerTasks(tuple(_tasks(node, True, local)), tuple(_tasks(node, False, local))) for node in plan.nodes]
    return network_time(layers, Overlap("compute", halos=False))


def _tasks(node: NodePlan, forward: bool, local: bool) -> Iterator[Task]:
    steps = [s for s in node.steps if (s.phase == "forward") == forward and s.cost.time_ps]
    for step in sorted(steps, key=_place):
        yield Task(step.what, _kind(node, step, local), step.cost.time_ps)


def _kind(node: NodePlan, step: NodeStep, local: bool) -> TaskKind:
    if not step.communicates:
        return "compute"
    if step.phase == "forward":
        return "transfer"
    if node.node.kind == "batch_norm":
        return "reduce" if local else "transfer"
    return "reduce" if step.what.split(" ", 1)[0] in REDUCED else "transfer"


def _place(step: NodeStep) -> int:
    """In backward: conversions of what is read; dw and its reduction; dx and its conversions."""
    if step.phase not in ("backward_data", "backward_filter"):
        return 0
    read = step.what.split(" ", 1)[0] in ("x", "dy") if step.communicates else False
    return 0 if read else 1 if step.phase == "backward_filter" else 2
