"""bench/kernels.py on a machine without a GPU: its problems, its refusal, and its measuring loop with another clock."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_cases import SM_90, three_by_three
from sampling import ALL
from scripts import bench_script

from convgen.kernels.families import FAMILIES
from convgen.kernels.problem import LocalDim
from convgen.spec.target import read_target
from convgen.tune.clock import race
from convgen.verify.interpreter import launch

BENCH = Path(__file__).resolve().parent.parent / "bench"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / "kernels.py"), *words], capture_output=True, text=True, check=False, timeout=1800
    )


def test_problems_are_listed_without_a_gpu() -> None:
    done = run("--list", "--networks", "resnet50", "--ways", "4", "--dtypes", "bfloat16", "--splits", "channel,spatial")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("bfloat16")]
    assert len(lines) > 30 and all(" 4 " in line for line in lines)
    assert {line.split()[1] for line in lines} == {"forward", "backward_data", "backward_filter"}


def test_chosen_problems_have_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at least in each phase in which any problem has one."""
    monkeypatch.syspath_prepend(str(BENCH))
    bench = bench_script("kernels")
    wanted = bench.Wanted(
        networks=("resnet50", "vgg16"), layers=(), ways=(4,), splits=tuple(bench.SPLITS), phases=bench.PHASES,
        dtypes=bench.DTYPES, families=(), configs=1, fused=False, limit=None,
    )  # fmt: skip
    every, few = (bench.plan(replace(wanted, chosen=chosen)).values() for chosen in (False, True))
    assert 50 <= len(few) <= 80 < len(every)
    for family in FAMILIES:
        able = [{q.problem.phase for q in some if family.refusal(q.problem, SM_90) is None} for some in (every, few)]
        assert able[0] == able[1], family.NAME


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_claimed(tmp_path: Path) -> None:
    results = tmp_path / "kernels.json"
    done = run("--results", str(results))
    assert done.returncode == 2 and "nothing was measured" in done.stderr
    assert not results.exists()


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import kernel_measure

    from convgen.tune import bind

    whole = bind.load_text

    def interpreted(text: str) -> ModuleType:
        module = whole(text)
        module.launch = launch
        return module

    monkeypatch.setattr(bind, "load_text", interpreted)
    monkeypatch.setattr(kernel_measure, "floor_launch", lambda device, programs: lambda: None)
    monkeypatch.setattr(kernel_measure, "race", partial(race, rounds=2))
    return kernel_measure


class Watch:
    """A clock for a CPU."""

    device = "cpu"

    def sync(self) -> None: ...

    def alive(self) -> bool:
        return True

    def lap(self, replays: Sequence[Callable[[], object]]) -> list[float]:
        found: list[float] = []
        for replay in replays:
            start = time.perf_counter()
            replay()
            found.append(time.perf_counter() - start)
        return found

    def capture(self, call: Callable[[], object], launches: int) -> tuple[Callable[[], object], bool]:
        return call, False


@pytest.mark.parametrize("phase", ["forward", "backward_data", "backward_filter"])
def test_candidates_are_checked_and_timed(measuring: Any, phase: str, tmp_path: Path) -> None:
    dims = (LocalDim("H", 4, 4, 3, 1, 1, 1), LocalDim("W", 4, 3, 3, 1, 1, 1))
    p = three_by_three(phase, batch=1, channels=8, filters=16, dims=dims)
    names = [f.NAME for f in FAMILIES]
    found = measuring.candidates(p, read_target("cuda").known(), names, 0)
    found = found if ALL else found[::2]  # formats in turn
    record = measuring.measure(p, "key", found, {}, Watch(), tmp_path / "marker")
    assert not record["left_out"]
    assert {r["family"] for r in record["kernels"].values()} >= {"pointer"}
    assert len(record["aten"]) == 2 and all(r["us"] > 0 for r in record["kernels"].values())
    assert not (tmp_path / "marker").exists()


def test_a_wrong_kernel_is_left_out(measuring: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = three_by_three("forward", 5, 6, channels=16, filters=16)
    whole = measuring.kernel_module
    monkeypatch.setattr(measuring, "kernel_module", lambda ks: whole(ks).replace("range(9 * ", "range(8 * "))
    found = measuring.candidates(p, read_target("cuda").known(), ["pointer"], 0)
    record = measuring.measure(p, "key", found, {}, Watch(), tmp_path / "marker")
    assert not record["kernels"] and all("Wrong" in cause for cause in record["left_out"].values())
