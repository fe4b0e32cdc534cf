"""`fuse-forms`: a convolution's kernel reads what arrives where it lies, and writes what leaves as it will travel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from convgen.algebra.grid import Grid
from convgen.passes.contract import NetworkPass
from convgen.program.forms import LEAST_PART, MOST_BOXES, boxes, ended, ends, equal_parts, part_faults, rim_faults
from convgen.program.network import Program
from convgen.program.rows import PlacedRow, at_rank, index_sets
from convgen.program.shared import shares
from convgen.spec.graph import FLOATS


@dataclass(frozen=True)
class FuseForms(NetworkPass):
    """What an exchange brings stays boxes beside the rank's own block. What is gathered or scattered along channels
    stays in parts one behind the other, and so does its gradient.

        %y.x = exchange %x over=H : x[N, *, H+(1,1), *]   --->   %y.x = exchange %x over=H as=rim : x[N, *, H+(1,1), *]
        %y.x = all_gather %x over=C : x[N, *, *, *]       --->   %y.x = all_gather %x over=C as=parts : x[N, *, *, *]
        %y = reduce_scatter %y over=C : y[N, C, *, *]     --->   %y = reduce_scatter %y over=C as=parts : y[N, C, *, *]

    Needs:  a GPU, whose kernels read and write both forms; it runs when overlap has been chosen.
    Sound:  elements are the same; only where they lie changes, and only for rows that know where.
    Leaves: what travels while others are computed, but for results of chunks; rows joined with others; channels cut
        within groups, and parts of groups; few channels, which the packed family reads and makes as one tensor; halos
        in more boxes, each of which costs every row of a tile a comparison; halos of filters' gradients whose blocks
        are of x's rows; rows whose gradients share what they fetch.

    Attributes:
        least_part: channels that a part has, or that some rank reads, at least.
        most_boxes: boxes that a rank's rim has, at most.
    """

    name: ClassVar[str] = "fuse-forms"
    least_part: int = LEAST_PART
    most_boxes: int = MOST_BOXES

    def run(self, program: Program) -> Program:
        rows = tuple(self._fused(row, program.grid) if _floats(program, row) else row for row in program.rows)
        return program if rows == program.rows else replace(program, rows=rows)

    def _fused(self, row: PlacedRow, grid: Grid) -> PlacedRow:
        if shares(row):
            return row
        found = replace(row, derived=tuple((k, self._fused(one, grid)) for k, one in row.derived))
        for k in range(len(row.fetch)):
            if self._pays_rim(row, k, grid):
                found = ended(found, k, "rim", made=False)
        for made, chains in ((False, row.fetch), (True, row.store)):
            for k in range(len(chains)):
                if self._pays_parts(row, k, grid, made=made):
                    found = ended(found, k, "parts", made=made)
        return found

    def _pays_rim(self, row: PlacedRow, k: int, grid: Grid) -> bool:
        if any(rim_faults(row, k, grid)):
            return False
        sets, (c,) = index_sets(row.signature, grid), row.fetch[k]
        count = boxes(sets, c.src, c.dst, c.over)
        assert count is not None
        return 0 < count.max() <= self.most_boxes and not self._few_channels(row, k, grid)

    def _pays_parts(self, row: PlacedRow, k: int, grid: Grid, *, made: bool) -> bool:
        if any(part_faults(row, k, grid, made=made)):
            return False
        side, n = ends(row, k, made=made)[0]
        c = getattr(row, side)[k][n]
        whole, cut = (c.src, c.dst) if made else (c.dst, c.src)
        size = equal_parts(index_sets(row.signature, grid), whole, cut, c.over)
        return size >= self.least_part and not (made and self._few_channels(row, 0, grid))

    def _few_channels(self, row: PlacedRow, k: int, grid: Grid) -> bool:
        """Whether every rank reads fewer channels of operand k than one step of a kernel at one tap takes."""
        if any(conv.conv.groups > 1 for conv, *_ in row.bound.operation.convolutions(row.way, at_rank(row, grid, 0))):
            return False
        channels = [at_rank(row, grid, rank).inside[k][1] for rank in range(grid.ranks)]
        return max(hi - lo for lo, hi in channels) < self.least_part


def _floats(program: Program, row: PlacedRow) -> bool:
    return all(program.values[v].dtype in FLOATS for v in row.bound.reads[:1])
