"""Work that the model has wrong by a bench, as measured steps of a machine: by what is done, not by a step's name.

A row's seconds are those of its marks on the slowest rank of each round. Where one mark covers several of a program's
steps (a row's gradients, a block that backward computes again), they share its seconds in proportion to the model's. A
collective that is waited for at once has the seconds of its mark on the rank that stands still least, packing included;
one that is started ahead has those that it took alone. Rows in parts, and chunks, stay as they are modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from convgen.bench.marks import Mark, key_of, sums
from convgen.cost.machine import Machine
from convgen.cost.measured_steps import MeasuredSteps, Seconds, Step, Travel
from convgen.cost.rows import Price, price_on
from convgen.cost.timeline import local_seconds, moved_seconds, price_of, started_seconds
from convgen.cost.travels import travel_of
from convgen.program.flow import Flow, Local, Start, backward, forward
from convgen.program.network import Moved, Program

OFF = 0.15  # share of the measured seconds: a model is right within it, or within the spread of repeats
LEAST = 1e-3  # share of a step: work that takes less gets no line

Key = tuple[str, str, str]
Rounds = Mapping[Key, Sequence[float]]


@dataclass(frozen=True)
class Corrected:
    """A step that the model has wrong.

    Attributes:
        modelled: the model's seconds; `taken`: the measured ones.
    """

    step: Step
    modelled: float
    taken: Seconds


def corrections(
    program: Program,
    machine: Machine,
    dtype: str,
    every: Sequence[Sequence[Sequence[Mark]]],
    alone: Mapping[tuple[str, str], Seconds],
    *,
    of_inputs: bool = False,
) -> list[Corrected]:
    """Steps that the machine's model has wrong, the longest first.

    Args:
        every: marks by rank and round.
        alone: by phase and name, what collectives took alone.
    """
    price = price_on(program.grid, machine, dtype)
    row_rounds, travel_rounds = _rounds(every)
    found: dict[Step, list[tuple[float, Seconds]]] = {}
    phases = {"forward": [*forward(program)], "backward": [*backward(program, of_inputs=of_inputs)]}
    for phase, steps in phases.items():
        for step, modelled, taken in (
            *_rows(program, price, phase, steps, row_rounds),
            *_travels(program, price, phase, steps, travel_rounds, alone),
        ):
            found.setdefault(step, []).append((modelled, taken))
    whole = sum(median(some) for some in row_rounds.values())
    whole += sum(median(some) for some in travel_rounds.values())
    corrected = [_together(step, some) for step, some in found.items()]
    worth = [
        one
        for one in corrected
        if abs(one.modelled - one.taken.seconds) > max(OFF, one.taken.spread) * one.taken.seconds
        and one.taken.seconds * len(found[one.step]) > LEAST * whole
    ]
    return sorted(worth, key=lambda one: -one.taken.seconds * len(found[one.step]))


def merged(some: Sequence[Corrected]) -> list[Corrected]:
    """The corrections of several benches, with the median for a step that several have."""
    by_step: dict[Step, list[tuple[float, Seconds]]] = {}
    for one in some:
        by_step.setdefault(one.step, []).append((one.modelled, one.taken))
    return [_together(step, them) for step, them in by_step.items()]


def as_steps(some: Sequence[Corrected]) -> MeasuredSteps:
    """Corrections as a machine's measured steps."""
    return MeasuredSteps(tuple((one.step, one.taken) for one in merged(some)))


def _together(step: Step, some: Sequence[tuple[float, Seconds]]) -> Corrected:
    """One correction for the same work several times: the median, and the spread among them or of each, the larger."""
    seconds = [taken.seconds for _, taken in some]
    p20, middle, p80 = np.quantile(seconds, (0.2, 0.5, 0.8)).tolist()
    spread = max((p80 - p20) / middle, median(taken.spread for _, taken in some))
    return Corrected(step, median(modelled for modelled, _ in some), Seconds(middle, spread))


def _rounds(every: Sequence[Sequence[Sequence[Mark]]]) -> tuple[Rounds, Rounds]:
    """Seconds in each round: a row's on the slowest rank, a collective's on the rank that stands still least."""
    rows: dict[Key, list[float]] = {}
    travels: dict[Key, list[float]] = {}
    for laps in zip(*(one for one in every if one), strict=True):
        known = [sums(marks) for marks in laps]
        for key in {k for one in known for k in one}:
            each = [one.get(key, 0.0) for one in known]
            if key[1] == "row":
                rows.setdefault(key, []).append(max(each))
            else:
                travels.setdefault(key, []).append(min(each))
    return rows, travels


def seconds_of(rounds: Sequence[float]) -> Seconds | None:
    """The rounds' median and spread; None where the median is 0."""
    p20, middle, p80 = np.quantile(rounds, (0.2, 0.5, 0.8)).tolist()
    return Seconds(middle, (p80 - p20) / middle) if middle > 0 else None


def _rows(
    program: Program, price: Price, phase: str, steps: Sequence[Flow], rounds: Rounds
) -> Iterator[tuple[Step, float, Seconds]]:
    by_key: dict[Key, list[Local]] = {}
    for step in steps:
        if isinstance(step, Local):
            by_key.setdefault(key_of("local", step.title, phase), []).append(step)
    for key, some in by_key.items():
        taken = seconds_of(rounds[key]) if key in rounds else None
        if taken is None or any(one.part != "whole" or one.rides for one in some):
            continue
        each = [part for one in some for part in _works(program, price, one)]
        modelled = sum(seconds for _, seconds in each)
        for work, seconds in each:
            share = seconds / modelled if modelled else 1 / len(each)
            yield work, seconds, taken._replace(seconds=taken.seconds * share)


def _works(program: Program, price: Price, local: Local) -> Iterator[tuple[Step, float]]:
    """The work of a step with its modelled seconds; of a product's gradients one by one."""
    here, row = price_of(program, price, local), local.placed
    operation, roles, asked = row.bound.operation, dict(row.roles), local.operands
    derived = tuple(k for k, _ in row.derived if k in asked)
    apart = operation.is_product and len(asked) > 1 and not derived
    for some in [(k,) for k in asked] if apart else [asked]:
        work = here.work(operation, row.way, roles, some or None, derived)
        one = local if some == asked else Local(local.name, local.row, row, some)
        yield work, float(local_seconds(here, one).max())


def _travels(
    program: Program,
    price: Price,
    phase: str,
    steps: Sequence[Flow],
    rounds: Rounds,
    alone: Mapping[tuple[str, str], Seconds],
) -> Iterator[tuple[Step, float, Seconds]]:
    for step in steps:
        if isinstance(step, Moved):
            key = key_of("move", step.step, phase)
            taken = seconds_of(rounds[key]) if key in rounds else None
            modelled = moved_seconds(program, price, step)
        elif isinstance(step, Start):
            taken, modelled = alone.get((phase, step.name)), started_seconds(program, price, step)
        else:
            continue
        travel = travel_of(program, price, step)
        if taken is not None and travel is not None:
            yield travel, modelled, taken


def corrected_text(some: Sequence[Corrected], file: str) -> str:
    """What was written, in a line."""
    if not some:
        return f"nothing is off by more than {OFF:.0%}: {file} stays as it is"
    first = some[0]
    what = first.step.collective if isinstance(first.step, Travel) else first.step.row
    more = f"{first.modelled * 1e3:.3f} ms modelled, {first.taken.seconds * 1e3:.3f} ms measured"
    return f"{len(some)} measured step{'s' * (len(some) > 1)} written to {file}; most of a step: {what}, {more}"
