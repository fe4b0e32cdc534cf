"""Modelled time of a configuration, which ranks candidates before any is measured. It is rough, and never reported as
measured.

On a GPU, convgen/kernels/estimate.py has it. On a CPU, ATen's products, the copies around them, and the calls add up.
"""

from __future__ import annotations

from convgen.cost.machines import load_machine
from convgen.kernels import estimate
from convgen.kernels.config import Config
from convgen.kernels.families import of_cpu, of_gpu
from convgen.kernels.problem import Problem
from convgen.kernels.work import whole_bytes, whole_flops
from convgen.spec.target import Target
from convgen.tune.database import Ceilings

# Seconds of a call on a CPU, through the dispatcher and its threads.
CALL_S = 1.2e-5


def assumed_ceilings(target: Target) -> Ceilings:
    """The ceilings of a device on which none were measured, from tuning/machines, which says where its numbers are
    from."""
    machine = load_machine(target.kind)
    return Ceilings(
        flops_per_s=dict(machine.peak_flops),
        bytes_per_s=machine.memory_bytes_per_s,
        floor_us=machine.launch_s * 1e6,
    )


def bounds_us(p: Problem, ceilings: Ceilings) -> dict[str, float]:
    """The least microseconds that a launch, the operands' bytes, and the products take."""
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
    if done is None:  # a library's kernel: its bounds, and copies to another arrangement
        copies = 2 * whole_bytes(p) / ceilings.bytes_per_s if config.tiles else 0.0
        return max(bounds_us(p, ceilings).values()) / 0.6 + copies * 1e6
    device = estimate.Ceilings(ceilings.flops_per_s[p.dtype], ceilings.bytes_per_s, ceilings.floor_us * 1e-6)
    return estimate.estimated_s(p, config, done, target, device) * 1e6


def _cpu_s(p: Problem, config: Config, ceilings: Ceilings) -> float:
    made = of_cpu(config)
    w = made.work(p, config)
    rate = ceilings.flops_per_s[p.dtype] * made.RATE
    return w.flops / rate + w.calls * CALL_S + w.copied_bytes / ceilings.bytes_per_s
