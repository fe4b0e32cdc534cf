"""DMA bandwidth by size ([SW] Figure 2): programs that move data and nothing else, on the emulator's clock.

Continuous: every CPE moves pieces of a size that lie together, one after the other. Strided: pieces of 32 KB, of blocks
that lie apart. Every transfer is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from convgen import __version__
from convgen.errors import InputError
from convgen.sw26010.machine.core_group import CPES
from convgen.sw26010.machine.memory import Dram
from convgen.sw26010.machine.mesh import Event, VectorMesh
from convgen.sw26010.machine.printing import load_program, print_program
from convgen.sw26010.machine.rates import Rates

STRIDED_BYTES = 32 * 1024  # of a CPE in the right half of the figure
SIZES = tuple(2**i for i in range(5, 15))
# Continuous streams of the benchmark behind the figure, in GB/s (swCandle, the paper's [27]).
MEASURED_STREAM = {64: 3.2, 128: 5.9, 256: 10.1, 512: 14.0, 1024: 17.6, 2048: 19.6}


@dataclass(frozen=True, slots=True)
class Moves:
    """Transfers of every CPE.

    Args:
        block_bytes: what lies together, of doubles.
        strided: as many blocks as make 32 KB in one transfer; else a transfer is one block.
    Raises:
        InputError: blocks of parts of doubles, or that don't fit.
    """

    block_bytes: int
    strided: bool
    direction: Literal["get", "put"] = "get"
    times: int = 4

    def __post_init__(self) -> None:
        most = STRIDED_BYTES
        if self.block_bytes < 8 or self.block_bytes % 8 or self.block_bytes > most or most % self.block_bytes:
            raise InputError(f"blocks of {self.block_bytes} B: a part of {most} B, of whole doubles", hint="256")

    @property
    def rows(self) -> int:
        return STRIDED_BYTES // self.block_bytes if self.strided else 1

    @property
    def total_bytes(self) -> int:
        return CPES * self.times * self.rows * self.block_bytes


def moves_program(moves: Moves) -> str:
    """Text of the program for the mesh at once."""
    said = "strided" if moves.strided else "continuous"
    return print_program(
        "dma",
        {
            "header": (f"Printed by convgen {__version__} (sw26010 dma).",),
            "title": f"DMA {moves.direction}, {said}, {moves.block_bytes} B together",
            "who": "the 64 CPEs at once", "put": moves.direction == "put", "strided": moves.strided,
            "times": moves.times, "rows": moves.rows, "elements": moves.block_bytes // 8,
        },
    )  # fmt: skip


def run_moves(moves: Moves) -> tuple[tuple[Event, ...], int]:
    """Events of a run, and the bytes that it moved."""
    elements = moves.block_bytes // 8
    lines = CPES * moves.times * moves.rows
    # A block a row, and a gap after it; or all of them in one row.
    memory = np.zeros((lines, 2 * elements))[:, :elements] if moves.strided else np.zeros((1, lines * elements))
    mesh = VectorMesh(log=True)
    counts = mesh.run(load_program(moves_program(moves)), Dram("X", memory))
    return tuple(mesh.events), counts.dma_bytes


def moves_seconds(moves: Moves, rates: Rates) -> float:
    """Seconds by closed form: a round for every transfer, and its bytes. Strided blocks move at the bandwidth of their
    size, a continuous piece at the best bandwidth."""
    together = CPES * moves.rows * moves.block_bytes
    speed = rates.bytes_per_s(moves.block_bytes) if moves.strided else rates.group.dma_bytes_per_s
    return moves.times * (rates.dma_round_s + together / speed)


def events_seconds(events: tuple[Event, ...], rates: Rates, *, strided: bool) -> float:
    """Seconds of a run's transfers by the same rates, one after the other."""
    seconds = 0.0
    for event in events:
        if event.kind in ("get", "put"):
            moved = dict(event.sizes)
            size = sum(moved.values())
            seconds += rates.dma_round_s + (rates.transfer_s(moved) if strided else size / rates.group.dma_bytes_per_s)
    return seconds
