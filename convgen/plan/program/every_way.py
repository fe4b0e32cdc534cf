"""Every way of a product on a grid, and what its local work takes: counted over all ways at once.

A way gives each axis an index, or none. So the part that a rank has of an index depends on the axes that the index has,
and on nothing else. These axes are bits of a number, by which the work of a way is looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.relations import Relation
from convgen.algebra.signature import Signature
from convgen.cost.rows import Price
from convgen.cost.work import at_blocks, largest_parts, relations
from convgen.operations.row import Operation, Work
from convgen.plan.program.candidates import Roles, Way
from convgen.program.rows import serves

EXACT = 1 << 53  # counts below it are exact in float64, in which they are divided


def every_way(operation: Operation, price: Price, most: float, *, idle: bool = False) -> list[tuple[int, Way]]:
    """(picoseconds of local work, way) of every role of every axis.

    Args:
        most: ways that take more than so many times the fastest's are left out.
        idle: whether ranks may have nothing to do.
    """
    key = operation, most, idle
    if (known := price.computed.ways.get(key)) is None:
        known = price.computed.ways[key] = [*_served(operation, price, most, idle=idle)]
    return known


def _served(operation: Operation, price: Price, most: float, *, idle: bool) -> Iterator[tuple[int, Way]]:
    found: list[tuple[int, int, _Ways, int]] = []
    for number, signature in enumerate(operation.signatures):
        if signature.reduction != "max":
            ways = _Ways(signature, price.grid, idle=idle)
            locals_ = _local(operation, number, ways, price)
            found += [(ps, number, ways, k) for k, ps in enumerate(locals_)]
    least = min((ps for ps, *_ in found), default=0)
    yield from ((ps, (number, ways.roles(k))) for ps, number, ways, k in found if ps <= most * least)


@lru_cache(maxsize=64)
def _chosen(indices: int, axes: int) -> NDArray[np.int64]:
    """[indices, ways]: bits of the axes that an index has; ways as itertools.product has them, no index last."""
    count = (indices + 1) ** axes
    choice = np.indices((indices + 1,) * axes, dtype=np.int64).reshape(axes, count)
    found = np.zeros((indices, count), dtype=np.int64)
    for a, chosen in enumerate(choice):
        for i in range(indices):
            found[i] |= (chosen == i).astype(np.int64) << a
    return found


class _Ways:
    """A signature's ways that a grid serves: by index and way, bits of the axes that the index has."""

    def __init__(self, signature: Signature, grid: Grid, *, idle: bool) -> None:
        self.signature, self.names = signature, grid.names
        self.several = [i for i, n in signature.extents if n > 1]
        subsets = range(1 << len(grid.names))
        self.axes: list[Axes] = [tuple(a for k, a in enumerate(grid.names) if bits >> k & 1) for bits in subsets]
        self.sizes = [tuple(grid.sizes[a] for a in axes) for axes in self.axes]
        parts = np.array([prod(sizes) for sizes in self.sizes], dtype=np.int64)
        bits = _chosen(len(self.several), len(grid.names))
        fits = np.ones(bits.shape[1], dtype=np.bool_)
        for k, i in enumerate(self.several if not idle else ()):
            fits &= parts[bits[k]] <= signature.extent[i]
        for nest in signature.nests:
            for i in (i for i in nest if i in self.several):
                alone = np.array([serves(signature, {i: axes}, grid) for axes in self.axes])
                fits &= alone[bits[self.several.index(i)]]
        self.bits = bits[:, fits]

    @property
    def count(self) -> int:
        return self.bits.shape[1]

    def roles(self, way: int) -> Roles:
        some: list[int] = self.bits[:, way].tolist()
        return tuple((i, self.axes[bits]) for i, bits in zip(self.several, some, strict=True) if bits)


def _local(operation: Operation, number: int, ways: _Ways, price: Price) -> list[int]:
    timed = price.machine.timed is not None or bool(price.machine.steps)
    if timed or type(operation).launches is not Operation.launches or _is_large(operation, number):
        return [price.local(operation, number, dict(ways.roles(k))) for k in range(ways.count)]
    signature = ways.signature
    read = relations(signature)
    one = np.ones(ways.count, dtype=np.bool_)  # where a single part of each index has most
    blocks: dict[str, Any] = {}
    rows: dict[tuple[str, Relation, int], Any] = {}
    for i, extent in signature.extents:
        reads = read.get(i, ())
        bits = ways.bits[ways.several.index(i)] if i in ways.several else np.zeros(ways.count, dtype=np.int64)
        table = np.zeros((len(ways.sizes), 1 + len(reads)), dtype=np.int64)
        single = np.zeros(len(ways.sizes), dtype=np.bool_)
        subsets: list[int] = np.unique(bits).tolist()
        for subset in subsets:
            parts = largest_parts(extent, ways.sizes[subset], reads)
            table[subset], single[subset] = parts[0], len(parts) == 1
        one &= single[bits]
        columns = table[bits].T
        blocks[i] = 0, columns[0]
        for (relation, there), column in zip(reads, columns[1:], strict=True):
            rows[i, relation, there] = 0, column
    work = operation.work(number, at_blocks(signature, blocks, rows))
    flops: list[int] = np.broadcast_to(work.flops, (ways.count,)).tolist()
    elements: list[int] = np.broadcast_to(work.elements, (ways.count,)).tolist()
    return [
        price.of_work(operation, Work(flops[k], elements[k]), dict(ways.roles(k)))
        if known
        else price.local(operation, number, dict(ways.roles(k)))
        for k, known in enumerate(one.tolist())
    ]


def _is_large(operation: Operation, number: int) -> bool:
    """Whether the counts of one rank that computes all of the operation are too large for arrays."""
    signature = operation.signatures[number]
    blocks = {i: (0, n) for i, n in signature.extents}
    rows = {(i, relation, n): (0, n) for i, reads in relations(signature).items() for relation, n in reads}
    work = operation.work(number, at_blocks(signature, blocks, rows))
    return max(work.flops, work.elements) >= EXACT
