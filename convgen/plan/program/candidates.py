"""What a row may do, and how a value may be stored: few of each, so that the best combination is found exactly.

Rows with products (convolutions, linear layers) try every role of every axis; the best by their own price, operands
stored as they want them, vote for how values of a shape are stored. Other rows follow: their roles are those that some
storage of an operand or result suggests, and values that no product touches are stored as some row makes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.signature import Operand, Signature
from convgen.operations.bound import Bound
from convgen.operations.row import Derived, Operation
from convgen.program.rows import Stored, index_of, kept, serves

Roles = tuple[tuple[str, Axes], ...]
Way = tuple[int, Roles]  # number of a signature, and roles
Shapes = tuple[tuple[int, ...] | None, ...]


def wanted(operand: Operand, signature: Signature, roles: Mapping[str, Axes]) -> Stored:
    """The storage from which an operand travels least: in the blocks that the row's roles give it."""
    return tuple(roles.get(index_of(made, signature) or "", ()) for made in operand.dims)


def made(result: Operand, signature: Signature, roles: Mapping[str, Axes]) -> Iterator[Stored]:
    """Storages of a result: as it is made, with whole sums on every rank; and with partial axes splitting channels."""
    stored = wanted(result, signature, roles)
    yield stored
    partial = signature.wants(result, roles).partial
    if partial and signature.reduction == "sum" and len(result.shape) > 1 and result.shape[1] > 1:
        yield tuple(axes + partial if d == 1 else axes for d, axes in enumerate(stored))


def parameter_stored(
    operand: Operand, signature: Signature, roles: Mapping[str, Axes], others: Iterable[Stored], grid: Grid
) -> Iterator[Stored]:
    """Storages of a parameter: as its row wants it; split over all spare axes too, or one of them; and the others.

    Args:
        others: storages that rows of gradients want.
    """
    stored = kept(operand, signature, roles)
    yield stored
    spare = tuple(a for a in grid.names if not any(a in axes for axes in stored))
    for axes in (spare, *((a,) for a in spare if len(spare) > 1)):
        for d, n in enumerate(operand.shape[:2]):  # filters, or where there are too few, channels
            wide = stored[d] + axes
            if axes and prod(grid.sizes[a] for a in wide) <= n:
                yield (*stored[:d], wide, *stored[d + 1 :])
                break
    yield from others


def read_by(one: Derived, name: str, operand: str, ways: Sequence[Way]) -> Iterator[Stored]:
    """Storages of a row's operand as the row of a gradient wants it, or makes it.

    Args:
        name: the operand whose gradient that row makes.
    """
    for number, roles in ways:
        signature, nests = one.operation.signatures[number], dict(roles)
        for read, source in zip(signature.inputs, one.reads, strict=True):
            if source == operand:
                yield kept(read, signature, nests)
        if name == operand:
            yield wanted(signature.results[0], signature, nests)


def named_alike(operation: Operation, ways: Sequence[Way], grid: Grid) -> Iterator[Way]:
    """The same roles in another operation whose indices have these names."""
    for number, signature in enumerate(operation.signatures):
        for _, roles in ways:
            nests = dict(roles)
            if set(nests) <= set(signature.extent) and serves(signature, nests, grid):
                yield number, roles


def suggested(operation: Operation, reads: Sequence[Stored | None], makes: Sequence[Stored | None]) -> Iterator[Way]:
    """Roles that the storage of some operands and results suggests: each index has the axes of a dimension of it."""
    for way, signature in enumerate(operation.signatures):
        if signature.reduction == "max":
            continue
        sides = [*zip(signature.inputs, reads, strict=True), *zip(signature.results, makes, strict=True)]
        roles: dict[str, Axes] = {}
        for operand, stored in sides:
            for dim, axes in zip(operand.dims, stored or (), strict=False):
                index = index_of(dim, signature)
                free = tuple(a for a in axes if not any(a in other for other in roles.values()))
                if index and free == axes and axes and index not in roles:
                    roles[index] = axes
        yield way, tuple((i, roles[i]) for i, _ in signature.extents if i in roles)


def votes(ways: Mapping[int, Sequence[Way]], bounds: Sequence[Bound], values: Mapping[str, tuple[int, ...]]) -> dict[
    tuple[int, ...], Counter[Stored]
]:  # fmt: skip
    """By shape, votes of the best ways of products for how its values are stored; better ways have more votes."""
    alike: Counter[tuple[Operation, tuple[Way, ...], Shapes, Shapes]] = Counter()
    for i, best in ways.items():
        reads, makes = (tuple(values.get(v) for v in some) for some in (bounds[i].reads, bounds[i].makes))
        alike[bounds[i].operation, tuple(best), reads, makes] += 1
    found: dict[tuple[int, ...], Counter[Stored]] = {}
    for (operation, best, reads, makes), times in alike.items():
        for rank, (way, roles) in enumerate(best):
            signature, nests = operation.signatures[way], dict(roles)
            weight = (len(best) - rank) * times
            for operand, shape in zip(signature.inputs, reads, strict=True):
                if shape is not None:
                    found.setdefault(shape, Counter())[wanted(operand, signature, nests)] += weight
            for result, shape in zip(signature.results, makes, strict=True):
                if shape is not None:
                    for stored in made(result, signature, nests):
                        found.setdefault(shape, Counter())[stored] += weight
    return found


def without_idle(stored: Stored, shape: Sequence[int], grid: Grid) -> bool:
    """Whether every rank has some of each dimension."""
    return all(prod(grid.sizes[a] for a in axes) <= n for axes, n in zip(stored, shape, strict=True))
