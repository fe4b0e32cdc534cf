"""How far a modelled step may be off, by what calibration knows of its own numbers.

Steps whose prices rest on the same number are wrong together, others independently. Collectives of one kind go with the
links' number, a convolution with its shape's efficiency, all other local work together, and a measured step with its
own repeats. So the deviation of a step of training is the root of the sum of squares over these; for the difference of
two layouts only what they don't have in common counts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from convgen.cost.machine import Machine
from convgen.cost.machine_measured import PHASES, Misfit, left_out
from convgen.cost.measured_steps import Seconds, Step
from convgen.cost.rows import Price, price_on
from convgen.cost.timeline import local_seconds, price_of, simulate
from convgen.cost.travels import travel_of
from convgen.program.flow import Local, Start, backward, forward
from convgen.program.network import Moved, Program

NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
QUANTILES = 1.683  # standard deviations between the quantiles 0.2 and 0.8 of a normal distribution
ENOUGH = 4  # measurements held out, at least, for a deviation to be told by them


@dataclass(frozen=True)
class Estimate:
    """The seconds of a modelled step of training, and how far they may be off.

    Attributes:
        seconds: with communication overlapped.
        deviations: standard deviations in seconds, by the number that they rest on.
    """

    seconds: float
    deviations: Mapping[Hashable, float]

    @property
    def deviation(self) -> float:
        """One standard deviation of the step's seconds."""
        return math.sqrt(sum(s * s for s in self.deviations.values()))

    def is_alike(self, other: Estimate) -> bool:
        """Whether two steps differ by no more than a standard deviation of their difference."""
        keys = {*self.deviations, *other.deviations}
        square = sum((self.deviations.get(k, 0.0) - other.deviations.get(k, 0.0)) ** 2 for k in keys)
        return abs(self.seconds - other.seconds) <= math.sqrt(square)


def shares(machine: Machine) -> tuple[float, float] | None:
    """One standard deviation of computing, and of links, as a share of their seconds: as the file says, or as far as
    each measurement in it is from what the others say of it; None where neither is known."""
    said = dict(machine.uncertainty)
    held = [abs(math.log(r)) for phase in PHASES for r in left_out(machine.probes, phase)] if machine.probes else []
    over = [abs(math.log(r)) for m in machine.misfits for r in _left_out(m)]
    computing = said.get("computing") or (NORMAL * median(held) if len(held) >= ENOUGH else None)
    links = said.get("links") or (NORMAL * median(over) if len(over) >= ENOUGH else None)
    return None if computing is None or links is None else (computing, links)


def _left_out(one: Misfit) -> Iterator[float]:
    """For each size between others, the ratio that the others give it over the measured one."""
    for i in range(1, len(one.bytes) - 1):
        rest = Misfit(
            kind=one.kind,
            ranks=one.ranks,
            bytes=one.bytes[:i] + one.bytes[i + 1 :],
            over_model=one.over_model[:i] + one.over_model[i + 1 :],
        )
        yield rest.at(one.bytes[i]) / one.over_model[i]


def estimate(program: Program, machine: Machine, dtype: str, *, of_inputs: bool = False) -> Estimate | None:
    """How long a step of training takes, and how far that may be off; None where the machine says nothing of it."""
    known = shares(machine)
    if known is None:
        return None
    computing, links = known
    step = simulate(program, machine, dtype, of_inputs=of_inputs, alike=True)
    price, found = price_on(program.grid, machine, dtype), dict[Hashable, float]()
    exposed = {(one.phase, one.name): one for one in step.travelled}

    def add(key: Hashable, seconds: float) -> None:
        found[key] = found.get(key, 0.0) + seconds

    for phase, steps in (("forward", forward(program)), ("backward", backward(program, of_inputs=of_inputs))):
        for one in steps:
            if isinstance(one, Local):
                work, measured = _work(program, price, one)
                seconds = float(local_seconds(price_of(program, price, one), one).max())
                share = measured.spread / QUANTILES if measured else computing
                is_own = measured or one.placed.bound.operation.convolves is not None
                add(work if is_own else "other local work", share * seconds)
            elif isinstance(one, (Moved, Start)):
                name = one.step if isinstance(one, Moved) else one.name
                if (travelled := exposed.get((phase, name))) is not None:
                    travel = travel_of(program, price, one)
                    measured = None if travel is None else price.machine.steps.known.get(travel)
                    share = measured.spread / QUANTILES if measured else links
                    add((phase, name) if measured else travelled.kind, share * travelled.exposed_s)
    return Estimate(step.end_s, found)


def _work(program: Program, price: Price, local: Local) -> tuple[Step, Seconds | None]:
    here, row = price_of(program, price, local), local.placed
    derived = tuple(k for k, _ in row.derived if k in local.operands)
    of = row.bound.operation, row.way, dict(row.roles), local.operands or None, derived
    work = here.work(*of)
    taken = here.machine.steps.known.get(work)
    if taken is None and here.measured_s(*of) is not None:  # gradients of a product, measured one by one
        each = (here.machine.steps.known[here.work(*of[:3], (k,), derived)] for k in local.operands)
        taken = max(each, key=lambda one: one.spread)
    return work, taken


def plus_minus(one: Estimate) -> str:
    """The seconds as text: 2.400 +- 0.500 ms."""
    return milliseconds(one.seconds, one.deviation)


def milliseconds(seconds: float, deviation_s: float | None) -> str:
    """The text of a step's milliseconds, and of its deviation where that is known.

    Example:
        >>> milliseconds(2.4e-3, 5e-4), milliseconds(2.4e-3, None)
        ('2.400 +- 0.500 ms', '2.400 ms')
    """
    return f"{seconds * 1e3:.3f}" + ("" if deviation_s is None else f" +- {deviation_s * 1e3:.3f}") + " ms"
