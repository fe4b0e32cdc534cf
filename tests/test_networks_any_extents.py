"""Networks' kernels that take extents as arguments: those of one shape of the input run at others, and ATen at none."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_networks_gpu import SM_90, loaded, step_on_no_device
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.kernels.config import parse_config
from convgen.kernels.facts import Launch, specialised
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.packages import runtime_of
from convgen.passes.contract import NetworkPass
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype
from convgen.verify.network import check_network, report_text


class Small(nn.Module):
    """Convolutions with steps behind and before, a stride, groups, a single tap, a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1))
        self.down, self.short = nn.Conv2d(32, 32, 3, 2, 1), nn.Conv2d(32, 32, 1, 2)
        self.last = nn.Sequential(
            nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Tanh(), nn.Conv2d(32, 16, 1), nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 2, 2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.down(x) + self.short(x))


@cache
def compiled(
    grid: str, shape: tuple[int, int], dtype: str, passes: tuple[NetworkPass, ...] | None = None
) -> tuple[CompiledNetwork, dict[str, Tensor]]:
    manual_seed: Any = torch.manual_seed
    manual_seed(0)
    graph, tensors = graph_of(Small().double(), (torch.randn(2, 8, *shape, dtype=torch.float64),))
    axes = ((axis, int(n)) for axis, n in (word.split("=") for word in grid.split(",")))
    return compile_network(with_dtype(graph, dtype), Grid(tuple(axes)), target=SM_90, passes=passes), tensors


def elsewhere(grid: str, shape: tuple[int, int], dtype: str) -> tuple[CompiledNetwork, dict[str, Tensor]]:
    """The network of another shape, with the kernels of the compiled one."""
    one, tensors = compiled(grid, shape, dtype)
    made = replace(one)
    made.__dict__["kernels"] = replace(compiled(grid, (8, 8), dtype)[0], any_extents=True).kernels
    return made, tensors


@pytest.mark.parametrize(
    ("grid", "dtype", "shape"), [("H=2", "bfloat16", (3, 4)), ("C=2", "float64", (1, 1)), ("H=2", "float64", (5, 2))]
)
def test_it_is_right_at_other_extents(grid: str, dtype: str, shape: tuple[int, int]) -> None:
    report = check_network(*elsewhere(grid, shape, dtype), interpret=True)
    assert report.ok, report_text(report)


@pytest.mark.parametrize(("grid", "dtype"), [("H=2", "bfloat16"), ("H=2,W=2", "bfloat16"), ("F=2,C=2", "float32")])
def test_aten_convolves_at_no_extents_and_nothing_is_compiled_anew(
    grid: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, made = set[Any](), dict[Any, set[str]]()
    for n, shape in enumerate(((8, 8), (1, 1), (3, 4), (7, 10), (6, 9), (20, 12))):
        one, tensors = elsewhere(grid, shape, dtype)
        files |= {(file.name, file.text) for file in one.kernels}
        (tmp_path / str(n)).mkdir()
        found: list[Launch] = []
        with loaded(one, tensors, tmp_path / str(n)) as package, monkeypatch.context() as patch:
            assert step_on_no_device(package, patch, launched=found)
        for launch in found:  # of each function one, and one for each number of boxes around a block, and each unit
            kinds = launch.constants.get("BOXES"), launch.constants.get("UNIT")
            own = launch.function.fn.__module__.rpartition(".")[2], launch.name, kinds
            made.setdefault(own, set()).add(str(specialised(launch)))
    assert len(files) == len(compiled(grid, (8, 8), dtype)[0].kernels)
    assert {len(one) for one in made.values()} == {1}


def test_the_nearest_serves_and_one_of_the_same_form_first(tmp_path: Path) -> None:
    one, tensors = elsewhere("H=2", (8, 8), "bfloat16")

    class Fake:
        def __init__(self, said: str) -> None:
            self.said = said

        def at(self, local: Any) -> tuple[str, Any]:
            return self.said, local

    with loaded(one, tensors, tmp_path) as package:
        runtime = runtime_of(package)

        def square(rows: int, **changes: int) -> Any:
            return runtime.LocalConvolution(8, 16, 1, ((rows, rows, 3, 1, 1, 1),) * 2)._replace(**changes)

        serving = runtime.OfAnyExtents()
        serving.made = {(square(n), rim): Fake(f"{n}{rim}") for n, rim in ((8, ""), (64, ""), (8, "x"))}
        for rows, rim, said in (
            (1, "", "8"),
            (20, "", "8"),
            (30, "", "64"),
            (999, "", "64"),
            (64, "x", "8x"),
            (64, "y", "64"),
        ):
            assert serving.at(square(rows), rim) == (said, square(rows))
        assert square(3).kind == square(5).kind != square(3, filters=8).kind
        assert runtime.any_extents("torch.bfloat16", square(5, channels=9)) is None


def test_what_was_tuned_is_taken_but_atens_own() -> None:
    plain, _ = compiled("H=2", (8, 8), "bfloat16")
    every = replace(plain, any_extents=True).kernels
    for text, of_any in (("aten", False), ("pointer BP=32 BF=16 BC=16 warps=4 stages=2", True)):
        tuned = parse_config(text)
        known = {p: tuned for file in every for p in file.problems if p[0].phase == "forward"}
        fixed, opened = (replace(plain, measured=known, any_extents=any_extents) for any_extents in (False, True))
        for one, taken in ((fixed, True), (opened, of_any)):
            configs = [k.config for file in one.kernels for k in file.kernels if k.problem.phase == "forward"]
            assert configs and all((config == tuned) is taken for config in configs)
