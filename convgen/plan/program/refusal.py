"""Nothing fits the memory: the least that there is, what takes most of it, and what would do, tried out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from convgen.algebra.grid import Grid
from convgen.cost.every_output import every_output
from convgen.cost.machine import Machine
from convgen.cost.network_memory import network_memory
from convgen.errors import InputError, Note
from convgen.plan.parts import Parts, Room
from convgen.plan.program.ranks import SCOUT, grids_of
from convgen.plan.program.search import Effort, Search, TooLittleMemory
from convgen.program.network import Program
from convgen.spec.placement import MAX_RANKS
from convgen.spec.text import gib, number_of

GIB = 1 << 30
LARGEST = 3  # layers that are named


def refusal(
    error: TooLittleMemory, parts: Parts, ranks: int, batch: int, machine: Machine, dtype: str, room: Room
) -> InputError:
    """What a plan says that fits nowhere.

    Args:
        error: of the search that came nearest.
    """
    budget = error.given
    program = Search(parts, error.grid, machine, dtype, Effort(), replace(room, memory_bytes=error.least)).run().program
    fact = (
        f"{parts.name} with {number_of(batch, 'sample')} on {number_of(ranks, 'rank')} needs at least "
        f"{gib(error.least)} GiB a rank, {gib(budget)} are given"
    )
    ways = [f"--memory {error.least / GIB + 0.0005:.3f}"]
    if room.keep == "every" and network_memory(program, room.states).peak <= budget:
        ways.append("--keep needed")
    ways += _ways(parts, error.grid, ranks, machine, dtype, replace(room, memory_bytes=budget))
    hint = ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])} or {ways[-1]}"
    return InputError(fact, (), tuple(_largest(program, room)), hint)


def _largest(program: Program, room: Room) -> Iterator[Note]:
    taken = Counter[str]()
    for one in every_output(program, room.parameter_bytes):
        if one.row is not None:
            taken[program.rows[one.row].bound.module] += one.bytes
    for module, count in taken.most_common(LARGEST):
        yield Note("layer", f"{module} takes {gib(count, 2)} GiB a rank")


def _ways(parts: Parts, grid: Grid, ranks: int, machine: Machine, dtype: str, room: Room) -> Iterator[str]:
    """Options and ranks with which plans of few candidates fit."""

    def fits(grid: Grid, room: Room) -> bool:
        try:
            Search(parts, grid, machine, dtype, SCOUT, room).run()
        except TooLittleMemory:
            return False
        return True

    if not room.regather and fits(grid, replace(room, regather=True)):
        yield "--regather"
    for times in (2, 4, 8, 16):
        if ranks * times <= MAX_RANKS and fits(grids_of(ranks * times, machine)[-1], room):
            yield f"--ranks {ranks * times}"
            return
