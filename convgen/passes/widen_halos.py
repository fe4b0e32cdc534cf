"""`widen-halos`: rows one behind the other with one halo, and halos that travel while moments do."""

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

    Behind a batch norm it is the halo of what is normalised, which is started before its moments are:

        %m   = moments %x ; all_reduce                     start %b.x0 = exchange %x over=H
        %n   = centred %x, %c                       --->   %m   = moments %x ; all_reduce
        %b.x = exchange %n over=H                          wait %b.x0
        %b   = conv_forward %n, %w                         %b   = centred_conv_forward %x, %c, %w

    Needs:  values between that nothing else reads; rows that are read in order; no buckets yet, which know rows by
        name.
    Sound:  a rank makes of what lies between all that its block of the result reads, of real rows alone; gradients of
        parameters are addends of its own block.
    Leaves: rows between which no halo travels.

    Args:
        only: `first:last`, labels of the rows that are one from the first to the last, with commas; by default every
            chain as far as its last halo.

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
    """Of a chain of rows those to be one."""
    names = [label(program.rows[i]) for i in chain]
    if asked is None:
        asked = [(names[0], names[n]) for n in halos_of(program, chain)[-1:]]
    for first, last in asked:
        if first in names and last in names[names.index(first) + 1 :]:
            yield chain[names.index(first) : names.index(last) + 1]


def halos_of(program: Program, chain: Group) -> list[int]:
    """Where in a chain a row fetches a halo."""
    return [n for n, i in enumerate(chain) if _has_halo(program.rows[i])]


def _has_halo(row: PlacedRow) -> bool:
    return any(c.dst.has_window and c.kind == "exchange" for chain in row.fetch for c in chain)


def _ahead(program: Program) -> Program:
    """Halos of what batch norms normalise are started before their moments."""
    rows = list(program.rows)
    for i, ahead in may_go_ahead(program).items():
        rows[i] = replace(rows[i], early=0, split=False, ahead=ahead)
    return replace(program, rows=tuple(rows))


def may_go_ahead(program: Program) -> dict[int, int]:
    """By row whose first operand's halo may travel while moments of it do, how many rows before it these are."""
    found: dict[int, int] = {}
    for first, norm in norms(program)[0].items():
        row = program.rows[norm.centred]
        kinds = {v: program.values[v].kind for v in row.bound.reads}
        others = [v for v in row.bound.reads[2:] if kinds[v] == "made"]  # its line stands where the moments' does
        if row.fetch[0] and not others and not any(early_faults(row, 0)):
            found[norm.centred] = norm.centred - first
    return found
