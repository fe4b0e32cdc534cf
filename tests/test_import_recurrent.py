"""Recurrent layers are imported from their first step, and nothing else is told apart by it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from networks_on_ranks import check, draw_parameters, imported, random_input
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


class Rows(nn.Module):
    """A recurrence along the rows of an image, under a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.along = nn.BatchNorm2d(3), nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        rows = self.norm(x).permute(0, 2, 3, 1).reshape(n * h, w, c)
        return self.along(rows)[0].view(n, h, w, -1).permute(0, 3, 1, 2)


def test_one_graph_is_of_training_and_evaluation() -> None:
    module = Rows().double()
    draw_parameters(module)
    given = imported(module, random_input((3, 3, 5, 4)))
    assert given.graph.modes == ("train", "eval")
    for training in (True, False):
        module.train(training)
        found = check(given, {"N": 2, "H": 2})
        assert (found if training else replace(found, volume="")).right, found  # VOLUME is of training
