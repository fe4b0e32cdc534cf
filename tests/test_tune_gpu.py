"""The tuner's way for a GPU, without one: kernels compiled for sm_90, and interpreted where they would be launched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sampling import ALL
from test_tune_tuner import Recorder

from convgen.kernels.config import parse_config
from convgen.kernels.families import of_gpu
from convgen.kernels.problem import LocalDim, Problem
from convgen.spec.target import read_target
from convgen.tune import bind, tuner
from convgen.tune.ahead import prepare
from convgen.tune.bench_gpu import GpuBench
from convgen.tune.candidates import Candidate, candidates, ranked
from convgen.tune.clock import CpuClock
from convgen.tune.database import Ceilings, update
from convgen.tune.device import Device
from convgen.tune.model import assumed_ceilings, bounds_us, modelled_us
from convgen.tune.operands import halo_regions
from convgen.tune.wanted import Use, Wanted
from convgen.verify.interpreter import launch

pytestmark = pytest.mark.usefixtures("forked")

SM_90 = read_target("cuda:sm_90").known()
DEVICE = Device("Test GPU", "cuda:sm_90")
CEILINGS = Ceilings(flops_per_s={"bfloat16": 1e15, "float32": 1e14}, bytes_per_s=1e13, floor_us=0.1)
DIMS = (LocalDim("H", 5, 5, 3, 1, 1, 1), LocalDim("W", 6, 6, 3, 1, 1, 1))


def problem(**given: Any) -> Problem:
    values: dict[str, Any] = {
        "phase": "forward", "batch": 2, "channels": 16, "filters": 16, "dims": DIMS, "dtype": "float32",
        "memory_format": "channels_last",
    }  # fmt: skip
    return Problem(**(values | given))


class InProcess:
    """The measuring process's bench, here, with interpreted kernels."""

    def __init__(self, *given: object) -> None:
        self.bench = GpuBench(CpuClock(1))

    def open(self, p: Problem) -> dict[str, float]:
        return self.bench.open(p, "", 0)["aten_us"]

    def attempt(self, candidate: Candidate, best_us: float) -> dict[str, Any]:
        return self.bench.attempt(candidate.label, candidate.text, best_us)

    def race(
        self, found: Sequence[Candidate], rounds: int, seed: int, seconds: float, calls: int = 0, settle: object = ()
    ) -> dict[str, Any]:
        return self.bench.race(tuple((c.label, c.text) for c in found), rounds, seed, 0.0)

    def close(self) -> None: ...


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bind.load_text

    def load(text: str) -> ModuleType:
        module = whole(text)
        module.launch = launch  # type: ignore[attr-defined]
        return module

    monkeypatch.setattr(bind, "load_text", load)
    monkeypatch.setattr(tuner, "Runner", InProcess)


def few(wrong: bool) -> Callable[[Problem, Any], list[Candidate]]:
    """The pointer family's default and ATen; one more that skips a tap."""

    def legal(p: Problem, target: Any) -> list[Candidate]:
        found = candidates(p, target)
        first = [
            next(c for c in found if c.config.family == "pointer"),
            *(c for c in found if c.config.family == "aten"),
        ]
        pointer = first[0]
        bad = [
            replace(
                pointer,
                config=parse_config(f"{pointer.label} split=9"),
                given=pointer.text.replace("range(9 * ", "range(8 * "),
            )
        ]
        return [*first, *(bad if wrong else [])]

    return legal


CASES = {
    "whole": problem(bias=True),
    "parts": problem(x_parts=2, y_parts=2),
    "rim": problem(phase="backward_data", rim=2),
    "backward_filter": problem(phase="backward_filter", dtype="bfloat16"),
}


