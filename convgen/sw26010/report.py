"""What the commands print: text for people, dictionaries for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convgen.sw26010.allreduce import StepTraffic, simulate_traffic
from convgen.sw26010.allreduce_cost import NUMBERINGS, Network, all_reduce_time, ring_time
from convgen.sw26010.counts import Counts
from convgen.sw26010.fit import fit
from convgen.sw26010.gemm_plan import GemmPlan
from convgen.sw26010.machine import LANES, MESSAGE_BYTES, SW26010
from convgen.sw26010.rates import FITTED, Rates
from convgen.sw26010.table2 import (
    KINDS,
    ORDER,
    Cell,
    Kind,
    Score,
    cells,
    held_out,
    read_table2,
    score,
    support_right,
    winners,
)

# A layer with big planes, which two constants need, and one without.
FIT_BIG, FIT_SMALL = ("conv1_2", "conv2_2"), ("conv3_1", "conv3_2", "conv4_1", "conv4_2", "conv5_1")
FIT_PAIRS = tuple((big, small) for big in FIT_BIG for small in FIT_SMALL)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ("  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
             for row in (head, *rows))  # fmt: skip
    return "\n".join(line.rstrip() for line in lines)


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


def scores(taken: Rates, constants: dict[str, float], fitted_layers: Sequence[str]) -> dict[str, Score]:
    """Errors of fitted and held-out cells, by kind."""
    everything = cells(taken)
    rest = held_out(everything, fitted_layers)
    named: dict[str, list[Cell]] = {
        "fitted": [c for c in everything if c not in rest],
        "held out": list(rest),
        "held out, implicit": [c for c in rest if c.kind == "implicit"],
        "held out, explicit": [c for c in rest if c.kind == "explicit"],
        "  56 pixels or fewer": [c for c in rest if c.kind == "explicit" and c.problem.h <= 56],
        "  112 pixels or more": [c for c in rest if c.kind == "explicit" and c.problem.h > 56],
    }
    return {name: score(chosen, constants) for name, chosen in named.items() if chosen}


def fit_range(taken: Rates) -> dict[str, tuple[float, float]]:
    """Lowest and highest mean error of held-out cells over pairs of layers to fit: what the choice of two is worth."""
    everything = cells(taken)
    found: dict[str, list[float]] = {}
    for layers in FIT_PAIRS:
        constants = fit(cell for cell in everything if set(cell.layers) & set(layers))
        for name, one in scores(taken, constants, layers).items():
            found.setdefault(name, []).append(one.mean)
    return {name: (min(means), max(means)) for name, means in found.items() if name != "fitted"}


def table2_json(taken: Rates, constants: dict[str, float], fitted_layers: Sequence[str], left_out: Score) -> Any:
    """Constants, every cell, and the scores."""
    won = winners(taken, constants)
    return {
        "fitted_layers": list(fitted_layers),
        "constants": constants,
        "cells": [
            {
                "layers": list(c.layers), "phase": c.phase, "kind": c.kind,
                "published_s": c.published_s, "predicted_s": c.terms.seconds(constants),
            }
            for c in cells(taken)
        ],
        "scores": {
            name: {"cells": s.cells, "mean": s.mean, "largest": s.largest}
            for name, s in (*scores(taken, constants, fitted_layers).items(), ("leave one layer out", left_out))
        },
        "winners": {
            "pairs": won.pairs, "right": won.right, "clear_pairs": won.clear_pairs, "clear_right": won.clear_right,
            "always_implicit": won.always_implicit, "wrong": list(won.wrong),
        },
        "held_out_over_pairs_of_fitted_layers": {name: list(bounds) for name, bounds in fit_range(taken).items()},
        "support": dict(zip(("right", "slots"), support_right(), strict=True)),
    }  # fmt: skip


def table2_text(taken: Rates, constants: dict[str, float], fitted_layers: Sequence[str], left_out: Score) -> str:
    """The table with predictions beside it, the constants and the scores."""
    predicted = {
        (name, c.phase, c.kind): c.terms.seconds(constants) for c in cells(taken) for name in c.layers
    }  # fmt: skip

    def entry(name: str, phase: Any, kind: Kind, published: float | None) -> str:
        return "-" if published is None else f"{published:.2f}/{predicted[name, phase, kind]:.2f}"

    head = ["layer", *(f"{phase.replace('backward_', '')} {kind}" for phase in ORDER for kind in KINDS)]
    rows = [
        [row.name + "*" * (row.name in fitted_layers)]
        + [entry(row.name, phase, kind, row.published_s.get((phase, kind))) for phase in ORDER for kind in KINDS]
        for row in read_table2()
    ]
    won = winners(taken, constants)
    right, slots = support_right()
    found = [*scores(taken, constants, fitted_layers).items(), ("leave one layer out", left_out)]
    lines = [
        "Table 2, seconds published/predicted; layers with * are fitted, the others held out",
        "",
        table(head, rows),
        "",
        table(("constant", "fitted"), [(name, f"{constants[name]:.4g}") for name in FITTED]),
        "",
        table(
            ("absolute error", "cells", "mean", "largest"),
            [(name, str(s.cells), f"{s.mean:.1%}", f"{s.largest:.1%}") for name, s in found],
        ),
        "",
        f"faster plan right in {won.right} of {won.pairs} pairs, "
        f"{won.clear_right} of the {won.clear_pairs} that differ by 3 %; always implicit: {won.always_implicit}",
        f"wrong: {', '.join(won.wrong) or 'none'}",
        f"implicit possible or not: right in {right} of {slots}",
        "",
        f"{len(FIT_PAIRS)} choices of the two fitted layers, of {', '.join(FIT_BIG)} and {', '.join(FIT_SMALL)}:",
        *(f"  {name}: mean {low:.1%} to {high:.1%}" for name, (low, high) in fit_range(taken).items()),
    ]
    return "\n".join(lines)


def all_reduce_json(network: Network, elements: int) -> dict[str, Any]:
    """Both numberings: seconds by Eqs. 2-6, and the traffic of every step. float32 elements."""
    found: dict[str, Any] = {
        "nodes": network.nodes, "supernode": network.supernode, "bytes": 4 * elements,
        "latency_s": network.latency_s, "inside_s_per_byte": network.inside_s_per_byte,
        "across_s_per_byte": network.across_s_per_byte, "reduce_s_per_byte": network.reduce_s_per_byte,
        "ring_s": ring_time(network, 4 * elements),
    }  # fmt: skip
    for numbering in NUMBERINGS:
        time = all_reduce_time(network, numbering, 4 * elements)
        found[numbering] = {
            "reduce_scatter_s": time.reduce_scatter_s,
            "all_gather_s": time.all_gather_s,
            "all_reduce_s": time.all_reduce_s,
            "steps": [_step_json(step) for step in simulate_traffic(network, numbering, elements, 4)],
        }
    return found


def _step_json(step: StepTraffic) -> dict[str, Any]:
    return {
        "phase": step.phase, "distance": step.distance, "message_bytes": step.message_bytes,
        "total_bytes": step.total_bytes, "crossing_bytes": step.crossing_bytes, "seconds": step.seconds,
    }  # fmt: skip


def all_reduce_text(network: Network, elements: int) -> str:
    """The same for people: steps with what crosses supernodes, then the equations and the messages' sum."""
    runs = {numbering: simulate_traffic(network, numbering, elements, 4) for numbering in NUMBERINGS}
    head = [
        "step",
        "distance",
        "message B",
        *(f"crossing B, {n}" for n in NUMBERINGS),
        *(f"ms, {n}" for n in NUMBERINGS),
    ]
    rows = [
        [a.phase, str(a.distance), f"{a.message_bytes:,}", f"{a.crossing_bytes:,}", f"{b.crossing_bytes:,}",
         f"{a.seconds * 1e3:.4f}", f"{b.seconds * 1e3:.4f}"]
        for a, b in zip(*runs.values(), strict=True)
    ]  # fmt: skip
    times = {numbering: all_reduce_time(network, numbering, 4 * elements) for numbering in NUMBERINGS}
    summary = [
        [numbering, f"{t.reduce_scatter_s * 1e3:.4f}", f"{t.all_gather_s * 1e3:.4f}", f"{t.all_reduce_s * 1e3:.4f}",
         f"{sum(s.seconds for s in runs[numbering]) * 1e3:.4f}", f"{sum(s.crossing_bytes for s in runs[numbering]):,}"]
        for numbering, t in times.items()
    ]  # fmt: skip
    gain = times["adjacent"].all_reduce_s / times["round-robin"].all_reduce_s
    lines = [
        f"all-reduce of {4 * elements:,} B on {network.nodes} nodes in supernodes of {network.supernode}",
        "",
        table(head, rows),
        "",
        table(("ms by Eqs. 2-6", "reduce-scatter", "all-gather", "all-reduce", "messages", "bytes crossing"), summary),
        "",
        f"round-robin numbers are {gain:.3f} times as fast; a ring without oversubscription takes "
        f"{ring_time(network, 4 * elements) * 1e3:.3f} ms",
    ]
    return "\n".join(lines)
