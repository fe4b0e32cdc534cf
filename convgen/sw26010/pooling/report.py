"""What `convgen sw26010 pool` prints."""

from __future__ import annotations

import numpy as np

from convgen.sw26010.machine.rates import taken_rates
from convgen.sw26010.machine.table import table
from convgen.sw26010.pooling.run import Pooling, run_pooling, run_pooling_backward


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
