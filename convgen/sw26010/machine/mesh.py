"""The mesh all at once: the 64 CPEs in lockstep, on arrays [8, 8, ...].

It executes programs printed for it, whose loops and transfers are those of one CPE and whose steps name the broadcasts
of a whole mesh. Messages and instructions are counted by closed form (they are checked against the emulation message
by message), transfers as they happen. `exact` multiplies in the order of the messages, one k at a time, and gives the
same bits; otherwise a tile is one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from convgen.sw26010.machine import transfers
from convgen.sw26010.machine.core_group import (
    CPES,
    LANES,
    MESH,
    REGISTER_COLUMNS,
    REGISTER_ROWS,
    SLOT_BYTES,
    SW26010,
    CoreGroup,
)
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.faults import DmaFault
from convgen.sw26010.machine.kernel_cycles import step_cycles
from convgen.sw26010.machine.ldm import Buffer, Ldm
from convgen.sw26010.machine.memory import Dram, block_bytes

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Event:
    """A line of the log: a transfer starts or is waited for, or a step is computed.

    `sizes` are the bytes of a get or a put by block size; `tile` is a step's tile (ml, nl, kl).
    """

    kind: Literal["get", "put", "wait", "step"]
    buffer: str = ""
    sizes: tuple[tuple[int, int], ...] = ()
    tile: tuple[int, int, int] = (0, 0, 0)


def step_counts(ml: int, nl: int, kl: int) -> Counts:
    """Events of one of the eight steps, by closed form, for tiles of ml x nl x kl a CPE.

    A is sent again for every 4 columns, B for every 16 rows: what is received is not stored.
    """
    putr = MESH * (ml // LANES) * -(-nl // REGISTER_COLUMNS) * kl
    putc = MESH * nl * -(-ml // REGISTER_ROWS) * kl
    return Counts(
        putr=putr,
        putc=putc,
        getr=(MESH - 1) * putr,
        getc=(MESH - 1) * putc,
        vmad=CPES * (ml // LANES) * nl * kl,
        cycles=step_cycles(ml, nl, kl),
    )


class VectorMesh:
    """All 64 CPEs. `row` and `column` are arrays that broadcast to [8, 8]."""

    def __init__(self, group: CoreGroup = SW26010, *, exact: bool = False, log: bool = False) -> None:
        """
        Args:
            exact: multiply in the order of the messages.
            log: keep the events of the run, for a clock to replay.
        """
        self.group = group
        self.exact = exact
        self.row = np.arange(MESH)[:, None]
        self.column = np.arange(MESH)[None, :]
        self.id = MESH * self.row + self.column
        self.counts = Counts()
        self.events: list[Event] = []
        self._log = log
        self._ldm = Ldm(group.ldm_bytes)
        self._steps: dict[tuple[int, int, int], int] = {}

    def run(self, program: Callable[..., None], *operands: Any) -> Counts:
        """Run a program printed for the mesh. Returns the events of this run. Raises MeshFault."""
        self._ldm = Ldm(self.group.ldm_bytes)
        earlier, self.counts = self.counts, Counts()
        self._steps.clear()
        program(self, *operands)
        self._ldm.check_arrived()
        run = self.counts
        for tile, times in self._steps.items():
            run.add(step_counts(*tile), times)
        self.counts = earlier
        self.counts.add(run)
        return run

    @property
    def ldm_bytes(self) -> int:
        """LDM that a CPE of the last run used."""
        return self._ldm.used_bytes

    def ldm(self, name: str, rows: int, columns: int, slot_bytes: int = SLOT_BYTES) -> Buffer:
        """A buffer in every CPE. Raises LdmOverflow."""
        return self._ldm.allocate(name, rows, columns, slot_bytes, lead=(MESH, MESH))

    def dma_get(self, into: Buffer, source: Dram, row: Any, column: Any) -> None:
        """Every CPE's dma_get; `row` and `column` may differ from CPE to CPE. Raises DmaFault."""
        transfers.begin_get(into, source)
        part = Counts()
        rows, columns = into.rows, into.columns
        window = self._window(source, row, column, rows, columns)
        if window is not None:
            into.array[...] = window
            block = block_bytes(rows, columns, source.pitch, source.itemsize)
            part.add_get(block, CPES * rows * columns * source.itemsize, ops=CPES)
        else:
            for (i, j), (at, start) in self._places(row, column):
                transfers.get_tile(part, into.array[i, j], source, at, start)
        self._note("get", into.name, part, part.get)

    def dma_wait(self, buffer: Buffer) -> None:
        buffer.arriving = False
        if self._log:
            self.events.append(Event("wait", buffer.name))

    def dma_put(self, target: Dram, buffer: Buffer, row: Any, column: Any) -> None:
        """Every CPE's dma_put. Raises PrecisionFault, DmaFault."""
        contents = transfers.check_put(buffer, target)
        part = Counts()
        for (i, j), (at, start) in self._places(row, column):
            transfers.put_tile(part, target, contents[i, j], at, start)
        self._note("put", buffer.name, part, part.put)

    def dma_get_lines(
        self, into: Buffer, source: Dram, row: Array, column: int, at: int, elements: int, *, where: Array
    ) -> None:
        """A dma_get_line by each CPE for which `where` is true, of a row each. Raises DmaFault."""
        if where.any():
            transfers.check_line(into, at, elements)
            transfers.begin_get(into, source)
            into.array[where, 0, at : at + elements] = self._lines(source, row[where], column, elements)[row[where]]
            total = int(where.sum())
            self.counts.add_get(elements * source.itemsize, total * elements * source.itemsize, total)

    def dma_put_lines(
        self, target: Dram, buffer: Buffer, row: Array, column: int, at: int, elements: int, *, where: Array
    ) -> None:
        """A dma_put_line by each CPE for which `where` is true, to a row each. Raises DmaFault, PrecisionFault."""
        if where.any():
            transfers.check_line(buffer, at, elements)
            contents = transfers.check_put(buffer, target)
            line = contents[where, 0, at : at + elements]
            self._lines(target, row[where], column, elements)[row[where]] = line
            total = int(where.sum())
            self.counts.add_put(elements * target.itemsize, total * elements * target.itemsize, total)

    @staticmethod
    def _lines(matrix: Dram, rows: Array, column: int, elements: int) -> Array:
        """Columns [column, column + elements) of a matrix, all rows. Raises DmaFault: a line that is not in it."""
        view = matrix.region(0, column, matrix.shape[0], elements)
        if view.shape[1] != elements or rows.min() < 0 or rows.max() >= matrix.shape[0]:
            raise DmaFault(f"{matrix.name}: a line of {elements} in rows {rows.min()} to {rows.max()} is outside")
        return view

    def pick(self, into: Buffer, source: Buffer, at: int, step: int) -> None:
        """Every CPE's pick."""
        line = source.settled()[..., at : at + step * (into.columns - 1) + 1 : step]
        into.overwritten(floats=source.floats)[...] = line

    def add_line(self, into: Buffer, source: Buffer, at: int, step: int, *, where: Array) -> None:
        """An add_line by each CPE for which `where` is true."""
        line = source.doubles()[where, 0]
        into.doubles()[where, 0, at : at + step * (source.columns - 1) + 1 : step] += line
        self.counts.vadd += int(where.sum()) * -(-source.columns // LANES)

    def zero(self, buffer: Buffer, floats: bool = False) -> None:
        buffer.overwritten(floats=floats)[...] = 0.0

    def widen(self, buffer: Buffer, where: Array | None = None) -> None:
        transfers.widen(self.counts, buffer, CPES if where is None else int(where.sum()))

    def narrow(self, buffer: Buffer, where: Array | None = None) -> None:
        transfers.narrow(self.counts, buffer, CPES if where is None else int(where.sum()))

    def transpose(self, into: Buffer, source: Buffer) -> None:
        transfers.transpose(self.counts, into, source, CPES)

    def along_rows(self, a: Buffer, t: int) -> Array:
        """A(i, t) [8, 1, KL, ML]: what column t of the mesh broadcasts along the rows."""
        return a.doubles()[:, t : t + 1]

    def along_columns(self, b: Buffer, t: int) -> Array:
        """B(t, j) [1, 8, NL, KL]: what row t of the mesh broadcasts along the columns."""
        return b.doubles()[t : t + 1]

    def multiply_add(self, c: Buffer, at: Array, bt: Array) -> None:
        """c(i, j) [NL, ML] += bt [NL, KL] at [KL, ML]."""
        result = c.doubles()
        kl, ml = at.shape[-2:]
        nl = bt.shape[-2]
        if self.exact:
            for k in range(kl):
                result += bt[..., :, k, None] * at[..., k, None, :]
        else:
            result += bt @ at
        tile = (ml, nl, kl)
        self._steps[tile] = self._steps.get(tile, 0) + 1
        if self._log:
            self.events.append(Event("step", tile=tile))

    def _note(self, kind: Literal["get", "put"], name: str, part: Counts, sizes: dict[int, int]) -> None:
        self.counts.add(part)
        if self._log:
            self.events.append(Event(kind, name, tuple(sorted(sizes.items()))))

    @staticmethod
    def _places(row: Any, column: Any) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """((i, j), (row, column)) for every CPE."""
        rows, columns = np.broadcast_to(row, (MESH, MESH)).tolist(), np.broadcast_to(column, (MESH, MESH)).tolist()
        return [((i, j), (rows[i][j], columns[i][j])) for i in range(MESH) for j in range(MESH)]

    @staticmethod
    def _window(source: Dram, row: Any, column: Any, rows: int, columns: int) -> Array | None:
        """[8, 8, rows, columns] on the memory, when all tiles lie inside it at even distances; else None."""
        at, start = np.broadcast_to(row, (MESH, MESH)), np.broadcast_to(column, (MESH, MESH))
        if at.min() < 0 or start.min() < 0:
            raise DmaFault(f"{source.name}: DMA from row {at.min()}, column {start.min()}")
        if len(source.shape) != 2 or at.max() + rows > source.shape[0] or start.max() + columns > source.shape[1]:
            return None
        offsets = at * source.pitch + start
        down, right = int(offsets[1, 0] - offsets[0, 0]), int(offsets[0, 1] - offsets[0, 0])
        if not np.array_equal(offsets, offsets[0, 0] + down * np.arange(MESH)[:, None] + right * np.arange(MESH)):
            return None
        size = source.itemsize
        base = source.region(int(at[0, 0]), int(start[0, 0]), source.shape[0], source.shape[1])
        strides = (down * size, right * size, source.pitch * size, size)
        return np.lib.stride_tricks.as_strided(base, (MESH, MESH, rows, columns), strides, writeable=False)
