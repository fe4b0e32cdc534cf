"""DMA between memory and LDM, and the conversions beside it: the same for one CPE and for all at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.sw26010.machine.core_group import LANES
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.faults import DmaFault, PrecisionFault
from convgen.sw26010.machine.ldm import Buffer
from convgen.sw26010.machine.memory import Dram, block_bytes

Array = NDArray[Any]


def begin_get(buffer: Buffer, source: Dram) -> None:
    """Mark the buffer: a get is now under way into it. Raises DmaFault: another already is."""
    if buffer.arriving:
        raise DmaFault(f"{buffer.name}: dma_get while another is under way into it")
    buffer.arriving = True
    buffer.written = True
    buffer.floats = source.itemsize == 4


def get_tile(counts: Counts, into: Array, source: Dram, row: int, column: int) -> None:
    """Fill `into` [rows, columns] from a matrix; what lies outside it becomes zero and is not transferred."""
    rows, columns = into.shape
    region = source.region(row, column, rows, columns)
    if region.shape != into.shape:
        into[...] = 0.0
    if region.size:
        into[: region.shape[0], : region.shape[1]] = region
        block = block_bytes(region.shape[0], region.shape[1], source.pitch, source.itemsize)
        counts.add_get(block, region.size * source.itemsize)


def put_tile(counts: Counts, target: Dram, tile: Array, row: int, column: int) -> None:
    """Write `tile` [rows, columns] to a matrix; what would lie outside it is dropped."""
    region = target.region(row, column, *tile.shape)
    if region.size:
        region[...] = tile[: region.shape[0], : region.shape[1]]
        block = block_bytes(region.shape[0], region.shape[1], target.pitch, target.itemsize)
        counts.add_put(block, region.size * target.itemsize)


def check_line(buffer: Buffer, at: int, elements: int) -> None:
    """Raises DmaFault: elements [at, at + elements) are not a part of a buffer of one row."""
    if buffer.rows != 1 or at < 0 or at + elements > buffer.columns:
        raise DmaFault(f"{buffer.name}[{buffer.rows}, {buffer.columns}] has no line of {elements} from {at}")


def check_put(buffer: Buffer, target: Dram) -> Array:
    """The buffer's contents, for a put. Raises PrecisionFault: they have another precision than memory."""
    contents = buffer.settled()
    if buffer.floats != (target.itemsize == 4):
        held, wanted = ("floats", "double") if buffer.floats else ("doubles", "float")
        raise PrecisionFault(f"{buffer.name} holds {held}, {target.name} is of {wanted}")
    return contents


def widen(counts: Counts, buffer: Buffer, cpes: int) -> None:
    """Floats become doubles in place, 4 an instruction. Raises PrecisionFault: they are doubles."""
    buffer.settled()
    if not buffer.floats:
        raise PrecisionFault(f"{buffer.name} holds doubles already")
    buffer.floats = False
    counts.convert += cpes * vectors(buffer)


def narrow(counts: Counts, buffer: Buffer, cpes: int) -> None:
    """Doubles become floats in place, rounded to nearest. Raises PrecisionFault: they are floats."""
    doubles = buffer.doubles()
    doubles[...] = doubles.astype(np.float32)
    buffer.floats = True
    counts.convert += cpes * vectors(buffer)


def transpose(counts: Counts, into: Buffer, source: Buffer, cpes: int) -> None:
    """`into` [columns, rows] = `source` [rows, columns] transposed: 8 shuffles for each 4x4 block.

    Raises:
        DmaFault: the shapes don't match, or a dma_get is under way into `into`.
    """
    contents = source.settled()
    if (into.rows, into.columns) != (source.columns, source.rows):
        raise DmaFault(f"{into.name} cannot hold {source.name} transposed")
    into.overwritten(floats=source.floats)[...] = np.swapaxes(contents, -1, -2)
    counts.shuffle += cpes * shuffles(source.rows, source.columns)


def vectors(buffer: Buffer) -> int:
    """Registers that a buffer fills."""
    return -(-buffer.rows * buffer.columns // LANES)


def shuffles(rows: int, columns: int) -> int:
    """A 4x4 transposition takes 8 shuffles of two registers; edges take whole blocks."""
    return 8 * -(-rows // LANES) * -(-columns // LANES)
