"""Work of the busiest rank, by the largest parts of each index, beside every rank's."""

from __future__ import annotations

from random import Random

import numpy as np
from sampling import draws
from small_networks import compiled, resnet, unet

from convgen.algebra.grid import Grid
from convgen.cost.work import most_work, work_by_rank


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
