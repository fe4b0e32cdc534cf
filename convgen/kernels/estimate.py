"""Estimated time of a configuration before it is compiled. It ranks candidates and chooses defaults, and is never
reported as measured.

Programs run in waves. A step takes a processor as long as its matrix instructions, the instructions that it issues,
shared memory, L2 or waiting for memory; bytes of the operands bound the whole. bound.py has the same terms from what a
kernel compiled to; here they are closed forms of the tile, and waiting and L2 are counted as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from convgen.cost.machines import load_machine
from convgen.kernels.config import Config, ceil_div
from convgen.kernels.problem import Problem
from convgen.kernels.rates import CACHE_BYTES, FLOAT32_PRODUCTS, ISSUES, RATES, SHARED_BYTES
from convgen.kernels.sharing import bunches
from convgen.kernels.work import Work, sum_bytes, whole_bytes
from convgen.spec.target import Target

# Rough rates of a processor, and the time that a loop waits for memory.
REGISTERS, MOST_THREADS = 65536, 2048
LATENCY_S = 7.0e-7
PROLOGUE_S = 1.5e-6
SUMMED = 32  # pieces of a filter gradient that the adding launch asks for before it waits
SUMMED_AT_ONCE = 4  # pieces that the last program of a tile asks for before it waits
ARRIVAL_S = 1.5e-6  # to write a piece, count it, and find that it is the last


@dataclass(frozen=True, slots=True)
class Ceilings:
    """A device's ceilings: flops a second in a dtype, bytes of memory a second, and the seconds of an empty launch."""

    flops_per_s: float
    bytes_per_s: float
    floor_s: float


def data_sheet(target: Target, dtype: str) -> Ceilings:
    """The ceilings in tuning/machines, which says where its numbers are from."""
    machine = load_machine(target.kind)
    return Ceilings(dict(machine.peak_flops)[dtype], machine.memory_bytes_per_s, machine.launch_s)


def estimated_s(p: Problem, config: Config, w: Work, target: Target, device: Ceilings) -> float:
    """Seconds of a launch and of the sum behind it."""
    rows, columns, _ = w.tile
    threads = config.warps * target.warp
    shared = w.step_bytes(p.element_bytes) * config.stages
    registers = min(255, 40 + (rows * columns * max(4, p.element_bytes) // 4) // threads)
    resident = max(
        1, min(target.shared_bytes // max(shared, 1), REGISTERS // (registers * threads), MOST_THREADS // threads)
    )
    waves = ceil_div(w.programs, target.processors * resident)
    sharing = min(resident, ceil_div(w.programs, target.processors))  # programs that a processor really has at once
    step = max(step_s(p, config, w, target, device) * sharing, LATENCY_S / max(1, config.stages - 1))
    loops = waves * (PROLOGUE_S + w.steps * step)
    seconds = device.floor_s + max(loops, whole_bytes(p) / device.bytes_per_s)
    seconds += w.launches * device.floor_s + w.more_bytes / device.bytes_per_s
    if w.split > 1:
        seconds += device.floor_s + 2 * sum_bytes(p, w) / device.bytes_per_s + ceil_div(w.split, SUMMED) * LATENCY_S
    if w.addends > 1:
        each, many = bunches(w.addends)
        waits = ceil_div(each, SUMMED_AT_ONCE) + (ceil_div(many, SUMMED_AT_ONCE) if many > 1 else 0)
        seconds += (1 + (many > 1)) * ARRIVAL_S + max(adding_s(w, target), waits * LATENCY_S)
    return seconds


def adding_s(w: Work, target: Target) -> float:
    """Seconds in which the last program of a tile reads the pieces that it adds."""
    rates = RATES.get(target.arch, RATES[80])
    return w.added_bytes / (CACHE_BYTES * rates.clock_hz)


def step_s(p: Problem, config: Config, w: Work, target: Target, device: Ceilings) -> float:
    """Seconds that a processor takes for a step of one program."""
    rows, columns, _ = w.tile
    rates = RATES.get(target.arch)
    read = w.step_bytes(p.element_bytes)
    if rates is None or not w.matrix or not rates.of(p.dtype):
        # Matrix units want tiles of 64x64 and more.
        fill = min(1.0, rows / 64) * min(1.0, columns / 64) if w.matrix else 0.1
        rate = device.flops_per_s / target.processors * max(fill, 1 / 16)
        return max(2 * w.multiplied / rate, read * w.scattered / 5.0e10)  # bytes a second of a processor, roughly
    return max(step_cycles(p, config, w, target).values()) / rates.clock_hz


def busy_s(p: Problem, config: Config, w: Work, target: Target, device: Ceilings) -> float:
    """Seconds of all steps with programs spread evenly, if nothing waits, not even for L2."""
    rates, waves = RATES.get(target.arch), ceil_div(w.programs, target.processors)
    if rates is None or not rates.of(p.dtype):
        return step_s(p, config, w, target, device) * w.steps * waves
    cycles = step_cycles(p, config, w, target)
    return max(cycles[n] for n in ("matrix", "issue", "shared")) * w.steps * waves / rates.clock_hz


def step_cycles(p: Problem, config: Config, w: Work, target: Target) -> dict[str, float]:
    """Cycles that a processor with matrix units takes for a step: to multiply, to issue, for shared memory and for
    L2."""
    rows, columns, _ = w.tile
    muls = FLOAT32_PRODUCTS if p.dtype == "float32" else 1
    filled = max(rows, 64) * max(columns, 8) / (rows * columns)
    return {
        "matrix": w.multiplied * muls * filled / RATES[target.arch].of(p.dtype),
        "issue": (w.instructions + splitting(p, config, w, target)) * config.warps / ISSUES,
        "shared": shared_bytes(w, config.warps, p.element_bytes, muls) / SHARED_BYTES,
        "L2": w.step_bytes(p.element_bytes) * w.scattered / CACHE_BYTES,
    }


def splitting(p: Problem, config: Config, w: Work, target: Target) -> float:
    """Instructions of a warp in a step that round operands to TF32, or split them."""
    each = {"tfloat32": 0 if w.rounded else 6, "float32": 9}.get(p.dtype, 0)
    return each * w.step_bytes(1) / (config.warps * target.warp)


def shared_bytes(w: Work, warps: int, element_bytes: int, products: int) -> float:
    """Bytes that a step moves in shared memory. Both operands are written once; a group of four warps reads its rows of
    the first, and all columns of the second for each 64 rows and product. Columns that are rewritten are read once
    more, and written once for each product but one: two parts of float32 make three products."""
    rows, columns, summed = w.tile
    groups = max(1, warps // 4)
    across = groups // max(1, min(groups, rows // 64))
    again = (1 + max(1, products - 1)) if w.rewrites else 0
    return summed * element_bytes * (rows * (1 + across) + columns * (1 + again + products * max(1.0, rows / 64)))
