"""`fuse-rims`: a convolution's kernel reads a halo where it has arrived."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from convgen.algebra.grid import Grid
from convgen.passes.contract import NetworkPass
from convgen.program.forms import LEAST_PART, MOST_BOXES, boxes, rim_faults
from convgen.program.network import FLOATS, Program
from convgen.program.rows import PlacedRow, at_rank, index_sets


@dataclass(frozen=True)
class FuseRims(NetworkPass):
    """What an exchange brings for a convolution stays boxes beside the rank's own block, not one tensor of both.

        %y.x = exchange %x over=H : x[N, *, H+(1,1), *]   --->   %y.x = exchange %x over=H as=rim : x[N, *, H+(1,1), *]

    Needs:  a GPU, whose kernels read both; what travels meanwhile is chosen.
    Sound:  elements are the same; only where they lie changes, and only for rows that know where.
    Leaves: halos that travel while an interior is computed; rows that are one with others; channels cut within groups;
        few channels, which the packed family reads of one tensor; halos in more boxes, each of which costs every row of
        a tile a comparison; gradients of filters by rows of x as blocks.

    Attributes:
        least_part: channels that some rank reads.
        most_boxes: of a rank's rim.
    """

    name: ClassVar[str] = "fuse-rims"
    least_part: int = LEAST_PART
    most_boxes: int = MOST_BOXES

    def run(self, program: Program) -> Program:
        rows = tuple(self._fused(row, program.grid) if _floats(program, row) else row for row in program.rows)
        return program if rows == program.rows else replace(program, rows=rows)

    def _fused(self, row: PlacedRow, grid: Grid) -> PlacedRow:
        derived = tuple((k, self._fused(one, grid)) for k, one in row.derived)
        fetch = tuple(
            (*chain[:-1], replace(chain[-1], form="rim")) if self._pays(row, k, grid) else chain
            for k, chain in enumerate(row.fetch)
        )
        return replace(row, derived=derived, fetch=fetch)

    def _pays(self, row: PlacedRow, k: int, grid: Grid) -> bool:
        if any(rim_faults(row, k, grid)):
            return False
        sets, (c,) = index_sets(row.signature, grid), row.fetch[k]
        count, channels = boxes(sets, c.src, c.dst, c.over), sets.held(c.dst)[:, 1]
        assert count is not None
        ((conv, *_),) = row.bound.operation.convolutions(row.way, at_rank(row, grid, 0))
        few = conv.conv.groups == 1 and int((channels[:, 1] - channels[:, 0]).max()) < self.least_part
        return 0 < count.max() <= self.most_boxes and not few


def _floats(program: Program, row: PlacedRow) -> bool:
    return all(program.values[v].dtype in FLOATS for v in row.bound.reads[:1])
