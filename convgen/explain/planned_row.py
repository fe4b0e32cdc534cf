"""The cost of one layer of a network's plan, step by step: what is moved and what is computed, forward and backward."""

from __future__ import annotations

from convgen.errors import InputError
from convgen.explain.planned import Planned
from convgen.program.network import label
from convgen.spec.graph import Graph
from convgen.spec.names import did_you_mean
from convgen.spec.network_plan import entries


def check_module(graph: Graph, name: str) -> None:
    """Check that a layer, value or module of the source has this name. Raises InputError: none has."""
    if name in (v.name for v in graph.inputs):
        raise InputError(f"{graph.name}'s {name} has no steps", hint="what reads it: see `convgen network`")
    known = (
        (call.module, call.module.rpartition(".")[2], *(r.name for r in call.results if r is not None))
        for call in graph.calls
    )
    names = dict.fromkeys(n for some in known for n in some if n)
    if name not in names:
        hint = did_you_mean(name, names, "a name of the table's first column, or a module of the source")
        raise InputError(f"{graph.name} has no {name}", hint=hint)


def explained_layers(plan: Planned, name: str) -> str:
    """The text of every step of the layers that make a value, or belong to a module, with sums.

    Raises:
        InputError: there is none.
    """
    check_module(plan.compiled.graph, name)
    lines: list[str] = []
    for one in plan.layers:
        if name not in (
            one.name,
            plan.name(one),
            *(v for row in one.rows for v in (label(row), *row.bound.makes, row.bound.module)),
        ):
            continue
        lines.append(f"{plan.name(one)}: {plan.kind(one)} on {plan.program.grid}")
        lines += [f"  reads   {value} {entries(stored)}" for value, stored in one.reads.items()]
        if one.stored is not None:
            lines.append(f"  stored  {entries(one.stored)}")
        if one.w is not None:
            lines.append(f"  w       {entries(one.w)}")
        if one.roles is not None:
            lines.append(f"  roles   {one.roles}")
        lines.append(f"  {'phase':<10}{'step':<24}{'ms':>10}{'bytes':>13}{'flops':>15}  what")
        for step in one.steps:
            lines.append(
                f"  {step.phase:<10}{step.kind:<24}{step.seconds * 1e3:>10.4f}{step.sent_bytes:>13}{step.flops:>15}"
                f"  {step.what}"
            )
        total_s = sum(s.seconds for s in one.steps)
        flops = sum(s.flops for s in one.steps)
        lines.append(f"  {'sum':<34}{total_s * 1e3:>10.4f}{one.sent_bytes:>13}{flops:>15}")
        lines += [f"  memory  {count:>13} bytes  {what}" for what, count in one.kept if count]
        if one.runner_up is not None:
            roles, more_s = one.runner_up
            lines.append(f"  next    {roles}: the whole plan would take {more_s * 1e3:.3f} ms more")
    return "\n".join(lines)
