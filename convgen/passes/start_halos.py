"""`start-halos`: a halo travels while the interior of its row is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from convgen.passes.contract import NetworkPass
from convgen.program.early import in_one, started_early
from convgen.program.network import Program, label
from convgen.program.rows import PlacedRow


@dataclass(frozen=True)
class StartHalos(NetworkPass):
    """Start exchanges of halos, compute what needs none of it, wait, and compute the rest; in backward likewise.

        %c.x = exchange %x over=H                      start %c.x = exchange %x over=H
        %c   = conv_forward %x, %w            --->     %c   = conv_forward %x, %w   (interior)
                                                       wait %c.x
                                                       %c   = conv_forward %x, %w   (boundary)

    Needs:  conversions that are final; one to three split dimensions.
    Sound:  pieces are blocks of the row's rows, and only those of the boundary read what arrives. The gradient of the
        halo is sent as soon as the boundary's is there, and added after the interior's.
    Leaves: rows without an interior on some rank, rows of an index that windows of several operands are of, and
        conversions that are no halo.

    Args:
        only: labels of rows, with commas; all by default.
        gradients: how gradients' rows wait for halos: in `pieces`; or `whole`, behind the row's other gradients alone,
            as the input's gradient behind the filter's.

    Source: [SP] IV-A, there in forward alone.
    """

    name: ClassVar[str] = "start-halos"

    only: str = ""
    gradients: Literal["pieces", "whole"] = "pieces"

    def run(self, program: Program) -> Program:
        names = self.only.split(",") if self.only else None
        chosen = [names is None or label(row) in names for row in program.rows]
        rows = tuple(
            self._early(row, program) if is_one else row for row, is_one in zip(program.rows, chosen, strict=True)
        )
        return program if rows == program.rows else replace(program, rows=rows)

    def _early(self, row: PlacedRow, program: Program) -> PlacedRow:
        found = started_early(row, program.grid)
        return in_one(found) if self.gradients == "whole" else found
