"""What `convgen sw26010 conv` and `pool` print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from convgen.sw26010.conv_cost import Choice, Plan
from convgen.sw26010.conv_counts import conv_counts
from convgen.sw26010.conv_problem import ConvProblem
from convgen.sw26010.implicit_plan import ImplicitPlan, implicit_trips
from convgen.sw26010.local_plan import plan_blocks, plan_ldm_bytes, plan_name
from convgen.sw26010.pooling import Pooling, run_pooling, run_pooling_backward
from convgen.sw26010.rates import taken_rates
from convgen.sw26010.report import table


def conv_json(problem: ConvProblem, choices: Mapping[str, Choice]) -> dict[str, Any]:
    """Of each phase the plans, the fastest first, with their events by closed form; and why implicit isn't one."""
    return {
        "problem": str(problem),
        **{
            phase: {
                "not_possible": choice.refusal and f"implicit: {choice.refusal}",
                "plans": [_plan_json(plan, seconds) for plan, seconds in choice.plans],
            }
            for phase, choice in choices.items()
        },
    }


def _plan_json(plan: Plan, seconds: float) -> dict[str, Any]:
    counts = conv_counts(plan)
    trips = implicit_trips(plan) if isinstance(plan, ImplicitPlan) else None
    return {
        "plan": plan_name(plan), "blocks": plan_blocks(plan), "seconds": seconds, "ldm_bytes": plan_ldm_bytes(plan),
        "useful_flops": plan.problem.flops, "issued_flops": counts.issued_flops, "vmad": counts.vmad,
        "putr": counts.putr, "putc": counts.putc, "getr": counts.getr, "getc": counts.getc,
        "convert": counts.convert, "shuffle": counts.shuffle, "vadd": counts.vadd, "cycles": counts.cycles,
        "get_bytes_by_block": {str(b): counts.get[b] for b in sorted(counts.get)},
        "put_bytes_by_block": {str(b): counts.put[b] for b in sorted(counts.put)},
        "get_operations": counts.get_ops, "put_operations": counts.put_ops,
        **({} if trips is None else {
            "products": trips.gemms, "data_tiles": trips.data_tiles, "out_tiles": trips.out_tiles
        }),
    }  # fmt: skip


def conv_text(problem: ConvProblem, choices: Mapping[str, Choice]) -> str:
    """The same for people, in short."""
    rows: list[list[str]] = []
    for phase, choice in choices.items():
        for place, (plan, seconds) in enumerate(choice.plans):
            counts = conv_counts(plan)
            why = f"implicit: {choice.refusal}" if choice.refusal and place == 0 else ""
            rows.append([
                phase, plan_name(plan), f"{seconds:.4f}", "chosen" if place == 0 else "", f"{plan_ldm_bytes(plan):,}",
                f"{counts.dma_bytes:,}", f"{counts.messages:,}", f"{counts.vmad:,}", why,
            ])  # fmt: skip
    head = ("phase", "plan", "seconds", "", "LDM B", "DMA B", "messages", "vmad", "not possible")
    return f"{problem} float32 on one core group\n{table(head, rows)}"


def pooling_text(pooling: Pooling) -> tuple[str, bool]:
    """Both directions, run on random numbers and compared with numpy; and whether they agree."""
    rng = np.random.default_rng(0)
    k, (n, c, h_out, w_out) = pooling.kernel, pooling.out_shape
    x = rng.standard_normal((n, c, pooling.h, pooling.w)).astype(pooling.dtype)
    dy = rng.standard_normal(pooling.out_shape).astype(pooling.dtype)
    inside = x[:, :, : h_out * k, : w_out * k].astype(np.float64).reshape(n, c, h_out, k, w_out, k)
    share = dy.astype(np.float64)[:, :, :, None, :, None]
    dx_want = np.zeros(x.shape)
    if pooling.kind == "max":
        y_want = inside.max(axis=(3, 5))
        spread = np.where(inside == y_want[:, :, :, None, :, None], share, 0.0)  # no two are equal
    else:
        y_want, spread = inside.mean(axis=(3, 5)), np.broadcast_to(share / k**2, inside.shape)
    dx_want[:, :, : h_out * k, : w_out * k] = spread.reshape(n, c, h_out * k, w_out * k)
    (y, forth), (dx, back) = (
        run_pooling(pooling, x),
        run_pooling_backward(pooling, dy, x if pooling.kind == "max" else None),
    )
    errors = [float(np.abs(found - want).max()) for found, want in ((y, y_want), (dx, dx_want))]
    allowed = 1e-15 * k**2 if pooling.dtype == "float64" else 2.0**-22
    rates = taken_rates()
    rows = [
        [
            name, f"{counts.get_bytes:,}", f"{counts.put_bytes:,}", " ".join(map(str, sorted(counts.get))),
            f"{(rates.transfer_s(counts.get) + rates.transfer_s(counts.put)) * 1e3:.3f}", f"{error:.1e}",
        ]
        for name, counts, error in (("forward", forth, errors[0]), ("backward", back, errors[1]))
    ]  # fmt: skip
    cut = f"in strips of {pooling.strip * k} columns" if pooling.strip < w_out else "whole"
    title = f"{pooling.kind} pooling of {list(x.shape)} {pooling.dtype} by {k} x {k}"
    title += f"; a CPE takes {pooling.together * k} rows at once, {cut}"
    head = ("", "DMA get B", "DMA put B", "by B", "ms of DMA", "error")
    return f"{title}\n{table(head, rows)}\nallowed error {allowed:.1e}", max(errors) <= allowed
