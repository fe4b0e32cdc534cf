"""Every operation alone, lowered and emitted, with free roles and storage: on virtual ranks and on real processes."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from generate import draws
from operation_programs import KINDS, wrong

from convgen.algebra.grid import Grid
from convgen.operations.reductions import Reduce

pytestmark = pytest.mark.usefixtures("in_doubles")


@pytest.fixture
def in_doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("seed", range(draws(2)))
def test_operations_on_virtual_ranks(seed: int) -> None:
    draw = Random(f"operations lowered {seed}")
    grid = Grid(draw.choice(((("a0", 2), ("a1", 2)), (("a0", 3),), (("a0", 2), ("a1", 3)))))
    assert wrong(draw, KINDS, 2 * len(KINDS), grid) == []


@pytest.mark.parametrize("seed", range(draws(1)))
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
