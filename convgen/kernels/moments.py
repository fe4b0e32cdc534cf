"""Moments of a kernel's result, made tile by tile while it is in registers, so that a norm behind needn't read it for
them.

Each tile of pixels gives a mean and a sum of squared deviations for each channel, of the values as they are rounded and
written. For a batch norm a tile has any pixels; for a norm by group it has those of one sample. norm_merge and
norm_groups (templates/kernels/norm.py.jinja) put the tiles together, in one order. Source: Chan, Golub and LeVeque
1979, Eqs. 2.1.
"""

from __future__ import annotations

from math import prod

from convgen.kernels.config import Config, ceil_div
from convgen.kernels.epilogues import operands
from convgen.kernels.problem import Problem

FAMILIES = ("gemm", "box")  # families whose programs hold whole channels of their pixels
EMPTY = 1.25  # the most pixels of tiles that are cut by sample, over the pixels that exist


def moments_refusal(problem: Problem, config: Config) -> str | None:
    """Why a kernel can't make the moments that a problem asks for, or why nothing is saved; None if it can."""
    if config.family not in FAMILIES:
        return f"programs of {config.family} don't hold whole channels of their pixels"
    if problem.phase != "forward" or not problem.channels_last:
        return "not forward, or channels are not last"
    if problem.groups > 1 or problem.x_parts > 1 or problem.y_parts > 1:
        return "channels are in groups, or in parts"
    if config.split > 1 and any(kind == "element" for _, kind in operands(problem.epilogue)):
        return "programs share a tile, and another tensor is added: registers spill"
    rows = problem.batch * prod(d.y for d in problem.dims)
    found = pieces(problem, config)
    tile = config.tile.get("BP", 0)  # a plain product's tiles may have pixels of several samples
    if problem.moments == "samples" and found * tile > EMPTY * rows:
        return f"{rows // problem.batch} pixels of a sample leave much of a tile of {tile} empty"
    numbers = 2 * 2 * (8 if problem.dtype == "float64" else 4)  # bytes of a tile's channel, written and read
    return None if found * numbers < rows * problem.element_bytes else "a tile's moments are no fewer bytes than it is"


def pieces(problem: Problem, config: Config) -> int:
    """How many tiles have moments."""
    rows, tile = [d.y for d in problem.dims], config.tile
    by_sample = problem.moments == "samples"
    if "BP" in tile:
        return problem.batch * ceil_div(prod(rows), tile["BP"]) if by_sample else ceil_div(problem.pixels, tile["BP"])
    boxes = prod(ceil_div(n, tile[f"T{d.name}"]) for n, d in zip(rows, problem.dims, strict=True))
    return boxes * (problem.batch if by_sample else ceil_div(problem.batch, tile["TN"]))


def moment_lines(there: str, filters: str, kind: str, wide: str) -> list[str]:
    """Triton's lines behind the sum `acc`[pixels, filters] of tile `number`.

    Args:
        there: which of the pixels exist, at least one; `filters`: numbers of its filters.
        kind: the type to which `acc` is rounded; `wide`: the moments' type.
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


def moment_lines_by_sample(there: str, filters: str, kind: str, wide: str, shape: str, each: str) -> list[str]:
    """Triton's lines that make moments of a tile of TN samples from `n` on, for each sample.

    Args:
        there: which pixels of a sample exist; `shape`: text of TN, those pixels, and filters.
        each: the text of how many tiles a sample has.
    """
    return [
        f"there, filters, sample = {there}, {filters}, n + tl.arange(0, TN)",
        f"held = acc.to({kind}).to({wide}).reshape({shape})",
        f"count = tl.sum(there.to(tl.int32), 0).to({wide})",
        "mean = tl.sum(tl.where(there[None, :, None], held, 0.0), 1) / count",
        "apart = tl.where(there[None, :, None], held - mean[:, None, :], 0.0)",
        f"piece = sample.to(tl.int64) * ({each}) + number % ({each})",
        "to = parts + piece[:, None] * (2 * F) + filters[None, :]",
        "known = (sample < N)[:, None] & (filters < F)[None, :]",
        "tl.store(to, mean, mask=known)",
        "tl.store(to + F, tl.sum(apart * apart, 1), mask=known)",
        "tl.store(counts + piece, count, mask=sample < N)",
    ]
