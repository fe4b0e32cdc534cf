"""What `convgen sw26010 gemm` prints: text for people, dictionaries for programs."""

from __future__ import annotations

from typing import Any

from convgen.sw26010.gemm.plan import GemmPlan
from convgen.sw26010.machine.core_group import LANES, MESSAGE_BYTES, SW26010
from convgen.sw26010.machine.counts import Counts


def gemm_json(plan: GemmPlan, counts: Counts, seconds: float, by_cycles_s: float | None) -> dict[str, Any]:
    """Plan, LDM, events and seconds of a GEMM."""
    return {
        "m": plan.m, "n": plan.n, "k": plan.k, "dtype": plan.dtype,
        "blocks": [plan.bm, plan.bn, plan.bk], "tile": list(plan.tile), "ldm_bytes": plan.ldm_bytes,
        "useful_flops": plan.useful_flops, "issued_flops": counts.issued_flops,
        "putr": counts.putr, "putc": counts.putc, "getr": counts.getr, "getc": counts.getc,
        "vmad": counts.vmad, "convert": counts.convert, "cycles": counts.cycles,
        "get_bytes_by_block": {str(b): counts.get[b] for b in sorted(counts.get)},
        "put_bytes_by_block": {str(b): counts.put[b] for b in sorted(counts.put)},
        "get_operations": counts.get_ops, "put_operations": counts.put_ops,
        "flops_per_byte": plan.useful_flops / counts.dma_bytes, "ridge_flops_per_byte": SW26010.ridge_flops_per_byte,
        "seconds": seconds, "seconds_by_cycles": by_cycles_s,
    }  # fmt: skip


def gemm_text(plan: GemmPlan, counts: Counts, seconds: float, by_cycles_s: float | None) -> str:
    """The same for people."""
    ml, nl, kl = plan.tile
    intensity = plan.useful_flops / counts.dma_bytes
    limit = "the mesh" if intensity >= SW26010.ridge_flops_per_byte else "DMA"
    moved = [f"{size:,} B by {block} B" for block, size in sorted(counts.get.items())]
    put = [f"{size:,} B by {block} B" for block, size in sorted(counts.put.items())]
    rate = plan.useful_flops / seconds / 1e9
    lines = [
        f"gemm      C[{plan.m}, {plan.n}] += A[{plan.m}, {plan.k}] B[{plan.k}, {plan.n}]  {plan.dtype}",
        f"blocks    {plan.bm} x {plan.bn} x {plan.bk}, a tile of {ml} x {nl} x {kl} in each CPE",
        f"LDM       {plan.ldm_bytes:,} of {SW26010.ldm_bytes:,} B",
        f"flops     {plan.useful_flops:,} useful, {counts.issued_flops:,} issued in {counts.vmad:,} vmad",
        f"messages  {counts.putr:,} putr, {counts.putc:,} putc, of {MESSAGE_BYTES} B to 7 CPEs each",
        f"converts  {counts.convert:,} of {LANES} elements between float32 and float64",
        f"DMA get   {'; '.join(moved)}",
        f"DMA put   {'; '.join(put)}",
        f"roofline  {intensity:.1f} flops a byte, ridge at {SW26010.ridge_flops_per_byte:.1f}: {limit} is the limit",
        f"cycles    {counts.cycles:,} of instructions in each CPE",
        f"time      {seconds * 1e3:.3f} ms, {rate:.0f} Gflop/s, {rate * 1e9 / SW26010.peak_flops_per_s:.0%} of peak "
        "(model)",
    ]
    if by_cycles_s is not None:
        lines.append(f"          {by_cycles_s * 1e3:.3f} ms on the emulator's clock, by cycles and DMA")
    return "\n".join(lines)
