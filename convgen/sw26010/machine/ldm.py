"""The 64 KB scratchpad (LDM) of a CPE: its buffers, and the state of their contents."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.sw26010.machine.core_group import SLOT_BYTES
from convgen.sw26010.machine.faults import DmaFault, LdmOverflow, PrecisionFault

Array = NDArray[Any]


class Buffer:
    """A matrix in LDM, in slots of 8 bytes (of 4, where floats only pass through).

    DMA brings elements as memory has them: floats lie in the slots as floats until `widen`, and doubles must be
    narrowed before they are put into a memory of floats. Contents that are still under way can't be used.
    """

    __slots__ = ("array", "arriving", "floats", "name", "written")

    def __init__(self, name: str, array: Array) -> None:
        self.name = name
        self.array = array  # [..., rows, columns]
        self.floats = False
        self.arriving = False
        self.written = False

    @property
    def rows(self) -> int:
        return self.array.shape[-2]

    @property
    def columns(self) -> int:
        return self.array.shape[-1]

    def settled(self) -> Array:
        """The contents, whatever their precision. Raises DmaFault: a dma_get is under way, or nothing was written."""
        if self.arriving:
            raise DmaFault(f"{self.name} is used before its dma_get was waited for")
        if not self.written:
            raise DmaFault(f"{self.name} is used before anything was written to it")
        return self.array

    def overwritten(self, *, floats: bool = False) -> Array:
        """The slots, for an instruction that writes to them. Raises DmaFault: a dma_get is under way into them."""
        if self.arriving:
            raise DmaFault(f"{self.name} is written to before its dma_get was waited for")
        self.written, self.floats = True, floats
        return self.array

    def doubles(self) -> Array:
        """The contents as doubles. Raises PrecisionFault: they are floats."""
        contents = self.settled()
        if self.floats:
            raise PrecisionFault(f"{self.name} holds floats, used as doubles: widen it first")
        return contents


class Ldm:
    """What is left of one CPE's scratchpad, and the buffers that it holds."""

    __slots__ = ("buffers", "capacity_bytes", "used_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.buffers: list[Buffer] = []

    def allocate(
        self, name: str, rows: int, columns: int, slot_bytes: int = SLOT_BYTES, lead: tuple[int, ...] = ()
    ) -> Buffer:
        """A buffer of rows x columns slots a CPE; `lead` is the shape of the CPEs that are emulated at once.

        Raises:
            LdmOverflow: it does not fit.
        """
        wanted = rows * columns * slot_bytes
        if self.used_bytes + wanted > self.capacity_bytes:
            raise LdmOverflow(
                f"{name}[{rows}, {columns}] needs {wanted} B of LDM; {self.used_bytes} of {self.capacity_bytes} B are "
                "in use"
            )
        self.used_bytes += wanted
        self.buffers.append(Buffer(name, np.zeros((*lead, rows, columns))))
        return self.buffers[-1]

    def check_arrived(self) -> None:
        """Raises DmaFault: a dma_get is still under way into a buffer when the program has ended."""
        for buffer in self.buffers:
            if buffer.arriving:
                raise DmaFault(f"the program ends before the dma_get into {buffer.name} was waited for")
