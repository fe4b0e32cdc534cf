"""Batch normalisation: sums of every channel, then its elements scaled and shifted; backward the same two steps.

    forward    y = a x + b                      a = g / sqrt(var + eps), b = h - a mean
    backward   dx = a dy + p x + q              from the sums of dy and of dy x: [SW] has Caffe's

A CPE has whole channels, so that nothing is summed over CPEs. The few numbers of a channel between the two steps are
the management core's.
Source: Ioffe and Szegedy 2015; [SW] 6.1 puts it in the place of AlexNet's local response normalisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen import __version__
from convgen.errors import InputError
from convgen.sw26010.gemm.counts import tiles_bytes
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.machine.core_group import CPES, LANES, SLOT_BYTES, SW26010, CoreGroup
from convgen.sw26010.machine.counts import Counts, total
from convgen.sw26010.machine.emulator import MessageMesh
from convgen.sw26010.machine.memory import Dram
from convgen.sw26010.machine.printing import load_program, print_program
from convgen.sw26010.machine.rates import Rates

NORM_LDM_BYTES = 60 * 1024
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Norm:
    """Normalisation of x [N, C, PIXELS] over samples and pixels.

    Raises:
        InputError: an extent below 1.
    """

    n: int
    c: int
    pixels: int
    dtype: Dtype = "float32"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if min(self.n, self.c, self.pixels) < 1:
            raise InputError(f"normalisation of {self.n} x {self.c} x {self.pixels} has an extent below 1")

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.n, self.c, self.pixels

    def piece(self, *, backward: bool) -> int:
        """Pixels in LDM at once: a plane, or as much of it as fits beside the other buffers."""
        most = NORM_LDM_BYTES // (SLOT_BYTES * (3 if backward else 2)) // LANES * LANES
        return min(most, -(-self.pixels // LANES) * LANES)


def sums_program(norm: Norm, *, backward: bool) -> str:
    """Text of the program of the first step."""
    title = "Sums of dy and of dy x over every channel" if backward else "Sums of x and of x^2 over every channel"
    return print_program("channel_sums", _context(norm, title, backward=backward))


def scale_program(norm: Norm, *, backward: bool) -> str:
    """Text of the program of the second step."""
    title = "dx = a dy + p x + q of every channel" if backward else "y = a x + b of every channel"
    return print_program("channel_scale", _context(norm, title, backward=backward))


def _context(norm: Norm, title: str, *, backward: bool) -> dict[str, object]:
    return {
        "header": (f"Printed by convgen {__version__} (sw26010 pointwise).",),
        "title": title, "backward": backward,
        "n": norm.n, "c": norm.c, "pixels": norm.pixels, "piece": norm.piece(backward=backward),
        "floats": norm.dtype == "float32",
    }  # fmt: skip


def run_norm(norm: Norm, x: Any, scale: Any, shift: Any, group: CoreGroup = SW26010) -> tuple[Array, Counts]:
    """y [N, C, PIXELS], and what the mesh did.

    Args:
        x: of that shape; scale, shift: [C].
    Raises:
        InputError: another shape.
    """
    given, mesh = _operand("x", x, norm), MessageMesh(group)
    sums, y = np.zeros((norm.c, 2)), np.zeros_like(given)
    mesh.run(load_program(sums_program(norm, backward=False)), Dram("X", given), Dram("SUMS", sums))
    mean, spread = _moments(norm, sums)
    a = np.asarray(scale, np.float64) / spread
    factors = np.stack([a, np.asarray(shift, np.float64) - a * mean], axis=1)
    program = load_program(scale_program(norm, backward=False))
    mesh.run(program, Dram("X", given), Dram("FACTORS", factors), Dram("Y", y))
    return y, mesh.counts


def run_norm_backward(norm: Norm, x: Any, dy: Any, scale: Any, group: CoreGroup = SW26010) -> tuple[Array, Counts]:
    """dx [N, C, PIXELS], and what the mesh did; the sums of x are those that the forward pass made.

    Raises:
        InputError: another shape.
    """
    given, gradient, mesh = _operand("x", x, norm), _operand("dy", dy, norm), MessageMesh(group)
    kept, sums, dx = np.zeros((norm.c, 2)), np.zeros((norm.c, 2)), np.zeros_like(given)
    MessageMesh(group).run(load_program(sums_program(norm, backward=False)), Dram("X", given), Dram("SUMS", kept))
    mean, spread = _moments(norm, kept)
    program = load_program(sums_program(norm, backward=True))
    mesh.run(program, Dram("X", given), Dram("DY", gradient), Dram("SUMS", sums))
    count = norm.n * norm.pixels
    a = np.asarray(scale, np.float64) / spread
    # With u = (x - mean) / spread: dx = a (dy - mean of dy - u * mean of dy u).
    along = (sums[:, 1] - mean * sums[:, 0]) / spread / count
    p = -a * along / spread
    factors = np.stack([a, p, -a * sums[:, 0] / count - p * mean], axis=1)
    program = load_program(scale_program(norm, backward=True))
    mesh.run(program, Dram("X", given), Dram("DY", gradient), Dram("FACTORS", factors), Dram("DX", dx))
    return dx, mesh.counts


def _moments(norm: Norm, sums: Array) -> tuple[Array, Array]:
    """Mean and sqrt(variance + eps) of every channel."""
    mean = sums[:, 0] / (norm.n * norm.pixels)
    variance = np.maximum(sums[:, 1] / (norm.n * norm.pixels) - np.square(mean), 0.0)
    return mean, np.sqrt(variance + norm.eps)


def _operand(name: str, value: Any, norm: Norm) -> Array:
    given = np.array(value, dtype=norm.dtype, order="C")
    if given.shape != norm.shape:
        raise InputError(f"{name} is {list(given.shape)}, the normalisation has {list(norm.shape)}")
    return given


def norm_counts(norm: Norm, *, backward: bool) -> Counts:
    """Events of both steps, by closed form."""
    return total((_sums_counts(norm, backward=backward), _scale_counts(norm, backward=backward)))


def _pieces(norm: Norm, *, backward: bool) -> tuple[dict[int, int], int]:
    """Bytes by block, and operations, to move all of x once."""
    size = 4 if norm.dtype == "float32" else 8
    sizes, pieces = tiles_bytes((1, 1), (norm.pixels, norm.piece(backward=backward)), size)
    lines = norm.n * norm.c
    return {block: lines * moved for block, moved in sizes.items()}, lines * pieces


def _sums_counts(norm: Norm, *, backward: bool) -> Counts:
    counts, operands = Counts(), 2 if backward else 1
    sizes, pieces = _pieces(norm, backward=backward)
    for block, moved in sizes.items():
        counts.add_get(block, operands * moved, 0)
    counts.get_ops = operands * pieces
    counts.add_put(2 * SLOT_BYTES, norm.c * 2 * SLOT_BYTES, norm.c)
    piece = norm.piece(backward=backward)
    whole, rest = divmod(norm.pixels, piece)
    counts.vadd = 2 * norm.n * norm.c * (whole * (piece // LANES) + -(-rest // LANES))
    if norm.dtype == "float32":
        counts.convert = operands * pieces * piece // LANES
    return counts


def _scale_counts(norm: Norm, *, backward: bool) -> Counts:
    counts, operands = Counts(), 2 if backward else 1
    sizes, pieces = _pieces(norm, backward=backward)
    for block, moved in sizes.items():
        counts.add_get(block, operands * moved, 0)
        counts.add_put(block, moved, 0)
    factors = (operands + 1) * SLOT_BYTES
    counts.add_get(factors, norm.c * factors, norm.c)
    counts.get_ops += operands * pieces
    counts.put_ops = pieces
    vectors = pieces * norm.piece(backward=backward) // LANES
    counts.vadd = operands * vectors
    if norm.dtype == "float32":
        counts.convert = (operands + 1) * vectors
    return counts


def norm_seconds(norm: Norm, rates: Rates, *, backward: bool) -> float:
    """Of DMA, with rounds of the busiest CPE: of what comes together for a piece, and of what goes."""
    counts = norm_counts(norm, backward=backward)
    _, pieces = _pieces(norm, backward=backward)
    mine = -(-norm.c // CPES) * (pieces // norm.c)
    rounds = 3 * mine + 2 * -(-norm.c // CPES)
    return rates.transfer_s(counts.get) + rates.transfer_s(counts.put) + rounds * rates.dma_round_s
