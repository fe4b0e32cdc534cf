"""A program's layout made better: each product's ways one by one, then what is drawn nearby."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

from convgen.cost.machine import Machine
from convgen.plan.program.nearby import Nearby, anneal
from convgen.plan.program.sweep import sweep
from convgen.program.network import Program


def improved(
    program: Program,
    machine: Machine,
    dtype: str,
    draws: int,
    frozen: Collection[str] = (),
    *,
    of_inputs: bool = False,
    by_step: bool = False,
    warm: Sequence[float] = (0.0,),
) -> tuple[Program, int]:
    """The program, or a better one near it, and the sum of its picoseconds.

    Args:
        draws: layouts that are looked at in each round, the same ones every time.
        by_step: better is a shorter step with communication overlapped, not a smaller sum.
        warm: by round, each from the best so far, by what share of the start's picoseconds a worse layout may be taken
            at first (`anneal`); 0: only better ones are.
    """
    near, draw = Nearby(program, machine, dtype, frozen, of_inputs=of_inputs, by_step=by_step), Random(program.name)
    if not near.grid.axes:
        return program, sum(map(sum, near.costs))
    sweep(near)
    least, best = near.time_ps, near.kept()
    for heat in warm:
        near.go_back(best)
        for _ in anneal(near, draws, draw, heat):
            if near.time_ps < least:
                least, best = near.time_ps, near.kept()
    near.go_back(best)
    return near.program, sum(map(sum, near.costs))
