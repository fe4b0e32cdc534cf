"""One core group of an SW26010, in numbers.

Source: [SW] 2.1 (mesh, LDM, clock, messages), Principles 1 and 2 (peak, DMA, copies by the MPE).
"""

from __future__ import annotations

from dataclasses import dataclass

MESH = 8  # CPEs a side
CPES = MESH * MESH
LANES = 4  # doubles in a 256-bit register
MESSAGE_BYTES = 8 * LANES
SLOT_BYTES = 8  # of an element in LDM, whatever memory holds: computation is in double
REGISTER_ROWS, REGISTER_COLUMNS = 16, 4  # of C in registers: 4 vectors by 4 columns


@dataclass(frozen=True, slots=True)
class CoreGroup:
    """What the emulator enforces and the cost model divides by.

    `fifo_depth` is in messages; the hardware's is not published, and no result depends on it.
    """

    clock_hz: float = 1.45e9
    flops_per_cycle: int = 8  # of a CPE: one multiply-add of 4 lanes
    ldm_bytes: int = 64 * 1024
    fifo_depth: int = 4
    dma_bytes_per_s: float = 28e9  # measured, long blocks, shared by the 64 CPEs
    copy_bytes_per_s: float = 9.9e9  # the MPE copying memory to memory

    @property
    def peak_flops_per_s(self) -> float:
        """742.4 Gflop/s for the 64 CPEs."""
        return CPES * self.flops_per_cycle * self.clock_hz

    @property
    def ridge_flops_per_byte(self) -> float:
        """Flops per byte of memory traffic above which the mesh, not DMA, is the limit: 26.5."""
        return self.peak_flops_per_s / self.dma_bytes_per_s


SW26010 = CoreGroup()
