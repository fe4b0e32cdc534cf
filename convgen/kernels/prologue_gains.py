"""Decides, by the bound, whether a product's kernel should do the prologue instead of a pass over memory."""

from __future__ import annotations

from dataclasses import replace

from convgen.kernels.config import Config, ceil_div
from convgen.kernels.estimate import busy_s, data_sheet
from convgen.kernels.families import gemm
from convgen.kernels.problem import Problem
from convgen.kernels.rates import ISSUES, RATES
from convgen.spec.target import Target

MEASURED = (90,)  # targets (sm_) for which sizes were compiled (families/gemm.py, HELD)
INSTRUCTIONS = 15  # a thread's for each element, counted in kernels that were compiled for sm_90


def prologue_refusal(problem: Problem, config: Config, target: Target) -> str | None:
    """Why a kernel can't do its prologue, or why that saves nothing by the bound; None if it can and saves."""
    if config.family != gemm.NAME or not problem.channels_last or problem.element_bytes != 2 or problem.groups > 1:
        return "no product of pixels and weights of two bytes each"
    if problem.rim is not None or problem.x_parts > 1 or problem.y_parts > 1:
        return "a halo, or parts"
    if problem.before is None:
        return "nothing stands before it"
    if target.arch not in MEASURED:
        return f"sizes that spill nothing are known of sm_90, not of {target}"
    rates = RATES[target.arch]
    device, plain = data_sheet(target, problem.dtype), replace(problem, before=None, moments="")
    work = gemm.work(plain, config)
    read, made = ("filters", "channels") if problem.phase == "backward_data" else ("channels", "filters")
    tiles = ceil_div(getattr(problem, made), config.tile[f"B{made[0].upper()}"])
    elements = problem.pixels * getattr(problem, read)
    own = gemm.default(plain, target)
    alone = busy_s(plain, own, gemm.work(plain, own), target, device)
    busy = busy_s(plain, config, work, target, device)
    more = elements * tiles * INSTRUCTIONS / (target.warp * ISSUES * target.processors * rates.clock_hz)
    one_pass = (problem.before.operands + 2) * elements * problem.element_bytes / device.bytes_per_s
    apart = max(device.floor_s, alone, plain.bytes / device.bytes_per_s) + max(device.floor_s, one_pass)
    together = max(device.floor_s, busy + more, problem.bytes / device.bytes_per_s)
    return None if together < apart else f"{together * 1e6:.1f} us by the bound, {apart * 1e6:.1f} us apart"
