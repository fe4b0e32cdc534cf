"""`widen-halos`: rows one behind the other with one halo, and halos that travel while moments do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from convgen.passes.network_contract import NetworkPass
from convgen.program.early import early_faults
from convgen.program.network import Program, label
from convgen.program.norms import norms
from convgen.program.rows import PlacedRow
from convgen.program.wide import Group, chains, widened


@dataclass(frozen=True)
class WidenHalos(NetworkPass):
    """Rows whose halos follow each other become one, of which the first operand's halo alone travels.

        %a.x = exchange %x over=H : x[.., H+(1,1)]         %b.x = exchange %x over=H : x[.., H+(2,2)]
        %a   = conv_forward %x, %v                  --->   %b   = conv_forward_relu_conv_forward %x, %v, %w
        %r   = relu %a
        %b.x = exchange %r over=H : x[.., H+(1,1)]
        %b   = conv_forward %r, %w

    Behind a batch norm it is the halo of what is normalised, which is started before its moments are:

        %m   = moments %x ; all_reduce                     start %b.x0 = exchange %x over=H
        %n   = centred %x, %c                       --->   %m   = moments %x ; all_reduce
        %b.x = exchange %n over=H                          wait %b.x0
        %b   = conv_forward %n, %w                         %b   = centred_conv_forward %x, %c, %w

    Needs:  values between that nothing else reads; rows that are read in order; no buckets yet, which know rows by name.
    Sound:  a rank makes of what lies between all that its block of the result reads, of real rows alone; gradients of
        parameters are addends of its own block.
    Leaves: rows between which no halo travels.

    Args:
        only: labels of rows behind which a halo is saved, with commas; all by default.

    Source: DESIGN section 12.
    """

    name: ClassVar[str] = "widen-halos"

    only: str = ""

    def run(self, program: Program) -> Program:
        names = self.only.split(",") if self.only else None
        if program.buckets:
            return program
        groups = [
            group for chain in chains(program) for group in halos_of(program, chain)
            if names is None or label(program.rows[group[-1]]) in names
        ]  # fmt: skip
        found = widened(program, groups)
        return program if found is program else _ahead(found)


def halos_of(program: Program, chain: Group) -> Iterator[Group]:
    """Of a chain of rows those to be one: from where a halo would be fetched first to the last row with a halo."""
    windowed = [n for n, i in enumerate(chain) if _has_halo(program.rows[i])]
    if windowed and windowed[-1] > 0:
        yield chain[: windowed[-1] + 1]


def _has_halo(row: PlacedRow) -> bool:
    return any(c.dst.has_window and c.kind == "exchange" for chain in row.fetch for c in chain)


def _ahead(program: Program) -> Program:
    """Halos of what batch norms normalise are started before their moments."""
    rows = list(program.rows)
    for first, norm in norms(program)[0].items():
        row = rows[norm.centred]
        kinds = {v: program.values[v].kind for v in row.bound.reads}
        others = [v for v in row.bound.reads[2:] if kinds[v] == "made"]  # its line stands where the moments' does
        if row.fetch[0] and not others and not any(early_faults(row, 0)):
            rows[norm.centred] = replace(row, early=0, split=False, ahead=norm.centred - first)
    return replace(program, rows=tuple(rows))
