"""bench/networks_gpu.py without a GPU: a result comes back, whatever becomes of the others; errors are the largest."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import bench_script

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return bench_script("networks_gpu")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('{\"ok\": 1}')", {"ok": 1}),
        ("import time; time.sleep(3600)", {"failed": "nothing after 1 s", "said": []}),
        ("import os; os.kill(os.getpid(), 9)", {"failed": "exit code -9", "said": []}),
        ("raise SystemExit('no device')", {"failed": "exit code 1", "said": ["no device"]}),
    ],
    ids=["ends", "hangs", "dies", "fails"],
)
def test_a_task_that_does_not_end_well_says_why(script: Any, program: str, said: dict[str, Any]) -> None:
    found = script.ended([sys.executable, "-c", program], 1.0 if "sleep" in program else 600.0)
    assert found == said


def test_what_failed_is_tried_once_more_and_the_rest_goes_on(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def ended(command: list[str], timeout_s: float) -> dict[str, Any]:
        name, task = command[command.index("--networks") + 1], command[command.index("--task") + 1]
        ran.append(f"{name} {task}")
        fails = (name, task) in (("unet", "check"), ("resnet50", "package"))
        if fails:
            return {"failed": "exit code -9", "said": []}
        of = {
            "package": {"import_s": 1.0, "compile_s": 1.0, "target": "cpu"},
            "kernels": {"compiled": 1, "found": 2, "seconds": 1.0},
        }
        step = {"ms": 1.0, "ratio": 0.5, "beside_ms": 2.0, "host_ms": 1.0, "first_s": 1.0, "peak_MiB": None}
        return of.get(task, step)

    monkeypatch.setattr(script, "ended", ended)
    path = tmp_path / "found.json"
    given = Namespace(networks=["resnet50", "unet"], dry_run=True, budget=600.0, timeout=10.0)
    assert script.supervise(given, path) == 0
    alone = [t for t in script.TASKS if t not in script.WANT_PACKAGE]
    assert ran == [f"resnet50 {t}" for t in alone] + [f"unet {t}" for t in script.TASKS]
    ran.clear()
    for _ in range(2):
        assert script.supervise(given, path) == 0
    assert ran == ["resnet50 package", "unet check"]
    kept = json.loads(path.read_text(encoding="utf-8"))["dry run"]
    assert set(kept["unet"]) == {*script.TASKS} and kept["unet"]["check"]["tries"] == script.TRIES
    assert script.supervise(Namespace(**{**vars(given), "networks": ["kl_decoder"], "budget": 0.0}), path) == 1


def test_errors_are_by_the_largest_entry(script: Any) -> None:
    truth = {"output": torch.tensor([2.0, -4.0]), "a": torch.tensor([10.0]), "b": torch.tensor([1e-6])}
    found = {"output": torch.tensor([2.0, -3.0]), "a": torch.tensor([10.0]), "b": torch.tensor([1e-3])}
    off = script.errors(found, truth)
    assert off["output"] == (0.25, "output")
    assert off["gradients"][1] == "b" and off["gradients"][0] == pytest.approx((1e-3 - 1e-6) / 1e-2)
    with pytest.raises(RuntimeError, match="no gradient of b"):
        script.errors({"output": found["output"], "a": found["a"]}, truth)


def test_the_first_hours_rehearsal_has_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    first_hour = bench_script("first_hour")
    dry, whole = (first_hour.stages(tmp_path, 60.0, 240.0, d) for d in (True, False))
    assert [s.name for s in dry] == ["chosen problems", "networks"]
    assert [s.name for s in whole] == ["chosen problems", "networks", "tuned entries", "all problems"]
    assert "--dry-run" in dry[1].command and "--dry-run" not in whole[1].command
    assert dry[1].command[dry[1].command.index("--timeout") + 1] == "216.0"
    lines: list[str] = []
    stage = first_hour.Stage("hangs", (sys.executable, "-c", "import time; time.sleep(3600)"), tmp_path / "none", 60.0)
    assert not first_hour.run_stage(stage, first_hour.time.monotonic() + 600.0, 0.2, lines.append)
    assert lines[-1] == "== hangs: given up, 3 runs found nothing new"
