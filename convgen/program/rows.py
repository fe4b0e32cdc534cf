"""A row on a grid: what moves for its operands, its results, and the gradients of both.

Everything follows from a signature, roles and how values are stored:

| chain | from | to |
|---|---|---|
| fetch | an operand as it is stored | as the row wants it |
| store | a result as the row makes it, perhaps partial | as it is stored |
| given | a result's gradient, stored as the result | the block that each rank has made |
| back | an operand's gradient as the row read it | as the operand is stored |

A gradient with a row of its own (`Operation.gradients`) has roles of its own; the cheaper of it and the vjp's is taken.

Source: docs/design.md, Networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from convgen.algebra import involved
from convgen.algebra.blocks import Uneven, groups_are_plain, span
from convgen.algebra.grid import Grid
from convgen.algebra.index_sets import IndexSets
from convgen.algebra.involved import Side
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Conversion
from convgen.algebra.signature import Made, Operand, Signature
from convgen.algebra.tensors import Dim, Rows, Tensor
from convgen.algebra.wants import layout
from convgen.operations.bound import Bound
from convgen.operations.row import At, Operation, standing
from convgen.operations.spare import spare_rows, with_spare

Chain = tuple[Conversion, ...]
Stored = tuple[Axes, ...]  # of a value: for each dimension the axes that split it, outermost first
Roles = tuple[tuple[str, Axes], ...]

NAMES = {1: ("N",), 2: ("N", "C"), 3: ("N", "C", "W"), 4: ("N", "C", "H", "W"), 5: ("N", "C", "D", "H", "W")}


@dataclass(frozen=True, slots=True)
class Chunks:
    """A row cut along an index (program/chunks.py).

    Attributes:
        count: number of chunks, the same on every rank.
        operand: whose fetch and gradient travel by chunks; None for none.
        result: whether what is made, and its gradient, travel by chunks.
    """

    index: str
    count: int
    operand: int | None
    result: bool


@dataclass(frozen=True)
class PlacedRow:
    """A row with its roles, and chains of conversions around it.

    Attributes:
        reads, makes: how operands and results are stored.
        back: by operand; None where there is no gradient, or a row of its own makes it.
        derived: by operand its gradient's row, and what that row reads: ("operand" | "result" | "gradient", number).
        early: the operand whose halo travels while the row's interior is computed (program/early.py); or, where a
            gradient's row is not `split`, while other gradients of the row are computed.
        ahead: by how many rows before its own an early halo starts.
        chunks: the index along which the row is cut, so that chunks travel while others are computed.
        holds: whether what it fetches stays until backward, for gradients' rows that would fetch the same (shared.py).
    """

    bound: Bound
    way: int
    roles: Roles
    reads: tuple[Stored, ...]
    makes: tuple[Stored, ...]
    fetch: tuple[Chain, ...]
    store: tuple[Chain, ...]
    given: tuple[Chain, ...]
    back: tuple[Chain | None, ...]
    derived: tuple[tuple[int, PlacedRow], ...] = ()
    early: int | None = None
    split: bool = True
    ahead: int = 0
    chunks: Chunks | None = None
    holds: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def __hash__(self) -> int:  # rows are keys of every cache
        return self._hash

    @cached_property
    def flows(self) -> dict[object, tuple[Any, ...]]:
        """What program/flow.py remembers about the row."""
        return {}

    @property
    def signature(self) -> Signature:
        return self.bound.operation.signatures[self.way]

    @property
    def is_cut(self) -> bool:
        """Whether its halo is early or it is computed in chunks, so that something travels while it is computed."""
        return self.early is not None or self.chunks is not None

    def between(self, wanted: Sequence[bool]) -> tuple[int, ...]:
        """Operands whose gradients' rows read a gradient within the row, which local code's vjp makes.

        Args:
            wanted: by operand, whether its gradient is asked for.
        """
        return tuple(k for k, _ in self.derived if wanted[k]) if self.bound.operation.has_between else ()

    @property
    def is_silent(self) -> bool:
        """Whether nothing moves for it, forward or backward."""
        chains = (*self.fetch, *self.store, *self.given, *(b for b in self.back if b))
        return not any(chains) and not self.derived


def nameless(row: PlacedRow) -> PlacedRow:
    """The row without the names of its values: most rows of a network differ in these alone."""
    bound = replace(row.bound, reads=("",) * len(row.bound.reads), makes=("",) * len(row.bound.makes), module="")
    return replace(row, bound=bound)


Dims = frozenset[tuple[str, int]]  # an operand or a result by its name, and a dimension of it


def open_dims(signatures: Sequence[Signature]) -> Dims:
    """Dimensions that a row's signatures at several sizes read by different rows: extents known at run time only."""
    found: set[tuple[str, int]] = set()
    for places in zip(*((*s.inputs, *s.results) for s in signatures), strict=True):
        for d, made in enumerate(places[0].dims):
            if made.relation is not None:
                ones = zip(places, signatures, strict=True)
                read = {(o.shape[d], o.dims[d], s.extent[made.indices[0]]) for o, s in ones}
                found |= {(places[0].name, d)} if len(read) > 1 else set()
    return frozenset(found)


