"""Strong and weak scaling of a network's plans, beside samples split alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from convgen.cost.every_output import every_output
from convgen.cost.network_memory import network_memory
from convgen.cost.rows import program_cost
from convgen.errors import InputError
from convgen.network_compiler import CompiledNetwork, plan_graph, sample_parallelism
from convgen.pictures.scaling import Point, Scaling, draw_scaling
from convgen.plan.parts import Room
from convgen.plan.setting import Setting
from convgen.program.network import Program
from convgen.spec.graph import Graph


def plot_scaling(graph: Graph, setting: Setting, ranks: int, file: Path, told: Callable[[str], None]) -> None:
    """Draw a network's scaling; plans that it can't have are left out."""
    machine, room, in_order = setting.machine, setting.bounded, replace(setting, by_step=False, layouts=0)
    known: dict[tuple[int, int], CompiledNetwork] = {}

    def planned(ranks: int, batch: int) -> Point:
        if batch != graph.batch and not graph.is_dynamic:
            return Point(None)
        try:
            known[ranks, batch], found = plan_graph(replace(graph, batch=batch), ranks, in_order)
        except InputError:
            return Point(None, fits=False)
        return Point(found.seconds)

    def sample(ranks: int, batch: int) -> Point:
        compiled = known.get((ranks, batch))
        program = sample_parallelism(compiled, ranks) if compiled is not None else None
        if compiled is None or program is None:
            return Point(None)
        seconds = program_cost(program, machine, setting.dtype or compiled.dtype).seconds
        fits = room.memory_bytes is None or memory_bytes(program, room) <= room.memory_bytes
        return Point(seconds, fits=fits)

    of = Scaling(graph.name, machine.name, graph.batch, planned, sample, room.memory_bytes)
    draw_scaling(of, ranks, file, told)


def memory_bytes(program: Program, room: Room) -> int:
    """Bytes that a program takes on the fullest rank, counted as the room says."""
    if room.keep == "every":
        return sum(one.bytes for one in every_output(program, room.parameter_bytes))
    return network_memory(program, room.states).peak
