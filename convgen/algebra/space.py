"""The index sets of one convolution on one grid."""

from __future__ import annotations

from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets


class Space(IndexSets):
    """x, w, y and bias of a convolution."""

    def __init__(self, conv: Conv, grid: Grid, *, virtual_padding: bool = False) -> None:
        """
        Args:
            virtual_padding: as for `IndexSets`.
        """
        super().__init__(grid, conv.tensors, conv.rows, virtual_padding=virtual_padding)
        self.conv = conv
