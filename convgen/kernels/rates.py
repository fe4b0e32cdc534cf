"""What a processor (SM) of a GPU does in a cycle.

NVIDIA's A100 and H100 architecture white papers, dense products a clock and SM; B200's are its data sheet's peak over
its processors and clock. Shared memory: CUDA C++ Programming Guide, 32 banks of 4 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

ISSUES = 4  # instructions that a processor issues in a cycle, one by each of its quarters
SHARED_BYTES = 128  # bytes of shared memory that a processor reads or writes in a cycle
CACHE_BYTES = 5120 / 132  # bytes from L2 for a processor in a cycle: A100's 5120 (its paper), over H100's processors
REGISTERS, RESERVED_BYTES = 65536, 1024  # a processor's registers; a program's shared memory besides its own
FLOAT32_PRODUCTS = 3  # TF32 products that make one of float32


@dataclass(frozen=True, slots=True)
class Rates:
    """Products that a processor makes in a cycle, with operands of 16 bits and of TF32; and cycles a second of the
    peaks."""

    half: int
    tf32: int
    clock_hz: float

    def of(self, dtype: str) -> int:
        """Products in a cycle with operands of this type; 0 where no matrix units are used."""
        return {"bfloat16": self.half, "float16": self.half, "float64": 0}.get(dtype, self.tf32)


RATES: dict[int | str, Rates] = {
    80: Rates(1024, 512, 1.41e9),
    90: Rates(2048, 1024, 1.83e9),
    100: Rates(4096, 2048, 1.86e9),
}