@lru_cache(maxsize=4096)
def index_sets(signature: Signature, grid: Grid, opened: Dims = frozenset()) -> IndexSets:
    """The index sets of a signature's operands and results on a grid.

    Args:
        opened: dimensions whose extents are known at run time only.
    """
    tensors: dict[str, Tensor] = {}
    rows: dict[tuple[str, int], Rows] = {}
    for operand, dims in sides(signature):
        tensors[operand.name] = Tensor(operand.name, tuple(side.dim for side in dims))
        for d, side in enumerate(dims):
            if side.rows is not None:
                key = operand.name, d
                rows[key] = replace(side.rows, is_open=True) if key in opened else side.rows
    return IndexSets(grid, tensors, rows, virtual_padding=True)


@lru_cache(maxsize=4096)
def sides(signature: Signature) -> tuple[tuple[Operand, tuple[Side, ...]], ...]:
    """Operands and results, each with its dimensions."""
    found: list[tuple[Operand, tuple[Side, ...]]] = []
    for operand in (*signature.inputs, *signature.results):
        names = NAMES.get(len(operand.shape), tuple(f"d{d}" for d in range(len(operand.shape))))
        dims = [Dim(name, n) for name, n in zip(names, operand.shape, strict=True)]
        found.append((operand, tuple(Side(d, _rows(m, signature)) for d, m in zip(dims, operand.dims, strict=True))))
    return tuple(found)


def _rows(made: Made, signature: Signature) -> Rows | None:
    if made.relation is None:
        return None
    (index,) = made.indices
    return Rows(made.relation, Dim(index, signature.extent[index]))


def index_of(made: Made, signature: Signature) -> str | None:
    """The index whose blocks are blocks of a dimension: the first of its nest with several elements."""
    for i in made.indices:
        if signature.extent[i] > 1:
            return i
    return None


def kept(operand: Operand, signature: Signature, roles: Mapping[str, Axes]) -> Stored:
    """How a row wants a parameter stored: whole along dimensions that it reads by relations."""
    return tuple(
        () if made.relation is not None else roles.get(index_of(made, signature) or "", ()) for made in operand.dims
    )


def serves(signature: Signature, roles: Mapping[str, Axes], grid: Grid) -> bool:
    """Whether blocks of nests are plain blocks of their dimensions: axes split the outermost index alone, evenly."""
    for outer, *inner in signature.nests:
        if any(roles.get(i) for i in inner):
            return False
        whole, sizes = signature.extent[outer], tuple([grid.sizes[a] for a in roles.get(outer, ())])
        uneven = any(isinstance(n, Uneven) for n in sizes)
        parts = prod(signature.extent[i] for i in inner)
        if not uneven and whole % prod(sizes):
            return False
        if uneven and not (signature.fits(roles, grid.sizes) and groups_are_plain(whole * parts, whole, sizes)):
            return False
    return not any(grid.sizes[a] > 1 for i in signature.beside for a in roles.get(i, ()))


@lru_cache(maxsize=1 << 14)
def converted(sets: IndexSets, src: Layout, dst: Layout) -> Chain:
    """The conversions from one layout to another, remembered."""
    return involved.converted(sets, src, dst)


def place(
    bound: Bound,
    grid: Grid,
    way: int,
    roles: Mapping[str, Axes],
    reads: Sequence[Stored],
    makes: Sequence[Stored],
    derived: Mapping[str, PlacedRow] | None = None,
    opened: Dims = frozenset(),
) -> PlacedRow:
    """A row with its chains.

    Args:
        way: number of the signature.
        roles: index -> axes, outermost first.
        reads, makes: how operands and results are stored.
        derived: by operand the rows that make its gradient, instead of the vjp.
        opened: as `index_sets` takes it.
    """
    signature = bound.operation.signatures[way]
    sets = index_sets(signature, grid, opened)
    fetch: list[Chain] = []
    back: list[Chain | None] = []
    derived = derived or {}
    for operand, axes in zip(signature.inputs, reads, strict=True):
        stored = Layout(operand.name, axes)
        fetch.append(converted(sets, stored, layout(sets, operand.name, signature.wants(operand, roles))))
        if not operand.gradient or operand.name in derived:
            back.append(None)
            continue
        found = layout(sets, operand.name, signature.gradient(operand, roles))
        back.append(collect(sets, found, stored))
    store: list[Chain] = []
    given: list[Chain] = []
    for result, axes in zip(signature.results, makes, strict=True):
        made, stored = layout(sets, result.name, signature.wants(result, roles)), Layout(result.name, axes)
        store.append(reduced(sets, made, stored, signature))
        given.append(converted(sets, stored, replace(made, partial=())))
    numbers = {o.name: k for k, o in enumerate(signature.inputs)}
    return PlacedRow(
        bound,
        way,
        tuple((i, a) for i, a in roles.items() if a),
        tuple(reads),
        tuple(makes),
        tuple(fetch),
        tuple(store),
        tuple(given),
        tuple(back),
        tuple((numbers[name], row) for name, row in derived.items()),
    )


