"""A network's plan, as text: what it takes, and where each product's axes went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from convgen.algebra.notation import roles_text
from convgen.cost.machine import Machine
from convgen.cost.moving import PICOSECONDS
from convgen.cost.rows import program_cost
from convgen.explain.memory import memory_json, memory_line
from convgen.network_compiler import CompiledNetwork, on_one_rank, sample_parallelism
from convgen.plan.fewer import IDLE, idle_line
from convgen.plan.program.candidates import is_product
from convgen.plan.program.ranks import NetworkPlan
from convgen.program.network import label
from convgen.spec.network_plan import entries


def planned_text(compiled: CompiledNetwork, found: NetworkPlan, machine: Machine) -> str:
    """A line a convolution or linear layer, then sums, then the other grids."""
    data = planned_json(compiled, found, machine)
    lines = [
        f"{data['network']} on {found.program.grid}, {compiled.graph.batch} samples, machine {machine.name}",
        f"{'layer':32} {'roles':22} {'stored':22} {'ranks':>5} {'compute ms':>10} {'move ms':>9}  runner-up",
    ]
    for row in data["rows"]:
        second = row["runner_up"]
        after = f"  {second['roles']} +{second['more_ms']:.3f} ms" if second is not None else ""
        lines.append(
            f"{row['makes'][:32]:32} {row['roles']:22} {row['stored']:22} {row['working_ranks']:5} "
            f"{row['compute_ms']:10.3f} {row['move_ms']:9.3f}{after}"
        )
    lines.append(f"{'everything else':84} {data['others']['compute_ms']:10.3f} {data['others']['move_ms']:9.3f}")
    lines.append(f"a step of training: {data['milliseconds']:.3f} ms modelled, one step after the other")
    lines += _compared(data)
    if IDLE in found.program.grid.sizes:
        lines.append(f"  {idle_line(found.program.grid)}")
    lines.append(memory_line(data["memory"], found.states))
    if found.program.again:
        lines.append(f"  computed again in backward: {', '.join(s.path for s in found.program.again)}")
    lines += [f"  scouted {grid}: {seconds * 1e3:.3f} ms with few candidates" for grid, seconds in found.tried]
    return "\n".join(lines)


def _compared(data: Mapping[str, Any]) -> Iterator[str]:
    """What one rank would take, and samples alone."""
    took = data["milliseconds"]
    one, samples = data["one_rank_milliseconds"], data["sample_milliseconds"]
    yield f"  on one rank: {one:.3f} ms, {one / took:.2f} times as long"
    ranks = prod(data["grid"].values())
    if samples is None:
        yield f"  by samples alone: can't be, {data['batch']} samples are fewer than {ranks} ranks"
    else:
        yield f"  by samples alone (N={ranks}): {samples:.3f} ms, {samples / took:.2f} times as long"
    if (paths := data["heuristic_milliseconds"]) is not None:
        yield f"  by longest paths one after the other: {paths:.3f} ms, {100 * (paths / took - 1):.2f} % more"


def _runner_up(found: NetworkPlan, i: int) -> dict[str, Any] | None:
    if i not in found.runner_up:
        return None
    (_, roles), more_s = found.runner_up[i]
    return {"roles": roles_text(roles) or "none", "more_ms": 1e3 * more_s}


def planned_json(compiled: CompiledNetwork, found: NetworkPlan, machine: Machine) -> dict[str, Any]:
    """The same as plain data."""
    program = found.program
    cost = program_cost(program, machine, compiled.dtype)
    rows: list[dict[str, Any]] = []
    others = [0, 0]
    for i, (row, (computing, moving)) in enumerate(zip(program.rows, cost.rows, strict=True)):
        if not is_product(row.bound.operation):
            others[0] += computing
            others[1] += moving
            continue
        rows.append(
            {
                "makes": label(row),
                "module": row.bound.module,
                "roles": roles_text(row.roles) or "none",
                "working_ranks": prod(program.grid.sizes[a] for _, axes in row.roles for a in axes),
                "stored": entries(program.values[row.bound.makes[0]].stored),
                "compute_ms": 1e3 * computing / PICOSECONDS,
                "move_ms": 1e3 * moving / PICOSECONDS,
                "runner_up": _runner_up(found, i),
            }
        )
    return {
        "network": program.name,
        "grid": dict(program.grid.axes),
        "batch": compiled.graph.batch,
        "machine": machine.name,
        "milliseconds": found.seconds * 1e3,
        "one_rank_milliseconds": 1e3 * program_cost(on_one_rank(compiled), machine, compiled.dtype).seconds,
        "sample_milliseconds": None
        if (samples := sample_parallelism(compiled)) is None
        else 1e3 * program_cost(samples, machine, compiled.dtype).seconds,
        "heuristic_milliseconds": None if found.heuristic is None else found.heuristic() * 1e3 / PICOSECONDS,
        "memory_bytes": found.memory_bytes,
        "again": [s.path for s in found.program.again],
        "memory": memory_json(found.program, found.states),
        "rows": rows,
        "others": {"compute_ms": 1e3 * others[0] / PICOSECONDS, "move_ms": 1e3 * others[1] / PICOSECONDS},
        "tried": [{"grid": dict(g.axes), "milliseconds": s * 1e3} for g, s in found.tried],
    }
