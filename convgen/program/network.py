"""A network as one program: values with tensors of their own, rows in order, and what each row moves.

Forward and backward are cuts of it: forward has the steps of every row's `fetch` and `store`; backward those of its
`given`, `derived` and `back`, in the opposite order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Literal

from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.redistribute import Conversion
from convgen.operations.bound import Bound
from convgen.program.biases import Biased, biased, leaves, products_of_biases, stays
from convgen.program.rows import Chain, PlacedRow, Stored, reads_of
from convgen.program.shared import in_order, shared
from convgen.program.types import RowTypes, types_of_rows, values_under
from convgen.spec.graph import FLOATS

Kind = Literal["input", "parameter", "buffer", "constant", "made"]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of a network.

    Attributes:
        shape: the whole tensor's.
        stored: for each dimension the axes that split it, outermost first; over other axes there are copies.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stored: Stored
    kind: Kind


@dataclass(frozen=True, slots=True)
class Moved:
    """A conversion of a program.

    Attributes:
        step: its name, the same in text, VOLUME and errors.
        row: number of the row that it belongs to.
        chain: the row's chain, as a word, and the number of the operand or result.
    """

    step: str
    row: int
    chain: tuple[str, int]
    value: str
    placed: PlacedRow
    conversion: Conversion

    @property
    def is_of_gradient(self) -> bool:
        """Whether it brings an operand's gradient to where the operand is stored."""
        return self.chain[0] == "back" or self.chain[0].endswith(" store")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sums of parameters' gradients, or of running statistics, that travel as one all-reduce: it starts when the last
    addend is there, and is waited for at the end of backward, or of forward.

    Attributes:
        steps: names of the all-reduces that it stands for, in the order in which the pass comes to them.
    """

    name: str
    over: Axes
    dtype: str
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows [start, stop): a block of the source, by its path."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Program:
    """A network on a grid.

    Attributes:
        buckets: sums of gradients, in the order in which they start; `forward_buckets`: sums of running statistics.
        updates: (buffer, value that it becomes after a step of training).
        outputs: (name, value).
        again: blocks that backward computes again (again.py), in order.
        joined: groups of described rows that are one row here (wide.py), in order.
        statistics: the kind of batch norms' statistics (spec/graph_parts.py); parts follow how operands are stored.
        reduce_dtype: in which parameters' gradients travel to be summed; "": each in its parameter's own.
        autocast: the type of the torch.autocast that it is compiled for, which every number of it is of; "": of none.
        tf32: convolutions and products of float32 take TF32 on a GPU.
    """

    name: str
    grid: Grid
    values: Mapping[str, Value]
    rows: tuple[PlacedRow, ...]
    updates: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    buckets: tuple[Bucket, ...] = ()
    forward_buckets: tuple[Bucket, ...] = ()
    again: tuple[Stretch, ...] = ()
    joined: tuple[tuple[int, ...], ...] = ()
    statistics: str = "global"
    reduce_dtype: str = ""
    autocast: str = ""
    tf32: bool = False

    def part(self, rows: tuple[PlacedRow, ...]) -> Program:
        """A program of some of these rows; under autocast its values have the types that they have here."""
        values = {n: replace(v, dtype=self.types[n]) for n, v in self.values.items()} if self.autocast else self.values
        return replace(self, rows=rows, values=values, again=(), joined=())

    def is_of_parameter(self, moved: Moved) -> bool:
        """Whether a conversion brings a parameter's gradient to where the parameter is stored."""
        return moved.is_of_gradient and self.values[moved.value].kind == "parameter"

    @cached_property
    def types(self) -> Mapping[str, str]:
        """Types of values as ranks have them: the module's, or those under autocast."""
        own = {n: v.dtype for n, v in self.values.items()}
        return values_under(self.autocast, own, ((r.bound, r.way) for r in self.rows))

    @cached_property
    def _typed(self) -> tuple[tuple[RowTypes, ...], dict[str, str]]:
        summed = {n: self.gradients_in(n) for n, v in self.values.items() if v.kind == "parameter"}
        outputs, wanted = [v for _, v in self.outputs], self.differentiable(of_inputs=True)
        rows = [(row.bound, row) for row in self.rows]
        return types_of_rows(self.autocast, self.types, rows, outputs, summed, wanted)

    @cached_property
    def products_of_biases(self) -> Mapping[int, int]:
        """By number of a row that adds a bias, the number of the product that may add it."""
        kinds = {n: v.kind for n, v in self.values.items()}
        read_behind = {v for _, v in (*self.outputs, *self.updates)}
        return products_of_biases([row.bound for row in self.rows], kinds, read_behind)

    @cached_property
    def biased(self) -> tuple[Biased, ...]:
        """What each row has to do with a bias."""
        return biased([row.bound for row in self.rows], self.products_of_biases)

    @cached_property
    def riding(self) -> frozenset[int]:
        """Numbers of rows whose biases their products add."""
        each = self.products_of_biases.items()
        return frozenset(i for i, product in each if stays(self.rows[i]) and leaves(self.rows[product]))

    @property
    def row_types(self) -> tuple[RowTypes, ...]:
        """The types in which each row moves and makes values."""
        return self._typed[0]

    def gradient_type(self, name: str) -> str:
        """The type of a value's gradient where it is complete."""
        return self._typed[1].get(name, self.types[name])

    def gradients_in(self, name: str) -> str:
        """The type in which a value's gradient travels to where the value is stored, without autocast."""
        value = self.values[name]
        return self.reduce_dtype or value.dtype if value.kind == "parameter" else value.dtype

    def dtype_of(self, moved: Moved) -> str:
        """The type in which a conversion's tensor travels."""
        (side, k), types = moved.chain, self.row_types[moved.row]
        if side == "back":
            return types.on_the_way_back(moved.placed, k)
        if not side.startswith("derived "):
            return {"fetch": types.fetch, "store": types.store, "given": types.given}[side][k]
        _, operand, way = side.split()
        own = types.of(self.rows[moved.row].signature.inputs[int(operand)].name)
        return own.fetch[k] if way == "fetch" else own.store

    def forward(self) -> Iterator[Moved]:
        """Conversions of the forward pass, in order."""
        for i, row in enumerate(self.rows):
            yield from fetched(row, i)
            yield from stored(row, i)

    def backward(self, *, of_inputs: bool = False) -> Iterator[Moved]:
        """Conversions of the backward pass, in the order in which autograd comes to them.

        Args:
            of_inputs: whether inputs want gradients, too; parameters always do.
        """
        wanted = self.differentiable(of_inputs=of_inputs)
        for i, row in reversed([*enumerate(self.rows)]):
            yield from gradients(row, i, asked(row.bound, wanted))

    def differentiable(self, *, of_inputs: bool) -> frozenset[str]:
        """Values that depend on what wants a gradient, and on which an output depends smoothly."""
        if (found := self._differentiable.get(of_inputs)) is None:
            kinds = {n: (v.kind, v.dtype in FLOATS) for n, v in self.values.items()}
            bounds = [row.bound for row in self.rows]
            found = differentiable(kinds, bounds, of_inputs=of_inputs)
            found &= smooth(kinds, bounds, [v for _, v in self.outputs])
            self._differentiable[of_inputs] = found
        return found

    @cached_property
    def _differentiable(self) -> dict[bool, frozenset[str]]:
        return {}


