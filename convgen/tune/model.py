"""Modelled time of a configuration: what ranks candidates before any is measured. Rough, never reported as measured.

On a GPU, programs run in waves; a step takes as long as its products, its copies from memory, or their latency; what
all programs move bounds the whole. On a CPU, ATen's products, the copies around them, and the calls add up.
"""

from __future__ import annotations

from math import prod

from convgen.cost.machines import load_machine
from convgen.kernels.config import Config, ceil_div
from convgen.kernels.problem import Problem
from convgen.spec.target import Target
from convgen.tune.database import Ceilings
from convgen.tune.work import work

# Of a GPU, roughly: reading shared memory and L2 by one processor, waiting for memory, filling and draining a loop.
REGISTERS, MOST_THREADS = 65536, 2048
CACHE_BYTES_PER_S = 5.0e10
LATENCY_S = 7.0e-7
PROLOGUE_S = 1.5e-6
# Of a CPU: a call through the dispatcher and its threads, and how much of a product's rate is reached.
CALL_S = 1.2e-5
SIMD_BYTES = 64
CPU_RATE = {"aten": 0.6, "arranged": 0.6, "product": 0.8, "unfolded": 0.7}


def assumed_ceilings(target: Target) -> Ceilings:
    """Of a device that none were measured on: tuning/machines, which says where its numbers are from."""
    machine = load_machine(target.kind)
    return Ceilings(
        flops_per_s=dict(machine.peak_flops),
        bytes_per_s=machine.memory_bytes_per_s,
        floor_us=machine.launch_s * 1e6,
    )


def whole_bytes(p: Problem) -> int:
    """Each operand once, parts included."""
    n = p.elements
    return (n["x"] * p.x_parts + n["w"] * p.x_parts * p.y_parts + n["y"] * p.y_parts) * p.element_bytes


def whole_flops(p: Problem) -> int:
    """Parts included."""
    return p.flops * p.x_parts * p.y_parts


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
    if config.family == "aten":
        copies = 2 * whole_bytes(p) / ceilings.bytes_per_s if config.tiles else 0.0
        return max(bounds_us(p, ceilings).values()) / 0.6 + copies * 1e6
    return _gpu_s(p, config, target, ceilings) * 1e6


def _gpu_s(p: Problem, config: Config, target: Target, ceilings: Ceilings) -> float:
    w = work(p, config)
    rows, columns, _ = w.tile
    threads = config.warps * target.warp
    shared = w.step_bytes(p.element_bytes) * config.stages
    registers = min(255, 40 + (rows * columns * max(4, p.element_bytes) // 4) // threads)
    resident = max(
        1, min(target.shared_bytes // max(shared, 1), REGISTERS // (registers * threads), MOST_THREADS // threads)
    )
    waves = ceil_div(w.programs, target.processors * resident)
    sharing = min(resident, ceil_div(w.programs, target.processors))  # programs that a processor really has at once
    # Matrix units want tiles of 64x64 and more; depthwise has none.
    fill = min(1.0, rows / 64) * min(1.0, columns / 64) if config.family != "depthwise" else 0.1
    rate = ceilings.flops_per_s[p.dtype] / target.processors * max(fill, 1 / 16)
    read = w.step_bytes(p.element_bytes)
    wide = 1.0 if p.channels_last or p.is_pointwise or config.family in ("box", "depthwise") else 3.0
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
    n, eb, t = p.elements, p.element_bytes, config.tile
    lanes = SIMD_BYTES // eb
    rate, bandwidth = ceilings.flops_per_s[p.dtype] * CPU_RATE[config.family], ceilings.bytes_per_s
    read = {"forward": ("x", "w"), "backward_data": ("y", "w"), "backward_filter": ("y", "x")}[p.phase]
    made = ({"x", "w", "y"} - set(read)).pop()
    if config.family in ("product", "unfolded"):
        seconds = p.flops / rate
        if config.family == "product":
            copied = sum(n[o] for o in ("x", "y")) if bool(t["whole"]) != p.channels_last else 0
            return seconds + CALL_S * (2 if t["whole"] else 1 + p.batch / 8) + 2 * copied * eb / bandwidth
        windows = p.batch * p.channels * p.taps * prod(d.y for d in p.dims)
        held = t["samples"] * windows // p.batch * eb
        slow = 1.0 if held < 2**20 else 1.5  # of what a core's cache holds
        calls = 3 * ceil_div(p.batch, t["samples"])
        return seconds + calls * CALL_S + 3 * slow * windows * eb / bandwidth + 2 * n[made] * eb / bandwidth
    own = int(p.channels_last)
    last, c, f = t.get("last", own), t.get("C", 1), t.get("F", 1)
    channels, filters = ceil_div(p.channels, c) * c, ceil_div(p.filters, f) * f
    pieces = ceil_div(p.batch, t.get("samples") or p.batch) * t.get("cut", 1)
    products = p.flops / (p.channels * p.filters) * channels * filters
    # Vectors run over channels of what is made, and what is left of the last one is idle; contiguous tensors go
    # through blocks of both kinds of channels.
    cut_filters = ceil_div(filters, t.get("cut", 1)) if p.phase != "backward_data" else filters
    idle_c, idle_f = (ceil_div(n, lanes) * lanes / n for n in (channels, cut_filters))
    idle = idle_c * idle_f if not last else idle_c if p.phase == "backward_data" else idle_f
    seconds = products * min(idle, 6.0) / rate
    grown = {"x": channels / p.channels, "y": filters / p.filters, "w": channels * filters / (p.channels * p.filters)}
    copies = sum(2 * n[o] * grown[o] for o in read if last != own or grown[o] > 1)
    copies += 2 * n[made] * (grown[made] if config.family == "arranged" else 0.0)
    if not last:  # oneDNN brings contiguous tensors into blocks of channels and back
        copies += sum(n[o] * grown[o] for o in ("x", "y"))
    if config.family == "arranged" and p.phase == "backward_filter" and pieces > 1:
        copies += 2 * n["w"] * pieces
    return seconds + (1 + 3 * (config.family == "arranged") * pieces) * CALL_S + copies * eb / bandwidth
