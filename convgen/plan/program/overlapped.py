"""What of a network's communication travels meanwhile: by the timeline, and only where that is faster.

Tried are buckets (one for all gradients, or of 1, 5 or 25 MiB), halos of rows where that saves more than pieces cost
(gradients with rows of their own in pieces too, or behind the other gradients of their row), and both.

Source: DESIGN section 12.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from convgen.cost.machine import Machine
from convgen.cost.rows import Price, price_on
from convgen.cost.timeline import local_seconds, moved_seconds, simulate
from convgen.passes.bucket_gradients import BucketGradients
from convgen.passes.start_halos import StartHalos
from convgen.program.flow import Flow, Local, Start, Wait, backward, forward
from convgen.program.network import Moved, Program, label

HALOS = (StartHalos(), StartHalos(gradients="whole"))
BUCKETS = (BucketGradients(0), BucketGradients(1), BucketGradients(5), BucketGradients(25))


def overlapped(program: Program, machine: Machine, dtype: str) -> Program:
    """The program whose step is modelled shortest; itself where nothing is shorter."""
    best, least = program, simulate(program, machine, dtype, alike=True).end_s
    for one in _candidates(program, machine, dtype):
        if (seconds := simulate(one, machine, dtype, alike=True).end_s) < least:
            best, least = one, seconds
    return best


def _candidates(program: Program, machine: Machine, dtype: str) -> Iterator[Program]:
    price = price_on(program.grid, machine, dtype)
    bases = [program]
    for how in HALOS:
        only = ",".join(sorted(worth_starting(program, how, price)))
        halos = replace(how, only=only).run(program) if only else program
        if halos not in bases:
            bases.append(halos)
            yield halos
    for base in bases:
        for one in BUCKETS:
            packed = one.run(base)
            if packed.buckets:
                yield packed


def worth_starting(program: Program, how: StartHalos, price: Price) -> set[str]:
    """Rows whose halos are hidden, by what is computed between their start and their wait, by more than pieces cost."""
    early = how.run(program)
    plain = _local(program, price)
    saved: dict[int, float] = {}
    for steps in (forward(early), backward(early)):
        flying: dict[str, tuple[Moved, float]] = {}
        for step in steps:
            match step:
                case Start():
                    flying[step.name] = step.moved[0], 0.0
                case Local():
                    least = float(local_seconds(price, step).min())
                    flying = {name: (m, behind + least) for name, (m, behind) in flying.items()}
                case Wait():
                    m, behind = flying.pop(step.name)
                    saved[m.row] = saved.get(m.row, 0.0) + min(moved_seconds(price, m), behind)
                case Moved():
                    pass
    pieces = _local(early, price)
    return {label(program.rows[i]) for i, seconds in saved.items() if seconds > pieces[i] - plain[i]}


def _local(program: Program, price: Price) -> dict[int, float]:
    """By row, seconds of its local work, forward and backward."""
    found: dict[int, float] = {}
    steps: list[Flow] = [*forward(program), *backward(program)]
    for step in steps:
        if isinstance(step, Local):
            found[step.row] = found.get(step.row, 0.0) + float(local_seconds(price, step).max())
    return found
