"""A bound on a launch: the least time that it can take, from what its kernel compiled to.

A step of its loop takes a processor at least the cycles of its matrix instructions, of issuing all instructions (four a
cycle), and of reading and writing shared memory (128 bytes a cycle). Where a processor holds one group of four warps,
which waits for all of its matrix instructions, their units are idle while it issues what comes before the next. Waiting
for memory and L2 come on top and are not counted, but for the pieces that the last program of a tile adds, which it
reads alone: a kernel reaches the bound at best. The whole can't be faster than its operands' bytes or a launch either,
and launches before and behind it, that arrange what it reads or sum what it made, take their bytes or a launch each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from convgen.kernels.config import Config, ceil_div
from convgen.kernels.families import of_gpu
from convgen.kernels.loops import Loop
from convgen.kernels.problem import Problem
from convgen.kernels.rates import (
    CACHE_BYTES,
    FLOAT32_PRODUCTS,
    ISSUES,
    RATES,
    REGISTERS,
    RESERVED_BYTES,
    SHARED_BYTES,
)
from convgen.kernels.work import Work, sum_bytes, whole_bytes, whole_products
from convgen.spec.target import Target

WARP, GROUP_WARPS = 32, 4  # threads of a warp, warps that issue a matrix instruction together


@dataclass(frozen=True, slots=True)
class Bound:
    """A launch's bound.

    Attributes:
        programs: the grid's. waves: how often each processor gets a program. steps: those of a program's loop.
        matrix_cycles: the cycles that a processor needs at least for a step's products.
        step_cycles: by what takes them: matrix (as compiled), issue, shared; waits: matrix instructions, then what is
            issued while none is at work.
        step_bytes: bytes copied in a step, as shared memory holds them.
        useful: share of the products that the problem asks for; the rest lies outside of its edges.
        times_us: by what takes them: loop (all steps, programs spread evenly), adding (by the last program of a tile,
            behind its steps), memory, floor; around, of the launches before and behind.
        ideal_us: the problem's bound, whatever the kernel: its products, its operands' bytes once, or a launch.
    """

    programs: int
    waves: int
    steps: int
    matrix_cycles: float
    step_cycles: Mapping[str, float]
    step_bytes: int
    useful: float
    times_us: Mapping[str, float]
    ideal_us: float

    @property
    def share(self) -> float:
        """The share of the matrix units' peak that a step allows at best."""
        return self.matrix_cycles / max(self.step_cycles.values())

    @property
    def share_by_issue(self) -> float:
        """The share of peak that the instructions alone allow, without shared memory."""
        return self.matrix_cycles / max(self.step_cycles["matrix"], self.step_cycles["issue"])

    @property
    def share_without_waits(self) -> float:
        """The share of peak with shared memory, as if matrix instructions never waited for those issued behind them."""
        return self.matrix_cycles / max(cycles for what, cycles in self.step_cycles.items() if what != "waits")

    @property
    def limit(self) -> str:
        """The name of what takes a step's cycles."""
        return max(self.step_cycles, key=lambda n: self.step_cycles[n])

    @property
    def us(self) -> float:
        """Microseconds of all launches, one behind the other."""
        t = self.times_us
        return max(t["loop"] + t["adding"], t["memory"], t["floor"]) + t["around"]


def resident(registers: int, shared_bytes: int, warps: int, target: Target) -> int:
    """Programs that a processor holds at once, by registers and shared memory."""
    by_registers = REGISTERS // (WARP * warps * max(registers, 1))
    return max(1, min(by_registers, (target.shared_bytes + RESERVED_BYTES) // (shared_bytes + RESERVED_BYTES)))


def around_s(p: Problem, work: Work, bytes_per_s: float, floor_s: float) -> float:
    """Seconds of the launches besides the one of products."""
    seconds = max(work.more_bytes / bytes_per_s, work.launches * floor_s)
    return seconds + (max(sum_bytes(p, work) / bytes_per_s, floor_s) if work.split > 1 else 0.0)


def bound_of(
    p: Problem,
    config: Config,
    loop: Loop | None,
    target: Target,
    *,
    bytes_per_s: float,
    floor_s: float,
    programs: int = 0,
) -> Bound | None:
    """The bound of a compiled launch; None where no loop of matrix instructions was found or its rate is unknown.

    Args:
        bytes_per_s: the device memory's. floor_s: seconds of an empty launch.
        programs: how many a processor holds at once; 0 where that isn't known.
    """
    rates, work = RATES.get(target.arch), of_gpu(config).work(p, config)
    if loop is None or work is None or rates is None or not rates.of(p.dtype) or not work.multiplied * work.programs:
        return None
    rate = rates.of(p.dtype)
    needed = work.multiplied * (FLOAT32_PRODUCTS if p.dtype == "float32" else 1)
    compiled = loop.products * config.warps
    passes = max(1, compiled // needed)  # steps in one pass of the loop
    warps = config.warps / passes
    read = work.step_bytes(p.element_bytes)
    boxes = read if loop.by_class.get("tensor copy") else 0  # the copy engine writes them
    cycles = {
        "matrix": max(needed, compiled / passes) / rate,
        "issue": loop.instructions * warps / ISSUES,
        "shared": ((loop.matrix_bytes + loop.moved_bytes) * warps + boxes) / SHARED_BYTES,
    }
    if loop.exposed and programs * config.warps == GROUP_WARPS:
        cycles["waits"] = cycles["matrix"] + loop.exposed / passes
    peak_products = rate * target.processors * rates.clock_hz
    waves = ceil_div(work.programs, target.processors)
    asked = whole_products(p)
    times = {
        "loop": waves * work.steps * max(cycles.values()) / rates.clock_hz * 1e6,
        "adding": work.added_bytes / CACHE_BYTES / rates.clock_hz * 1e6,
        "memory": whole_bytes(p) / bytes_per_s * 1e6,
        "floor": floor_s * 1e6,
        "around": around_s(p, work, bytes_per_s, floor_s) * 1e6,
    }
    compute = asked * (needed // work.multiplied) / peak_products * 1e6
    return Bound(
        programs=work.programs,
        waves=waves,
        steps=work.steps,
        matrix_cycles=needed / rate,
        step_cycles=cycles,
        step_bytes=read,
        useful=min(1.0, asked / (work.programs * work.steps * work.multiplied)),
        times_us=times,
        ideal_us=max(compute, whole_bytes(p) / bytes_per_s * 1e6, times["floor"]),
    )
