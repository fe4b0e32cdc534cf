"""Sums of two gradients of one value, done by the kernel that makes the second before it writes.

a = ...                                           a = ...
b, dw = vjp conv (kept, dy)              is       s, dw = vjp_sum conv (kept, dy, a)
s = add x.grad (a, b)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple


class SumTaken(NamedTuple):
    """A sum that the step which makes one of its addends can do.

    Attributes:
        maker, add: numbers of the step that makes an addend, and of the step that adds.
        other: the slot of the other addend, which is made before the maker runs.
    """

    maker: int
    add: int
    other: str


def sums_taken(lines: Sequence[Any], may_add: Callable[[int], bool], stays: Collection[str] = ()) -> list[SumTaken]:
    """The sums that can be done by the steps that make one of their addends as their first result.

    Args:
        lines: the steps, in the order in which they run, with their kinds, and the slots that they make and read.
        may_add: says by a step's number whether it can add something to what it makes first.
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
