"""`widen-halos`: rows in a chain share one halo, and a batch norm's halo travels while its moments do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from convgen.passes.contract import NetworkPass
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

    Behind a batch norm the halo is of what is normalised, and starts before the moments:

        %m   = moments %x ; all_reduce                     start %b.x0 = exchange %x over=H
        %n   = centred %x, %c                       --->   %m   = moments %x ; all_reduce
        %b.x = exchange %n over=H                          wait %b.x0
        %b   = conv_forward %n, %w                         %b   = centred_conv_forward %x, %c, %w

    Needs:  values between that no other row reads; rows that are read in order; no buckets yet, as these name rows.
    Sound:  a rank computes of the values between all that its block of the result reads, of rows that exist; gradients
        of parameters are addends of its own block.
    Leaves: chains with no halo between their rows.

    Args:
        only: `first:last`, labels of the first and the last of the rows that become one, with commas; by default every
            chain up to its last halo.

    Source: docs/overlap.md.
    """

    name: ClassVar[str] = "widen-halos"

    only: str = ""

    def run(self, program: Program) -> Program:
        if program.buckets:
            return program
        asked = [tuple(pair.split(":")) for pair in self.only.split(",")] if self.only else None
        groups = [group for chain in chains(program) for group in _groups(program, chain, asked)]
        found = widened(program, groups)
        return program if found is program else _ahead(found)


def _groups(program: Program, chain: Group, asked: Sequence[tuple[str, ...]] | None) -> Iterator[Group]:
    """The groups of a chain's rows that become one each."""
    names = [label(program.rows[i]) for i in chain]
    if asked is None:
        asked = [(names[0], names[n]) for n in halos_of(program, chain)[-1:]]
    for first, last in asked:
        if first in names and last in names[names.index(first) + 1 :]:
            yield chain[names.index(first) : names.index(last) + 1]


def halos_of(program: Program, chain: Group) -> list[int]:
    """Places in a chain whose rows fetch a halo."""
    return [n for n, i in enumerate(chain) if _has_halo(program.rows[i])]


def _has_halo(row: PlacedRow) -> bool:
    return any(c.dst.has_window and c.kind == "exchange" for chain in row.fetch for c in chain)


def _ahead(program: Program) -> Program:
    """Start the halos of what batch norms normalise before their moments."""
    rows = list(program.rows)
    for i, ahead in may_go_ahead(program).items():
        rows[i] = replace(rows[i], early=0, split=False, ahead=ahead)
    return replace(program, rows=tuple(rows))


def may_go_ahead(program: Program) -> dict[int, int]:
    """By row whose first operand's halo may travel with its moments: how many rows before it the moments stand."""
    found: dict[int, int] = {}
    for first, norm in norms(program)[0].items():
        row = program.rows[norm.centred]
        kinds = {v: program.values[v].kind for v in row.bound.reads}
        others = [v for v in row.bound.reads[2:] if kinds[v] == "made"]  # the row stands where moments do: not made yet
        if row.fetch[0] and not others and not any(early_faults(row, 0)):
            found[norm.centred] = norm.centred - first
    return found
