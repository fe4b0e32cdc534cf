"""Checks of operations, by signature: same index, same block; rows at hand; every term once; copies equal.

These checks name no operation but the bias, which is added to a sum and must be added once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from convgen.algebra.index_sets import Box, overlaps, volume
from convgen.algebra.layout import Axes
from convgen.algebra.signature import Made
from convgen.algebra.windows import fits_one_padding, padding_of
from convgen.program.nodes import Compute, Convert, is_convolution
from convgen.program.verify.facts import Computed, Facts, Fault, interval, listed
from convgen.program.verify.typed import same_group, unread_rows

Spans = NDArray[np.int64]  # [ranks, 2]


class Part:
    """Each rank's part of an operation: for every index its block, as each operand has it.

    Attributes:
        said: for every index the operands that are made of it, with their blocks.
        torn: operands whose block of a nest is neither whole outer blocks nor a part of one, by rank.
    """

    def __init__(self, f: Facts, one: Computed) -> None:
        self.one = one
        self.said: dict[str, list[tuple[str, Spans]]] = {}
        self.torn: list[tuple[str, NDArray[np.bool_]]] = []
        for operand, layout in one.all:
            box = f.held(layout)
            for d, made in enumerate(operand.dims[: box.shape[1]]):
                if made.relation is None and made.indices:
                    self._add(operand.name, made, box[:, d], one.signature.extent)
        self.of: dict[str, Spans] = {index: found[0][1] for index, found in self.said.items()}

    def _add(self, operand: str, made: Made, block: Spans, extent: dict[str, int]) -> None:
        torn = np.zeros(len(block), dtype=np.bool_)
        for i, index in enumerate(made.indices):
            unit = prod(extent[inner] for inner in made.indices[i + 1 :])
            first, last = block[:, 0] // unit, -(-block[:, 1] // unit)
            last = np.maximum(last, first)
            self.said.setdefault(index, []).append((operand, np.stack([first, last], axis=-1)))
            several = last - first > 1
            torn |= several & (block % unit != 0).any(axis=1)
            inner = block - (first * unit)[:, None]
            block = np.where(several[:, None], np.array([0, unit]), inner)
        self.torn.append((operand, torn))

    @cached_property
    def terms(self) -> Box:
        """Per rank the terms that it computes: a block of each index."""
        return np.stack(list(self.of.values()), axis=1)

    @cached_property
    def busy(self) -> NDArray[np.bool_]:
        """Whether a rank has a term."""
        return volume(self.terms) > 0


@lru_cache(maxsize=2)
def parts(f: Facts) -> tuple[Part, ...]:
    """The parts of every operation, found once for all checks."""
    return tuple(Part(f, one) for one in f.computed)


def check_operands_match(f: Facts) -> Iterator[Fault]:
    """Operands and results that have an index hold the same part of it on every rank that has something to do."""
    for part in parts(f):
        one, busy = part.one, part.busy
        for index, ((first, block), *others) in part.said.items():
            for other, theirs in others:
                for rank in np.flatnonzero(busy & (block != theirs).any(axis=1))[:1]:
                    mine, its = interval(block[rank]), interval(theirs[rank])
                    yield one.step, f"rank {rank} has {index} {mine} of {first}, {its} of {other}"
        for operand, torn in part.torn:
            for rank in np.flatnonzero(busy & torn)[:1]:
                yield one.step, f"rank {rank} has a part of {operand} that cuts groups"
        for operand, layout in one.all:
            box = f.held(layout)
            for d, made in enumerate(operand.dims[: box.shape[1]]):
                whole = not made.indices and (box[:, d] != (0, operand.shape[d])).any(axis=1)
                for rank in np.flatnonzero(busy & whole)[:1]:
                    yield one.step, f"rank {rank} has {interval(box[rank, d])} of {operand.name}, it needs all of it"


def check_bias_lies_as_what_it_is_added_to(f: Facts) -> Iterator[Fault]:
    """The bias's operations take tensors as they are stored, also on a rank with nothing to do.

    So blocks have no rows of zeros around them, and an index that several operands have is split over the same axes.
    """
    for one in f.computed:
        axes_of: dict[tuple[str, ...], Axes] = {}
        for operand, layout in one.all if not is_convolution(one.step) else ():
            if layout.has_window:
                yield one.step, f"{operand.name} is {layout}: it takes blocks"
            for made, axes in zip(operand.dims, layout.axes, strict=False):
                if (wanted := axes_of.setdefault(made.indices, axes)) != axes:
                    yield one.step, f"{operand.name} is {layout}: its {made} would be over {listed(wanted)}"


def check_rows_are_at_hand(f: Facts) -> Iterator[Fault]:
    """A block of an index finds every row that it reads through a relation."""
    for part in parts(f):
        one, busy = part.one, part.busy
        for operand, layout in one.operands:
            box = f.held(layout)
            for d, made in enumerate(operand.dims[: box.shape[1]]):
                if made.relation is None:
                    continue
                block, of = part.of[made.indices[0]].T, f"on {f.space.dims(layout.tensor)[d].name}"
                for text in unread_rows(made.relation, (block[0], block[1]), box[:, d], operand.shape[d], of, busy):
                    yield one.step, text


def check_one_padding_fits(f: Facts) -> Iterator[Fault]:
    """On every rank the local convolution pads both sides alike, as modules say it, and has exactly the rows needed.

    All rows of x are padded as the layer says, a block or a window of x not at all. A window of dy is padded by what it
    leaves open (of a transposed convolution all rows of y, and what a window of x leaves open).
    Kernels that pad virtually take any padding.
    """
    if f.space.virtual_padding:
        return
    for one in f.computed:
        blocks = {
            made.indices: (layout, d)
            for operand, layout in one.all
            for d, made in enumerate(operand.dims)
            if made.relation is None and made.indices
        }
        for operand, layout in one.operands:
            for d, made in enumerate(operand.dims):
                if made.relation is None:
                    continue
                (other, at), own = blocks[made.indices], f.space.frame(layout)
                index = f.space.frame(other)
                found = padding_of(made.relation, (own[:, d, 0], own[:, d, 1]), (index[:, at, 0], index[:, at, 1]))
                if found is None:
                    continue
                taps, below, above = found
                busy = (volume(own) > 0) & (volume(index) > 0)
                fits = np.asarray(fits_one_padding(taps, below, above))
                if is_convolution(one.step):
                    conv = f.space.conv
                    fine, coarse = (layout, other) if layout.tensor == conv.fine else (other, layout)
                    all_rows = not fine.axes[d] and fine.windows[d] is None
                    said = conv.spatial[d - 2].pad_lo if all_rows else 0
                    fits = fits & ((coarse.windows[d] is not None) | np.equal(below, said))
                for rank in np.flatnonzero(busy & ~fits)[:1]:
                    name = f.space.dims(layout.tensor)[d].name
                    yield one.step, f"rank {rank} wants padding ({below[rank]}, {above[rank]}) on {name}"


def check_every_term_is_summed_once(f: Facts) -> Iterator[Fault]:
    """Ranks with different parts or addends of the result sum each term once in all; copies sum the same terms.

    A term is one element of every index: a product of a convolution, an element of a sum.
    """
    grid = f.space.grid
    for part in parts(f):
        one, terms = part.one, part.terms
        size = volume(terms)
        apart = one.step.type.used | set(one.step.type.partial)
        copies = tuple(a for a in grid.names if a not in apart)
        chosen = np.flatnonzero(sum((grid.coordinates[a] for a in copies), np.zeros(grid.ranks, dtype=np.int64)) == 0)
        total = prod(one.signature.extent.values())
        if (found := int(size[chosen].sum())) != total:
            yield one.step, f"{found} terms are summed over {listed(grid.ordered(apart))}, there are {total}"
        both = overlaps(terms, terms)
        same = same_group(grid, copies)
        for i, j in np.argwhere((~same & (both > 0))[np.ix_(chosen, chosen)])[:1]:
            a, b = chosen[i], chosen[j]
            yield one.step, f"ranks {a} and {b} both sum {both[a, b]} terms, and are no copies"
        for i, j in np.argwhere(same & (both != size[:, None]))[:1]:
            yield one.step, f"ranks {i} and {j} hold copies of the result, but not of {size[i] - both[i, j]} terms"


def check_bias_is_added_once(f: Facts) -> Iterator[Fault]:
    """Between the convolution and y the bias is added once, to whole sums, and each rank adds its own part of it."""
    made = {step.result: step for step in f.schedule.forward}
    value, added = "y", 0
    while value in made:
        step = made[value]
        value = step.source if isinstance(step, Convert) else step.inputs[0]
        if isinstance(step, Compute) and "bias" in step.inputs:
            added += 1
            if step.type.partial:
                yield step, "the bias would be in every addend"
            if (f.held(step.type)[:, 1] != f.held(f.stored["bias"])[:, 0]).any():
                yield step, f"{f.stored['bias']} is not the part of {step.type}"
        if is_convolution(step):
            break
    if added != int("bias" in f.stored):
        yield None, f"the bias is added {added} times"
