"""The constants that turn counts into seconds: tuning/sw26010/rates.json.

Those under `taken` are published or were measured by others; each has its source. Those under `fitted` come out of
[SW] Table 2 (table2/fit.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from convgen.resources import data_file
from convgen.sw26010.machine.core_group import SW26010, CoreGroup

FITTED: tuple[str, ...] = (
    "implicit_kernel_slowdown",
    "im2col_operation_s",
    "col2im_element_s",
)
TAKEN = ("dma_half_block_bytes", "gemm_kernel_efficiency", "dma_round_s", "library_call_s", "library_row_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What turns counts into seconds.

    Attributes:
        dma_half_block_bytes: the block size at which strided DMA reaches half of its bandwidth.
        gemm_kernel_efficiency: the part of peak at which the GEMM's kernel multiplies.
        dma_round_s: seconds of every transfer that is waited for, and of every tile that the implicit kernel reads,
            multiplies or writes.
        library_call_s: seconds of a product by the general library beside its work on the mesh.
        library_row_s: the same of each row of its first matrix, column-major, whatever the other extents.
        implicit_kernel_slowdown: how many times longer flops take in the implicit kernel than at peak.
        im2col_operation_s: seconds of a DMA operation of im2col or col2im, beside the bytes of im2col.
        col2im_element_s: seconds of an element of the matrix that col2im reads.
    """

    dma_half_block_bytes: float
    gemm_kernel_efficiency: float
    dma_round_s: float
    library_call_s: float
    library_row_s: float
    implicit_kernel_slowdown: float = 1.0
    im2col_operation_s: float = 0.0
    col2im_element_s: float = 0.0
    group: CoreGroup = SW26010

    def bytes_per_s(self, block_bytes: float) -> float:
        """DMA of blocks of this size, 64 CPEs together: 28 GB/s * b / (b + b_half), [SW] Figure 2."""
        return self.group.dma_bytes_per_s * block_bytes / (block_bytes + self.dma_half_block_bytes)

    def transfer_s(self, sizes: Mapping[int, int]) -> float:
        """Seconds to move these bytes, given by block size."""
        return sum(size / self.bytes_per_s(block) for block, size in sizes.items())

    def fitted(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in FITTED}


@cache
def read_rates_file() -> dict[str, Any]:
    """The file as it stands."""
    return json.loads(data_file("tuning", "sw26010", "rates.json").read_text(encoding="utf-8"))


def taken_rates() -> Rates:
    """What is not fitted; the fitted constants have no effect."""
    taken = read_rates_file()["taken"]
    numbers: dict[str, Any] = {name: float(taken[name][0]) for name in TAKEN}
    return Rates(**numbers)


def load_rates() -> Rates:
    """All constants of the file."""
    fitted = read_rates_file()["fitted"]
    constants: dict[str, Any] = {name: float(fitted[name]) for name in FITTED}
    return replace(taken_rates(), **constants)


def rates_json(constants: Mapping[str, float], layers: Sequence[str]) -> str:
    """Text of the file with other fitted constants.

    Args:
        layers: of [SW] Table 2, that they were fitted to.
    """
    contents = read_rates_file()
    fitted: dict[str, Any] = {"from": f"[SW] Table 2, {' and '.join(layers)}; convgen sw26010 table2 --write FILE"}
    fitted.update({name: float(f"{constants[name]:.6g}") for name in FITTED})
    return json.dumps({**contents, "fitted": fitted}, indent=1) + "\n"
