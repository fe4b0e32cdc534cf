"""Dropouts that work in place: export writes them out, and here they are dropouts again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from convgen.spec.exported_walk import Found
from convgen.spec.graph import Arg, Call, Ref, refs
from convgen.spec.graph_edit import DROPOUT


def in_place_dropouts(found: Sequence[Found]) -> list[Found]:
    """The calls, with one dropout in the place of the four that nn.Dropout(p, inplace=True) is exported as.

        %e = empty_like(%x)
        %b = bernoulli.p(%e, 1 - p)
        %d = div.Scalar(%b, 1 - p)
        %y = mul.Tensor(%x, %d)         --->    %y = dropout(%x, p, true)

    Leaves: noise of another shape than x's (Dropout2d, stochastic depth), and noise that is read twice.
    """
    made = {v.name: one.call for one in found for v in one.call.results if v is not None}
    read = Counter(name for one in found for arg in one.call.args for name in refs(arg))
    changed: list[Found] = []
    for one in found:
        kept = _kept(one.call, made, read)
        if kept is not None:
            one = replace(one, call=replace(one.call, op=DROPOUT, args=(one.call.args[0], _dropped(kept), True)))
        changed.append(one)
    return changed


def _kept(call: Call, made: Mapping[str, Call], read: Counter[str]) -> float | None:
    """The share of values that a product keeps, if it is a dropout's."""
    if call.op != "mul.Tensor":
        return None
    scaled = _maker(call.args[1], "div.Scalar", made, read)
    drawn = _maker(scaled.args[0], "bernoulli.p", made, read) if scaled is not None else None
    like = _maker(drawn.args[0], "empty_like", made, read) if drawn is not None else None
    if scaled is None or drawn is None or like is None or like.args[0] != call.args[0]:
        return None
    kept = drawn.args[1]
    return kept if isinstance(kept, float) and kept == scaled.args[1] else None


def _maker(arg: Arg, op: str, made: Mapping[str, Call], read: Counter[str]) -> Call | None:
    call = made.get(arg.name) if isinstance(arg, Ref) and read[arg.name] == 1 else None
    return call if call is not None and call.op == op else None


def _dropped(kept: float) -> float:
    """The p that 1 - p was computed of, where a short number is."""
    short = round(1 - kept, 12)
    return short if 1 - short == kept else 1 - kept
