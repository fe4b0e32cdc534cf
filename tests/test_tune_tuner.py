"""The tuner on this CPU: what is wrong, dies or hangs never wins; what was measured is kept, whatever ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from generate import DRAWS

from convgen.kernels.config import parse_config
from convgen.kernels.problem import LocalDim, Problem
from convgen.spec.target import CPU, Target
from convgen.tune.candidates import Candidate, candidates
from convgen.tune.clock import CpuClock, ceilings
from convgen.tune.database import Ceilings, Entry, read_database, update
from convgen.tune.device import Device, this_cpu, versions
from convgen.tune.key import key_of
from convgen.tune.trials import Trial, append, read_trials
from convgen.tune.tuner import Outcome, Tuner, _winner
from convgen.tune.wanted import Use, Wanted
from convgen.tune.worker import Bench

DIM = LocalDim("H", 8, 8, 3, 1, 1, 1)
PROBLEM = Problem(
    phase="forward", batch=2, channels=5, filters=6, dims=(DIM, replace(DIM, name="W")), dtype="float32",
    memory_format="contiguous",
)  # fmt: skip
ONE = Wanted(PROBLEM, [Use("layer", "forward")])
DEVICE = Device("Test CPU, 1 thread", "cpu", 1)
CEILINGS = Ceilings(flops_per_s={"float32": 1e13}, bytes_per_s=1e13, floor_us=0.1)
PLANTED = {
    "wrong": "def forward(x, w, bias, padding, shape, groups):\n    return x.new_zeros(shape)\n",
    "crashed": "import os\n\ndef forward(*given):\n    os.abort()\n",
    "hung": "def forward(*given):\n    while True:\n        pass\n",
    "error": "def forward(*given):\n    raise MemoryError('of no use')\n",
}


def tuner(folder: Path, view: object, **given: object) -> Tuner:
    """A quick one, with ceilings as if they were measured."""
    update(folder / "d.json", DEVICE, {}, CEILINGS)
    given = {"effort": "quick"} | given
    return Tuner(DEVICE, CPU, folder / "d.json", folder / "t.jsonl", view, **given)  # type: ignore[arg-type]


class Recorder:
    """A view: label -> cause of what failed, and all labels that were tried."""

    def __init__(self) -> None:
        self.causes: dict[str, str] = {}
        self.labels: list[str] = []

    def begin(self, wanted: Sequence[Wanted]) -> None: ...
    def problem(self, wanted: Wanted, count: int, limit: int, aten_us: float | None) -> None: ...
    def racing(self, count: int) -> None: ...
    def done(self, outcome: Outcome) -> None: ...

    def tried(self, candidate: Candidate, us: float | None, cause: str, said: str) -> None:
        self.labels.append(candidate.label)
        if us is None:
            self.causes[candidate.label] = cause
            assert said


def planted(problem: Problem, target: Target) -> list[Candidate]:
    """A few legal candidates, and one of each kind that must not win, which the model ranks first."""
    some = candidates(problem, target)[:3]
    bad = [
        Candidate(problem, parse_config(f"product whole={i}"), target, given=text)
        for i, text in enumerate(PLANTED.values(), 2)
    ]
    return [*bad, *some]


def test_what_is_wrong_or_dies_or_hangs_is_reported_and_never_wins(tmp_path: Path) -> None:
    """A full search measures all seven; a quick one leaves one out, and which depends on the times of the others."""
    view = Recorder()
    (outcome,) = tuner(tmp_path, view, legal=planted, limit_s=5.0, effort="full").run([ONE])
    assert outcome.status == "tuned" and outcome.entry is not None
    causes = {c.label: cause for c, cause in zip(planted(PROBLEM, CPU), PLANTED, strict=False)}
    assert view.causes | causes == view.causes and outcome.failures.keys() >= PLANTED.keys()
    assert outcome.entry.kernel in {c.label for c in candidates(PROBLEM, CPU)[:3]}
    kept = {t.kernel: t.cause for t in read_trials(tmp_path / "t.jsonl")}
    assert {label: kept[label] for label in view.causes} == view.causes
    made = read_database(tmp_path / "d.json")
    assert made is not None and made.entries == {key_of(PROBLEM): outcome.entry}
    assert made.ceilings is not None and outcome.entry.share > 0


def test_a_kernel_that_is_right_only_once_does_not_win(tmp_path: Path) -> None:
    """It passes the first check, on operands that the final one does not use, and is fast."""
    slow = candidates(PROBLEM, CPU)[1]
    text = slow.text.replace("def forward(", "seen = {}\n\n\ndef forward(")
    lie = "    if not seen.setdefault('x', x).equal(x):\n        return x.new_zeros(shape)\n"
    text = text.replace("    y = torch.empty(", lie + "    y = torch.empty(")
    assert text != slow.text
    cheat = Candidate(PROBLEM, slow.config, CPU, given=text)
    plain = candidates(PROBLEM, CPU)[0]
    (outcome,) = tuner(tmp_path, Recorder(), legal=lambda p, t: [plain, cheat]).run([ONE])
    assert outcome.entry is not None and outcome.entry.kernel == plain.label
    assert outcome.failures["wrong"] == 1
    assert [t.cause for t in read_trials(tmp_path / "t.jsonl") if t.kernel == cheat.label] == ["", "wrong"]


def test_what_was_measured_before_is_not_measured_again(tmp_path: Path) -> None:
    list(tuner(tmp_path, Recorder()).run([ONE]))
    (tmp_path / "d.json").unlink()
    view = Recorder()
    (outcome,) = tuner(tmp_path, view).run([ONE])
    assert view.labels == [] and outcome.status == "tuned" and outcome.resumed == outcome.entry.tried  # type: ignore[union-attr]
    (again,) = tuner(tmp_path, view).run([ONE])
    assert again.status == "kept" and again.entry == outcome.entry


def test_measurements_of_other_versions_and_templates_are_not_used(tmp_path: Path) -> None:
    plain = candidates(PROBLEM, CPU)[0]
    for given, source in (({"torch": "1.0.0"}, plain.source), ({"torch": "2.13.0"}, "0" * 12)):
        append(tmp_path / "t.jsonl", Trial(key_of(PROBLEM), plain.label, 1e-3, "", "", given, source))
    (outcome,) = tuner(tmp_path, Recorder(), legal=lambda p, t: [plain]).run([ONE])
    assert outcome.resumed == 0


def test_without_time_nothing_is_claimed(tmp_path: Path) -> None:
    (outcome,) = tuner(tmp_path, Recorder(), seconds=1e-9).run([ONE])
    assert outcome.status == "not reached" and outcome.entry is None


def test_a_short_search_measures_what_won_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its trials, an entry of few measurements would give way to ATen's plain call, raced alone."""
    won = candidates(PROBLEM, CPU)[-1]
    entry = Entry(
        kernel=won.label, ms=0.5, p20=0.4, p80=0.6, aten_ms=0.7, ratio=1.4, share=0.5, bound="compute", error=1e-7,
        tried=1, of=30, effort="quick", versions=versions(CPU), source=won.source,
    )  # fmt: skip
    view = Recorder()
    time_s = lambda: float(len(view.labels))  # noqa: E731  time is up with the first measurement
    monkeypatch.setattr("convgen.tune.tuner.time", SimpleNamespace(monotonic=time_s))
    made = tuner(tmp_path, view, seconds=0.5)
    update(made.database, DEVICE, {key_of(PROBLEM): entry})
    (outcome,) = made.run([ONE])
    assert outcome.status == "tuned" and view.labels == [won.label]


