"""Seconds of a blocked GEMM, by closed form and by replaying a run's events; and the search for blocks.

The mesh computes one block of K while DMA brings the next; C's transfers and the first blocks of A and B are waited
for. Every transfer that is waited for costs a round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.errors import InputError
from convgen.sw26010.gemm.plan import GemmPlan, round_up
from convgen.sw26010.machine.core_group import CPES, MESH, SLOT_BYTES
from convgen.sw26010.machine.kernel_cycles import tile_cycles
from convgen.sw26010.machine.mesh import Event
from convgen.sw26010.machine.rates import Rates

SEARCH_LDM_BYTES = 60 * 1024  # the rest is the program's stack
MOST_BM, MOST_BN = 1024, 512

Reals = NDArray[np.float64]


def library_seconds(plan: GemmPlan, rates: Rates) -> float:
    """Seconds of a product by the general library beside the mesh's work: of the call, and of each row of C."""
    return rates.library_call_s + rates.library_row_s * plan.m


def gemm_seconds(plan: GemmPlan, rates: Rates) -> float:
    """Seconds of a double-buffered plan; blocks on the edges count whole, as they are computed.

    Raises:
        InputError: the plan is not double buffered.
    """
    if not plan.double_buffer:
        raise InputError("the closed form is that of double buffering", hint="clock_seconds replays any run")
    cm, cn, ck = plan.blocks
    compute = plan.bm * plan.bn * plan.bk * _flop_s(rates) * 2
    return cm * cn * float(_block_of_c(plan, plan.bm, plan.bn, np.array([plan.bk]), np.array([ck]), compute, rates)[0])


def _flop_s(rates: Rates) -> float:
    return 1 / (rates.group.peak_flops_per_s * rates.gemm_kernel_efficiency)


def _block_of_c(plan: GemmPlan, bm: int, bn: int, bk: Any, ck: Any, compute: Any, rates: Rates) -> Reals:
    """Seconds of one block of C with its ck blocks of A and B, for several bk at once."""
    size = plan.itemsize

    def transfer(elements: Any, along: Any) -> Any:  # blocks are a CPE's share of the contiguous axis
        line = along * size / MESH
        return elements * size * (line + rates.dma_half_block_bytes) / (rates.group.dma_bytes_per_s * line)

    a = transfer(bm * bk, bk if plan.a_transposed else bm)
    b = transfer(bk * bn, bn if plan.b_transposed else bk)
    load = a + b + rates.dma_round_s
    c = transfer(bm * bn, bm) + rates.dma_round_s
    return (2 if plan.accumulate else 1) * c + load + (ck - 1) * np.maximum(compute, load) + compute


@cache
def search_blocks(plan: GemmPlan, rates: Rates, bm_step: int = 128) -> GemmPlan:
    """The plan with the fastest blocks by `gemm_seconds`.

    Double-buffered blocks that fit into 60 KB are tried: bm in multiples of `bm_step` up to 1024, bn of 32 up to 512,
    bk of 8. Of equally fast ones the first is taken, by bn, then bm, then bk.

    Args:
        bm_step: 128, as the published library has it (16 rows of registers on 8 CPEs), or 32.
    Raises:
        InputError: no block fits (never with 60 KB).
    """
    best: tuple[float, int, int, int] | None = None
    slots = CPES * SEARCH_LDM_BYTES // SLOT_BYTES
    for bn in range(32, min(MOST_BN, round_up(plan.n, 32)) + 1, 32):
        for bm in range(bm_step, min(MOST_BM, round_up(plan.m, bm_step)) + 1, bm_step):
            most = (slots - bm * bn) // (2 * (bm + bn)) // MESH
            bk = MESH * np.arange(1, min(most, round_up(plan.k, MESH) // MESH) + 1)
            if not bk.size:
                continue
            compute = 2 * bm * bn * bk * _flop_s(rates)
            block = _block_of_c(plan, bm, bn, bk, plan.images * -(-plan.k // bk), compute, rates)
            seconds = -(-plan.m // bm) * -(-plan.n // bn) * block
            at = int(seconds.argmin())
            if best is None or seconds[at] < best[0]:
                best = (float(seconds[at]), bm, bn, int(bk[at]))
    if best is None:
        raise InputError(f"no blocks of {plan.m} x {plan.n} x {plan.k} fit into {SEARCH_LDM_BYTES} B")
    return replace(plan, bm=best[1], bn=best[2], bk=best[3], double_buffer=True)


def clock_seconds(events: Iterable[Event], rates: Rates, *, by_cycles: bool = False) -> float:
    """Seconds of a run from its events: DMA goes on beside the mesh, until it is waited for.

    Args:
        by_cycles: steps take the cycles of their instructions, instead of the kernel's efficiency.
    """
    now = engine = 0.0
    arrives: dict[str, float] = {}
    for event in events:
        if event.kind == "step":
            ml, nl, kl = event.tile
            if by_cycles:
                now += tile_cycles(ml, nl, kl) / MESH / rates.group.clock_hz
            else:
                now += 2 * CPES * ml * nl * kl * _flop_s(rates)
        elif event.kind == "get":
            # What queues up behind a transfer shares its round.
            start = engine if engine > now else now + rates.dma_round_s
            engine = start + rates.transfer_s(dict(event.sizes))
            arrives[event.buffer] = engine
        elif event.kind == "put":
            now = engine = max(now, engine) + rates.dma_round_s + rates.transfer_s(dict(event.sizes))
        else:
            now = max(now, arrives.pop(event.buffer, now))
    return now
