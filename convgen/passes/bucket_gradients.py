"""`bucket-gradients`: parameters' gradients are summed together, while backward goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.index_sets import volume
from convgen.algebra.layout import Axes
from convgen.passes.contract import NetworkPass
from convgen.program.network import Bucket, Moved, Program, asked
from convgen.program.rows import index_sets
from convgen.spec.layer import DTYPE_BYTES

MEBIBYTE = 2**20
K = TypeVar("K")


@dataclass(frozen=True)
class BucketGradients(NetworkPass):
    """Pack the all-reduces of parameters' gradients, over the same axes and of one type, into buckets.

        %b.dw = all_reduce %b.weight over=N             (b's gradients are made)
        %a.dx = exchange add ...                  --->  start %bucket_1 = all_reduce %b.dw, %a.dw over=N
        %a.dw = all_reduce %a.weight over=N             (what is left of backward)
                                                        wait %bucket_1

    Needs:  nothing; runs last, on a program whose conversions are final.
    Sound:  nothing in a step reads a parameter's gradient before the sum of all that rows add to it, and a bucket has
        all of that sum or nothing. Elements are added rank by rank as before: the same numbers to the last bit.
    Leaves: gradients that are scattered to blocks; gradients of values that are no parameters, as the step reads them.

    Args:
        mebibytes: a bucket is closed when the busiest rank has so much in it; 0: one bucket for all ([SW] 5.1).
        first: the first bucket is closed earlier, so that the link is at work soon.

    Source: [SW] 5.1; sizes as torch's DistributedDataParallel has them.
    """

    name: ClassVar[str] = "bucket-gradients"

    mebibytes: int = 25
    first: int = 1

    def run(self, program: Program) -> Program:
        buckets = tuple(self._buckets(program))
        return program if buckets == program.buckets else replace(program, buckets=buckets)

    def _buckets(self, program: Program) -> Iterator[Bucket]:
        """The buckets, in the order in which backward fills them."""
        sums = summed_parameters(program)
        items: list[tuple[tuple[Axes, str], NDArray[np.int64]]] = []
        for m in sums:
            dtype = program.dtype_of(m)
            counts = volume(index_sets(m.placed.signature, program.grid).held(m.conversion.src))
            items.append(((m.conversion.over, dtype), counts * DTYPE_BYTES.get(dtype, 8)))
        packed = closing(items, self.mebibytes, self.first, lambda held: int(held.max()))
        for i, ((over, dtype), members) in enumerate(packed):
            yield Bucket(f"bucket_{i + 1}", over, dtype, tuple(sums[k].step for k in members))


def closing(
    sums: Sequence[tuple[K, Any]], mebibytes: int, first: int = 1, most: Callable[[Any], int] = int
) -> list[tuple[K, list[int]]]:
    """Buckets of sums: their keys and numbers, in the order in which they are full or have the last sum of their key.

    Args:
        sums: what may only be packed with its like, and bytes, in the order in which sums are made.
        mebibytes, first: as of BucketGradients.
        most: the busiest rank's bytes, where there are those of each.
    """
    open_ones: dict[K, list[int]] = {}
    held: dict[K, Any] = {}
    closed: list[tuple[K, list[int]]] = []
    for i, (key, size) in enumerate(sums):
        open_ones.setdefault(key, []).append(i)
        held[key] = held.get(key, 0) + size
        limit = mebibytes if closed else min(first, mebibytes)
        if limit and most(held[key]) >= limit * MEBIBYTE:
            closed.append((key, open_ones.pop(key)))
            del held[key]
    return sorted([*closed, *open_ones.items()], key=lambda one: one[1][-1])


def summed_parameters(program: Program) -> list[Moved]:
    """All-reduces of backward that make parameters' whole gradients, in backward's order. What travels by chunks is not
    among them: it is no step of its own."""
    wanted, every = program.differentiable(of_inputs=False), [m for m in program.backward() if m.is_of_gradient]
    found: dict[str, list[Moved]] = {}
    for m in every:
        found.setdefault(m.value, []).append(m)
    readers = Counter[str]()
    for row in program.rows:
        derived = dict(row.derived)
        for k, (name, is_asked) in enumerate(zip(row.bound.reads, asked(row.bound, wanted), strict=True)):
            readers[name] += is_asked and (row.back[k] is not None or k in derived)
    whole: set[str] = set()
    for name, value in program.values.items():
        steps = found.get(name, [])
        if value.kind != "parameter" or not steps or name not in wanted:
            continue
        alone = len(steps) == len({(m.row, m.chain) for m in steps}) == readers[name]
        if (
            alone
            and not any(_in_chunks(m) for m in steps)
            and {m.conversion.kind for m in steps} == {"all_reduce"}
            and len({m.conversion.over for m in steps}) == 1
        ):
            whole.add(name)
    return [m for m in every if m.value in whole]


def _in_chunks(m: Moved) -> bool:
    chunks, (chain, number) = m.placed.chunks, m.chain
    return chunks is not None and (chunks.result if chain.endswith("store") else number == chunks.operand)
