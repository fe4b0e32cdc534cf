"""A plan as text and as plain data: a row a layer, totals, comparisons, and the steps of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convgen.algebra.grid import Grid
from convgen.cost.model import PICOSECONDS
from convgen.errors import InputError
from convgen.plan.fewer import idle_line
from convgen.plan.network.overlapped import overlapped
from convgen.plan.network.planner import NodePlan, Plan, gib
from convgen.plan.network.sample import SampleParallelism
from convgen.plan.network.splits import Split, text
from convgen.spec.names import did_you_mean
from convgen.spec.network import Network
from convgen.spec.network_blocks import INPUT
from convgen.spec.text import number_of

MIB = 1 << 20
HEAD = ("layer", "x", "w", "y", "roles", "ranks", "compute", "comm.", "MB sent", "MiB", "runner-up")


def plan_text(plan: Plan, sample: SampleParallelism) -> str:
    """What `convgen plan` prints: a row for each layer, and for each other node that redistributes activations."""
    rows = [HEAD, *(_row(node, plan.grid) for node in plan.nodes if node.option is not None or node.redistributes)]
    return "\n".join([*_aligned(rows), "", *_summary(plan, sample)])


def _row(node: NodePlan, grid: Grid) -> tuple[str, ...]:
    x = "; ".join(f"[{text(s)}]" for s in dict.fromkeys(node.reads))
    y = f"[{text(node.stored)}]" if node.stored is not None else ""
    option = node.option
    held = "" if option is None or option.hold_gathered else ", x gathered again"
    return (
        node.node.name,
        x,
        "" if option is None else str(option.w).removeprefix("w"),
        y,
        f"({node.node.kind})" if option is None else option.roles_text() + held,
        f"{node.working(grid)}",
        _milliseconds(node.compute_s),
        _milliseconds(node.communication_s),
        f"{node.sent_bytes / 1e6:.2f}",
        f"{node.memory_bytes / MIB:.1f}",
        "" if node.runner_up is None else f"{node.runner_up[0]} +{_milliseconds(node.runner_up[1])}",
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns: text to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    numbers = range(5, 10)
    lines: list[str] = []
    for row in rows:
        cells = (c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join(cells).rstrip())
    return lines


def _summary(plan: Plan, sample: SampleParallelism) -> list[str]:
    network, nodes = plan.network, plan.nodes
    compute, moving = sum(n.compute_s for n in nodes), sum(n.communication_s for n in nodes)
    layers = sum(n.option is not None for n in nodes)
    machine = plan.setting.machine.name
    rest = [n for n in nodes if n.option is None]
    lines = [
        f"{network.name}: {number_of(layers, 'layer')}, {number_of(network.batch, 'sample')}, "
        f"{number_of(plan.grid.ranks, 'rank')} of {machine} as {plan.grid}",
        f"step    {_milliseconds(plan.seconds)}: compute {_milliseconds(compute)}, communication "
        f"{_milliseconds(moving)}; modelled, steps one after the other"
        + (", reductions of dw hidden" if plan.setting.hide_dw else ""),
        *_behind(plan, sample),
        f"others  {len(rest)} other nodes: compute {_milliseconds(sum(n.compute_s for n in rest))}, "
        f"communication {_milliseconds(sum(n.communication_s for n in rest))}",
        f"sent    {sum(n.sent_bytes for n in nodes) / 1e6:.2f} MB a rank",
        f"memory  {gib(plan.memory_bytes)} GiB on the fullest rank"
        + (f", of {gib(plan.budget_bytes)} that it may take" if plan.budget_bytes is not None else ""),
        f"sample  {_sample(plan, sample)}",
    ]
    if again := sum(plan.graph.recomputed(plan.values, n.node) for n in nodes):
        lines.append(f"again   {again} outputs are computed again in backward (--recompute)")
    if plan.free:
        gap = plan.heuristic_seconds / plan.seconds - 1
        lines.append(f"paths   longest-path heuristic {_milliseconds(plan.heuristic_seconds)}, {100 * gap:.2f} % more")
    if plan.idle > 1:
        lines.append(f"ranks   {idle_line(plan.grid)}")
    if plan.tried:
        found = (f"{_sizes(grid)} {'does not fit' if s is None else _milliseconds(s)}" for grid, s in plan.tried)
        lines.append(f"grids   {', '.join(found)}; searched with few candidates, the best then with all")
    lines.append(f"found   by {plan.how}: the least modelled seconds of all candidates on this grid")
    if plan.setting.measured is not None:
        lines.append(f"local   {_measured(plan)}")
    return lines


def _behind(plan: Plan, sample: SampleParallelism) -> list[str]:
    """The same plan with reductions of gradients behind computation; nothing where they are taken as hidden."""
    if plan.setting.hide_dw:
        return []
    found = overlapped(plan)
    hidden = (found.reductions_ps - found.exposed_ps) / PICOSECONDS
    beside = f"; sample parallelism then {_milliseconds(sample.overlapped_s)}" if sample.overlapped_s else ""
    return [
        f"overlap {_milliseconds(found.seconds)} with reductions of gradients behind backward's computation: "
        f"{_milliseconds(hidden)} of {_milliseconds(found.reductions_ps / PICOSECONDS)} hidden{beside}"
    ]


def _measured(plan: Plan) -> str:
    local = [s for n in plan.nodes for s in n.steps if s.kind.startswith("conv_")]
    count, machine = sum(s.cost.measured for s in local), plan.setting.machine
    peak = dict(machine.peak_flops)[plan.network.dtype]
    return (
        f"{count} of {number_of(len(local), 'local convolution')} measured on {plan.setting.measured_on}; the others "
        f"by the roofline at {machine.efficiency:.0%} of {peak / 1e9:.0f} GFLOP/s"
    )


def _sample(plan: Plan, sample: SampleParallelism) -> str:
    if sample.seconds is None or sample.memory_bytes is None:
        return f"parallelism alone can't be: {sample.why_not}"
    fits = plan.budget_bytes is None or sample.memory_bytes <= plan.budget_bytes
    return (
        f"parallelism alone {_milliseconds(sample.seconds)}, {sample.seconds / plan.seconds:.2f} times as long; "
        f"{gib(sample.memory_bytes)} GiB" + ("" if fits else ", which does not fit")
    )


def check_node(network: Network, name: str) -> None:
    """Whether there is such a node to explain.

    Raises:
        InputError: there is none.
    """
    names = [node.name for node in network.nodes if node.kind != "input"]
    if name == INPUT:
        fact = f"{network.name}'s input has no steps"
        raise InputError(fact, hint=f"{network.readers[INPUT][0].name}, which reads it")
    if name not in names:
        hint = did_you_mean(name, names, "a name of the table's first column, or any node of `convgen network`")
        raise InputError(f"{network.name} has no node {name}", hint=hint)


def explain_text(plan: Plan, name: str) -> str:
    """Every step of one node, down to collectives and local operations, and how they sum up to its row.

    Raises:
        InputError: the network has no such node.
    """
    check_node(plan.network, name)
    (node,) = (n for n in plan.nodes if n.node.name == name)
    lines = [f"{name}: {node.node.kind} on {plan.grid}"]
    for said, split in zip(node.node.inputs, node.reads, strict=True):
        lines.append(f"  reads   {said} [{text(split)}]")
    if node.stored is not None:
        lines.append(f"  stored  [{text(node.stored)}]")
    if node.option is not None:
        lines.append(f"  w       {node.option.w}")
        lines.append(f"  roles   {node.option.roles_text()}")
    lines.append(f"  {'phase':<16}{'step':<22}{'ms':>10}{'bytes':>13}{'flops':>15}  what")
    for step in node.steps:
        cost = step.cost
        lines.append(
            f"  {step.phase:<16}{step.kind:<22}{cost.seconds * 1e3:>10.4f}{cost.sent_bytes:>13}{cost.flops:>15}"
            f"  {step.what}"
        )
    total_s = node.compute_s + node.communication_s
    lines.append(
        f"  {'sum':<38}{total_s * 1e3:>10.4f}{node.sent_bytes:>13}{sum(s.cost.flops for s in node.steps):>15}  "
        f"compute {_milliseconds(node.compute_s)}, communication {_milliseconds(node.communication_s)}"
    )
    for what, count in memory_parts(plan, node):
        lines.append(f"  memory  {count:>13} bytes  {what}")
    if node.runner_up is not None:
        roles, more_s = node.runner_up
        lines.append(f"  next    {roles}: the whole plan would take {_milliseconds(more_s)} more")
    return "\n".join(lines)


def memory_parts(plan: Plan, node: NodePlan) -> list[tuple[str, int]]:
    """What a node's memory is made of, in bytes on the fullest rank."""
    parts: list[tuple[str, int]] = []
    graph = plan.graph
    if node.option is not None:
        conv = graph.convs[node.node.name]
        states = plan.setting.optimizer_states
        parts.append((f"w, its gradient and {states} optimizer states", conv.weight_bytes(node.option.w)))
        if node.stored is not None and conv.conv.bias:
            parts.append(("bias, its gradient and states", conv.bias_bytes(conv.layout("y", node.stored))))
        held = conv.held(conv.layout("x", node.reads[0]), node.option) * plan.network.element_bytes
        if held:
            parts.append(("x as gathered, held for backward", held))
    rest = node.memory_bytes - sum(count for _, count in parts)
    if rest:
        signals = ", error signals" if plan.setting.keep == "every" else ""
        parts.append((f"its output and what is made of it in place, as kept for backward{signals}", rest))
    return parts


