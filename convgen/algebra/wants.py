"""The layouts of a signature's operands and results under roles: types of values, exact on every rank."""

from __future__ import annotations

from collections.abc import Mapping

from convgen.algebra.index_sets import IndexSets
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.signature import Signature, Wanted


def layouts(sets: IndexSets, signature: Signature, roles: Mapping[str, Axes]) -> tuple[Layout, ...]:
    """The layouts of inputs, then of results, in the signature's order; an operand has the name of its tensor.

    A window is wanted only where the rank's block does not serve as it is.
    """
    return tuple(layout(sets, o.name, signature.wants(o, roles)) for o in (*signature.inputs, *signature.results))


def layout(sets: IndexSets, tensor: str, wanted: Wanted) -> Layout:
    """A wanted type as a layout; windows only where the rank's block does not serve as it is."""
    pieces = wanted.pieces[: len(sets.dims(tensor))]
    windows = tuple([None if p.relation is None else sets.window(tensor, d, p.axes) for d, p in enumerate(pieces)])
    return Layout(tensor, tuple([p.axes for p in pieces]), windows, sets.grid.ordered(wanted.partial))
