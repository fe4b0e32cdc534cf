"""What `convgen sw26010 transform` prints."""

from __future__ import annotations

import numpy as np

from convgen.sw26010.conv.layouts import Transform, run_transform, transform_counts
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.rates import Rates, taken_rates
from convgen.sw26010.machine.table import table


def transform_seconds(counts: Counts, rates: Rates) -> float:
    """Of DMA by block; shuffles take less."""
    return rates.transfer_s(counts.get) + rates.transfer_s(counts.put)


def transform_text(transform: Transform, *, run: bool) -> tuple[str, bool]:
    """Events by closed form, and of a run on random numbers; and whether they agree, and the numbers with numpy's."""
    counts, rates = transform_counts(transform), taken_rates()
    there = "(N, C, H, W) to (H, W, C, N)" if transform.direction == "to_implicit" else "(H, W, C, N) to (N, C, H, W)"
    blocks = " ".join(map(str, sorted({*counts.get, *counts.put})))
    size = f"N={transform.n} C={transform.c} H={transform.h} W={transform.w} {transform.dtype}"
    lines = [
        f"transform {there}, {size}, by blocks of {transform.block} x {transform.block}",
        table(
            ("DMA get B", "DMA put B", "by B", "operations", "shuffles", "ms"),
            [[f"{counts.get_bytes:,}", f"{counts.put_bytes:,}", blocks, f"{counts.get_ops + counts.put_ops:,}",
              f"{counts.shuffle:,}", f"{transform_seconds(counts, rates) * 1e3:.3f}"]],
        ),
    ]  # fmt: skip
    right = True
    if run:
        tensor = np.random.default_rng(0).standard_normal(transform.source_shape).astype(transform.dtype)
        found, ran = run_transform(transform, tensor)
        axes = (2, 3, 1, 0) if transform.direction == "to_implicit" else (3, 2, 0, 1)
        right = bool(np.array_equal(found, tensor.transpose(axes))) and ran == counts
        same = "run: numpy's transposition bit by bit, events equal the closed form"
        lines.append(same if right else "run: WRONG, or events DIFFER FROM the closed form")
    return "\n".join(lines), right
