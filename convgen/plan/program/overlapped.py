"""Which communication of a network overlaps with computing: by the timeline, and only where that is faster.

It tries buckets (of 1, 5 or 25 MiB, or one for all gradients); halos that start early, where that saves more than
pieces of rows cost (gradients' rows in pieces too, or behind the other gradients of their row); gathers and scatters in
2, 4 or 8 chunks, where that saves more than chunks cost; several rows as one, where that saves more than their rims
cost (widening.py); and these together. With buckets it also tries to make backward's first gradient of a parameter
before the others of its row. Running statistics travel as one sum wherever that takes no longer.

Source: docs/overlap.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from convgen.cost.machine import Machine
from convgen.cost.rows import Price, price_on
from convgen.cost.timeline import local_seconds, moved_seconds, simulate, started_seconds
from convgen.passes.bucket_gradients import BucketGradients
from convgen.passes.bucket_statistics import BucketStatistics
from convgen.passes.chunk_collectives import ChunkCollectives
from convgen.passes.parameters_first import ParametersFirst, ready
from convgen.passes.start_halos import StartHalos
from convgen.plan.program.alone import alone
from convgen.plan.program.step_ps import SIZES
from convgen.plan.program.widening import worth_widening
from convgen.program.flow import Flow, Local, Start, Wait, backward, forward
from convgen.program.network import Moved, Program, label
from convgen.program.rows import PlacedRow

HALOS = (StartHalos(), StartHalos(gradients="whole"))
CHUNKS = (2, 4, 8)
BUCKETS = tuple(BucketGradients(mebibytes) for mebibytes in SIZES)
# A candidate replaces an earlier one where its step takes less than this part of the other's: the model is not exact
# enough to tell them apart above it, and candidates that come earlier launch fewer pieces.
WORTH = 0.995


def overlapped(program: Program, machine: Machine, dtype: str, *, of_inputs: bool = False) -> Program:
    """The program whose step is modelled shortest, to half a percent (WORTH); `program` itself where none is shorter.

    Args:
        of_inputs: whether inputs want gradients, too.
    """
    # The kind of statistics changes nothing that travels.
    how, plain = (machine, dtype, of_inputs), replace(program, statistics="")
    found = next((found for known, found in tuple(_last) if known == (how, plain)), None)
    if found is None:
        found = _shortest(plain, machine, dtype, of_inputs)
        _last.append(((how, plain), found))
    return program if found is plain or found == plain else replace(found, statistics=program.statistics)


_last = deque[tuple[object, Program]](maxlen=8)  # a plan's program is asked for again where it is compiled and printed


def _shortest(program: Program, machine: Machine, dtype: str, of_inputs: bool) -> Program:
    own = sum(len(row.derived) for row in program.rows)

    def seconds(one: Program) -> float:
        """A step, with a launch for each gradient that has got a row: it is called apart from its row's others."""
        calls = sum(len(row.derived) for row in one.rows) - own
        end_s = simulate(one, machine, dtype, of_inputs=of_inputs, alike=True).end_s
        return end_s + max(calls, 0) * machine.launch_s

    def better(best: Program, least: float, others: Iterator[Program]) -> tuple[Program, float]:
        for one in others:
            if (taken := seconds(one)) < WORTH * least:
                best, least = one, taken
        return best, least

    best, least = better(program, seconds(program), _candidates(program, machine, dtype, of_inputs))
    best, least = better(best, least, _sums_first(best))
    packed = BucketStatistics().run(best)
    return best if packed is best or seconds(packed) > least else packed


def _sums_first(program: Program) -> Iterator[Program]:
    """Programs in which the row that backward comes to first makes its parameter's gradient before its other gradients,
    so that the sum travels behind these."""
    if program.buckets and (rows := [label(row) for row in program.rows if any(ready(row, program))]):
        first = ParametersFirst(rows[-1]).run(program)
        yield from (one.run(first) for one in BUCKETS)


