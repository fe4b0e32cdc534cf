"""When buffers take their new values: as soon as these are made, so the last read of an old value must come before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from convgen.late import torch
from convgen.spec.exported_walk import Found
from convgen.spec.graph import Call, Ref, Value, refs
from convgen.spec.graph_edit import BATCH_NORM, renamed

# Operators whose results rows may make by views, beside those of which ATen says that they are views.
HAND_ON = frozenset(
    {
        "_to_copy", "_unsafe_view", "clone", "constant_pad_nd", "copy", "expand_copy", "flip", "pad", "repeat", "tile",
    }
)  # fmt: skip


def in_order(
    found: Sequence[Found],
    updates: Mapping[str, str],
    outputs: Mapping[str, str],
    given: Sequence[Value],
    smooth: set[str],
) -> tuple[list[Found], dict[str, str], dict[str, str]]:
    """The calls, updates and outputs, with copies of buffers' old values at the beginning, and of new values at the
    end, so that nobody who wants an old value finds the new one in its place.

    Args:
        updates: by buffer, the value that it becomes; outputs: by name, the value.
        given: inputs, parameters, buffers and constants.
        smooth: names of values that gradients reach.
    """
    values, leads = {v.name: v for v in given}, set(smooth)
    for call in [one.call for one in reversed(found)]:
        if not leads.isdisjoint([v.name for v in call.results if v is not None]):
            leads.update([name for arg in call.args for name in refs(arg)])
    while True:
        calls, renewed = late_updates(found, updates, given)
        name = next((b for b in updates if _is_wanted(b, renewed[b], calls, outputs, leads)), None)
        if name is None:
            return calls, renewed, dict(outputs)
        copy = replace(values[name], name=f"%old {name}")
        found, updates, outputs = _of_copy(name, copy, found, updates, outputs)


def _of_copy(
    name: str, copy: Value, found: Sequence[Found], updates: Mapping[str, str], outputs: Mapping[str, str]
) -> tuple[Sequence[Found], Mapping[str, str], Mapping[str, str]]:
    """The calls, updates and outputs, with a copy of a value made at the beginning, and taken for it everywhere."""

    def old(n: str) -> str:
        return copy.name if n == name else n

    first = Found(Call(op="clone", args=(Ref(name), None), results=(copy,), module="", kind=""), "")
    calls = [one if _renews(one.call) else replace(one, call=renamed(one.call, old)) for one in found]
    return [first, *calls], {b: old(v) for b, v in updates.items()}, {n: old(v) for n, v in outputs.items()}


def _is_wanted(buffer: str, value: str, found: Sequence[Found], outputs: Mapping[str, str], leads: set[str]) -> bool:
    """Whether a buffer's old value, or what lies in its memory, is an output or the new value, or is read once that is
    made, or for what gradients reach: backward may read it, or compute again what is made of it.

    Args:
        leads: names of values of which others are made that gradients reach, these included.
    """
    lies, is_made = {buffer}, False
    for call in (one.call for one in found):
        results = {v.name for v in call.results if v is not None}
        if not _renews(call) and not lies.isdisjoint(name for arg in call.args for name in refs(arg)):
            is_copy = any(name.startswith(("%old ", "%copy of ")) for name in results)
            hands_on = _hands_on(call)
            if (is_made and not is_copy) or not (hands_on or leads.isdisjoint(results)):
                return True
            lies |= results if hands_on and not is_copy else set()
        is_made |= value in results
    return not lies.isdisjoint((value, *outputs.values()))


def _renews(call: Call) -> bool:
    """Whether a call is a batch norm in training, which reads running statistics for nothing but their new values."""
    return call.op == BATCH_NORM and call.args[5] is True


def _hands_on(call: Call) -> bool:
    """Whether a call's results may lie in the memory of an operand."""
    packet, _, overload = call.op.partition(".")
    operator: Any = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    says = operator is not None and any(r.alias_info is not None for r in operator._schema.returns)
    return says or packet in HAND_ON


def late_updates(
    found: Sequence[Found], updates: Mapping[str, str], given: Sequence[Value]
) -> tuple[list[Found], dict[str, str]]:
    """The calls, with a copy of a buffer's new value at the end where the old value is read after the new one is made,
    where no call makes the new value, and where two buffers become one value.

    Args:
        updates: by buffer, the value that it becomes.
        given: inputs, parameters, buffers and constants.
    """
    found, updates = list(found), dict(updates)
    values = {v.name: v for v in given} | {v.name: v for one in found for v in one.call.results if v is not None}
    made = {v.name: k for k, one in enumerate(found) for v in one.call.results if v is not None}
    while late := [b for k, (b, v) in enumerate(updates.items()) if _late(b, v, k, found, made, updates)]:
        value = values[updates[late[0]]]
        copy = replace(value, name=f"%copy of {value.name} for {late[0]} {len(found)}")
        values[copy.name], made[copy.name], updates[late[0]] = copy, len(found), copy.name
        call = Call(op="clone", args=(Ref(value.name), None), results=(copy,), module="", kind="")
        found.append(Found(call, ""))
    return found, updates


def _late(
    buffer: str, value: str, place: int, found: Sequence[Found], made: Mapping[str, int], updates: Mapping[str, str]
) -> bool:
    if value not in made or value in [*updates.values()][:place]:
        return True
    behind = found[made[value] + 1 :]
    return any(buffer in refs(arg) for one in behind for arg in one.call.args)
