"""A plan that takes no more memory than there is: what a rank holds as counted row by row, not as the search bounds it.

The search bounds memory by a sum over rows and values, which it can minimise under; the count walks forward and
backward (cost/network_memory.py). The fastest plan of all is taken if it fits; else the bound is lowered in proportion
and searched again. Where blocks may be computed again, those that save most bytes a second are, until it fits; of a
plan that fits so and one that fits without, the faster is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from convgen.cost.every_output import every_output
from convgen.cost.machine import Machine
from convgen.cost.network_memory import MemoryWalk, fullest
from convgen.cost.rows import price_on, row_cost
from convgen.plan.parts import Room
from convgen.plan.program.search import Found, TooLittleMemory
from convgen.program.again import stretches
from convgen.program.network import Stretch, asked

TRIES = 5  # searches under lower and lower bounds
MARGIN = 0.98  # of a bound that is lowered in proportion, so that the next plan rather fits


@dataclass(frozen=True)
class Fitted:
    """A plan and the bytes that its fullest rank holds at most; how they were counted, row by row."""

    found: Found
    peak: int
    walk: MemoryWalk | None = None


def fitted(
    search: Callable[[int | None], Found], room: Room, machine: Machine, dtype: str, *, recompute: bool
) -> Fitted:
    """The fastest plan found that fits.

    Args:
        search: the best plan under a bound of the search's own count.
        recompute: whether blocks may be computed again in backward.
    Raises:
        TooLittleMemory: no plan found fits.
    """
    if room.keep == "every":
        return _exactly(search, room)
    budget, tried = room.memory_bytes, list[Fitted]()
    bound = lowest = None
    for _ in range(TRIES):
        try:
            found = search(bound)
        except TooLittleMemory as error:
            lowest = error.least  # of the search's own count: below it there is nothing
            found = search(lowest)
        tried.append(_walked(found, room.states))
        if budget is None or tried[-1].peak <= budget or lowest is not None:
            break
        bound = int(found.memory_bytes * budget / tried[-1].peak * MARGIN)
    if budget is None or tried[0].peak <= budget:
        return tried[0]
    if recompute:
        tried += [again for one in tried for again in _recomputed(one, budget, room.states, machine, dtype)]
    fits = [one for one in tried if one.peak <= budget]
    if not fits:
        least = min(tried, key=lambda one: one.peak)
        program = least.found.program
        raise TooLittleMemory(program.name, program.grid, least.peak, budget, program)
    return min(fits, key=lambda one: one.found.time_ps)


def _exactly(search: Callable[[int | None], Found], room: Room) -> Fitted:
    """The fastest plan that fits by the search's own count, which is the one wanted (`keep: every`)."""
    found, budget = search(None), room.memory_bytes
    if budget is not None and found.memory_bytes > budget:
        found = search(budget)
    return Fitted(found, found.memory_bytes)


def _recomputed(one: Fitted, budget: int, states: int, machine: Machine, dtype: str) -> Iterator[Fitted]:
    """The same layout with blocks computed again, until it fits or there are none left."""
    program, price = one.found.program, price_on(one.found.program.grid, machine, dtype)
    walk, wanted = one.walk or fullest(program, states), program.differentiable(of_inputs=False)
    takes: dict[Stretch, int] = {}
    for s in stretches(program):
        rows = [(program.rows[i], program.row_types[i], program.biased[i]) for i in range(s.start, s.stop)]
        twice = (row_cost(row, price, types, asked(row.bound, wanted), bias, again=True) for row, types, bias in rows)
        once = (row_cost(row, price, types, asked(row.bound, wanted), bias) for row, types, bias in rows)
        takes[s] = sum(map(sum, twice)) - sum(map(sum, once))
    chosen: tuple[Stretch, ...] = ()
    peak = one.peak
    while peak > budget and len(chosen) < len(takes):
        saves = {s: peak - walk.memory((*chosen, s)).peak for s in takes if s not in chosen}
        held = {s: walk.saved_by(s) for s in saves}
        best = max(saves, key=lambda s: (max(saves[s], 0) / takes[s], held[s] / takes[s]))
        chosen, peak = (*chosen, best), walk.memory((*chosen, best)).peak
    for s in sorted(chosen, key=lambda s: -takes[s]):  # drop blocks that later ones have made needless
        fewer = tuple(c for c in chosen if c != s)
        if walk.memory(fewer).peak <= budget:
            chosen, peak = fewer, walk.memory(fewer).peak
    if chosen:
        again = replace(program, again=tuple(sorted(chosen, key=lambda s: s.start)))
        time_ps = one.found.time_ps + sum(takes[s] for s in chosen)
        # The fullest rank may be another one than before.
        yield _walked(replace(one.found, program=again, time_ps=time_ps, runner_up={}, heuristic=None), states)


def counted(found: Found, room: Room) -> Fitted:
    """A program with the bytes that its fullest rank holds, counted as the room says."""
    if room.keep == "needed":
        return _walked(found, room.states)
    return Fitted(found, sum(one.bytes for one in every_output(found.program, room.parameter_bytes)))


def _walked(found: Found, states: int) -> Fitted:
    walk = fullest(found.program, states)
    return Fitted(found, walk.memory().peak, walk)
