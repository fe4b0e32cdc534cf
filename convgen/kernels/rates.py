"""What a processor of a GPU does in a cycle.

NVIDIA's A100 and H100 architecture white papers, dense products a clock and SM; B200's are its data sheet's peak over
its processors and clock. Shared memory: CUDA C++ Programming Guide, 32 banks of 4 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

ISSUES = 4  # instructions of a processor and cycle, one of each of its quarters
SHARED_BYTES = 128  # of a processor and cycle
CACHE_BYTES = 5120 / 132  # from L2, a processor and cycle: A100's 5120 a cycle (its paper), over H100's processors
REGISTERS, RESERVED_BYTES = 65536, 1024  # of a processor; shared memory that a program takes besides its own
FLOAT32_PRODUCTS = 3  # of TF32, for one of float32


@dataclass(frozen=True, slots=True)
class Rates:
    """Products of a processor and cycle with operands of 16 bits and of TF32; cycles a second at which peaks hold."""

    half: int
    tf32: int
    clock_hz: float

    def of(self, dtype: str) -> int:
        """0 where no matrix units are used."""
        return {"bfloat16": self.half, "float16": self.half, "float64": 0}.get(dtype, self.tf32)


RATES: dict[int | str, Rates] = {
    80: Rates(1024, 512, 1.41e9),
    90: Rates(2048, 1024, 1.83e9),
    100: Rates(4096, 2048, 1.86e9),
}
