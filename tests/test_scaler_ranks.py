"""GradScaler where one element of a gradient is infinite, of the output's or of a parameter's, whichever ranks hold it:
steps are skipped, and scales renewed, as by one process. Parameters have several types, and all ranks hold some."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from networks_on_ranks import draw_parameters
from torch import Tensor, nn

import convgen
from convgen.verify.processes import spawn

GRIDS, STEPS, RANKS, CASES = ("C=4", "N=2,H=2", "N=2,C=2"), 3, 4, 4


class Mixed(nn.Module):
    """Of float64, and a number of float32 that all ranks hold, before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.a, self.b = nn.Conv2d(4, 8, 3, padding=1, dtype=torch.float64), nn.BatchNorm2d(8, dtype=torch.float64)
        self.c = nn.Conv2d(8, 7, 3, padding=1, dtype=torch.float64)  # which two ranks split unevenly

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(self.a(x * self.scale))))


def local(t: Any) -> Tensor:
    return getattr(t.detach(), "_local_tensor", getattr(t.detach(), "_block", t.detach()))


def steps(model: Any, x: Tensor, dy: Callable[[int], Tensor], plant: Callable[[int], None]) -> tuple[Any, ...]:
    """Scales, and which steps went; `plant` follows a step's backward."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)  # pyright: ignore[reportPrivateImportUsage]
    scales, went, at = list[float](), list[int](), [0]
    optimizer.register_step_post_hook(lambda *_: went.append(at[0]))
    for at[0] in range(STEPS):
        optimizer.zero_grad()
        model(x).backward(scaler.scale(dy(at[0])))
        plant(at[0])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, went


@pytest.mark.slow
def test_steps_are_skipped_as_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    module = Mixed()
    draw_parameters(module)
    x, dy = (torch.randn(4, c, 6, 5, dtype=torch.float64) for c in (4, 7))
    for grid in GRIDS:
        convgen.from_torch(module, (x,), grid)

    def numbered(model: Any) -> dict[str, Tensor]:
        """By parameter, the place in the whole tensor of each element that this rank holds."""
        places, whole = copy.deepcopy(model), module.state_dict()
        places.load_full({n: torch.arange(t.numel(), dtype=t.dtype).reshape(t.shape) for n, t in whole.items()})
        return {n: local(p) for n, p in places.named_parameters()}

    def check(first: Any, places: dict[str, Tensor], draw: Random, of_parameter: bool) -> bool:
        """Whether this rank holds the infinity that was drawn."""
        model, reference, at = copy.deepcopy(first), copy.deepcopy(module), draw.randrange(STEPS)
        name = draw.choice([*places]) if of_parameter else ""
        element = draw.randrange(module.get_parameter(name).numel() if name else dy.numel())
        other = dy.clone()
        other.view(-1)[element] = torch.inf

        def plant(of: Any, i: int) -> None:
            if name and i == at:
                here = (
                    places[name] == element
                    if of is model
                    else torch.arange(module.get_parameter(name).numel()) == element
                )
                g = local(of.get_parameter(name).grad)
                g[here.view(g.shape)] = torch.inf

        found, wanted = (
            steps(of, x, lambda i: dy if name or i != at else other, lambda i, of=of: plant(of, i))
            for of in (model, reference)
        )
        assert found == wanted and wanted[1] == [i for i in range(STEPS) if i != at], (name, element, found, wanted)
        full = model.full_state_dict()
        for n, t in reference.state_dict().items():
            assert full[n].dtype == t.dtype, n
            assert torch.allclose(full[n], t, rtol=1e-5, atol=1e-6), n
        return bool(name and (places[name] == element).any())

    def program(rank: int) -> int:
        held = 0
        for grid in GRIDS:
            for kind in ("dtensors", "blocks"):
                first: Any = convgen.parallelize(module, (x,), grid, None, parameters=kind)
                places = numbered(first)
                for case in range(CASES):
                    held += check(first, places, Random(f"{grid} {kind} {case}"), case % 2 == 0)
        return held

    held = spawn(program, RANKS, 300.0)
    assert min(held) > 0 and len({*held}) > 1
