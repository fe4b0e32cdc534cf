"""The mesh message by message: 64 coroutines, bounded FIFOs, DMA.

A CPE program is a generator function of a `Cpe` and of `Dram` operands. It sees its own LDM, and the other CPEs only
through `putr`, `putc`, `getr`, `getc`, which take a message or stall. Messages carry no sender. A program that stalls
for ever, leaves a message behind, overflows LDM or mixes up precisions ends in an error, never in numbers.

Multiply and add round one after the other; the hardware's `vmad` rounds once. Results of the two levels of emulation
are the same bit by bit, those of the hardware differ in the last one.
Source: [SW] 2.1 and Principles 2-4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.sw26010.machine import transfers
from convgen.sw26010.machine.core_group import LANES, MESH, MESSAGE_BYTES, SLOT_BYTES, SW26010, CoreGroup
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.faults import Deadlock, DmaFault, LdmOverflow, MessageFault, UndrainedFifo, Waiting
from convgen.sw26010.machine.kernel_cycles import block_cycles, registers_cycles
from convgen.sw26010.machine.layer_vectors import LayerVectors
from convgen.sw26010.machine.ldm import Buffer, Ldm
from convgen.sw26010.machine.memory import Dram

Array = NDArray[Any]
Stalls = Generator[None, None, None]
Program = Callable[..., Generator[None, None, None]]


class Cpe(LayerVectors):
    """What a program may touch: its place in the mesh, its LDM, the two buses, DMA, its registers."""

    def __init__(self, row: int, column: int, counts: Counts, group: CoreGroup) -> None:
        self.row, self.column = row, column
        self.id = row * MESH + column
        super().__init__(counts)
        self.stalls = 0
        self.progress = 0
        self.waiting: str = ""
        self.sent: dict[str, int] = {"r": 0, "c": 0}
        self._ldm = Ldm(group.ldm_bytes)
        self._depth = group.fifo_depth
        self._received: dict[str, deque[tuple[Array, int]]] = {"r": deque(), "c": deque()}
        self.peers: dict[str, list[Cpe]] = {"r": [], "c": []}

    # Buses: one 256-bit message to the 7 others of the row or column at once.
    def putr(self, message: Array) -> Stalls:
        """Broadcast along the row; stalls while any of the 7 FIFOs is full. Raises MessageFault."""
        return self._put("r", message)

    def putc(self, message: Array) -> Stalls:
        """Broadcast along the column; stalls while any of the 7 FIFOs is full. Raises MessageFault."""
        return self._put("c", message)

    # A program may say which CPE it expects the next message from. The hardware can't check that; the emulator does.
    def getr(self, sender: int | None = None) -> Generator[None, None, Array]:
        """Take the next message of the row bus; stalls while there is none. Raises MessageFault: another column's."""
        return self._get("r", sender)

    def getc(self, sender: int | None = None) -> Generator[None, None, Array]:
        """Take the next message of the column bus; stalls while there is none. Raises MessageFault: another row's."""
        return self._get("c", sender)

    def _put(self, bus: str, message: Array) -> Stalls:
        if message.dtype != np.float64 or message.nbytes != MESSAGE_BYTES:
            raise MessageFault(
                f"CPE({self.row},{self.column}) put{bus}: a message is 4 doubles in {MESSAGE_BYTES} B, "
                f"not {message.size} of {message.dtype} in {message.nbytes} B"
            )
        peers = self.peers[bus]
        while any(len(p._received[bus]) >= self._depth for p in peers):
            yield from self._stall("put" + bus)
        for peer in peers:
            peer._received[bus].append((message, self.column if bus == "r" else self.row))
        self.progress += 1
        self.sent[bus] += 1
        if bus == "r":
            self.counts.putr += 1
        else:
            self.counts.putc += 1

    def _get(self, bus: str, expected: int | None) -> Generator[None, None, Array]:
        received = self._received[bus]
        while not received:
            yield from self._stall("get" + bus)
        self.progress += 1
        if bus == "r":
            self.counts.getr += 1
        else:
            self.counts.getc += 1
        message, sender = received.popleft()
        if expected is not None and expected != sender:
            which = "column" if bus == "r" else "row"
            raise MessageFault(
                f"CPE({self.row},{self.column}) get{bus}: a message of {which} {sender}, taken for that of {expected}"
            )
        return message

    def _stall(self, operation: str) -> Stalls:
        self.waiting = operation
        self.stalls += 1
        yield
        self.waiting = ""

    # LDM and DMA. A get goes on beside the program until it is waited for.
    def ldm(self, name: str, rows: int, columns: int, slot_bytes: int = SLOT_BYTES) -> Buffer:
        """A buffer of rows x columns slots. Raises LdmOverflow, naming the CPE."""
        try:
            return self._ldm.allocate(name, rows, columns, slot_bytes)
        except LdmOverflow as error:
            raise LdmOverflow(f"CPE({self.row},{self.column}): {error}") from None

    @property
    def ldm_bytes(self) -> int:
        """Bytes of LDM in use."""
        return self._ldm.used_bytes

    def check_arrived(self) -> None:
        """Raises DmaFault, naming the CPE: a get is under way into a buffer."""
        try:
            self._ldm.check_arrived()
        except DmaFault as error:
            raise DmaFault(f"CPE({self.row},{self.column}): {error}") from None

    def dma_get(self, into: Buffer, source: Dram, row: int, column: int) -> None:
        """Start to fill the buffer from a matrix; elements outside the matrix are zeros. Raises DmaFault."""
        transfers.begin_get(into, source)
        transfers.get_tile(self.counts, into.array, source, row, column)

    def dma_wait(self, buffer: Buffer) -> None:
        """Wait for the get into this buffer; nothing happens when there is none."""
        buffer.arriving = False

    def dma_put(self, target: Dram, buffer: Buffer, row: int, column: int) -> None:
        """Write the buffer to a matrix; elements outside the matrix are dropped. Raises PrecisionFault, DmaFault."""
        transfers.put_tile(self.counts, target, transfers.check_put(buffer, target), row, column)

    def dma_get_line(self, into: Buffer, source: Dram, row: int, column: int, at: int, elements: int) -> None:
        """Fill columns [at, at + elements) of a buffer of one row. Raises DmaFault: outside either."""
        transfers.check_line(into, at, elements)
        transfers.begin_get(into, source)
        transfers.get_tile(self.counts, into.array[:, at : at + elements], source, row, column)

    def dma_put_line(self, target: Dram, buffer: Buffer, row: int, column: int, at: int, elements: int) -> None:
        """Write columns [at, at + elements) of a buffer of one row. Raises DmaFault: outside either."""
        transfers.check_line(buffer, at, elements)
        contents = transfers.check_put(buffer, target)
        transfers.put_tile(self.counts, target, contents[:, at : at + elements], row, column)

    # Registers hold a block of C: 4 columns of up to 4 vectors each.
    def load(self, buffer: Buffer, row: int, column: int) -> Array:
        """Load four neighbouring elements of a row of the buffer into a register."""
        return buffer.doubles()[row, column : column + LANES].copy()

    def load_splat(self, buffer: Buffer, row: int, column: int) -> Array:
        """Load one element into all four lanes of a register."""
        return np.repeat(buffer.doubles()[row, column], LANES)

    def load_block(self, c: Buffer, columns: range, vectors: range) -> Array:
        """Load a block of C into registers [column, vector, lane]."""
        self.cycles += registers_cycles(len(columns), len(vectors))
        block = c.doubles()[columns.start : columns.stop, vectors.start : vectors.start + LANES * len(vectors)]
        return block.reshape(len(columns), len(vectors), LANES).copy()

    def vmad(self, block: Array, a: list[Array], b: list[Array]) -> None:
        """block[q, v] += a[v] * b[q] for every vector v and column q, one instruction each."""
        block += np.array(a)[None, :, :] * np.array(b)[:, None, :]
        self.counts.vmad += len(a) * len(b)
        self.cycles += block_cycles(len(b), len(a))

    def store_block(self, c: Buffer, columns: range, vectors: range, block: Array) -> None:
        """Write a block of C back."""
        lanes = slice(vectors.start, vectors.start + LANES * len(vectors))
        c.doubles()[columns.start : columns.stop, lanes] = block.reshape(len(columns), -1)

    def fifo_lengths(self) -> dict[str, int]:
        """Messages not yet received, by bus."""
        return {bus: len(queue) for bus, queue in self._received.items()}