def record(us: float, beats: float, against: float) -> dict[str, float]:
    return {"us": us, "beats": beats, "against": against}


def test_ties_go_to_aten() -> None:
    first, second = candidates(PROBLEM, CPU)[1:3]
    aten = {"us": 100.0}
    clear = {first.label: record(80.0, 1.0, 1.25), second.label: record(90.0, 1.0, 1.1), "ATen": aten}
    assert _winner([first, second], clear, CPU) == (first.label, clear[first.label])
    for near in (record(99.0, 1.0, 1.01), record(80.0, 0.6, 1.25), record(120.0, 0.0, 0.8)):
        assert _winner([first], {first.label: near, "ATen": aten}, CPU) == ("ATen", aten)
    wrong = {first.label: {"cause": "wrong"}, "ATen": aten}
    assert _winner([first], wrong, CPU) == ("ATen", aten)
    assert _winner([], {}, CPU) is None


LAYER = """name: layer
layer: conv2d
input: [4, 12, 24, 24]
out_channels: 20
kernel_size: 3
padding: 1
grid: {N: 2}
algorithm: sample
"""


# The command, which measures three candidates, and then waits for its end.
UNTIL = """
import time
from convgen.commands import main as cli
from convgen.tune import tuner

append, left = tuner.append, iter((2, 1, 0))

def held(*given):
    append(*given)
    if next(left) == 0:
        while True:
            time.sleep(0.01)

tuner.append = held
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL] if DRAWS <= 1 else [signal.SIGINT, signal.SIGKILL])
def test_ended_in_between_it_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "layer.yaml"
    file.write_text(LAYER)
    words = ["tune", str(file), "--threads", "1", "--effort", "quick", "--json"]
    command = [sys.executable, "-m", "convgen.cli", *words]
    environment = os.environ | {"CONVGEN_CACHE": str(tmp_path)}
    device = this_cpu(1)
    update(tmp_path / "devices" / device.file_name, device, {}, CEILINGS)
    trials = tmp_path / "trials" / f"{device.file_name}l"
    held = [sys.executable, "-c", UNTIL, *words]
    running = subprocess.Popen(held, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True)
    while (count := len(list(read_trials(trials)))) < 3:
        assert running.poll() is None, running.communicate()
        time.sleep(0.05)
    running.send_signal(number)
    out, error = running.communicate(timeout=1800)
    assert running.returncode == (130 if number == signal.SIGINT else -number), error
    if number == signal.SIGINT:
        assert "goes on" in error and isinstance(json.loads(out), list)
    assert len(list(read_trials(trials))) == count == 3
    done = subprocess.run(command, capture_output=True, env=environment, text=True, timeout=1800, check=True)
    results = json.loads(done.stdout)
    assert [r["status"] for r in results].count("tuned") + [r["status"] for r in results].count("kept") == 3
    assert sum(r["resumed"] for r in results) + sum(r["tried"] for r in results if r["status"] == "kept") >= count
    made = read_database(tmp_path / "devices" / device.file_name)
    assert made is not None and len(made.entries) == 3
    again = subprocess.run(command, capture_output=True, env=environment, text=True, timeout=1800, check=True)
    assert [r["status"] for r in json.loads(again.stdout)] == ["kept"] * 3


def test_one_round_alone_is_enough_to_see_who_breaks_a_race() -> None:
    """The survivors of a race that broke are raced alone, one round each: two laps give percentiles, one none."""
    bench = Bench(CPU, CpuClock(torch.get_num_threads()))
    bench.open(PROBLEM, 0)
    one = candidates(PROBLEM, CPU)[1]
    found = bench.race(((one.label, one.text),), 1, 1, 0.0)
    assert found[one.label]["p20"] <= found[one.label]["us"] <= found[one.label]["p80"]


def test_a_small_product_of_one_type_leaves_the_others_large(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    multiply = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        made.append(tuple(a.shape))
        return multiply(a, b, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    ceilings(CpuClock(torch.get_num_threads()), ("float16", "float32"), size=300, elements=64)
    assert set(made) == {(256, 256), (300, 300)}
