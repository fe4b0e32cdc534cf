"""Measurements for the cost model: seconds of local convolutions, and a machine with this device's numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from convgen.algebra.space import Space
from convgen.cost.machine import Machine, Operands
from convgen.errors import InputError
from convgen.kernels.choose import plain_problem
from convgen.kernels.config import largest
from convgen.kernels.problem import Problem
from convgen.program.nodes import Phase
from convgen.spec.target import Target
from convgen.tune.database import Entry
from convgen.tune.lookup import Remembered, remembered

PHASE_OF: dict[str, Phase] = {"y": "forward", "x": "backward_data", "w": "backward_filter"}  # by the tensor made


@dataclass(frozen=True, eq=False)
class Timed:
    """Seconds of local convolutions as a device's database has them; `convgen.cost.machine.LocalTimes`."""

    memory: Remembered
    dtype: str

    @property
    def pads_virtually(self) -> bool:
        return self.memory.target.pads_virtually

    def __call__(self, space: Space, operands: Operands) -> float | None:
        """Seconds of the rank with most to do; with the bias added, if only that was measured."""
        problem = self.problem(space, operands)
        plain = self.memory.measured_s(problem)
        if plain is None and problem.phase == "forward":
            return self.memory.measured_s(replace(problem, bias=True))
        return plain

    def problem(self, space: Space, operands: Operands) -> Problem:
        """The problem of the rank with most to do."""
        frames = {layout.tensor: space.frame(layout) for layout in operands}
        phase, form = PHASE_OF[operands[2].tensor], self.memory.target.memory_format(len(space.conv.spatial))
        return largest(
            [
                plain_problem(space.conv, phase, {t: box[rank] for t, box in frames.items()}, self.dtype, form)
                for rank in range(space.grid.ranks)
            ]
        )


def timed(target: Target, dtype: str) -> Timed:
    """The databases' seconds for a target, on the device for which it is compiled.

    Raises:
        InputError: nothing was measured, or a database is broken.
    """
    memory = remembered(target)
    if not memory.files or not memory.entries(dtype):
        said = (
            memory.said or f"nothing in {dtype} was measured on {memory.device.name if memory.device else target.text}"
        )
        raise InputError(f"no measured kernels for {target.text}: {said}", hint="convgen tune FILE... first")
    return Timed(memory, dtype)


def as_measured(machine: Machine, known: Timed) -> Machine:
    """The machine with its device's measured ceilings, for convolutions that weren't measured.

    Flops, bytes and launches are the database's ceilings; the efficiency is the median share of them that measured
    kernels bound by products reach.
    """
    ceilings, entries = known.memory.ceilings(), known.memory.entries(known.dtype)
    machine = replace(machine, timed=known)
    if ceilings is None or known.dtype not in ceilings.flops_per_s:
        return machine
    return replace(
        machine,
        peak_flops=tuple((d, ceilings.flops_per_s.get(d, peak)) for d, peak in machine.peak_flops),
        efficiency=efficiency(entries) or machine.efficiency,
        probes=(),  # the probes were of another peak
        tiles=None,  # the median efficiency includes what tiles lose
        memory_bytes_per_s=ceilings.bytes_per_s,
        launch_s=ceilings.floor_us / 1e6,
    )


def efficiency(entries: list[Entry]) -> float | None:
    """The median share of the roofline of kernels bound by products."""
    shares = [e.share for e in entries if e.bound == "compute"]
    return min(1.0, median(shares)) if shares else None
