"""`start-halos`: a halo travels while the interior of its row is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from convgen.passes.network_contract import NetworkPass
from convgen.program.early import started_early
from convgen.program.network import Program, label


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
    Leaves: rows without an interior on some rank, rows that several operands' windows are of, and what is no halo.

    Args:
        only: labels of rows, with commas; all by default.

    Source: [SP] IV-A, there in forward alone.
    """

    name: ClassVar[str] = "start-halos"

    only: str = ""

    def run(self, program: Program) -> Program:
        names = self.only.split(",") if self.only else None
        rows = tuple(
            started_early(row, program.grid) if names is None or label(row) in names else row for row in program.rows
        )
        return program if rows == program.rows else replace(program, rows=rows)
