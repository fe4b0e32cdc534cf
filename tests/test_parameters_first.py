"""`parameters-first`: sums of parameters' gradients are on their way before the other gradients of their rows."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from free_networks import imported
from networks_on_ranks import check, with_passes
from networks_on_ranks import imported as module_of
from sampling import cases_of
from test_networks_edited import same
from test_overlap import step_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.passes.bucket_gradients import BucketGradients
from convgen.passes.parameters_first import ParametersFirst
from convgen.passes.start_halos import StartHalos
from convgen.program.flow import Local, Start, backward
from convgen.program.network import Program
from convgen.program.verify.network import verify_network
from convgen.verify.virtual import World


def a_tower(draw: Random) -> nn.Module:
    """Convolutions with what there is between them; some grouped, some with a bias."""
    layers: list[nn.Module] = []
    for _ in range(draw.randint(2, 3)):
        groups, bias = draw.choice((1, 1, 2)), draw.choice((True, False))
        layers.append(nn.Conv2d(4, 4, draw.choice((1, 3)), draw.choice((1, 2)), 1, groups=groups, bias=bias))
        layers += [one for one in (nn.BatchNorm2d(4), nn.Tanh()) if draw.random() < 0.4]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


def of(module: nn.Module, shape: tuple[int, ...]) -> Any:
    x = torch.randn(shape, dtype=torch.float64)
    module.double()(x)
    return module_of(module, x)


@pytest.mark.parametrize("seed", cases_of(4, "test_the_numbers_are_right"))
def test_the_numbers_are_right(seed: int) -> None:
    draw = Random(f"parameters first {seed}")
    torch.manual_seed(seed)
    given = of(a_tower(draw), (draw.choice((4, 5)), 4, 9, 8))
    grid = draw.choice(({"N": 2}, {"N": 3}, {"N": 2, "F": 2}, {"N": 2, "H": 2}))
    passes = [ParametersFirst(), BucketGradients(draw.choice((0, 1)))]
    if draw.random() < 0.5:
        passes.insert(draw.randint(0, 1), StartHalos())
    program = compile_network(given.graph, Grid(tuple(grid.items()))).plain
    for one in passes:
        program = one.run(program)
        verify_network(program)
        assert one.run(program) is program
    errors = check(given, grid, passes=tuple(passes))
    assert errors.right, errors


def order(program: Program) -> list[str]:
    """A backward pass: what is computed of convolutions, and what is started."""
    steps = backward(program, of_inputs=True)
    return [s.name for s in steps if isinstance(s, Start) or (isinstance(s, Local) and ".d" in s.name)]


class Tower(nn.Module):
    """Three convolutions, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))


def tower_on(tmp_path: Path, *passes: Any) -> tuple[Program, Any]:
    torch.manual_seed(0)
    module = Tower()
    given = module_of(module, torch.randn(4, 4, 9, 8))
    compiled = with_passes(compile_network(given.graph, Grid((("N", 2),))), *passes)
    return compiled.program, imported(compiled.package().files, tmp_path)


class Backwards(TorchDispatchMode):
    """Notes gradients of convolutions as they are computed."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution_backward" in str(func):
            self.seen.append("".join(name for name, asked in zip("xw", args[-1], strict=False) if asked))
        return func(*args, **(kwargs or {}))


def test_a_sum_is_started_before_what_comes_behind_it(tmp_path: Path) -> None:
    """In the program, and as ranks run it."""
    every_one = BucketGradients(1, 0)
    program, net = tower_on(tmp_path, ParametersFirst(), every_one)
    (bucket,) = program.buckets
    assert order(program) == ["c.dw", "c.dx", "b.dw", "b.dx", "a.dw", bucket.name, "a.dx"]
    seen: list[list[str]] = [[], []]

    class Noting:
        def __init__(self, end: Any) -> None:
            self.end = end

        def __getattr__(self, name: str) -> Any:
            return getattr(self.end, name)

        def start(self, *what: Any) -> Any:
            seen[self.rank].append("start")
            return self.end.start(*what)

    def step(end: Any) -> Any:
        with Backwards(seen[end.rank]):
            return step_of(net, torch.randn(4, 4, 9, 8))(Noting(end))

    World(2).run(step)
    assert seen == [["w", "x", "w", "x", "w", "start", "x"]] * 2


def test_its_text_reads_back() -> None:
    for passes in ((ParametersFirst(),), (ParametersFirst("c"), BucketGradients(0))):
        given = module_of(Tower(), torch.randn(4, 4, 9, 8))
        compiled = with_passes(compile_network(given.graph, Grid((("N", 2),))), *passes)
        assert sum(bool(row.derived) for row in compiled.program.rows) == (1 if passes[1:] else 3)
        same(compiled)


def test_what_has_nothing_to_travel_behind_is_left_alone() -> None:
    """Halos move for the filter's gradient, too; and a row that no other gradient is asked of stays."""
    module = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1))
    given = module_of(module, torch.randn(4, 4, 9, 8))
    rows = compile_network(given.graph, Grid((("H", 2),))).plain
    assert ParametersFirst().run(rows) is rows
    samples = compile_network(given.graph, Grid((("N", 2),))).plain
    first = ParametersFirst("_1_sum").run(samples)
    assert not any(row.derived for row in samples.rows)
    assert [bool(row.derived) for row in first.rows] == [False, False, True, False]