def place_gradient(
    bound: Bound,
    name: str,
    grid: Grid,
    way: int,
    roles: Mapping[str, Axes],
    stored: Mapping[str, Stored],
    others: Sequence[Bound] = (),
) -> PlacedRow:
    """The row that makes an operand's gradient, for its row's `derived`.

    Args:
        bound: the row that has the operand; `name`: the operand's.
        stored: as `stored_by_name` gives it.
        others: the same row at other sizes.
    """
    one = bound.operation.gradients[name]
    each = [b.operation.gradients[name].operation.signatures[way] for b in (bound, *others)]
    own = Bound(one.operation, one.reads, (name,), autocast=gradients_kinds(bound, one.reads))
    reads = [stored[r] for r in one.reads]
    row = place(own, grid, way, roles, reads, [stored[name]], opened=open_dims(each))
    return replace(row, back=(None,) * len(one.reads))


def gradients_kinds(bound: Bound, reads: Sequence[str]) -> tuple[str, ...]:
    """How autocast takes what a gradient's row reads: operands as their row does, the rest as its first operand."""
    if not bound.autocast:
        return ()
    inputs = bound.operation.signatures[0].inputs
    known = {o.name: kind for o, kind in zip(inputs, bound.autocast, strict=True)}
    return tuple(known.get(name, bound.autocast[0]) for name in reads)


def stored_by_name(signature: Signature, reads: Sequence[Stored], makes: Sequence[Stored]) -> dict[str, Stored]:
    """How operands, results and results' gradients are stored, by the names that gradients' rows have for them."""
    found = {f"d{r.name}": s for r, s in zip(signature.results, makes, strict=True)}
    found |= {r.name: s for r, s in zip(signature.results, makes, strict=True)}
    return found | {o.name: s for o, s in zip(signature.inputs, reads, strict=True)}


def reduced(sets: IndexSets, made: Layout, stored: Layout, signature: Signature) -> Chain:
    """The chain that stores a result. What no sum reduces is gathered, and every rank reduces it alike."""
    if signature.reduction == "sum" or not made.partial:
        return converted(sets, made, stored)
    whole = replace(made, partial=())
    first = Conversion("all_gather", made.partial, made, whole, signature.reduction)
    return (first, *converted(sets, whole, stored))


@lru_cache(maxsize=1 << 14)
def collect(sets: IndexSets, found: Layout, stored: Layout) -> Chain:
    """The chain from a gradient as a row found it to where its operand is stored, remembered."""
    return involved.collected(sets, found, stored)


def reads_of(operation: Operation, names: Sequence[str]) -> list[tuple[str, int]]:
    """Where a gradient's row finds its operands: ("operand" | "result" | "gradient", number).

    Args:
        operation: the operation of the row that has the gradient's operand.
        names: operands and results by their names, a result's gradient with a d before it.
    """
    signature = operation.signatures[0]
    places = {o.name: ("operand", k) for k, o in enumerate(signature.inputs)}
    for k, result in enumerate(signature.results):
        places.setdefault(result.name, ("result", k))
        places[f"d{result.name}"] = ("gradient", k)
    return [places[name] for name in names]


def at_rank(row: PlacedRow, grid: Grid, rank: int) -> At:
    """A rank's place in a row, as the runtime has it."""
    at = {a: int(c[rank]) for a, c in grid.coordinates.items()}
    signature = row.signature
    roles = dict(row.roles)
    blocks: dict[str, tuple[int, int]] = {}
    for index, extent in signature.extents:
        axes = roles.get(index, ())
        blocks[index] = span(extent, 1, tuple(grid.sizes[a] for a in axes), tuple(at[a] for a in axes), 0)
    at = standing(signature, blocks)
    at = replace(at, parts=parts) if (parts := in_parts(row, grid)) else at
    operation = row.bound.operation
    if not any(map(any, operation.spare(row.way))):
        return at
    sets = index_sets(signature, grid)
    stored = zip(signature.inputs, row.reads, row.fetch, strict=True)
    held = [None if chain else _held(sets, Layout(o.name, axes), rank) for o, axes, chain in stored]
    return with_spare(at, spare_rows(operation, row.way, at, held))


def _held(sets: IndexSets, layout: Layout, rank: int) -> list[tuple[int, int]]:
    return [(int(lo), int(hi)) for lo, hi in sets.held(layout)[rank]]


def in_parts(row: PlacedRow, grid: Grid) -> dict[str, int]:
    """Operands and results that come, or go, in equal parts of their channels; by name, the number of parts."""
    ends = [
        *((o.name, chain[-1:]) for o, chain in zip(row.signature.inputs, row.fetch, strict=True)),
        *((o.name, chain[:1]) for o, chain in zip(row.signature.results, row.store, strict=True)),
    ]
    return {name: grid.over(c.over) for name, end in ends for c in end if c.form == "parts"}
