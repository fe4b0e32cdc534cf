# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped)
"""Outputs with rows around a rank's block, for their next reader, made of rows that have been fetched for others.

    %y.x  = exchange %x over=H : x[.., H+(1,1), ..]          next+around = take %y.x
    %next = take %x                                 --->
    return next = %next                                      return next = next+around

The next call takes it with its halo (surrounded.py), so that nothing is sent for these rows a second time. Rows are
never fetched just for this: where some would have to be, the output is the plain block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from convgen.operations.row import At

from .here import held_at
from .layout import Box
from .listing import Line
from .rows import Stand
from .surrounded import HALO, window_of

AROUND = "+around"
Boxes = tuple[Box, ...]  # one for each rank of the mesh
NONE: Mapping[str, Boxes] = {}


class Wide(NamedTuple):
    """A step that makes more than a rank's block: its place, and the boxes of what it reads, on this rank."""

    at: At
    reads: tuple[Box, ...]


class Found(NamedTuple):
    """A slot that has at least the rows that are wanted, and by rank the box that it has."""

    slot: str
    boxes: Boxes


class HandedOn:
    """Outputs with rows around them.

    Args:
        lines: steps of forward.
        halos: inputs that have come with their halos, with their boxes by rank.

    Attributes:
        added: steps that are to come behind all others; `wide`: by the slot that such a step makes, how it makes it.
    """

    def __init__(self, actions: Any, lines: Sequence[Line], halos: Mapping[str, Boxes]) -> None:
        self.actions, self.halos = actions, halos
        self.me, self.count = actions.place.me, len(actions.place.ranks)
        self.added: list[Line] = []
        self.wide: dict[str, Wide] = {}
        self.makers = {n: line for line in lines if line.kind in ("forward", "same") for n in line.makes}
        self.fetches = {line.makes[0]: line for line in lines if line.kind == "fetch"}
        self.windows: dict[str, list[tuple[Line, Boxes]]] = {}
        for line in lines:
            if line.kind == "wait" and line.reads[-1].endswith(HALO):
                continue
            if line.kind in ("fetch", "wait") and (move := window_of(line, actions.moves)) is not None:
                stand, _ = actions.moves["fetch", line.key]
                boxes = self._held(stand, move.dst)
                self.windows.setdefault(line.reads[-1].removesuffix(HALO), []).append((line, boxes))

    def _held(self, layer: Any, layout: Any) -> Boxes:
        return tuple([held_at(layer, layout, p, 0) for p in range(self.count)])

    def output(self, slot: str, wanted: Boxes) -> str | None:
        """The slot with the wanted boxes of an output; None, on all ranks alike, where something would have to be sent
        for them."""
        kept = len(self.added)
        found = self._found(slot, wanted)
        if found is None:
            del self.added[kept:]
            return None
        return self._cut(found.slot, f"{slot}{AROUND}", found.boxes[self.me], wanted[self.me])

    def _cut(self, slot: str, name: str, have: Box, wanted: Box) -> str:
        """The slot of a box cut from what a slot has; an empty tensor where it has ()."""
        return self._add(Line("around", slot, (name,), (slot,), None, False), None, [have, wanted])

    def _add(self, line: Line, at: At | None, reads: Sequence[Box]) -> str:
        (name,) = line.makes
        self.added.append(line)
        self.wide[name] = Wide(at or At({}, (), ()), tuple(reads))
        return name

    def _found(self, slot: str, wanted: Boxes) -> Found | None:
        if slot in self.halos and _cover(self.halos[slot], wanted):
            return Found(f"{slot}{HALO}", self.halos[slot])
        for line, boxes in self.windows.get(slot, ()):
            if not _cover(boxes, wanted):
                continue
            if line.kind == "fetch":
                return Found(line.makes[0], boxes)
            name = f"{line.makes[0]}{AROUND}"
            if name not in self.wide:
                self._add(Line("window", line.key, (name,), (line.makes[0], line.reads[-1]), None, False), None, ())
            return Found(name, boxes)
        return self._made(slot, wanted)

    def _made(self, slot: str, wanted: Boxes) -> Found | None:
        """The slot of a row's wider result, made of wider operands, if the row reads no rows of other blocks."""
        line = self.makers.get(slot)
        if line is not None and line.kind == "same":
            return self._found(line.reads[0], wanted)
        stand: Stand | None = None if line is None else self.actions.stands.get(line.key)
        if line is None or stand is None or line.makes[0] != slot or any(stand.store) or self._reads_rows(stand):
            return None
        if ("forward", line.key) in self.actions.of_norms or len(line.reads) != len(stand.signature.inputs):
            return None  # a norm's kernels compute it with other rows
        ats = [self._at(stand, p, box) for p, box in enumerate(wanted)]
        if any(at is None for at in ats):
            return None
        reads: list[str] = []
        boxes: list[Box] = []
        for k, name in enumerate(line.reads):
            need = tuple([at.inside[k] for at in ats if at is not None])
            held = self._held(stand, stand.windows[k])
            if all(any(hi <= lo for lo, hi in box) for box in need):
                reads.append(self._cut(name, f"{slot}{AROUND}{len(self.added)}", (), need[self.me]))
                boxes.append(need[self.me])
                continue
            if _cover(held, need):
                reads.append(name)
                boxes.append(held[self.me])
                continue
            value = self.fetches[name].reads[-1].removesuffix(HALO) if name in self.fetches else name
            found = self._found(value, need)
            if found is None:
                return None
            reads.append(found.slot)
            boxes.append(found.boxes[self.me])
        name = f"{slot}{AROUND}{len(self.added)}"
        self._add(Line("wide", line.key, (name,), tuple(reads), None, False), ats[self.me], boxes)
        return Found(name, wanted)

    def _reads_rows(self, stand: Stand) -> bool:
        """Whether a block reads other rows than its own along a dimension that an axis splits."""
        return any(
            made.relation is not None and stand.row.roles.get(made.indices[0])
            for operand in stand.signature.inputs
            for made in operand.dims
        )

    def _at(self, stand: Stand, p: int, box: Box) -> At | None:
        """The place at which a row makes a box of its result on a rank; None if no blocks make it."""
        (result, *others), at = stand.signature.results, stand.at_rank(p)
        if others:
            return None
        blocks = dict(at.blocks)
        for made, side, own in zip(result.dims, box, stand.result_box(at), strict=True):
            if len(made.indices) == 1:
                blocks[made.indices[0]] = side
            elif side != own:
                return None
        return stand.at_blocks(blocks)


def _cover(have: Boxes, wanted: Boxes) -> bool:
    """Whether every rank has what it wants."""
    return all(
        hi <= lo or (a <= lo and hi <= b)
        for box, want in zip(have, wanted, strict=True)
        for (a, b), (lo, hi) in zip(box, want, strict=True)
    )