def differentiable(
    values: Mapping[str, tuple[str, bool]], rows: Sequence[Bound], *, of_inputs: bool = False
) -> frozenset[str]:
    """Values that depend on parameters, or on inputs where these want gradients, too.

    Args:
        values: the kind of each, and whether it has floating-point numbers.
    """
    kinds = ("parameter", "input") if of_inputs else ("parameter",)
    found = {n for n, (kind, floats) in values.items() if kind in kinds and floats}
    for bound in rows:
        signature = bound.operation.signatures[0]
        if any(v in found and o.gradient for o, v in zip(signature.inputs, bound.reads, strict=True)):
            results = zip(signature.results, bound.makes, strict=True)
            found |= {v for r, v in results if v and r.gradient and values[v][1]}
    return frozenset(found)


def asked(bound: Bound, wanted: Collection[str]) -> list[bool]:
    """By operand, whether its gradient is asked for: never where no result of this very row wants one."""
    reached = any(v in wanted for v in bound.makes if v)
    return [reached and v in wanted for v in bound.reads]


def smooth(values: Mapping[str, tuple[str, bool]], rows: Sequence[Bound], outputs: Sequence[str]) -> frozenset[str]:
    """Values that outputs' gradients reach; a gradient reaches no value that is only compared, or only indexed by."""
    found = set(outputs)
    for bound in reversed(rows):
        signature = bound.operation.signatures[0]
        results = zip(signature.results, bound.makes, strict=True)
        if any(v in found and r.gradient and values[v][1] for r, v in results):
            operands = zip(signature.inputs, bound.reads, strict=True)
            found |= {v for o, v in operands if o.gradient and values[v][1]}
    return frozenset(found)


