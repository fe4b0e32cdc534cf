"""Cycles of the register kernel, by counting the issue slots of its two pipelines.

For a 16x4 block of C (4 vectors by 4 columns) one k takes 16 `vmad` on the floating-point pipeline beside 8 loads,
puts or gets on the other: 16 cycles, the peak. A block is loaded and stored once (a cycle a vector each) and takes
10 cycles to fill: the latency of a message.
Source: [SW] Principle 1 (two pipelines), Jiang et al., ICPP 2017 (the 4x4 block).
"""

from __future__ import annotations

from convgen.sw26010.machine.core_group import LANES, MESH, REGISTER_COLUMNS, REGISTER_ROWS

FILL_CYCLES = 10


def block_cycles(columns: int, vectors: int) -> int:
    """One k of a block: multiply-adds on one pipeline, its messages on the other."""
    return max(columns * vectors, columns + vectors)


def registers_cycles(columns: int, vectors: int) -> int:
    """Once a block: load, store, fill."""
    return 2 * columns * vectors + FILL_CYCLES


def pieces(extent: int, piece: int) -> list[tuple[int, int]]:
    """(size, how many) of the pieces that `extent` is cut into: whole ones, and what remains."""
    whole, rest = divmod(extent, piece)
    return [(size, times) for size, times in ((piece, whole), (rest, 1)) if size and times]


def step_cycles(ml: int, nl: int, kl: int) -> int:
    """One of the eight steps, on tiles of ml x nl x kl elements a CPE (ml a multiple of 4)."""
    return sum(
        rows * columns * (registers_cycles(width, height // LANES) + kl * block_cycles(width, height // LANES))
        for height, rows in pieces(ml, REGISTER_ROWS)
        for width, columns in pieces(nl, REGISTER_COLUMNS)
    )


def tile_cycles(ml: int, nl: int, kl: int) -> int:
    """The eight steps."""
    return MESH * step_cycles(ml, nl, kl)
