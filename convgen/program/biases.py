"""Biases that products add as they compute: rows that launch nothing and go over nothing of their own.

    %y_sum = conv_forward %x, %w
    %y = add %y_sum, %bias              --->   one call of local code (templates/runtime/biases.py)

So it is where nothing else reads the sum, and nothing moves between the two rows. Where the product's result moves, as
partial sums do, the bias takes a pass over memory of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from convgen.operations.bound import Bound
from convgen.operations.row import Operation
from convgen.program.rows import PlacedRow

THERE = ("parameter", "buffer", "constant")  # kinds of values that exist before any row runs


class Biased(NamedTuple):
    """What a row has to do with a bias.

    Attributes:
        is_bias: the row is a bias that its product may add.
        behind: the bias that the row, a product, may add.
    """

    is_bias: bool = False
    behind: Operation | None = None


NONE = Biased()


def products_of_biases(
    bounds: Sequence[Bound], kinds: Mapping[str, str], read_behind: Collection[str]
) -> dict[int, int]:
    """By number of a row that adds a bias, the number of its product.

    Args:
        kinds: by value, its kind, as a program has it.
        read_behind: values that are outputs, or that buffers become.
    """
    makers = {v: i for i, bound in enumerate(bounds) for v in bound.makes if v}
    readers = Counter(v for bound in bounds for v in bound.reads)
    found: dict[int, int] = {}
    for i, bound in enumerate(bounds):
        along = bound.operation.adds_along
        if along is None or (product := makers.get(bound.reads[0])) is None:
            continue
        alone = readers[bound.reads[0]] == 1 and bound.reads[0] not in read_behind
        if alone and kinds[bound.reads[1]] in THERE and bounds[product].operation.bias_along == along:
            found[i] = product
    return found


def biased(bounds: Sequence[Bound], products: Mapping[int, int]) -> tuple[Biased, ...]:
    """What each row has to do with a bias.

    Args:
        products: as `products_of_biases` has them.
    """
    found = [NONE] * len(bounds)
    for i, product in products.items():
        found[i], found[product] = Biased(is_bias=True), Biased(behind=bounds[i].operation)
    return tuple(found)


def stays(row: PlacedRow) -> bool:
    """Whether a row that adds a bias reads its product's result where it is made, and leaves its own there."""
    return not (any((*row.fetch, *row.store)) or row.is_cut)


def leaves(row: PlacedRow) -> bool:
    """Whether a product's result stays where it is made, all of it at once."""
    return not (row.store[0] or row.is_cut)
