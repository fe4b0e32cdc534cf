"""A network's plan, as text: what it takes, and where each product's axes went."""

from __future__ import annotations

from typing import Any

from convgen.cost.machine import Machine
from convgen.cost.moving import PICOSECONDS
from convgen.cost.rows import program_cost
from convgen.explain.memory import memory_json, memory_line
from convgen.network_compiler import CompiledNetwork
from convgen.plan.program.candidates import is_product
from convgen.plan.program.ranks import NetworkPlan
from convgen.program.network import label
from convgen.spec.network_plan import entries, roles_text


def planned_text(compiled: CompiledNetwork, found: NetworkPlan, machine: Machine) -> str:
    """A line a convolution or linear layer, then sums, then the other grids."""
    data = planned_json(compiled, found, machine)
    lines = [
        f"{data['network']} on {found.program.grid}, {compiled.graph.batch} samples, machine {machine.name}",
        f"{'layer':32} {'roles':22} {'stored':22} {'compute ms':>10} {'move ms':>9}",
    ]
    lines += [
        f"{row['makes'][:32]:32} {row['roles']:22} {row['stored']:22} {row['compute_ms']:10.3f} {row['move_ms']:9.3f}"
        for row in data["rows"]
    ]
    lines.append(f"{'everything else':78} {data['others']['compute_ms']:10.3f} {data['others']['move_ms']:9.3f}")
    lines.append(f"a step of training: {data['milliseconds']:.3f} ms modelled, one step after the other")
    lines.append(memory_line(found.program))
    lines += [f"  scouted {grid}: {seconds * 1e3:.3f} ms with few candidates" for grid, seconds in found.tried]
    return "\n".join(lines)


def planned_json(compiled: CompiledNetwork, found: NetworkPlan, machine: Machine) -> dict[str, Any]:
    """The same as plain data."""
    program = found.program
    cost = program_cost(program, machine, compiled.dtype)
    rows: list[dict[str, Any]] = []
    others = [0, 0]
    for row, (computing, moving) in zip(program.rows, cost.rows, strict=True):
        if not is_product(row.bound.operation):
            others[0] += computing
            others[1] += moving
            continue
        rows.append(
            {
                "makes": label(row),
                "module": row.bound.module,
                "roles": roles_text(row.roles) or "none",
                "stored": entries(program.values[row.bound.makes[0]].stored),
                "compute_ms": 1e3 * computing / PICOSECONDS,
                "move_ms": 1e3 * moving / PICOSECONDS,
            }
        )
    return {
        "network": program.name,
        "grid": dict(program.grid.axes),
        "batch": compiled.graph.batch,
        "machine": machine.name,
        "milliseconds": found.seconds * 1e3,
        "memory_bytes": found.memory_bytes,
        "memory": memory_json(found.program),
        "rows": rows,
        "others": {"compute_ms": 1e3 * others[0] / PICOSECONDS, "move_ms": 1e3 * others[1] / PICOSECONDS},
        "tried": [{"grid": dict(g.axes), "milliseconds": s * 1e3} for g, s in found.tried],
    }
