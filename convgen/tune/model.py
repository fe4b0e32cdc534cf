"""Modelled time of a configuration: what ranks candidates before any is measured. Rough, never reported as measured.

On a GPU, programs run in waves; a step takes as long as its products, its copies from memory, or their latency; what
all programs move bounds the whole. On a CPU, ATen's products, the copies around them, and the calls add up.
"""

from __future__ import annotations

from convgen.cost.machines import load_machine
from convgen.kernels.config import Config, ceil_div
from convgen.kernels.families import of_cpu, of_gpu
from convgen.kernels.problem import Problem
from convgen.kernels.work import Work, whole_bytes, whole_flops
from convgen.spec.target import Target
from convgen.tune.database import Ceilings

# Of a GPU, roughly: reading shared memory and L2 by one processor, waiting for memory, filling and draining a loop.
REGISTERS, MOST_THREADS = 65536, 2048
CACHE_BYTES_PER_S = 5.0e10
LATENCY_S = 7.0e-7
PROLOGUE_S = 1.5e-6
# Of a CPU: a call through the dispatcher and its threads.
CALL_S = 1.2e-5


def assumed_ceilings(target: Target) -> Ceilings:
    """Of a device that none were measured on: tuning/machines, which says where its numbers are from."""
    machine = load_machine(target.kind)
    return Ceilings(
        flops_per_s=dict(machine.peak_flops),
        bytes_per_s=machine.memory_bytes_per_s,
        floor_us=machine.launch_s * 1e6,
    )


def bounds_us(p: Problem, ceilings: Ceilings) -> dict[str, float]:
    """Microseconds that a launch, the operands' bytes, and the products take at least."""
    return {
        "floor": ceilings.floor_us,
        "memory": whole_bytes(p) / ceilings.bytes_per_s * 1e6,
        "compute": whole_flops(p) / ceilings.flops_per_s[p.dtype] * 1e6,
    }


def modelled_us(p: Problem, config: Config, target: Target, ceilings: Ceilings) -> float:
    """Microseconds of a launch, by the model."""
    if target.is_cpu:
        return _cpu_s(p, config, ceilings) * 1e6
    done = of_gpu(config).work(p, config)
    if done is None:  # a library's: what bounds it, and copies to another arrangement
        copies = 2 * whole_bytes(p) / ceilings.bytes_per_s if config.tiles else 0.0
        return max(bounds_us(p, ceilings).values()) / 0.6 + copies * 1e6
    return _gpu_s(p, config, done, target, ceilings) * 1e6


def _gpu_s(p: Problem, config: Config, w: Work, target: Target, ceilings: Ceilings) -> float:
    made = of_gpu(config)
    rows, columns, _ = w.tile
    threads = config.warps * target.warp
    shared = w.step_bytes(p.element_bytes) * config.stages
    registers = min(255, 40 + (rows * columns * max(4, p.element_bytes) // 4) // threads)
    resident = max(
        1, min(target.shared_bytes // max(shared, 1), REGISTERS // (registers * threads), MOST_THREADS // threads)
    )
    waves = ceil_div(w.programs, target.processors * resident)
    sharing = min(resident, ceil_div(w.programs, target.processors))  # programs that a processor really has at once
    # Matrix units want tiles of 64x64 and more.
    fill = min(1.0, rows / 64) * min(1.0, columns / 64) if made.MATRIX_UNITS else 0.1
    rate = ceilings.flops_per_s[p.dtype] / target.processors * max(fill, 1 / 16)
    read = w.step_bytes(p.element_bytes)
    wide = 1.0 if p.channels_last or p.is_pointwise or made.WHOLE_LINES else 3.0
    step = max(2 * w.multiplied / rate, read * wide / CACHE_BYTES_PER_S) * sharing
    step = max(step, LATENCY_S / max(1, config.stages - 1))
    loops = waves * (PROLOGUE_S + w.steps * step)
    memory = whole_bytes(p) / ceilings.bytes_per_s
    seconds = ceilings.floor_us * 1e-6 + max(loops, memory)
    if w.split > 1:
        partial = 4 * p.elements["w"] * p.x_parts * p.y_parts * w.split
        seconds += ceilings.floor_us * 1e-6 + 2 * partial / ceilings.bytes_per_s
    return seconds


def _cpu_s(p: Problem, config: Config, ceilings: Ceilings) -> float:
    made = of_cpu(config)
    w = made.work(p, config)
    rate = ceilings.flops_per_s[p.dtype] * made.RATE
    return w.flops / rate + w.calls * CALL_S + w.copied_bytes / ceilings.bytes_per_s
