# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped)
"""An input may come with the rows around a rank's block that its readers fetch; then nothing is sent for these rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from convgen.operations.rimmed import Rimmed, RimPlaces

from .conversions import missing, within
from .layout import Box, common
from .listing import NOTHING, Line, said
from .regions import around
from .rows import Stand
from .travel import Move, Packing, RowHere

HALO = "+halo"  # an input's name with this behind it is the slot of the input with its rows around it
WINDOWS = ("exchange", "exchange_rim")
BRINGS = ("fetch", "start", "wait")
Moves = Mapping[tuple[str, str], tuple[Stand, Move]]


def with_halos(lines: Sequence[Line], moves: Moves, wide: Sequence[str]) -> list[Line]:
    """The steps, where those that fetch rows around the blocks of these inputs take them from the inputs instead."""
    found: list[Line] = []
    for line in lines:
        if line.kind in BRINGS and line.reads[-1] in wide and window_of(line, moves):
            if line.kind == "start":
                continue
            line = line._replace(reads=(*(NOTHING,) * (len(line.reads) - 1), f"{line.reads[-1]}{HALO}"))
        found.append(line)
    return found


def window_of(line: Line, moves: Moves) -> Move | None:
    """The conversion of a step that fetches rows around a block; None for a step that fetches something else."""
    _, move = moves.get(("fetch", line.key), (None, None))
    return move if move is not None and move.kind in WINDOWS else None


def surrounded(name: str, own: Box, lines: Sequence[Line], moves: Moves, held: Callable[[Stand, Any], Box]) -> Box:
    """The box of an input's block with the rows that its readers fetch.

    Args:
        own: where the block lies.
        held: gives the box that this rank has in a layout of a row.

    Raises:
        ValueError: a step fetches something other than rows around the block.
    """
    boxes = [own]
    for line in lines:
        if line.kind not in (*BRINGS, "send_fetch") or name not in line.reads:
            continue
        stand, move = moves["fetch", line.key.partition(":")[0]]
        if move.kind == "slice":
            continue
        if line.kind == "send_fetch" or move.kind not in WINDOWS:
            what = move.kind.replace("_", " ")
            fact = f"{stand.name}: {name} can't be read with its halo: the step `{said(line)}` is an {what} of it"
            raise ValueError(f"{fact} over {','.join(move.over)}; read the block without its halo")
        boxes.append(held(stand, move.dst))
    return around(boxes)


def taker(move: Move, box: Box, here: RowHere) -> Callable[[Tensor], Any]:
    """The function that takes a rank's window from the block with the rows around it, which lies at `box`."""
    need, own = here.held(move.dst), here.held(move.src)
    if move.kind == "exchange":
        return lambda wide: taken_from(wide, box, need)
    receives = missing(move.src, move.dst, move.over, here)[1]
    places = RimPlaces(need, own, receives)
    packing = Packing(box, [common(box, b) for b in receives], here.layer, last=places.last)

    def rimmed(wide: Tensor) -> Rimmed:
        return Rimmed(taken_from(wide, box, own), packing.packed(wide), places)

    return rimmed


def taken_from(wide: Tensor, outer: Box, inner: Box) -> Tensor:
    """The box `inner` of a tensor that lies at `outer`, in memory of its own."""
    return within(wide, outer, tuple((lo, max(lo, hi)) for lo, hi in inner)).contiguous()
