"""Recurrent layers are imported from their first step, and nothing else is told apart by it."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import convgen.spec.exported as exported
from convgen.spec.exported import graph_of
from convgen.spec.exported_recurrent import LAYERS, first_steps


class Both(nn.Module):
    """What comes out, in a form that strides decide upon, and the last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        y, state = self.layer(x)
        return y.transpose(0, 1).reshape(-1, y.shape[-1]), state


def drawn(draw: Random) -> tuple[nn.Module, torch.Tensor]:
    kind = draw.choice([nn.LSTM, nn.GRU, nn.RNN])
    more = {"nonlinearity": draw.choice(["tanh", "relu"])} if kind is nn.RNN else {}
    layer = kind(
        3, 4, draw.randint(1, 2), bidirectional=draw.random() < 0.5, batch_first=draw.random() < 0.5,
        bias=draw.random() < 0.5, **more,
    )  # fmt: skip
    return Both(layer), torch.randn(draw.randint(2, 3), draw.randint(2, 3), 3)


@pytest.mark.parametrize("seed", range(3))
def test_the_graph_is_that_of_every_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    module, x = drawn(Random(seed))
    found = graph_of(module, (x,))[0]
    monkeypatch.setattr(exported, "first_steps", nullcontext)
    assert found == graph_of(module, (x,))[0]
    truth = module(x)[0]
    with first_steps():
        assert torch.equal(module(x)[0], truth)


def test_a_layer_of_many_steps_is_made_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._decomp.decompositions as decompositions

    cells: list[int] = []
    cell: Any = decompositions.lstm_cell
    monkeypatch.setattr(decompositions, "lstm_cell", lambda *a, **k: cells.append(1) or cell(*a, **k))
    ops: list[Any] = [getattr(torch.ops.aten, name).input for name in LAYERS]
    before = [dict(op.py_kernels) for op in ops]
    counts: list[int] = []
    for steps in (2, 50):
        cells.clear()
        graph_of(Both(nn.LSTM(3, 4, batch_first=True)), (torch.randn(2, steps, 3),))
        counts.append(len(cells))
    assert 0 < counts[0] == counts[1]
    assert [dict(op.py_kernels) for op in ops] == before