def fetched(row: PlacedRow, number: int) -> Iterator[Moved]:
    """Conversions of a row's operands."""
    for k, chain in enumerate(row.fetch):
        yield from _named(chain, number, ("fetch", k), row.bound.reads[k], f"{label(row)}.{_name(row, k)}", row)


def stored(row: PlacedRow, number: int) -> Iterator[Moved]:
    """Conversions of a row's results."""
    for k, chain in enumerate(row.store):
        step = f"{label(row)}.{row.signature.results[k].name}" if k else label(row)
        yield from _named(chain, number, ("store", k), row.bound.makes[k], step, row)


def gradients(row: PlacedRow, number: int, wanted: Sequence[bool]) -> Iterator[Moved]:
    """Conversions of a row's gradients: those of gradients' rows, then those of the vjp, the last operand first.

    Args:
        wanted: by operand, whether its gradient is asked for.
    """
    base, names = label(row), row.signature.inputs
    once = shared(row, tuple(wanted))
    for k, one in in_order(row, tuple(wanted)):
        step = f"{base}.d{names[k].name}"
        for j, chain in enumerate(one.fetch):
            of, value = f"{step}.{one.signature.inputs[j].name}", _read(row, k, one, j)
            moved = _named(chain, number, (f"derived {k} fetch", j), value, of, one)
            yield from islice(moved, once.served((k, j)), None)
        yield from _named(one.store[0], number, (f"derived {k} store", 0), row.bound.reads[k], step, one)
    back = [k for k, chain in enumerate(row.back) if chain is not None and wanted[k]]
    if not back:
        return
    for k, chain in reversed([*enumerate(row.given)]):
        if row.signature.results[k].gradient:
            step = f"{base}.d{row.signature.results[k].name}"
            moved = _named(chain, number, ("given", k), row.bound.makes[k], step, row)
            yield from islice(moved, once.given[k][1] if k in once.given else 0, None)
    for k in reversed(back):
        yield from _named(row.back[k] or (), number, ("back", k), row.bound.reads[k], f"{base}.d{names[k].name}", row)


def _read(row: PlacedRow, k: int, one: PlacedRow, j: int) -> str:
    """The value that a gradient's row reads, or the value whose gradient it reads."""
    kind, n = reads_of(row.bound.operation, one.bound.reads)[j]
    return row.bound.reads[n] if kind == "operand" else row.bound.makes[n] or row.bound.reads[k]


def label(row: PlacedRow) -> str:
    """The name of a row's steps: the first value that it makes."""
    return next(filter(None, row.bound.makes), "") or row.bound.operation.name


def _name(row: PlacedRow, k: int) -> str:
    return row.signature.inputs[k].name


def _named(chain: Chain, number: int, of: tuple[str, int], value: str, step: str, row: PlacedRow) -> Iterator[Moved]:
    for i, conversion in enumerate(chain):
        yield Moved(f"{step}.{i + 1}" if len(chain) > 1 else step, number, of, value, row, conversion)
