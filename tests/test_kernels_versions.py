"""What versions of Triton make of the same kernels: counts by the one at hand, and beside another where one is there
(`pip install --target build/triton36 --no-deps triton==3.6.0`, or another folder in CONVGEN_OTHER_TRITON)."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from scripts import bench_script

study = bench_script("kernel_versions")
OTHER = Path(os.environ.get("CONVGEN_OTHER_TRITON", str(Path(__file__).parents[1] / "build" / "triton36")))


def least(name: str, rounds_in_copies: bool) -> tuple[float, float]:
    """Of a problem and phase, the share of the matrix units by issue, and with shared memory, that a step allows.

    Versions before 3.7 issue up to a half more where a step of a filter gradient makes several taps.
    """
    filters = name.endswith("backward_filter")
    by_taps = 0.6 if filters and not rounds_in_copies else 0.9
    match name.split():
        case ["4", "parts", *_]:
            return (0.6, 0.6) if filters else (0.25, 0.2)
        case ["7x7", *_]:
            return (0.6, 0.6) if filters else (0.9, 0.75) if name.endswith("forward") else (0.25, 0.2)
        case ["4", "rows", *_]:
            return min(0.75 if filters else 0.9, by_taps), 0.5
        case ["1x1", "backward_filter"]:
            return 0.3, 0.2
        case ["3x3", "of", "56x56", _]:
            return 0.9, 0.95
        case [_, "tfloat32", _] | [_, _, "tfloat32", _] if filters:
            return (0.9 if rounds_in_copies else 0.65), 0.5
        case [_, "tfloat32", _] | [_, _, "tfloat32", _]:
            return 0.9, 0.8 if rounds_in_copies else 0.4
        case [_, "float32", _] | [_, _, "float32", _]:
            return 0.9, 0.9
        case _:
            return by_taps, 0.4


def check(found: Mapping[str, Any]) -> None:
    rounds_in_copies = tuple(int(n) for n in found["triton"].split(".")[:2]) >= (3, 7)
    for name, row in found["kernels"].items():
        issue, shared = least(name, rounds_in_copies)
        assert row["spilled"] == 0 and row["narrowest"] == 16, name
        assert row["issue"] >= issue and row["shared"] >= shared, (name, row)


PROBLEMS = {f"{name} {p.phase}": (name, p) for name, p in study.problems()}


@pytest.mark.parametrize("name", PROBLEMS)
def test_counts(name: str) -> None:
    check(study.counts([PROBLEMS[name]]))


@pytest.mark.slow
def test_counts_by_another_version() -> None:
    if not OTHER.is_dir():
        pytest.skip(f"no other triton in {OTHER}")
    here, there = study.counts(), study.of_other(OTHER)
    check(here)
    assert there["triton"] != here["triton"]
    check(there)
    assert {n: r["kernel"] for n, r in there["kernels"].items()} == {n: r["kernel"] for n, r in here["kernels"].items()}


def test_what_differs_is_told() -> None:
    shares = {"issue": 1.0, "shared": 0.8, "waits": 0.7}
    row = {"kernel": "box", "spilled": 0, "narrowest": 16, "instructions": 100, "us": 9.0} | shares
    here = {"triton": "3.7.1", "kernels": {"a forward": row, "b forward": dict(row)}}
    there = json.loads(json.dumps(copy.deepcopy(here) | {"triton": "3.6.0"}))
    _, last = study.compared(here, there)
    assert last == "2 of 2 differ by less than a tenth; 2 have the same sizes; 0 spill; copies of 16 bytes at least"
    there["kernels"]["b forward"] |= {"shared": 0.5, "spilled": 8, "kernel": "pointer", "narrowest": 4}
    head, line, last = study.compared(here, there)
    assert head.startswith("triton 3.7.1, 3.6.0 ") and line.split()[:2] == ["b", "forward"] and "0.80, 0.50" in line
    assert last == "1 of 2 differ by less than a tenth; 1 have the same sizes; 1 spill; copies of 4 bytes at least"


def test_problems_are_sixteen_a_phase() -> None:
    assert len(PROBLEMS) == 48
