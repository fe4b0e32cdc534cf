"""The bet: layouts, windows, reductions and gradients of every operation follow from its signature alone.

Random operations, relations and grids with *free* roles and storage: named layouts would hide mistakes. Operands are
whole numbers, so linear operations have to be exact.
"""

from __future__ import annotations

from random import Random

import pytest
import torch
from brute import Value, gather, gradients, results, run, scatter
from operation_cases import CASES, operands

from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes
from convgen.algebra.signature import Operand, Signature
from convgen.operations.row import Operation

DRAWS = 60


def a_grid(draw: Random) -> Grid:
    while True:
        sizes = [draw.choice((1, 2, 2, 3, 4)) for _ in range(draw.randint(1, 3))]
        if torch.tensor(sizes).prod() <= 8:
            return Grid(tuple((f"a{i}", n) for i, n in enumerate(sizes)))


def free_roles(draw: Random, signature: Signature, grid: Grid) -> dict[str, Axes]:
    """Each axis any index or none."""
    while True:
        roles: dict[str, Axes] = {}
        for axis in draw.sample(grid.names, len(grid.names)):
            index = draw.choice([*signature.extent, None])
            if index is not None:
                roles[index] = (*roles.get(index, ()), axis)
        if signature.fits(roles, grid.sizes):
            return roles


def free_storage(draw: Random, operand: Operand, grid: Grid) -> tuple[Axes, ...]:
    axes: list[Axes] = [()] * len(operand.shape)
    for axis in draw.sample(grid.names, len(grid.names)):
        d = draw.randrange(len(operand.shape) + 1)
        if d < len(operand.shape):
            axes[d] = (*axes[d], axis)
    return tuple(axes)


def stored(draw: Random, operand: Operand, grid: Grid, tensor: torch.Tensor) -> Value:
    return scatter(tensor, grid, (1,) * len(operand.shape), free_storage(draw, operand, grid))


@pytest.mark.parametrize("kind", CASES)
def test_any_roles_and_storage_give_the_whole_operation_and_its_gradients(kind: str) -> None:
    draw = Random(f"bet {kind}")
    for _ in range(DRAWS):
        operation = CASES[kind](draw)
        check(draw, operation)


def check(draw: Random, operation: Operation) -> None:
    way = draw.randrange(len(operation.signatures))
    signature, grid = operation.signatures[way], a_grid(draw)
    roles, given = free_roles(draw, signature, grid), operands(draw, operation)
    where = f"{operation}, way {way}, {grid}, roles {roles}"
    for t in given:
        t.requires_grad_(t.is_floating_point())
    expected = operation.reference(*given)
    values = [stored(draw, o, grid, t.detach()) for o, t in zip(signature.inputs, given, strict=True)]
    done = run(operation, way, grid, roles, values)
    outs = [stored(draw, o, grid, torch.zeros(o.shape, dtype=torch.float64)) for o in signature.results]
    for found, right in zip(results(done, outs), expected, strict=True):
        assert torch.allclose(gather(found), right.detach(), rtol=1e-12, atol=1e-12), where
    dys = [
        torch.randint(-4, 5, o.shape, generator=torch.Generator().manual_seed(draw.randrange(99))).double()
        for o in expected
    ]
    pairs = [(o, dy) for o, dy in zip(expected, dys, strict=True) if o.requires_grad]
    if not pairs:
        return
    some = [t for t in given if t.requires_grad]
    right = torch.autograd.grad([o for o, _ in pairs], some, [dy for _, dy in pairs], allow_unused=True)
    by = dict(zip(map(id, some), right, strict=True))
    dy_values = [stored(draw, o, grid, dy) for o, dy in zip(signature.results, dys, strict=True)]
    to = [stored(draw, o, grid, torch.zeros(o.shape)) for o in signature.inputs]
    for t, found in zip(given, gradients(done, dy_values, to), strict=True):
        if (wanted := by.get(id(t))) is not None:
            assert torch.allclose(gather(found), wanted, rtol=1e-12, atol=1e-12), where
