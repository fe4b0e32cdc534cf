"""Main memory as a CPE sees it: matrices that only DMA can reach."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.errors import InputError
from convgen.sw26010.machine.faults import DmaFault

Array = NDArray[Any]
DTYPES = ("float32", "float64")


class Dram:
    """A tensor in main memory, float32 or float64, row-major. A program may index it, and hand it to DMA.

    The last two axes are what one DMA operation addresses: rows, and elements that lie together.
    """

    __slots__ = ("_array", "name")

    def __init__(self, name: str, array: Array) -> None:
        """Raises InputError: not float32 or float64, or fewer than two axes."""
        if array.dtype.name not in DTYPES or array.ndim < 2:
            raise InputError(
                f"{name} is {array.dtype.name} with {array.ndim} axes; the mesh's memory holds float32 and float64 "
                "matrices and tensors"
            )
        if array.shape[-1] > 1 and array.size and array.strides[-1] != array.itemsize:
            raise InputError(f"{name}: the elements of a row must lie together", hint="numpy.ascontiguousarray")
        self.name = name
        self._array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def itemsize(self) -> int:
        return self._array.itemsize

    def __getitem__(self, index: int | tuple[int, ...]) -> Dram:
        """The part at the leading indices. Raises DmaFault: an index is negative, or outside the tensor."""
        wanted = index if isinstance(index, tuple) else (index,)
        for axis, (at, extent) in enumerate(zip(wanted, self.shape, strict=False)):
            if not 0 <= at < extent:
                raise DmaFault(f"{self.name}{list(wanted)} is outside: axis {axis} has {extent}")
        return Dram(self.name, self._array[wanted])

    def region(self, row: int, column: int, rows: int, columns: int) -> Array:
        """The part of a matrix from (row, column) that exists, at most rows x columns.

        Raises:
            DmaFault: not a matrix, or a negative start.
        """
        if self._array.ndim != 2:
            raise DmaFault(f"DMA addresses matrices; {self.name} here has {self._array.ndim} axes")
        if row < 0 or column < 0:
            raise DmaFault(f"{self.name}: DMA from row {row}, column {column}")
        return self._array[row : row + rows, column : column + columns]

    @property
    def pitch(self) -> int:
        """The distance from a row of a matrix to the next, in elements."""
        array = self._array
        # An axis of one element may have any stride in numpy, so a contiguous matrix is asked for its shape.
        return array.shape[-1] if array.flags.c_contiguous else array.strides[0] // array.itemsize


def block_bytes(rows: int, columns: int, pitch: int, itemsize: int) -> int:
    """Bytes of a region that lie together: those of one row, or of the whole region if its rows follow each other.

    Args:
        pitch: the distance from a row to the next, in elements.
    """
    return itemsize * (rows * columns if columns == pitch or rows == 1 else columns)


def as_matrix(name: str, array: Any, dtype: str) -> Array:
    """A contiguous copy in `dtype`. Raises InputError: not a matrix."""
    matrix = np.array(array, dtype=dtype, order="C")
    if matrix.ndim != 2:
        raise InputError(f"{name} has {matrix.ndim} axes; a matrix has 2")
    return matrix
