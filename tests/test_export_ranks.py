"""Who exports: one rank of each cache that lacks the answer, none where it is there; errors reach all ranks."""

from __future__ import annotations

import dataclasses
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import convgen
from convgen import parallel
from convgen.errors import InputError
from convgen.exports import ranks as meetings
from convgen.verify.processes import ProcessFailed, spawn

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
GRID: Any = {"N": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Made:
    y: Tensor
    parts: Any
    nothing: Tensor | None = None


class Small(nn.Module):
    """With a constant, a table that no state dict has, a parameter that torch doesn't initialise, and containers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lin = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6))
        self.shift = torch.arange(6.0, dtype=torch.float64)
        self.register_buffer("table", torch.rand(6, dtype=torch.float64), persistent=False)
        self.double()

    def forward(self, x: Tensor) -> Made:
        y = self.lin(x) * self.scale + self.shift + self.table
        return Made(y, [Pair(y.relu(), None), {"a": y + 1, "b": (2, float("inf"))}])


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def counted(folder: Path, program: Callable[[int], Any]) -> Callable[[int], Any]:
    """A program whose exports and compilations leave files."""

    def noted(label: str, of: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            (folder / f"{label}_{len(list(folder.iterdir()))}").touch()
            return of(*args, **keywords)

        return call

    def run(rank: int) -> Any:
        parallel.exported = noted(f"exported_{rank}", parallel.exported)
        parallel.compile_network = noted(f"compile_network_{rank}", parallel.compile_network)
        return program(rank)

    return run


def calls(folder: Path, program: Callable[[int], Any], ranks: int = 2) -> tuple[Counter[str], list[Any]]:
    """What has been done on which rank, such as exported_0."""
    folder.mkdir()
    found = spawn(counted(folder, program), ranks)
    return Counter(path.name.rpartition("_")[0] for path in folder.iterdir()), found


def right(rank: int) -> None:
    module = Small()
    model = convgen.parallelize(module, (X,), GRID, "sample")
    found, truth = model(X), module(X)
    assert type(found) is Made and type(found.parts[0]) is Pair and found.nothing is None
    assert found.parts[1]["b"] == (2, float("inf")) and found.parts[0].second is None
    pairs = (
        (found.y, truth.y),
        (found.parts[0].first, truth.parts[0].first),
        (found.parts[1]["a"], truth.parts[1]["a"]),
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_one_rank_exports_and_none_where_the_cache_has_it(tmp_path: Path, cache: Path) -> None:
    assert calls(tmp_path / "first", right)[0] == {"exported_0": 1, "compile_network_0": 1}
    assert calls(tmp_path / "second", right)[0] == {}
    (entry,) = (cache / "exports").iterdir()
    assert sorted(p.name for p in entry.iterdir()) == ["call.json", "constants.pt", "graph.yaml", "manifest.json"]
    graph = entry / "graph.yaml"
    graph.write_text(graph.read_text().replace("add.Tensor", "sub.Tensor"))

    def warned(rank: int) -> list[str]:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            right(rank)
        return [str(one.message) for one in heard]

    found, words = calls(tmp_path / "damaged", warned)
    assert found == {"exported_0": 1}
    assert all(any("graph.yaml is another than was written" in one for one in those) for those in words)
    assert calls(tmp_path / "healed", right)[0] == {}
    shutil.rmtree(cache / "networks")
    assert calls(tmp_path / "recompiled", right)[0] == {"compile_network_0": 1}


def test_from_torch_has_the_same_exports(tmp_path: Path) -> None:
    calls(tmp_path / "first", right)

    def program(rank: int) -> None:
        convgen.from_torch(Small(), (X,), GRID, "sample")

    assert calls(tmp_path / "second", program, 1)[0] == {}


def test_each_cache_has_a_rank_that_exports(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        os.environ["CONVGEN_CACHE"] = str(tmp_path / f"own{rank % 2}")
        right(rank)

    def four(rank: int) -> None:
        os.environ["CONVGEN_CACHE"] = str(tmp_path / f"own{rank % 2}")
        convgen.parallelize(Small(), (X,), {"N": 4}, "sample")

    assert calls(tmp_path / "first", program)[0] == {
        f"{n}_{r}": 1 for n in ("exported", "compile_network") for r in (0, 1)
    }
    assert calls(tmp_path / "second", program)[0] == {}
    assert calls(tmp_path / "four", four, 4)[0] == {"compile_network_0": 1, "compile_network_1": 1}


def test_without_the_cache_every_rank_exports(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = {"exported_0": 1, "exported_1": 1}
    calls(tmp_path / "first", right)

    def off(rank: int) -> None:
        os.environ["CONVGEN_EXPORTS"] = "0" if rank else "1"
        right(rank)

    assert calls(tmp_path / "one rank has it off", off)[0] == {"exported_1": 1}
    monkeypatch.setenv("CONVGEN_EXPORTS", "0")
    assert calls(tmp_path / "off", right)[0] == every
    monkeypatch.delenv("CONVGEN_EXPORTS")
    shutil.rmtree(cache)
    cache.write_text("")  # where a folder would be

    def quiet(rank: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            right(rank)

    assert calls(tmp_path / "unwritable", quiet)[0] == every | {"compile_network_0": 1, "compile_network_1": 1}


class Unknown(Small):
    def forward(self, x: Tensor) -> Made:
        made = super().forward(x)
        return Made(made.y if id(self) else made.parts, made.parts)


def test_what_has_no_fingerprint_is_exported_each_time(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        convgen.parallelize(Unknown(), (X,), GRID, "sample")

    for name in ("first", "second"):
        assert calls(tmp_path / name, program)[0].keys() >= {"exported_0", "exported_1"}
    assert not (tmp_path / "cache" / "exports").exists()


def test_ranks_with_other_modules_are_refused_as_ever(tmp_path: Path) -> None:
    def program(rank: int) -> str:
        module = Small() if rank else nn.Sequential(Small(), nn.Identity())
        with pytest.raises(InputError) as error:
            convgen.parallelize(module, (X,), GRID, "sample", name="net")
        return str(error.value)

    found, words = calls(tmp_path / "first", program)
    assert found.keys() >= {"exported_0", "exported_1"}
    assert all("the modules of ranks [1] have other programs" in one for one in words)


def test_an_input_error_reaches_all_ranks(tmp_path: Path) -> None:
    def program(rank: int) -> str:
        with pytest.raises(InputError) as error:
            convgen.parallelize(Branching(), (X,), GRID)
        right(rank)  # ranks meet again
        return str(error.value)

    found, words = calls(tmp_path / "first", program)
    assert found["exported_1"] == 0
    assert all(
        "torch.export can't trace Branching: which branch is taken" in one and "try     torch.where" in one
        for one in words
    )
    assert "rank    0 found this" in words[1] and "found this" not in words[0]


def test_any_other_error_reaches_all_ranks(tmp_path: Path) -> None:
    def program(rank: int) -> str:
        if rank == 0:
            parallel.compile_network = lambda *_, **__: 1 // 0
        with pytest.raises((ZeroDivisionError, RuntimeError)) as error:
            convgen.parallelize(Small(), (X,), GRID, "sample")
        return f"{type(error.value).__name__}: {error.value}"

    _, (first, second) = calls(tmp_path / "first", program)
    assert first.startswith("ZeroDivisionError")
    assert second.startswith(
        "RuntimeError: Small: rank 0, which exports and compiles for the others, failed: ZeroDivision"
    )


def test_a_rank_that_dies_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "SILENT_S", 2.0)
    monkeypatch.setattr(meetings, "BEAT_S", 0.1)

    def program(rank: int) -> None:
        if rank == 0:
            parallel.exported = lambda *_, **__: os._exit(1)
        convgen.parallelize(Small(), (X,), GRID, "sample")

    with pytest.raises(
        ProcessFailed, match=r"TimeoutError: Small: ranks \[0\] did not come: rank 0 exports and compiles"
    ):
        spawn(program, 2)
