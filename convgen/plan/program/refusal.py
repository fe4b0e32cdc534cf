"""Nothing fits the memory: the least that there is, what takes most of it, and what would do, tried out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from convgen.algebra.grid import Grid
from convgen.cost.every_output import every_output
from convgen.cost.network_memory import fullest, network_memory
from convgen.errors import InputError, Note
from convgen.plan.parts import Parts, Room
from convgen.plan.program.fitting import fitted
from convgen.plan.program.ranks import SCOUT, grids_of
from convgen.plan.program.search import Effort, Found, Search, TooLittleMemory
from convgen.plan.setting import Setting
from convgen.program.again import stretches
from convgen.program.network import Program
from convgen.spec.placement import MAX_RANKS
from convgen.spec.text import gib, number_of

GIB = 1 << 30
LARGEST = 3  # layers that are named


class TooLittleOnRanks(InputError):
    """Nothing that is searched fits the ranks' memory.

    Attributes:
        least_bytes: what a rank would need.
    """

    least_bytes: int = 0


def refusal(
    error: TooLittleMemory, parts: Parts, ranks: int, batch: int, setting: Setting, dtype: str
) -> TooLittleOnRanks:
    """The error of a network that fits on no grid.

    Args:
        error: the error of the search that came nearest.
    """
    budget, room = error.given, setting.bounded
    program = error.nearest
    if program is None:
        least = replace(room, memory_bytes=error.least)
        program = Search(parts, error.grid, setting.machine, dtype, Effort(), least).run().program
    found = "" if error.nearest is None else ", of the layouts found"
    fact = (
        f"{parts.name} with {number_of(batch, 'sample')} on {number_of(ranks, 'rank')} needs at least "
        f"{gib(error.least)} GiB a rank{found}, {gib(budget)} are given"
    )
    ways = [f"--memory {error.least / GIB + 0.0005:.3f}"]
    if room.keep == "every" and network_memory(program, room.states).peak <= budget:
        ways.append("--keep needed")
    ways += _ways(parts, error.grid, ranks, replace(setting, room=replace(room, memory_bytes=budget)), dtype, program)
    hint = ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])} or {ways[-1]}"
    refused = TooLittleOnRanks(fact, (), tuple(_largest(program, room)), hint)
    refused.least_bytes = error.least
    return refused


def _largest(program: Program, room: Room) -> Iterator[Note]:
    if room.keep == "every":
        kept = [(one.row, one.bytes) for one in every_output(program, room.parameter_bytes)]
    else:
        kept = [(row, count) for row, _, count in fullest(program, room.states).by_row()]
    taken = Counter[str]()
    for row, count in kept:
        if row is not None:
            taken[program.rows[row].bound.module] += count
    for module, count in taken.most_common(LARGEST):
        yield Note("layer", f"{module} takes {gib(count, 2)} GiB a rank")


def _ways(parts: Parts, grid: Grid, ranks: int, setting: Setting, dtype: str, program: Program) -> Iterator[str]:
    """Options and ranks with which plans of few candidates fit."""
    machine, room = setting.machine, setting.room

    def fits(grid: Grid, *, regather: bool = room.regather, recompute: bool = setting.recompute) -> bool:
        own = replace(room, regather=regather)

        def search(bound: int | None) -> Found:
            return Search(parts, grid, machine, dtype, SCOUT, replace(own, memory_bytes=bound)).run()

        try:
            fitted(search, own, machine, dtype, recompute=recompute)
        except TooLittleMemory:
            return False
        return True

    if room.keep == "needed" and not setting.recompute and stretches(program) and fits(grid, recompute=True):
        yield "--recompute"
    if not room.regather and fits(grid, regather=True):
        yield "--regather"
    for times in (2, 4, 8, 16):
        if ranks * times <= MAX_RANKS and fits(grids_of(ranks * times, machine)[-1]):
            yield f"--ranks {ranks * times}"
            return
