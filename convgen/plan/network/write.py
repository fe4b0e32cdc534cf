"""A plan as a YAML file: each layer as a layer file would say it, so that `convgen compile plan.yaml` takes it.

Nodes that are no convolutions have no modules yet; what they read and how their output is stored stands under `others`
where they redistribute anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convgen.algebra.conv import PHASES
from convgen.plan.network.conv_node import Option
from convgen.plan.network.planner import NodePlan, Plan
from convgen.plan.network.splits import Split
from convgen.spec.build import layer_from_dict
from convgen.spec.layer import Layer
from convgen.spec.write import convolution_data


def plan_yaml(plan: Plan, command: str) -> str:
    """The file's text.

    Args:
        command: that made the plan, for the header.
    """
    machine = plan.setting.machine.name
    lines = [
        f"# {command}",
        f"# {plan.seconds * 1e3:.3f} ms a step of {plan.network.batch} samples, modelled; machine {machine}",
        f"plan: {_flow(plan.network.name)}",
        f"memory_bytes: {plan.memory_bytes}",
        "layers:",
    ]
    for node in plan.nodes:
        if node.option is not None:
            lines += _block(layer_data(plan, node, node.option))
    others = [n for n in plan.nodes if n.redistributes and n.option is None]
    lines.append("others:" if others else "others: []")
    for node in others:
        reads = ", ".join(
            f"{_flow(n)}: {_flow(_entries(s))}" for n, s in zip(node.node.inputs, node.reads, strict=True)
        )
        stored = "" if node.stored is None else f", stored: {_flow(_entries(node.stored))}"
        lines.append(f"  - {{name: {_flow(node.node.name)}, kind: {node.node.kind}, reads: {{{reads}}}{stored}}}")
    return "\n".join(lines) + "\n"


def planned_layer(plan: Plan, node: NodePlan, option: Option) -> Layer:
    """A convolution or linear layer as the compiler takes it."""
    return layer_from_dict(layer_data(plan, node, option))


def layer_data(plan: Plan, node: NodePlan, option: Option) -> dict[str, Any]:
    """The keys of a layer file."""
    conv = node.node.conv
    assert conv is not None and node.stored is not None
    one = plan.graph.convs[node.node.name]
    data = convolution_data(node.node.name, conv) | {
        "dtype": plan.network.dtype,
        "target": plan.setting.target.text,
        "grid": dict(plan.grid.axes),
        "distribution": {
            "x": _entries(one.layout("x", node.reads[0]).axes),
            "w": _entries(option.w.axes),
            "y": _entries(one.layout("y", node.stored).axes),
        },
        "roles": {
            phase: {a: role for role, axes in roles.nests for a in axes}
            for phase, roles in zip(PHASES, option.roles, strict=True)
        },
    }
    plain = {"stride": 1, "padding": [0, 0], "dilation": 1}
    for key, value in plain.items():
        if all(v == value for v in data[key]):
            del data[key]
    for key, value in (("groups", 1), ("bias", False), ("dtype", "float32"), ("target", "cpu")):
        if data[key] == value:
            del data[key]
    if not option.hold_gathered:
        data["options"] = {"hold_x": "stored"}
    return data


def _entries(split: Split) -> list[str | list[str]]:
    return ["*" if not axes else axes[0] if len(axes) == 1 else list(axes) for axes in split]


def _block(data: Mapping[str, Any]) -> list[str]:
    """A layer as a list entry, a key a line, values in one line each."""
    lines: list[str] = []
    for key, value in data.items():
        if key in ("distribution", "roles"):
            lines.append(f"    {key}:")
            lines += [f"      {name}: {_flow(inner)}" for name, inner in value.items()]
        else:
            lines.append(f"    {key}: {_flow(value)}")
    lines[0] = "  - " + lines[0].lstrip()
    return lines


def _flow(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case dict():
            items: dict[str, Any] = dict(value)  # type: ignore[arg-type]
            return "{" + ", ".join(f"{_flow(k)}: {_flow(v)}" for k, v in items.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(_flow(v) for v in list(value)) + "]"  # type: ignore[arg-type]
        case str() if value == "*" or value.lower() in ("true", "false", "null"):  # no text in YAML without quotes
            return f'"{value}"'
        case _:
            return str(value)
