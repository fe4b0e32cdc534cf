"""Gradients of one value that kernels of backward-data add up: right, where the rule says so, and nowhere else."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from sampling import cases_of
from test_networks_gpu import SM_90, loaded, step_on_no_device
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from convgen.algebra.grid import Grid
from convgen.kernels.facts import Launch
from convgen.kernels.of_rows import local_convolutions
from convgen.network_compiler import compile_network
from convgen.operations.convolution import ADD
from convgen.operations.gradient_sums import SumTaken, sums_taken
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype
from convgen.verify.network import check_network, report_text


def pooled(x: Tensor) -> Tensor:
    """What is no step behind a convolution's kernel, so that the convolution stays a row of its own."""
    return nn.functional.max_pool2d(x, 3, 1, 1)


class Branches(nn.Module):
    """Values that several convolutions read, and others beside them."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.channels = c = 8 * rng.randint(1, 2)
        self.levels = nn.ModuleList()
        self.skips: list[bool] = []
        for _ in range(2):
            stride, kernel = rng.choice((1, 1, 2)), rng.choice((1, 3))
            groups = rng.choice((1, 1, 8))
            convs = [nn.Conv2d(c, c, kernel, stride, kernel // 2, bias=rng.random() < 0.3)]
            convs += [nn.Conv2d(c, c, 1, stride, groups=groups, bias=False) for _ in range(rng.randint(0, 2))]
            self.levels.append(nn.ModuleList(convs))
            self.skips.append(stride == 1 and rng.random() < 0.6)

    def forward(self, x: Tensor) -> Tensor:
        for convs, skips in zip(self.levels, self.skips, strict=True):
            first, *others = (pooled(conv(x)) for conv in convs)
            y = sum(others, first)
            x = torch.tanh(y + x if skips else y)
        return x


@pytest.mark.parametrize("seed", cases_of(8, "gradients' sums in kernels"))
def test_drawn_networks_are_right(seed: int) -> None:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    module = Branches(rng)
    shape = (rng.choice((1, 2, 3)), module.channels, rng.choice((5, 6)), rng.choice((4, 5)))
    graph, tensors = graph_of(module, (torch.randn(shape),), name="drawn")
    graph = with_dtype(graph, rng.choice(("float64", "float32", "bfloat16")))
    grid = rng.choice(({"N": 2}, {"N": 2}, {"H": 2}, {"F": 2}))
    one = compile_network(graph, Grid(tuple(grid.items())), target=SM_90)
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(16, 16, k, padding=k // 2, bias=False) for k in (1, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = pooled(self.a(x)) + x
        return pooled(self.b(x)) + pooled(self.c(x))


def test_nothing_else_adds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of x's two gradients, and of those of what two convolutions read."""
    graph, tensors = graph_of(Residual(), (torch.randn(4, 16, 6, 6),), name="residual")
    one = compile_network(with_dtype(graph, "bfloat16"), Grid((("N", 2),)), target=SM_90)
    assert sum(row.epilogue == ADD for row in local_convolutions(one.program)) == 2
    seen: Counter[str] = Counter()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if args and isinstance(args[0], Tensor) and args[0].dim() == 4:
                seen[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    found: list[Launch] = []
    with loaded(one, tensors, tmp_path) as package, Counted():
        step_on_no_device(package, monkeypatch, launched=found)
    backward = [launch for launch in found if launch.name.startswith("backward_data")]
    assert len(backward) == 2 * 3  # on two ranks
    assert sum("with_0" in launch.function.arg_names for launch in backward) == 2 * 2
    assert seen["add"] <= 2 * 2 and not seen["add_"], seen  # forward's own


class Biased(nn.Module):
    """Whose convolutions' kernels add a bias, and one of them a rectifier that hides what gradients are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(16, 16, k, padding=k // 2) for k in (1, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = pooled(self.a(x)) + x
        return torch.relu(self.b(x)) + pooled(self.c(x))


def test_of_convolutions_that_add_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, tensors = graph_of(Biased(), (torch.randn(4, 16, 6, 6),), name="biased")
    one = compile_network(with_dtype(graph, "float64"), Grid((("N", 2),)), target=SM_90)
    assert sum(row.epilogue == ADD for row in local_convolutions(one.program)) == 2
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)
    found: list[Launch] = []
    with loaded(one, tensors, tmp_path) as package:
        step_on_no_device(package, monkeypatch, launched=found)
    backward = [launch for launch in found if launch.name.startswith("backward_data")]
    assert len(backward) == 2 * 3 and sum("with_0" in launch.function.arg_names for launch in backward) == 2 * 2


class Line(NamedTuple):
    kind: str
    makes: tuple[str, ...]
    reads: tuple[str, ...]


def test_which_sums_are_taken() -> None:
    a, b = Line("vjp", ("a", "w"), ("k", "dy")), Line("vjp", ("b",), ("l", "dy"))
    add = Line("add", ("s",), ("a", "b"))
    every = lambda _: True  # noqa: E731
    assert sums_taken([a, b, add], every) == [SumTaken(1, 2, "a")]
    assert sums_taken([b, a, add], every) == [SumTaken(1, 2, "b")]
    assert sums_taken([a, add._replace(reads=("a", "given"))], every) == [SumTaken(0, 1, "given")]
    # What is made first may add nothing that comes later; nor may who is read elsewhere, or makes it second.
    assert sums_taken([a, b, add], lambda n: n == 0) == []
    assert sums_taken([a, b, add], every, stays={"b"}) == []
    assert sums_taken([a, b, add, Line("back", ("t",), ("b",))], every) == []
    assert sums_taken([b, a._replace(makes=("w", "a")), add], every) == []
    # A chain: each adds what the one before has added.
    third, last = Line("vjp", ("c",), ("m", "dy")), Line("add", ("t",), ("s", "c"))
    assert sums_taken([a, b, add, third, last], every) == [SumTaken(1, 2, "a"), SumTaken(3, 4, "s")]
    # Twice of one: the second sum is a step of its own.
    again = Line("add", ("t",), ("s", "b"))
    assert sums_taken([a, b, add, again], lambda n: n < 2) == []
