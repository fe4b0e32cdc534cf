"""Every way of a product, counted at once: those that trying each finds, in its order, with what each takes alone."""

from __future__ import annotations

from itertools import product
from math import prod
from random import Random

import pytest
from sampling import draws
from small_networks import compiled, resnet, unet

from convgen.algebra.blocks import axis_size
from convgen.algebra.grid import Grid
from convgen.cost.machines import load_machine
from convgen.cost.rows import Price
from convgen.network_compiler import compile_network
from convgen.operations.contraction import linear
from convgen.operations.row import Operation
from convgen.plan.program.candidates import Way
from convgen.plan.program.every_way import every_way
from convgen.program.rows import serves
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import network_from_dict


def tried(operation: Operation, price: Price, most: int, *, idle: bool) -> list[tuple[int, Way]]:
    """One after the other."""
    grid, found = price.grid, list[tuple[int, Way]]()
    for number, signature in enumerate(operation.signatures):
        if signature.reduction == "max":
            continue
        for chosen in product([*(i for i, n in signature.extents if n > 1), None], repeat=len(grid.names)):
            pairs = list(zip(grid.names, chosen, strict=True))
            roles = {i: axes for i, _ in signature.extents if (axes := tuple(a for a, c in pairs if c == i))}
            full = idle or all(prod(grid.sizes[a] for a in axes) <= signature.extent[i] for i, axes in roles.items())
            if full and serves(signature, roles, grid):
                found.append((price.local(operation, number, roles), (number, tuple(roles.items()))))
    least = min(ps for ps, _ in found)
    return [(ps, way) for ps, way in found if ps <= most * least]


@pytest.mark.parametrize("machine", ["lassen", "cuda", "cpu"])
def test_every_way_is_found_as_if_each_were_tried(machine: str) -> None:
    draw = Random(f"every way {machine}")
    rows = {row.bound.operation for made in (resnet, unet) for row in compiled(made, H=2)[0].program.rows}
    operations = [*rows, *(one.operation for row in rows for one in row.gradients.values()), linear((6, 10), 12)]
    products = sorted({o for o in operations if o.is_product}, key=repr)
    assert len(products) > 5
    for operation in draw.sample(products, min(len(products), draws(12))):
        grid = Grid(tuple((a, draw.choice((2, 3, 4, 5, 7))) for a in "abc"[: draw.randrange(4)]))
        price, most = Price(grid, load_machine(machine), "float32"), draw.choice((1, 2, 100))
        for idle in (False, True):
            found = every_way(operation, price, most, idle=idle)
            assert found == tried(operation, price, most, idle=idle), (operation, grid)


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_groups_are_not_cut_by_shares(groups: int) -> None:
    """Blocks of channels over an axis with shares are whole groups, or no way splits groups over it."""
    conv = {"name": "a", "kind": "conv", "out_channels": 16, "kernel_size": 3, "padding": 1, "groups": groups}
    network = network_from_dict({"name": "grouped", "input": [2, 16, 4, 4], "nodes": [conv]})
    rows = compile_network(network_graph(network), Grid((("N", 1),))).program.rows
    operation = next(row.bound.operation for row in rows if row.bound.operation.is_product)
    for shares in ((1, 3), (3, 5), (1, 1, 1, 5), (1, 1)):
        grid = Grid((("a", axis_size(shares)), ("b", 2)))
        price = Price(grid, load_machine("lassen"), "float32")
        assert every_way(operation, price, 100) == tried(operation, price, 100, idle=False), shares
