"""A program's layout made better: each product's ways one by one, then what is drawn nearby.

What is drawn is better as it is, or after the rows around it have found ways and storage that go with it (a hop).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

from convgen.cost.machine import Machine
from convgen.plan.program.nearby import Nearby, anneal
from convgen.plan.program.sweep import settle, sweep
from convgen.program.network import Program

MANY = 3  # changes that a hop takes, at most


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
    hops: int = 0,
) -> tuple[Program, int]:
    """The program, or a better one near it, and the sum of its picoseconds.

    Args:
        draws: layouts that are looked at in each round, the same ones every time.
        by_step: better is a shorter step with communication overlapped, not a smaller sum.
        warm: by round, each from the best so far, by what share of the start's picoseconds a worse layout may be taken
            at first (`anneal`); 0: only better ones are.
        hops: layouts, before these, that are drawn whatever they cost, and then made better row by row.
    """
    near, draw = Nearby(program, machine, dtype, frozen, of_inputs=of_inputs, by_step=by_step), Random(program.name)
    if not near.grid.axes or not near.rows:
        return program, near.in_order_ps
    sweep(near)
    best = near.kept()
    for _ in range(hops):
        _hop(near, draw)
        if near.time_ps < best.time_ps:
            best = near.kept()
        else:
            near.go_back(best)
    for heat in warm:
        for _ in anneal(near, draws, draw, heat):
            if near.time_ps < best.time_ps:
                best = near.kept()
        near.go_back(best)
    return near.program, near.in_order_ps


def _hop(near: Nearby, draw: Random) -> None:
    """Take one to three changes that are drawn, whatever they cost, and then what is better around them."""
    rows = set[int]()
    for _ in range(draw.randint(1, MANY)):
        if (change := near.draw(draw, far=True)) is not None:
            near.take(change)
            rows |= {*change.rows}
    settle(near, rows)
