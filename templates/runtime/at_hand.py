"""Checks that a rank holds the rows that its local code takes, each time that rows stand at new sizes.

The conversions were derived at a few sizes that stand for all others. Where they bring too little at some sizes, all
ranks refuse the call: nothing is computed from rows that aren't there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .layout import Box, common
from .mesh import Place
from .rows import Stand
from .splits import Split
from .travel import RowHere


def lacking(stands: Mapping[str, Stand], place: Place) -> Iterator[str]:
    """Words for what rows lack on this rank, of operands of which they read more than a block."""
    gradients = {one.label for stand in stands.values() for one in stand.derived.values()}  # which have none
    for stand in stands.values():
        here = RowHere(stand, place, 0)  # type: ignore[arg-type]
        operands = zip(stand.signature.inputs, stand.windows, stand.at(place).inside, strict=True)
        for k, (operand, windows, taken) in enumerate(operands):
            if all(made.relation is None for made in operand.dims):
                continue
            held = here.held(windows)
            yield from _short(stand, operand.name, held, taken)
            slices = [m for m in (*stand.fetch[k], *stand.back[k]) if m.kind == "slice"]
            for move in slices:
                yield from _short(stand, operand.name, here.held(move.src), here.held(move.dst))
            if operand.gradient and not stand.row.back[k] and k not in stand.derived and stand.label not in gradients:
                stored = Split(operand.name, operand.shape, stand.row.fetch[k].start.axes)
                yield from _short(stand, f"d{operand.name}", here.held(stored), held)


def _short(stand: Stand, name: str, held: Box, taken: Box) -> Iterator[str]:
    if stand.size(taken, "") and common(held, taken) != taken:
        has, wants = (", ".join(f"{lo}:{hi}" for lo, hi in box) for box in (held, taken))
        yield f"{stand.label} takes [{wants}] of {name} on this rank, which has [{has}]"
