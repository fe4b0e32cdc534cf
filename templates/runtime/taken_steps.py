# pyright: reportUnknownMemberType=false
# (what torch leaves untyped)
"""Steps that the kernels of other steps do: moments of what a convolution makes, and sums of two gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from convgen.operations.convolution import ANY_EXTENTS, MASKED, MOMENTS
from convgen.operations.gradient_sums import sums_taken

from .actions import Actions, Flags
from .listing import Line


class Chosen(NamedTuple):
    """A step of backward that runs: for each slot that it makes, whether anybody reads it; for each slot that it reads,
    whether it is there."""

    line: Line
    makes: Flags
    reads: Flags


def with_moments(lines: Sequence[Line], actions: Actions) -> list[Line]:
    """The steps, where convolutions whose kernels make moments of their results hand these to the norms behind them."""
    makers = {line.makes[0]: n for n, line in enumerate(lines) if line.kind == "forward" and line.makes}
    found = [*lines]
    for n, line in enumerate(lines):
        k = makers.get(line.reads[0], -1) if (line.kind, line.key) in actions.by_tiles else -1
        if k < 0 or not _may_have_moments(lines[k], actions):
            continue
        slot = f"{lines[k].makes[0]}.moments"
        found[k] = lines[k]._replace(kind="forward_moments", makes=(*lines[k].makes, slot))
        found[n] = line._replace(reads=(*line.reads, slot))
    return found


def _may_have_moments(line: Line, actions: Actions) -> bool:
    if line.kind != "forward" or line.again or (line.kind, line.key) in actions.of_norms or line.key in actions.biases:
        return False
    return bool(MOMENTS) and line.key in actions.stands and actions.stands[line.key].operation.may_have_moments


def with_sums(wanted: Sequence[Chosen], actions: Actions, stays: Collection[str]) -> list[Chosen]:
    """Backward's steps, where kernels add two gradients of one value that a step of its own would add."""

    def may_add(n: int) -> bool:
        return all(wanted[n].reads) and _may_add(wanted[n].line, actions)

    taken = [s for s in sums_taken([w.line for w in wanted], may_add, stays) if all(wanted[s.add].reads)]
    found: list[Chosen | None] = [*wanted]
    for maker, add, other in taken:
        line, makes, reads = wanted[maker]
        (made,) = wanted[add].line.makes
        slots = {"kind": f"{line.kind}_sum", "makes": (made, *line.makes[1:]), "reads": (*line.reads, other)}
        found[maker], found[add] = Chosen(line._replace(**slots), makes, (*reads, True)), None
    return [w for w in found if w is not None]


def _may_add(line: Line, actions: Actions) -> bool:
    """Whether a step of backward can add something to what it makes first."""
    if line.kind not in ("vjp", "forward") or line.again:
        return False
    if (line.kind, line.key) in actions.of_norms:
        return (f"{line.kind}_sum", line.key) in actions.of_norms
    stand = actions.stands.get(line.key)
    return bool(MASKED or ANY_EXTENTS) and stand is not None and stand.operation.may_add(line.kind == "vjp")
