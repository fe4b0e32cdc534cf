"""Dropouts in place, which export writes out as several calls, become dropouts again. Noise that a module makes from
uniform numbers becomes what ATen draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from convgen.spec.exported_walk import Found
from convgen.spec.graph import Arg, Call, Ref, refs
from convgen.spec.graph_edit import BERNOULLI, DROPOUT


def in_place_dropouts(found: Sequence[Found]) -> list[Found]:
    """The calls, with one dropout in place of the four calls that nn.Dropout(p, inplace=True) is exported as.

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
    """The share of elements that a product keeps, if the product is a dropout's; else None."""
    if call.op != "mul.Tensor":
        return None
    scaled = _maker(call.args[1], "div.Scalar", made, read)
    drawn = _maker(scaled.args[0], BERNOULLI, made, read) if scaled is not None else None
    like = _maker(drawn.args[0], "empty_like", made, read) if drawn is not None else None
    if scaled is None or drawn is None or like is None or like.args[0] != call.args[0]:
        return None
    kept = drawn.args[1]
    return kept if isinstance(kept, float) and kept == scaled.args[1] else None


def written_noise(found: Sequence[Found]) -> list[Found]:
    """The calls, with draws of ones and zeros in place of rounded uniform numbers (stochastic depth, as many have
    written it since before `bernoulli_`).

        %u = rand(shape)                       %u = zeros(shape)
        %s = add.Tensor(%u, p, 1)
        %y = floor(%s)                --->     %y = bernoulli.p(%u, p)
    """
    made = {v.name: one.call for one in found for v in one.call.results if v is not None}
    read = Counter(name for one in found for arg in one.call.args for name in refs(arg))
    noise: dict[str, tuple[Arg, float]] = {}  # by what rounds: what is drawn, and the probability of ones
    for one in found:
        moved = _maker(one.call.args[0], "add.Tensor", made, read) if one.call.op == "floor" else None
        drawn = _maker(moved.args[0], "rand", made, read) if moved is not None else None
        if moved is not None and drawn is not None and isinstance(moved.args[1], float) and 0 < moved.args[1] < 1:
            noise[_made(one.call)] = moved.args[0], moved.args[1]
    uniform = {drawn.name for drawn, _ in noise.values() if isinstance(drawn, Ref)}
    changed: list[Found] = []
    for one in found:
        if _made(one.call) in uniform:
            one = replace(one, call=replace(one.call, op="zeros"), problem="")
        elif _made(one.call) in noise:
            one = replace(one, call=replace(one.call, op=BERNOULLI, args=(*noise[_made(one.call)], None)))
        changed.append(one)
    return changed


def _made(call: Call) -> str:
    return call.results[0].name if call.results and call.results[0] is not None else ""


def _maker(arg: Arg, op: str, made: Mapping[str, Call], read: Counter[str]) -> Call | None:
    call = made.get(arg.name) if isinstance(arg, Ref) and read[arg.name] == 1 else None
    return call if call is not None and call.op == op else None


def _dropped(kept: float) -> float:
    """The p from which 1 - p was computed, if a short number gives it."""
    short = round(1 - kept, 12)
    return short if 1 - short == kept else 1 - kept
