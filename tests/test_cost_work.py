"""Work of the busiest rank, by the largest parts of each index, beside every rank's."""

from __future__ import annotations

from random import Random

import numpy as np
from sampling import draws
from small_networks import compiled, resnet, unet

from convgen.algebra.grid import Grid
from convgen.cost.machines import load_machine
from convgen.cost.rows import price_on
from convgen.cost.work import most_work, work_by_rank
from convgen.operations.pointwise import Pointwise, bias
from convgen.operations.row import Work


def test_the_busiest_rank_is_found_without_numbering_ranks() -> None:
    """Of rows of networks and of their gradients, under random roles, ragged and empty blocks among them."""
    draw = Random("work")
    rows = {row.bound.operation for made in (resnet, unet) for row in compiled(made, H=2)[0].program.rows}
    operations = [*rows, *(one.operation for row in rows for one in row.gradients.values())]
    cases = 0
    for operation in sorted(operations, key=repr):
        for way, signature in enumerate(operation.signatures):
            for _ in range(draws(4)):
                roles: dict[str, tuple[str, ...]] = {}
                sizes = {axis: draw.choice((2, 3, 4, 5, 7)) for axis in "abc"}
                for axis in sizes:
                    if index := draw.choice([*signature.extent, ""]):
                        roles[index] = (*roles.get(index, ()), axis)
                grid = Grid(tuple((a, n) for a, n in sizes.items() if any(a in axes for axes in roles.values())))
                ranks = work_by_rank(operation, way, tuple(roles.items()), grid)
                found = most_work(operation, way, tuple((i, tuple(sizes[a] for a in roles[i])) for i in roles))
                for one, most in zip(ranks, found, strict=True):
                    assert most.work.flops == np.max(one.work.flops)
                    assert most.work.elements == np.max(one.work.elements)
                    cases += 1
    assert cases > 100


def test_an_addend_of_the_sums_shape_costs_nothing_on_the_way_back() -> None:
    """A bias's gradient is one sum that reads the sum's gradient once; that of what it is added to is passed on."""
    shape, grid = (4, 8, 6, 6), Grid((("a", 2),))
    price = price_on(grid, load_machine("lassen"), "float32")
    elements = 2 * 8 * 6 * 6
    row = bias(shape)
    split = {row.signatures[0].extents[0][0]: ("a",)}
    assert price.local(row, 0, split, [0]) == 0
    both = price.local(row, 0, split, [0, 1])
    assert both == price.local(row, 0, split, [1]) == price.seconds_of(Work(elements, elements + 8))
    assert price.local(Pointwise("add", shape, (shape, shape)), 0, split, [0, 1]) == 0
    assert price.local(Pointwise("mul", shape, (shape, shape)), 0, split, [0, 1]) > 0
