"""Layouts near a program's by annealing, where each likely one is timed as plans are (by_timeline.py).

A quick count of the step (step_ps.py) says whether annealing takes a layout. Those that it finds the shortest so far,
and a few others, are timed whole; the last layouts are a descent by these times alone. `convgen plan --layouts` asks
for it, and bench/adversary.py, which looks for what plans miss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from random import Random

from convgen.cost.machine import Machine
from convgen.cost.rows import program_cost
from convgen.plan.program.by_timeline import SHORTER, overlapped_s
from convgen.plan.program.nearby import Nearby, anneal
from convgen.plan.program.ranks import NetworkPlan, StepSeconds, frozen_in, in_room, widened, working
from convgen.program.network import Program

WARM = 2e-3  # of the start's seconds: how much worse a layout annealing takes at first
SURE = 3e-4  # of the quick count: a layout that is shorter by so much is timed
NEAR = 5e-3  # of the quick count: a layout that is longer by more is not timed in the descent
ROUND = 10_000  # layouts, after which annealing begins again from the best
TIMED = 0.05  # of all layouts: half of these are timed whatever the quick count says of them, half are the descent


@dataclass
class Annealed:
    """The shortest step found, in seconds, and its program; how many layouts were looked at, how many of them timed."""

    seconds: float
    program: Program
    looked: int = 0
    timed: int = 0


def annealed(
    program: Program,
    machine: Machine,
    dtype: str,
    layouts: int,
    draw: Random,
    frozen: Collection[str] = (),
    *,
    of_inputs: bool = False,
    fits: Callable[[Program], bool] = lambda _: True,
) -> Annealed:
    """The best of a program and of layouts near it.

    Args:
        layouts: how many are looked at in all.
        frozen: values whose storage stays.
        of_inputs: whether inputs want gradients, too.
        fits: says whether a program that is shorter may be taken.
    """
    found = Annealed(overlapped_s(program, machine, dtype), program)

    def near_of(start: Program) -> Nearby:
        return Nearby(start, machine, dtype, frozen, of_inputs=of_inputs, by_step=True)

    def is_shorter(near: Nearby) -> bool:
        found.timed += 1
        one = near.program
        if (seconds := overlapped_s(one, machine, dtype)) >= found.seconds or not fits(one):
            return False
        found.seconds, found.program = seconds, one
        return True

    last = round(layouts * TIMED / 2)
    near, every = near_of(program), max(round(2 / TIMED), 1)
    least = near.time_ps
    for number, _ in enumerate(anneal(near, layouts - last, draw, WARM)):
        if near.time_ps < (1 - SURE) * least or number % every == 0:
            least = min(least, near.time_ps)
            is_shorter(near)
    near = near_of(found.program)
    for _ in range(last):
        if (change := near.draw(draw)) is not None and change.more_ps < NEAR * near.time_ps:
            before = near.kept()
            near.take(change)
            if not is_shorter(near):
                near.go_back(before)
    found.looked = layouts
    return found


def further(plan: NetworkPlan, ranks: int, machine: Machine, dtype: str, layouts: int) -> NetworkPlan:
    """A plan that was chosen by its step, or one near it whose step is shorter and that its room has the memory for.

    Args:
        ranks: how many there are.
        layouts: how many are looked at, the same ones every time.
    """
    here = working(plan)
    if (frozen := frozen_in(here)) is None or here.parts is None or plan.step is None:
        return plan
    best = here.program

    def has_room(one: Program) -> bool:
        return here.room.memory_bytes is None or in_room(here, one) is not None

    for number in range(0, layouts, ROUND):
        draw, some = Random(f"{best.name} {number}"), min(ROUND, layouts - number)
        best = annealed(best, machine, dtype, some, draw, frozen, of_inputs=here.parts.of_inputs, fits=has_room).program
    if best is here.program or (fits := in_room(here, best)) is None:
        return plan
    seconds = program_cost(best, machine, dtype).seconds
    made = replace(here, program=best, seconds=seconds, memory_bytes=fits.peak, walk=fits.walk)
    made = widened(replace(made, runner_up={}, heuristic=None), ranks, machine, dtype)  # those are of another plan
    made = replace(made, step=StepSeconds(overlapped_s(made.program, machine, dtype), plan.step.by_sums))
    return made if made.step_s < SHORTER * plan.step_s else plan
