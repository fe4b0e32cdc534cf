"""How far a plan is from the best, at most: lower bounds over layouts, found by the same search.

One step after the other the search is exact. With overlap it runs once more over the same candidates on the plan's
grid, whatever memory they take, at prices that no step is below (cost/relaxed.py): each choice of shares gives a bound,
and the largest counts. No layout on any grid of so many ranks, or fewer, is below what one rank as fast as all of them
together would compute, and launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from convgen.algebra.grid import Grid
from convgen.cost.machine import Machine
from convgen.cost.moving import PICOSECONDS
from convgen.cost.relaxed import Relaxed
from convgen.cost.rows import Price, price_on
from convgen.cost.timeline import local_seconds, price_of
from convgen.plan.fewer import without_idle
from convgen.plan.program.asking import answered
from convgen.plan.program.ranks import NetworkPlan
from convgen.plan.program.search import Search
from convgen.plan.program.tables import Answer, Question
from convgen.program.flow import Local, backward, forward
from convgen.program.network import Program
from convgen.spec.text import times_as

SHARES = ((1.0, 1.0), (1.0, 0.5), (0.5, 0.5))  # of computing, against moving, in forward and in backward (relaxed.py)


@dataclass(frozen=True)
class Bound:
    """Seconds of a plan's step, a lower bound over its grid's candidates, and one over any layout of its ranks.

    Attributes:
        anywhere_s: None where what ranks compute was measured, which says nothing of other blocks.
    """

    plan_s: float
    candidates_s: float
    anywhere_s: float | None

    @property
    def gap(self) -> float:
        """The plan's step is longer than that of the best candidate by at most this share of it."""
        return max(times_as(self.plan_s, self.candidates_s) - 1, 0.0)

    @property
    def gap_anywhere(self) -> float | None:
        """The same of any layout."""
        return None if self.anywhere_s is None else max(times_as(self.plan_s, self.anywhere_s) - 1, 0.0)


def bound(plan: NetworkPlan, machine: Machine, dtype: str) -> Bound | None:
    """Bounds; None where rows are given, blocks computed again, types those of autocast, or gradients' sums hidden."""
    parts = plan.parts
    if parts is None or parts.given or parts.autocast or plan.program.again or machine.hides_gradients:
        return None
    grid, room = without_idle(plan.program.grid), replace(plan.room, memory_bytes=None)
    if plan.step is None:
        least = Search(parts, grid, machine, dtype, room=room).time_ps()
        return Bound(plan.step_s, least / PICOSECONDS, anywhere_s(plan, machine, dtype))
    rank = busiest(plan.program, machine, dtype)
    tried = (Least(parts, grid, machine, dtype, room=room).below(rank, *shares) for shares in SHARES)
    return Bound(plan.step_s, max(tried) / PICOSECONDS, anywhere_s(plan, machine, dtype))


def busiest(program: Program, machine: Machine, dtype: str) -> int:
    """The rank that computes most."""
    price, total = price_on(program.grid, machine, dtype), np.zeros(program.grid.ranks)
    for step in (*forward(program), *backward(program)):
        if isinstance(step, Local):
            total = total + local_seconds(price_of(program, price, step), step)
    return int(total.argmax()) % without_idle(program.grid).ranks


def anywhere_s(plan: NetworkPlan, machine: Machine, dtype: str) -> float | None:
    """A lower bound, in seconds, over all layouts on as many ranks; None where the machine's numbers are measured."""
    if plan.parts is None or machine.probes or machine.steps or machine.timed is not None:
        return None
    times = plan.ranks or plan.program.grid.ranks
    one = replace(
        machine,
        peak_flops=tuple((kind, times * rate) for kind, rate in machine.peak_flops),
        memory_bytes_per_s=times * machine.memory_bytes_per_s,
    )
    room, copies = replace(plan.room, memory_bytes=None), {n: ((),) * len(s) for n, s in plan.parts.fixed.items()}
    return Search(plan.parts._replace(fixed=copies), Grid((("a", 1),)), one, dtype, room=room).time_ps() / PICOSECONDS


class Least(Search):
    """The same candidates, at prices that no step is below."""

    at: tuple[Price, Price]

    def below(self, rank: int, *shares: float) -> int:
        """Picoseconds that no step is below, with these shares of forward and backward."""
        first, second = (Relaxed(self.price, rank, share) for share in shares)
        self.at = first, second
        return self.time_ps()

    def _answer(self, question: Question, *, again: bool = False) -> Answer:
        return answered(question, *self.at)