def plan_json(plan: Plan, sample: SampleParallelism) -> dict[str, Any]:
    """The same numbers for programs."""
    return {
        "network": plan.network.name,
        "machine": plan.setting.machine.name,
        "ranks": plan.grid.ranks,
        "grid": dict(plan.grid.axes),
        "working_ranks": plan.graph.grid.ranks,
        "samples": plan.network.batch,
        "seconds": plan.seconds,
        "overlapped_seconds": None if plan.setting.hide_dw else overlapped(plan).seconds,
        "compute_seconds": sum(n.compute_s for n in plan.nodes),
        "communication_seconds": sum(n.communication_s for n in plan.nodes),
        "sent_bytes": sum(n.sent_bytes for n in plan.nodes),
        "memory_bytes": plan.memory_bytes,
        "input_memory_bytes": plan.input_memory_bytes,
        "memory_budget_bytes": plan.budget_bytes,
        "found_by": plan.how,
        "sample_parallelism": {
            "seconds": sample.seconds,
            "overlapped_seconds": sample.overlapped_s,
            "memory_bytes": sample.memory_bytes,
            "why_not": sample.why_not or None,
        },
        "heuristic_seconds": plan.heuristic_seconds if plan.free else None,
        "nodes": [_node_json(node, plan.grid) for node in plan.nodes],
    }


def _node_json(node: NodePlan, grid: Grid) -> dict[str, Any]:
    option = node.option
    return {
        "name": node.node.name,
        "kind": node.node.kind,
        "reads": [_entries(split) for split in node.reads],
        "stored": _entries(node.stored) if node.stored is not None else None,
        "w": [list(axes) for axes in option.w.axes] if option is not None else None,
        "roles": option.roles_text() if option is not None else None,
        "working_ranks": node.working(grid),
        "compute_seconds": node.compute_s,
        "communication_seconds": node.communication_s,
        "sent_bytes": node.sent_bytes,
        "memory_bytes": node.memory_bytes,
        "runner_up": dict(zip(("roles", "more_seconds"), node.runner_up or (), strict=False)) or None,
        "steps": [
            {
                "phase": s.phase,
                "kind": s.kind,
                "what": s.what,
                "seconds": s.cost.seconds,
                "sent_bytes": s.cost.sent_bytes,
                "flops": s.cost.flops,
            }
            for s in node.steps
        ],
    }


def _entries(split: Split) -> list[list[str]]:
    return [list(axes) for axes in split]


def _sizes(grid: Grid) -> str:
    return "x".join(str(size) for _, size in grid.axes)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
