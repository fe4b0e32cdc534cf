"""What of a network's communication travels meanwhile: by the timeline, and only where that is faster.

| tried | is |
|---|---|
| buckets | one for all gradients, or of 1, 5 or 25 MiB |
| halos | rows whose interior takes longer than what a halo behind it saves costs: alone, or with buckets |

Source: DESIGN section 12.
"""

from __future__ import annotations

from collections.abc import Iterator

from convgen.cost.machine import Machine
from convgen.cost.rows import Price
from convgen.cost.timeline import local_seconds, moved_seconds, simulate
from convgen.passes.bucket_gradients import BucketGradients
from convgen.passes.start_halos import StartHalos
from convgen.program.flow import HALOS, Flow, Local, Start, backward, forward
from convgen.program.network import Program, label

BUCKETS = (BucketGradients(0), BucketGradients(1), BucketGradients(5), BucketGradients(25))


def overlapped(program: Program, machine: Machine, dtype: str) -> Program:
    """The program whose step is modelled shortest; itself where nothing is shorter."""
    best, least = program, simulate(program, machine, dtype).end_s
    for one in _candidates(program, machine, dtype):
        if (seconds := simulate(one, machine, dtype).end_s) < least:
            best, least = one, seconds
    return best


def _candidates(program: Program, machine: Machine, dtype: str) -> Iterator[Program]:
    only = ",".join(sorted(worth_starting(program, Price(program.grid, machine, dtype))))
    halos = StartHalos(only).run(program) if only else program
    if halos is not program:
        yield halos
    for base in (program,) if halos is program else (program, halos):
        for one in BUCKETS:
            packed = one.run(base)
            if packed.buckets:
                yield packed


def worth_starting(program: Program, price: Price) -> set[str]:
    """Rows whose halos are hidden by more than what their pieces cost."""
    early = StartHalos().run(program)
    saved: dict[str, float] = {}
    plain = _local(program, price)
    pieces = _local(early, price)
    for steps in (forward(early), backward(early)):
        for step in steps:
            if isinstance(step, Start) and step.lane == HALOS:
                (m,) = step.moved
                name = label(program.rows[m.row])
                saved[name] = saved.get(name, 0.0) + min(moved_seconds(price, m), pieces[m.row][1])
    for i, row in enumerate(program.rows):
        if label(row) in saved:
            saved[label(row)] -= pieces[i][0] - plain[i][0]
    return {name for name, seconds in saved.items() if seconds > 0}


def _local(program: Program, price: Price) -> dict[int, tuple[float, float]]:
    """By row, seconds of its local work, forward and backward, and those of an interior."""
    found: dict[int, tuple[float, float]] = {}
    steps: list[Flow] = [*forward(program), *backward(program)]
    for step in steps:
        if isinstance(step, Local):
            seconds = local_seconds(price, step)
            whole, interior = found.get(step.row, (0.0, 0.0))
            most = max(interior, float(seconds.min())) if step.part == "interior" else interior
            found[step.row] = whole + float(seconds.max()), most
    return found
