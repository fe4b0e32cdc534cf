"""`fetch-caches`: a stream's cache and the new frames behind it along time are fetched apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from convgen.operations.rows import Concatenate, Take
from convgen.passes.contract import NetworkPass
from convgen.program.network import Program
from convgen.program.rows import PlacedRow
from convgen.program.wide import Group, as_one, widened

CACHED = (Concatenate,)  # and none of its kinds that come round


@dataclass(frozen=True)
class FetchCaches(NetworkPass):
    """A convolution behind a concatenation of a cache and new frames is one row with it, that reads a window of each:

        %c   = concatenate %cache, %x                    %y.x0 = exchange %cache over=H : x0[.., H+(1,1), ..]
        %y.x = exchange %c over=H : x[.., H+(1,1), ..]   %y.x1 = exchange %x over=H : x1[.., H+(1,1), ..]
        %y   = conv_forward %c, %w                 --->  %y   = concatenate_conv_forward %cache, %x, %w

    A convolution behind a padding is treated alike, whatever the padding fills in. A cache that comes with its halo, as
    a stream's do (docs/streaming.md), is then not sent again.

    Needs:  a concatenation of an input that is a cache, which one row alone reads (spec/graph_caches.py), perhaps
        behind a padding.
    Sound:  the window of a concatenation is the windows of its parts, one behind the other; along a dimension that no
        axis splits a rank has all rows of each.
    Leaves: a convolution that reads no rows of other ranks.

    Args:
        caches: names of inputs, with commas; no other input is taken for a cache.
    """

    name: ClassVar[str] = "fetch-caches"

    caches: str = ""

    def run(self, program: Program) -> Program:
        return widened(program, [*self._groups(program)], lambda program, group: as_one(program, group, several=True))

    def _groups(self, program: Program) -> Iterator[Group]:
        caches = {*self.caches.split(",")}
        kept = {v for _, v in (*program.outputs, *program.updates)}
        readers = Counter(v for row in program.rows for v in row.bound.reads)
        reads = {v: i for i, row in enumerate(program.rows) for v in row.bound.reads}

        def alone(v: str) -> int | None:
            """The one row that reads a value."""
            return reads[v] if readers[v] == 1 and v not in kept else None

        taken = set[int]()
        handed: dict[str, Group] = dict.fromkeys(caches, ())  # values that are a cache unchanged, with the rows between
        for i, row in enumerate(program.rows):
            operation, (first, *_) = row.bound.operation, row.bound.reads or ("",)
            hands_on = operation.name in ("_to_copy", "clone") or isinstance(operation, Take)
            if hands_on and first in handed and alone(row.bound.makes[0]) is not None:
                handed[row.bound.makes[0]] = (*handed[first], i)
            if type(operation) not in CACHED or not handed.keys() & {*row.bound.reads}:
                continue
            group = [*next(handed[v] for v in row.bound.reads if v in handed), i]
            while (after := alone(program.rows[group[-1]].bound.makes[0])) is not None:
                group.append(after)
                if not isinstance(program.rows[after].bound.operation, Take):
                    break
            if len(group) > 1 and _has_window(program.rows[group[-1]], program.rows[group[-2]].bound.makes[0]):
                taken |= {*group}
                yield tuple(group)
        for i, row in enumerate(program.rows):
            after = alone(row.bound.makes[0]) if isinstance(row.bound.operation, Take) and i not in taken else None
            if after is not None and after not in taken and _has_window(program.rows[after], row.bound.makes[0]):
                yield i, after


def _has_window(row: PlacedRow, value: str) -> bool:
    """Whether a row is a convolution that reads rows of a value from other ranks' blocks."""
    fetch = row.fetch[row.bound.reads.index(value)]
    return row.bound.operation.convolves is not None and any(c.dst.has_window for c in fetch)