class MessageMesh:
    """The 64 CPEs, connected. `run` executes a program on all of them."""

    def __init__(self, group: CoreGroup = SW26010, watch: Callable[[Sequence[Cpe]], None] | None = None) -> None:
        """
        Args:
            watch: is called with the CPEs each time all of them have run until they stalled or ended.
        """
        self.group = group
        self.counts = Counts()
        self.cpes: list[Cpe] = []
        self._watch = watch

    def run(self, program: Program, *operands: Any) -> Counts:
        """Run a program to its end.

        Args:
            program: generator function of a Cpe and the operands (`Dram`).
        Returns:
            Events of this run.
        Raises:
            MeshFault: LdmOverflow, MessageFault, DmaFault, PrecisionFault where the program breaks a rule; Deadlock
                when all wait; UndrainedFifo when it ended with messages not received.
        """
        counts = Counts()
        self.cpes = [Cpe(i, j, counts, self.group) for i in range(MESH) for j in range(MESH)]
        for cpe in self.cpes:
            cpe.peers["r"] = [p for p in self.cpes if p.row == cpe.row and p is not cpe]
            cpe.peers["c"] = [p for p in self.cpes if p.column == cpe.column and p is not cpe]
        live = [(cpe, program(cpe, *operands)) for cpe in self.cpes]
        while live:
            before = sum(cpe.progress for cpe in self.cpes)
            still = [(cpe, coroutine) for cpe, coroutine in live if not _ended(coroutine)]
            if len(still) == len(live) and sum(cpe.progress for cpe in self.cpes) == before:
                raise Deadlock(tuple(_waiting(cpe, self.group) for cpe, _ in still))
            live = still
            if self._watch is not None:
                self._watch(self.cpes)
        left = [("row" if bus == "r" else "column", cpe.row, cpe.column, n)
                for cpe in self.cpes for bus, n in cpe.fifo_lengths().items() if n]  # fmt: skip
        if left:
            raise UndrainedFifo(tuple(left))
        for cpe in self.cpes:
            cpe.check_arrived()
        counts.cycles = max(cpe.cycles for cpe in self.cpes)
        self.counts.add(counts)
        return counts

    @property
    def ldm_bytes(self) -> int:
        """Most LDM that a CPE of the last run used."""
        return max((cpe.ldm_bytes for cpe in self.cpes), default=0)

    @property
    def stalls(self) -> int:
        """How often a CPE of the last run had to wait; depends on the order in which CPEs are run."""
        return sum(cpe.stalls for cpe in self.cpes)


def _ended(coroutine: Generator[None, None, None]) -> bool:
    """Run a CPE until it stalls; True when its program is over."""
    try:
        next(coroutine)
    except StopIteration:
        return True
    return False


def _waiting(cpe: Cpe, group: CoreGroup) -> Waiting:
    bus = cpe.waiting[-1:] or "r"
    peers = cpe.peers[bus]
    if cpe.waiting.startswith("put"):
        peers = [p for p in peers if p.fifo_lengths()[bus] >= group.fifo_depth]
    return Waiting(cpe.row, cpe.column, cpe.waiting, tuple((p.row, p.column) for p in peers))