@pytest.mark.parametrize("name", CASES if ALL else ["parts", "backward_filter"])
def test_a_problem_is_tuned(interpreted: None, tmp_path: Path, name: str) -> None:
    p = CASES[name]
    database, wrong = tmp_path / "d.json", name in ("whole", "parts")
    update(database, DEVICE, {}, CEILINGS)
    made = tuner.Tuner(
        DEVICE, SM_90, database, tmp_path / "t.jsonl", Recorder(), effort="quick", jobs=1, legal=few(wrong)
    )
    (outcome,) = made.run([Wanted(p, [Use("layer", p.phase)])])
    assert outcome.status == "tuned" and outcome.entry is not None, outcome
    assert outcome.entry.aten_ms is not None and outcome.entry.versions.keys() == {"torch", "triton"}
    assert outcome.failures["wrong"] == wrong and sum(outcome.failures.values()) == wrong
    assert outcome.entry.kernel in {c.label for c in few(False)(p, SM_90)}


def test_what_spills_or_does_not_fit_is_dropped_before_it_runs() -> None:
    p = problem(dtype="float32", channels=64, filters=256, batch=32)
    spilling = Candidate(p, parse_config("pointer BP=128 BF=128 BC=16 warps=4 stages=2"), SM_90)
    large = Candidate(p, parse_config("pointer BP=64 BF=64 BC=64 warps=4 stages=8"), SM_90)
    wrong = Candidate(p, parse_config("pointer BP=64 BF=48 BC=16 warps=4 stages=2"), SM_90)
    assert prepare(spilling.kernel, fill=False).cause == "spills"
    assert prepare(large.kernel, fill=False).cause == "fit"
    assert prepare(wrong.kernel, fill=False).cause == "compile"
    good = prepare(Candidate(p, parse_config("pointer BP=64 BF=64 BC=16 warps=4 stages=2"), SM_90).kernel, fill=False)
    assert not good.cause and dict(good.facts)["registers"] > 0


def test_a_halo_has_regions_that_cover_the_window_once() -> None:
    p = problem(rim=0, dims=tuple(replace(d, x=9, y=9) for d in DIMS))
    for boxes in (0, 1, 2, 3, 5, 8):
        regions = halo_regions(replace(p, rim=boxes), (9, 9))
        assert len(regions) == boxes + 1
        cells = [(h, w) for (a, b), (c, d) in regions for h in range(a, b) for w in range(c, d)]
        assert len(cells) == len(set(cells)) == 81


@pytest.mark.parametrize("phase", ["forward", "backward_data", "backward_filter"])
def test_every_product_is_counted(phase: str) -> None:
    """Programs, steps and tiles cover the products of the problem, and not many times."""
    p = problem(phase=phase, batch=16, channels=64, filters=48, dims=tuple(replace(d, x=14, y=14) for d in DIMS))
    products = p.flops // 2
    seen = set[str]()
    for c in candidates(p, SM_90):
        if c.config.family != "aten":
            w = of_gpu(c.config).work(p, c.config)
            made = w.programs * w.steps * w.multiplied
            assert made >= products and math.prod(c.config.tile.values()) > 0
            seen.add(c.config.family)
            assert (
                modelled_us(p, c.config, SM_90, assumed_ceilings(SM_90))
                >= bounds_us(p, assumed_ceilings(SM_90))["floor"]
            )
    assert "pointer" in seen


def test_the_model_prefers_enough_programs_and_no_idle_tiles() -> None:
    """Of two configurations the obviously worse one is ranked behind."""
    dims = tuple(replace(d, x=14, y=14) for d in DIMS)
    p = problem(dtype="bfloat16", batch=32, channels=256, filters=256, dims=dims)
    order = [c.label for _, c in ranked(candidates(p, SM_90), assumed_ceilings(SM_90))]
    assert order.index("pointer BP=128 BF=128 BC=64 warps=8 stages=3") < order.index(
        "pointer BP=16 BF=16 BC=16 warps=4 stages=2"
    )
    narrow = replace(p, filters=16)
    assert not any("BF=64" in c.label for _, c in ranked(candidates(narrow, SM_90), assumed_ceilings(SM_90)))
