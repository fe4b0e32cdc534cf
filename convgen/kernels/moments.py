"""Moments of what a kernel makes, tile by tile, before it leaves the registers: a batch norm behind it reads nothing.

A tile of pixels has a mean and a sum of squared deviations a channel, of what is written, rounded as it is; norm_merge
(templates/kernels/norm.py.jinja) puts the tiles together, in one order. Source: Chan, Golub and LeVeque 1979, Eqs. 2.1.
"""

from __future__ import annotations

from convgen.kernels.config import Config
from convgen.kernels.problem import Problem

FAMILIES = ("gemm", "box")  # whose programs hold whole channels of their pixels


def has_moments(problem: Problem, config: Config) -> bool:
    """Whether a kernel can make them."""
    plain = problem.groups == problem.x_parts == problem.y_parts == 1 and problem.rim is None and not problem.bias
    return plain and config.family in FAMILIES and problem.phase == "forward" and problem.channels_last


def moment_lines(there: str, filters: str, kind: str, wide: str) -> list[str]:
    """Triton's lines behind the sum `acc`[pixels, filters] of tile `number`.

    Args:
        there: which of the pixels there are, at least one; `filters`: numbers of its filters.
        kind: the type to which `acc` is rounded; `wide`: that of moments.
    """
    return [
        f"there, filters = {there}, {filters}",
        f"held = acc.to({kind}).to({wide})",
        f"count = tl.sum(there.to(tl.int32), 0).to({wide})",
        "mean = tl.sum(tl.where(there[:, None], held, 0.0), 0) / count",
        "apart = tl.where(there[:, None], held - mean[None, :], 0.0)",
        "to = parts + tl.cast(number, tl.int64) * (2 * F) + filters",
        "tl.store(to, mean, mask=filters < F)",
        "tl.store(to + F, tl.sum(apart * apart, 0), mask=filters < F)",
        "tl.store(counts + number, count)",
    ]
