"""When buffers take their new values: as soon as these are made, so the last read of an old value must come before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from convgen.spec.exported_walk import Found
from convgen.spec.graph import Call, Ref, Value, refs


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
