"""Every operation alone, lowered and emitted, with free roles and storage: on virtual ranks and on real processes."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from networks_on_ranks import imported, random_input
from operation_programs import KINDS, wrong
from sampling import cases_of
from torch import nn

from convgen.algebra.grid import Grid
from convgen.cost.network_memory import network_memory
from convgen.network_compiler import compile_network
from convgen.operations.bound import Bound
from convgen.operations.moments import batch_normed, centred
from convgen.operations.reductions import Reduce
from convgen.operations.rows import Concatenate
from convgen.program.rows import place
from convgen.verify.graph_reference import run_graph

pytestmark = pytest.mark.usefixtures("in_doubles")


@pytest.fixture
def in_doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("seed", cases_of(2, "test_operations_on_virtual_ranks"))
def test_operations_on_virtual_ranks(seed: int) -> None:
    draw = Random(f"operations lowered {seed}")
    grid = Grid(draw.choice(((("a0", 2), ("a1", 2)), (("a0", 3),), (("a0", 2), ("a1", 3)))))
    assert wrong(draw, KINDS, 2 * len(KINDS), grid) == []


@pytest.mark.parametrize("seed", cases_of(1, "test_operations_on_processes"))
def test_operations_on_processes(seed: int) -> None:
    draw = Random(f"operations on processes {seed}")
    grid = Grid(draw.choice(((("a0", 2), ("a1", 2)), (("a0", 3),))))
    assert wrong(draw, KINDS, len(KINDS), grid, processes=True) == []


def test_a_sum_of_too_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Reduce.reference

    def more(self: Reduce, *operands: Any) -> tuple[Any, ...]:
        return tuple(y + 1 for y in right(self, *operands))

    monkeypatch.setattr(Reduce, "reference", more)
    found = wrong(Random("a sum"), ["sum, mean"], 3, Grid((("a0", 2),)))
    assert [text.partition(":")[0] for text in found] == ["sum, mean"] * 3


@pytest.mark.parametrize("shape", [(1, 4, 3, 2), (2, 1, 3, 2), (1, 3, 2, 2, 2), (1, 3, 5), (2, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_of_any_strides_has_its_gradients(shape: tuple[int, ...], training: bool) -> None:
    """ATen's own has others where operand and gradient are contiguous in different ways."""
    along = [d for d in range(len(shape)) if d != 1]
    wide = [1, -1] + [1] * (len(shape) - 2)
    for first in (False, True):
        x, dy = torch.randn(shape), torch.randn(shape)
        last = (x if first else dy).movedim(1, -1).contiguous().movedim(-1, 1)
        x, dy = (last, dy) if first else (x, last)
        w, b = torch.randn(2, shape[1], requires_grad=True)
        table = torch.rand(shape[1], 4) + 0.5  # columns of which are not contiguous
        x.requires_grad_()
        given = None if training else (table[:, 1].contiguous(), table[:, 2].contiguous())
        y = batch_normed(x, w, b, *(given or (None, None)), training, 0.0, 1e-5)
        mean, variance = given or (x.mean(along), x.var(along, correction=0))
        right = (x - mean.view(wide)) / (variance.view(wide) + 1e-5).sqrt() * w.view(wide) + b.view(wide)
        for one, other in zip(*(torch.autograd.grad(v, (x, w, b), dy) for v in (y, right)), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-10)
        if not training:
            mean, scale, shift = table[:, 0], table[:, 1].clone().requires_grad_(), table[:, 2]
            found = torch.autograd.grad(centred(x, mean, scale, shift), (x, scale), dy)
            plain = (x - mean.view(wide)) * scale.view(wide) + shift.view(wide)
            for one, other in zip(found, torch.autograd.grad(plain, (x, scale), dy), strict=True):
                assert torch.allclose(one, other, rtol=0, atol=1e-10)


def test_rows_of_another_ranks_block_are_fetched() -> None:
    """Blocks of a0 and a1 of the result read rows across the operand's blocks of a0."""
    grid, bound = Grid((("a0", 2), ("a1", 3))), Bound(Concatenate(((5,), (4,)), 0), ("x", "z"), ("y",))
    row = place(bound, grid, 0, {"d0": ("a0", "a1")}, [(("a0",),), ((),)], [(("a0", "a1"),)], {})
    assert [step.kind for step in row.fetch[0]] == ["exchange"]


def test_rows_that_read_nothing_have_a_memory() -> None:
    given = imported(nn.MultiMarginLoss(), random_input((4, 6)), torch.tensor([0, 3, 5, 1]))
    program = compile_network(given.graph, Grid((("N", 2),))).program
    assert any(not row.bound.reads for row in program.rows)
    assert network_memory(program).peak > 0


def test_a_graph_reshapes_permuted_values() -> None:
    x = random_input((3, 4, 5, 2))
    given = imported(Permuted(), x)
    found = run_graph(given.graph, {"x": x}, training=True).outputs
    assert torch.equal(found[given.graph.outputs[0][0]], Permuted()(x))


class Permuted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 2)
