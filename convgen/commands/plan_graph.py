"""`convgen plan` of a network from PyTorch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convgen.commands.inputs import need
from convgen.commands.outputs import telling
from convgen.errors import InputError
from convgen.files import keep_input, write_file
from convgen.pictures.scaling import Point, Scaling, draw_scaling

GIB = 1 << 30
HINTS = {
    "keep": "without --keep: what a graph's program keeps for backward is counted",
    "batch_norm": "--statistics global, spatial or local",
}
if TYPE_CHECKING:
    from convgen.algebra.grid import Grid
    from convgen.cost.machine import Machine
    from convgen.network_compiler import CompiledNetwork
    from convgen.spec.graph import Graph


def plan_graph_file(
    file: str,
    machine: str,
    ranks: int,
    grid: Grid | None,
    batch: int | None,
    memory: float | None,
    statistics: str,
    recompute: bool,
    output: Path | None,
    as_json: bool,
    explain: str | None,
    plot: Path | None,
    overlapped: bool,
    optimizer_states: int,
    others: Mapping[str, Any],
) -> None:
    """Choose the layout of every value and row for the least modelled seconds of a training step.

    Args:
        memory: GiB that a rank may take.
        statistics: of batch norms.
        overlapped: steps are compared with what travels meanwhile.
        recompute: whether blocks may be computed again in backward.
        optimizer_states: values a parameter that the optimizer keeps.
        others: options that plans of hand-written networks have; refused where they are given.
    """
    for name, value in others.items():
        if value:
            flag = "--" + name.replace("_", "-")
            raise InputError(
                f"{flag} is of hand-written networks; {file} is a graph", hint=HINTS.get(name, f"without {flag}")
            )
    need("torch", "a network's operators are ATen's, which needs torch")
    from convgen.cost.machines import load_machine
    from convgen.explain.planned import planned_json, planned_text
    from convgen.explain.planned_row import explained_rows
    from convgen.network_compiler import plan_graph
    from convgen.plan.program.written import plan_of
    from convgen.spec.graph_file import read_graph
    from convgen.spec.network_plan import write_plan
    from convgen.spec.source import locate

    if output is not None:
        keep_input(output, file, "-o")
    graph = read_graph(file)
    if batch is not None:
        if not graph.is_dynamic and batch != graph.batch:
            raise InputError(
                f"--batch: {file} is of {graph.batch} samples, and no other number", hint="import it again"
            )
        graph = replace(graph, batch=batch)
    chosen = load_machine(machine)
    budget = None if memory is None else round(memory * GIB)
    try:
        with telling(ranks) as told:
            compiled, found = plan_graph(
                graph, ranks, chosen, grid, budget, statistics, recompute, told, overlapped, optimizer_states
            )
    except InputError as error:
        raise locate(error, graph.source_file) from None
    if explain is not None:
        click.echo(explained_rows(found.program, explain, chosen, compiled.dtype))
    elif as_json:
        click.echo(json.dumps(planned_json(compiled, found, chosen), indent=1))
    else:
        click.echo(planned_text(compiled, found, chosen))
        if found.step is not None:
            took, sums = (f"{seconds * 1e3:.3f} ms" for seconds in found.step)
            click.echo(f"with what travels meanwhile: {took}; the plan of the least sum: {sums}")
    if output is not None:
        beside = os.path.relpath(Path(file).absolute(), output.absolute().parent)
        plan = plan_of(compiled.program, Path(beside).as_posix(), chosen.name, found.seconds)
        size = f" --batch {batch}" * (batch is not None)
        size += (f" --memory {memory:g}" if memory is not None else "") + " --recompute" * recompute
        size += " --overlapped" * overlapped
        size += f" --optimizer-states {optimizer_states}" * (optimizer_states != 1)
        size += f" --statistics {statistics}" * (statistics != "global")
        head = (f"convgen plan {Path(file).name} --machine {machine} --ranks {ranks}{size}",)
        write_file(output, write_plan(plan, head), "-o")
    if plot is not None:
        draw_scaling(_scaling(graph, chosen, budget, statistics, recompute, optimizer_states), ranks, plot)
        click.echo(str(plot), err=True)


def _scaling(
    graph: Graph, machine: Machine, budget: int | None, statistics: str, recompute: bool, states: int
) -> Scaling:
    """Plans of the graph for numbers of ranks and samples; those that it can't have are left out."""
    from convgen.cost.rows import program_cost
    from convgen.network_compiler import plan_graph, sample_parallelism

    known: dict[tuple[int, int], CompiledNetwork] = {}

    def planned(ranks: int, batch: int) -> Point:
        if batch != graph.batch and not graph.is_dynamic:
            return Point(None)
        try:
            one = replace(graph, batch=batch)
            known[ranks, batch], found = plan_graph(
                one, ranks, machine, None, budget, statistics, recompute, optimizer_states=states
            )
        except InputError:
            return Point(None, fits=False)
        return Point(found.seconds)

    def sample(ranks: int, batch: int) -> Point:
        compiled = known.get((ranks, batch))
        program = sample_parallelism(compiled) if compiled is not None else None
        if compiled is None or program is None:
            return Point(None)
        return Point(program_cost(program, machine, compiled.dtype).seconds)

    return Scaling(graph.name, machine.name, graph.batch, planned, sample, budget)
