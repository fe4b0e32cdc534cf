"""The tensor transformation layer: (N, C, H, W), which other layers and the explicit plan have, to (R, C, N, B) back.

Source: [SW] 4.3: strided DMA and SIMD shuffles. Here (R, C, N, B) is called (H, W, C, N).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from convgen import __version__
from convgen.errors import InputError
from convgen.sw26010.gemm.counts import tiles_bytes
from convgen.sw26010.machine.core_group import SW26010, CoreGroup
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.emulator import MessageMesh
from convgen.sw26010.machine.memory import DTYPES, Dram
from convgen.sw26010.machine.printing import load_program, print_program
from convgen.sw26010.machine.transfers import shuffles

Direction = Literal["to_implicit", "to_explicit"]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Transform:
    """A transformation of a float32 or float64 tensor of N samples, C channels, H x W pixels.

    Raises:
        InputError: an extent below 1, or another dtype.
    """

    n: int
    c: int
    h: int
    w: int
    dtype: str
    direction: Direction

    def __post_init__(self) -> None:
        if min(self.n, self.c, self.h, self.w) < 1 or self.dtype not in DTYPES:
            raise InputError(f"cannot transform {self.n} x {self.c} x {self.h} x {self.w} of {self.dtype}")

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 8

    @property
    def block(self) -> int:
        """Rows and columns of a block: 256 B, from which on strided DMA is fast ([SW] Principle 3)."""
        return 256 // self.itemsize

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, columns) of a channel before the transformation."""
        samples, pixels = self.n, self.h * self.w
        return (samples, pixels) if self.direction == "to_implicit" else (pixels, samples)

    @property
    def source_shape(self) -> tuple[int, int, int, int]:
        to = self.direction == "to_implicit"
        return (self.n, self.c, self.h, self.w) if to else (self.h, self.w, self.c, self.n)

    @property
    def target_shape(self) -> tuple[int, int, int, int]:
        to = self.direction == "to_implicit"
        return (self.h, self.w, self.c, self.n) if to else (self.n, self.c, self.h, self.w)


def transform_program(transform: Transform) -> str:
    """Text of the program that one CPE runs."""
    rows, columns = transform.matrix
    names = ("(N, C, H, W) to (H, W, C, N)", "(H, W, C, N) to (N, C, H, W)")
    context = {
        "header": (f"Printed by convgen {__version__} (sw26010 layouts).",),
        "direction": names[transform.direction == "to_explicit"],
        "channels": transform.c, "rows": rows, "columns": columns,
        "block": transform.block, "block_bytes": transform.block * transform.itemsize,
        "itemsize": transform.itemsize,
    }  # fmt: skip
    return print_program("transform", context)


def run_transform(transform: Transform, tensor: Any, group: CoreGroup = SW26010) -> tuple[Array, Counts]:
    """The tensor in the other layout, and what the mesh did.

    Args:
        tensor: of `source_shape` and the transformation's dtype.
    Raises:
        InputError: another shape or dtype.
    """
    source = np.ascontiguousarray(tensor)
    if source.shape != transform.source_shape or source.dtype.name != transform.dtype:
        raise InputError(
            f"a tensor {list(source.shape)} of {source.dtype.name}, the transformation has "
            f"{list(transform.source_shape)} of {transform.dtype}"
        )
    target = np.zeros(transform.target_shape, transform.dtype)
    rows, columns = transform.matrix
    # Channels first, as views: the strides stay those of memory.
    views = (
        source.reshape(rows, transform.c, columns).transpose(1, 0, 2),
        target.reshape(columns, transform.c, rows).transpose(1, 0, 2),
    )
    mesh = MessageMesh(group)
    counts = mesh.run(load_program(transform_program(transform)), Dram("SOURCE", views[0]), Dram("TARGET", views[1]))
    return target, counts


def transform_counts(transform: Transform) -> Counts:
    """Events of a run, by closed form."""
    rows, columns = transform.matrix
    block, c = transform.block, transform.c
    counts = Counts()
    get, get_ops = tiles_bytes((rows, block), (columns, block), transform.itemsize, c * columns)
    put, put_ops = tiles_bytes((columns, block), (rows, block), transform.itemsize, c * rows)
    for size, total in get.items():
        counts.add_get(size, c * total, 0)
    for size, total in put.items():
        counts.add_put(size, c * total, 0)
    counts.get_ops, counts.put_ops = c * get_ops, c * put_ops
    counts.shuffle = c * get_ops * shuffles(block, block)
    return counts
