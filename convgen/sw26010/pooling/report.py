"""What `convgen sw26010 pool` prints."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.sw26010.machine.rates import taken_rates
from convgen.sw26010.machine.table import table
from convgen.sw26010.operations.task import operation_seconds, run_operation
from convgen.sw26010.pooling.run import Pooling, run_pooling, run_pooling_backward
from convgen.sw26010.pooling.windows import Pool, Windows

Array = NDArray[Any]


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


def windows_text(windows: Windows) -> tuple[str, bool]:
    """Both directions of windows that may overlap, compared with sums and maxima over shifted views."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((windows.n, windows.c, windows.h, windows.w)).astype(windows.dtype)
    dy = rng.standard_normal(windows.out_shape).astype(windows.dtype)
    y_want, dx_want = _shifted(windows, x.astype(np.float64), dy.astype(np.float64))
    forward, backward = Pool(windows), Pool(windows, backward=True)
    made, forth = run_operation(forward, x)
    gradient, back = run_operation(backward, *((x,) if windows.kind == "max" else ()), dy)
    unit = 1e-15 if windows.dtype == "float64" else 2.0**-22
    allowed = unit * windows.kernel**2
    rates = taken_rates()
    rows: list[list[str]] = []
    right = True
    for name, counts, pool, found, want in (
        ("forward", forth, forward, made["y"], y_want), ("backward", back, backward, gradient["dx"], dx_want),
    ):  # fmt: skip
        error = float(np.abs(found - want).max())
        right = right and error <= allowed
        seconds = operation_seconds(pool, rates)
        blocks = " ".join(map(str, sorted(counts.get)))
        rows.append(
            [name, f"{counts.get_bytes:,}", f"{counts.put_bytes:,}", blocks, f"{seconds * 1e3:.3f}", f"{error:.1e}"]
        )
    k, s, p = windows.kernel, windows.stride, windows.padding
    title = f"{windows.kind} pooling of {list(x.shape)} {windows.dtype} by {k} x {k}, stride {s}, padding {p}"
    title += f"; a CPE takes {windows.together} rows of windows at once, {windows.together_backward} rows of dx"
    lines = (title, table(("", "DMA get B", "DMA put B", "by B", "ms", "error"), rows))
    verdict = "events equal the closed form" if right else "WRONG"
    return "\n".join([*lines, f"allowed error {allowed:.1e}; {verdict}"]), right


def _shifted(windows: Windows, x: Array, dy: Array) -> tuple[Array, Array]:
    """y and dx in float64, a tap at a time."""
    k, s, p = windows.kernel, windows.stride, windows.padding
    h_out, w_out = windows.out_shape[2:]
    outside = -np.inf if windows.kind == "max" else 0.0
    wide = np.pad(x, ((0, 0), (0, 0), (p, p + k), (p, p + k)), constant_values=outside)

    def tap(tensor: Array, i: int, j: int) -> Array:
        return tensor[:, :, i : i + (h_out - 1) * s + 1 : s, j : j + (w_out - 1) * s + 1 : s]

    taps = [(i, j) for i in range(k) for j in range(k)]
    y = np.maximum.reduce([tap(wide, *at) for at in taps]) if windows.kind == "max" else 0.0
    if windows.kind == "average":
        y = sum((tap(wide, *at) for at in taps), np.zeros(dy.shape)) / k**2
    gradient = np.zeros(wide.shape)
    for at in taps:  # no two elements of a window are equal
        tap(gradient, *at)[...] += dy * (tap(wide, *at) == y) if windows.kind == "max" else dy / k**2
    return np.asarray(y), gradient[:, :, p : p + windows.h, p : p + windows.w]