def _candidates(program: Program, machine: Machine, dtype: str, of_inputs: bool) -> Iterator[Program]:
    price = price_on(program.grid, machine, dtype)
    bases = [program]
    cut = worth_cutting(program, machine, dtype, of_inputs=of_inputs)
    wide = worth_widening(program, machine, dtype, of_inputs=of_inputs)
    for whole in (program, *(one for one in (cut, wide) if one is not program)):
        if whole not in bases:
            bases.append(whole)
            yield whole
        for how in HALOS:
            only = ",".join(sorted(worth_starting(whole, how, price, of_inputs=of_inputs)))
            halos = replace(how, only=only).run(whole) if only else whole
            if halos not in bases:
                bases.append(halos)
                yield halos
    for base in bases:
        for one in BUCKETS:
            packed = one.run(base)
            if packed.buckets:
                yield packed


def worth_cutting(program: Program, machine: Machine, dtype: str, *, of_inputs: bool = False) -> Program:
    """The program with each row, and each gradient's row, in the number of chunks with which it is fastest alone; the
    program itself where no row is faster in chunks."""
    wanted = program.differentiable(of_inputs=of_inputs)
    times: dict[str, float] = {}
    counts: dict[str, int] = {}
    for count in CHUNKS:
        cut = ChunkCollectives(count).run(program)
        for plain, row in zip(program.rows, cut.rows, strict=True):
            for name in _cut(label(row), plain, row):
                of_row = program.part((plain,))
                if name not in times:
                    times[name] = alone(of_row, wanted, machine, dtype)
                one = ChunkCollectives(count, only=name).run(of_row)
                if (seconds := alone(one, wanted, machine, dtype)) < times[name]:
                    times[name], counts[name] = seconds, count
    best = program
    for count in CHUNKS:
        if names := [name for name, fastest in counts.items() if fastest == count]:
            best = ChunkCollectives(count, only=",".join(names)).run(best)
    return best


def _cut(name: str, plain: PlacedRow, row: PlacedRow) -> Iterator[str]:
    """Names, as the pass has them, of the row and of its gradients' rows that are in chunks."""
    if row.chunks is not plain.chunks:
        yield name
    for (k, a), (_, b) in zip(plain.derived, row.derived, strict=True):
        yield from _cut(f"{name}.d{row.signature.inputs[k].name}", a, b)


def worth_starting(program: Program, how: StartHalos, price: Price, *, of_inputs: bool = False) -> set[str]:
    """Rows whose halos are better early: computing between start and wait hides more seconds than pieces cost."""
    early = how.run(program)
    plain = _local(program, price, of_inputs)
    saved: dict[int, float] = {}
    for steps in (forward(early), backward(early, of_inputs=of_inputs)):
        flying: dict[str, tuple[Moved, float]] = {}
        for step in steps:
            match step:
                case Start():
                    taken = started_seconds(early, price.processor, step) if price.processor else 0.0
                    saved[step.moved[0].row] = saved.get(step.moved[0].row, 0.0) - taken
                    flying[step.name] = step.moved[0], 0.0
                case Local():
                    least = float(local_seconds(price, step).min())
                    flying = {name: (m, behind + least) for name, (m, behind) in flying.items()}
                case Wait():
                    m, behind = flying.pop(step.name)
                    saved[m.row] = saved.get(m.row, 0.0) + min(moved_seconds(program, price, m), behind)
                case Moved():
                    pass
    pieces = _local(early, price, of_inputs)
    return {label(program.rows[i]) for i, seconds in saved.items() if seconds > pieces[i] - plain[i]}


def _local(program: Program, price: Price, of_inputs: bool) -> dict[int, float]:
    """By row, seconds of its local work, forward and backward; a bias's are its product's."""
    found: dict[int, float] = {}
    steps: list[Flow] = [*forward(program), *backward(program, of_inputs=of_inputs)]
    for step in steps:
        if isinstance(step, Local):
            row = program.products_of_biases.get(step.row, step.row)
            found[row] = found.get(row, 0.0) + float(local_seconds(price, step).max())
    return found
