"""Types in which a program's rows move and compute: the module's, or those under the autocast it is compiled for.

| tensor | its type under autocast |
|---|---|
| a value that a row makes | what local code makes of operands that are taken as autocast takes them |
| an operand on its way | the low type, where autocast takes it so; else the value's |
| a gradient that local code's vjp makes | that in which the row was given the operand |
| a gradient that a row of its own makes | its local code's |
| a value's gradient | the widest of those that its readers make |

A parameter's gradient has the parameter's type where it begins, or travels to be summed in a type of its own. To find
what local code makes, it runs on tensors without memory, as on ranks that compute nothing (`types_under`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from convgen.operations.autocast import AUTOCAST, types_under, usual_types
from convgen.operations.bound import Bound
from convgen.operations.row import Operation
from convgen.program.rows import PlacedRow, gradients_kinds, reads_of
from convgen.spec.graph import FLOATS

Types = tuple[str, ...]


class OwnTypes(NamedTuple):
    """In which types a gradient's row computes, has its operands brought to it, and sends its result."""

    local: str
    fetch: Types
    store: str


class RowTypes(NamedTuple):
    """The types of a row.

    Attributes:
        local: in which it computes; "" where it has no floating-point operand or result.
        reads: in which its operands are stored; `fetch`: in which they are brought to it.
        back: by operand, in which its gradient travels back, where the operand was brought; else `back_here`.
        store: of its results; `given`: of their gradients.
        own: types of gradients' rows, by the name of the operand.
    """

    local: str
    reads: Types
    fetch: Types
    back: Types
    back_here: Types
    store: Types
    given: Types
    own: tuple[tuple[str, OwnTypes], ...]

    def on_the_way_back(self, row: PlacedRow, k: int) -> str:
        """The type of an operand's gradient as local code has made it."""
        return (self.back if row.fetch[k] else self.back_here)[k]

    def of(self, name: str) -> OwnTypes:
        """The types of the row that makes an operand's gradient."""
        return dict(self.own)[name]


def _carried(kinds: Sequence[str], k: int, kind: str, low: str) -> str:
    """The type in which a row is brought an operand of this type.

    Args:
        kinds: by operand, how autocast takes it; empty where it takes none.
    """
    return low if low and kinds and kinds[k] == "low" and kind in AUTOCAST else kind


def _widest(one: str, other: str) -> str:
    """The type of the sum of values of two floating-point types, as torch has it."""
    return one if one == other else "float64" if "float64" in (one, other) else "float32"


def values_under(low: str, own: Mapping[str, str], rows: Iterable[tuple[Bound, int]]) -> Mapping[str, str]:
    """Types of values under autocast.

    Args:
        low: autocast's type; "" where it is off.
        own: types without it.
        rows: in order, each with the number of its signature.
    """
    if not low:
        return own
    found = dict(own)
    for bound, way in rows:
        made = types_under(bound.operation, way, tuple(found[v] for v in bound.reads), bound.autocast, low)
        found |= {v: kind for v, kind in zip(bound.makes, made, strict=True) if found.get(v, "") in AUTOCAST}
    return found


def types_of_rows(
    low: str,
    values: Mapping[str, str],
    rows: Sequence[tuple[Bound, PlacedRow | None]],
    outputs: Iterable[str],
    summed: Mapping[str, str],
    wanted: Collection[str],
) -> tuple[tuple[RowTypes, ...], dict[str, str]]:
    """Types of each row; and types of values' complete gradients, where they are not the values' own.

    Args:
        values: types of values.
        rows: with their places; without one, gradients are taken to be vjps' of operands that are brought.
        summed: by parameter, the type in which its gradient travels.
        wanted: values that have gradients.
    """
    gradients = {v: values[v] for v in outputs if low}
    found: list[RowTypes] = []
    for bound, row in reversed(rows):
        types = _of_row(low, bound, 0 if row is None else row.way, values, gradients, summed)
        found.append(types)
        if not low or not any(v in wanted for v in bound.makes):
            continue
        derived = {} if row is None else dict(row.derived)
        for k, (v, operand) in enumerate(zip(bound.reads, bound.operation.signatures[0].inputs, strict=True)):
            if v in summed or v not in wanted or not operand.gradient:
                continue
            kind = types.fetch[k]
            if k in derived:
                kind = types.of(operand.name).store
            elif row is not None and (not row.fetch[k] or k == row.early):  # of the interior, which reads the value
                kind = types.reads[k]
            gradients[v] = _widest(gradients.get(v, kind), kind)
    return tuple(reversed(found)), gradients


def _of_row(
    low: str, bound: Bound, way: int, values: Mapping[str, str], gradients: Mapping[str, str], summed: Mapping[str, str]
) -> RowTypes:
    """
    Args:
        gradients: types of results' complete gradients.
    """
    given, sums = tuple([gradients.get(v) for v in bound.makes]), tuple([summed.get(v) for v in bound.reads])
    reads, made = tuple([values[v] for v in bound.reads]), tuple([values.get(v) for v in bound.makes])
    return _alike(low, bound.operation, bound.autocast, way, reads, made, given, sums)


@lru_cache(maxsize=1 << 12)
def _alike(
    low: str,
    operation: Operation,
    kinds: tuple[str, ...],
    way: int,
    reads: Types,
    made: tuple[str | None, ...],
    gradients: tuple[str | None, ...],
    summed: tuple[str | None, ...],
) -> RowTypes:
    """Types of rows that differ in the names of their values alone.

    Args:
        made: types of results; None for a result that nobody reads.
    """
    bound = Bound(operation, reads, ("",) * len(made), autocast=kinds)
    fetch = tuple(_carried(kinds, k, kind, low) for k, kind in enumerate(reads))
    usual = usual_types(operation.signatures[way].results, reads)
    if low and not all(made):
        usual = types_under(operation, way, reads, kinds, low)
    store = tuple(known or kind for known, kind in zip(made, usual, strict=True))
    given = tuple(known or kind for known, kind in zip(gradients, store, strict=True))
    back = tuple(known or kind for known, kind in zip(summed, fetch, strict=True))
    back_here = tuple(known or kind for known, kind in zip(summed, reads, strict=True))
    read = {"operand": reads, "result": store, "gradient": store if operation.has_between else given}
    own: list[tuple[str, OwnTypes]] = []
    for k, operand in enumerate(operation.signatures[0].inputs):
        if (one := operation.gradients.get(operand.name)) is None:
            continue
        there, taken = [read[kind][n] for kind, n in reads_of(operation, one.reads)], gradients_kinds(bound, one.reads)
        brought = tuple(_carried(taken, j, kind, low) for j, kind in enumerate(there))
        kind = summed[k]
        if not kind:
            kind = types_under(one.operation, 0, brought, taken, low)[0] if low else reads[k]
        own.append((operand.name, OwnTypes(_computed(taken, brought), brought, kind)))
    return RowTypes(
        _computed(kinds, fetch) or _computed((), store), reads, fetch, back, back_here, store, given, tuple(own)
    )


def _computed(kinds: Sequence[str], brought: Sequence[str]) -> str:
    """In which type a row computes: autocast's float32, or the type of its first floating-point operand."""
    first = next((kind for kind in brought if kind in FLOATS), "")
    return "float32" if kinds and kinds[0] == "float32" and first in AUTOCAST else first
