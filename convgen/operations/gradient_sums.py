"""Sums of two gradients of one value, of which the second is made by a kernel that can add the first before it writes.

a = ...                                           a = ...
b, dw = vjp conv (kept, dy)              is       s, dw = vjp_sum conv (kept, dy, a)
s = add x.grad (a, b)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple


class SumTaken(NamedTuple):
    """A step that adds what another one, before it, has found.

    Attributes:
        maker, add: numbers of the step that makes an addend, and of that which adds.
        other: the slot of the other addend, which is there before the maker runs.
    """

    maker: int
    add: int
    other: str


def sums_taken(lines: Sequence[Any], may_add: Callable[[int], bool], stays: Collection[str] = ()) -> list[SumTaken]:
    """Sums that the steps which make one of their addends first can do.

    Args:
        lines: steps, in the order in which they run, with their kind, and slots that they make and read.
        may_add: by the number of a step, whether it can add something to what it makes first.
        stays: slots that somebody else reads.
    """
    readers = Counter(slot for line in lines for slot in line.reads)
    makers: dict[str, int] = {}
    found: dict[int, SumTaken] = {}
    for n, line in enumerate(lines):
        if line.kind == "add":
            for own, other in (line.reads, line.reads[::-1]):
                at = makers.get(own, -1)
                alone = at >= 0 and at not in found and readers[own] == 1 and own not in stays
                if alone and lines[at].makes[0] == own and makers.get(other, -1) < at and may_add(at):
                    found[at] = SumTaken(at, n, other)
                    break
        makers |= dict.fromkeys(line.makes, n)
    return list(found.values())
