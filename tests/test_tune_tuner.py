"""The tuner on this CPU: what is wrong, dies or hangs never wins; what was measured is kept, whatever ends it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from sampling import ALL

from convgen.commands.main import cli
from convgen.kernels.config import parse_config
from convgen.kernels.problem import LocalDim, Problem
from convgen.spec.target import CPU, Target
from convgen.tune.bench_cpu import ATEN, CpuBench
from convgen.tune.candidates import Candidate, candidates
from convgen.tune.claims import Claims
from convgen.tune.clock import CpuClock, ceilings
from convgen.tune.database import Ceilings, Entry, read_database, update
from convgen.tune.device import Device, this_cpu, versions
from convgen.tune.intervals import LEAST, Interval, of_ratios, of_values
from convgen.tune.key import key_of
from convgen.tune.replay import module_of
from convgen.tune.trials import Trial, append, read_trials
from convgen.tune.tuner import Outcome, Tuner
from convgen.tune.verdict import against_family, challenger, judged, rivals
from convgen.tune.wanted import Use, Wanted
from convgen.tune.weigh import Weighed

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
        self.said: dict[str, str] = {}
        self.labels: list[str] = []

    def begin(self, found: Sequence[Weighed]) -> None: ...
    def problem(self, wanted: Wanted, count: int, limit: int, aten_us: float | None) -> None: ...
    def racing(self, count: int) -> None: ...
    def done(self, outcome: Outcome) -> None: ...

    def tried(self, candidate: Candidate, us: float | None, cause: str, said: str) -> None:
        self.labels.append(candidate.label)
        if us is None:
            self.causes[candidate.label], self.said[candidate.label] = cause, said
            assert said


def planted(problem: Problem, target: Target) -> list[Candidate]:
    """A few legal candidates, and one of each kind that must not win, which the model ranks first."""
    some = candidates(problem, target)[:3]
    bad = [
        Candidate(problem, parse_config(f"product whole={i}"), target, given=text)
        for i, text in enumerate(PLANTED.values(), 2)
    ]
    return [*bad, *some]


@pytest.mark.usefixtures("forked")
def test_what_is_wrong_or_dies_or_hangs_is_reported_and_never_wins(tmp_path: Path) -> None:
    """A full search measures all seven; a quick one leaves one out, and which depends on the times of the others."""
    view = Recorder()
    (outcome,) = tuner(tmp_path, view, legal=planted, limit_s=1.5, effort="full").run([ONE])
    assert outcome.status == "tuned" and outcome.entry is not None
    causes = {c.label: cause for c, cause in zip(planted(PROBLEM, CPU), PLANTED, strict=False)}
    assert view.causes | causes == view.causes and outcome.failures.keys() >= PLANTED.keys()
    assert outcome.entry.kernel in {c.label for c in candidates(PROBLEM, CPU)[:3]}
    kept = {t.kernel: t.cause for t in read_trials(tmp_path / "t.jsonl")}
    assert {label: kept[label] for label in view.causes} == view.causes
    made = read_database(tmp_path / "d.json")
    assert made is not None and made.entries == {key_of(PROBLEM): outcome.entry}
    assert made.ceilings is not None and outcome.entry.share > 0


# What a kernel may do beside its convolution, and how it is named for it; {} is a right one.
HEAD = "import os, sys, time, threading\n\nseen = dict()\n\n\n"
SLY = {
    "wrong once in fifty": ("    seen['n'] = seen.get('n', 0) + 1\n    if seen['n'] == 50:\n        y += 1\n", "error"),
    "a remembered result": ("    y = seen.setdefault(x.data_ptr(), y)\n", "error"),
    "writes before x": ("    x.as_strided((1,), (1,), x.storage_offset() - 1).zero_()\n", "written outside of x"),
    "writes behind w": (
        "    w.as_strided((1,), (1,), w.storage_offset() + w.numel()).zero_()\n", "written outside of w"),
    "writes to x": ("    x.view(-1)[:1].add_(1)\n", "written to x"),
    "switches mkldnn off": ("    torch.backends.mkldnn.set_flags(False)\n", "changed mkldnn of"),
    "takes more threads": ("    torch.set_num_threads(3)\n", "changed threads of"),
    "slows others down": (
        "    mm = torch.mm\n    torch.mm = lambda *a, **k: (time.sleep(0.01), mm(*a, **k))[1]\n",
        "changed torch.mm of"),
    "forks, and comes back twice": ("    os.fork()\n", "started a process"),
    "leaves a process behind": (
        "    if not os.fork():\n        time.sleep(1000)\n", "started a process"),
    "has it done by another": (
        "    if not (pid := os.fork()):\n        os._exit(0)\n    os.waitpid(pid, 0)\n", "started a process"),
    "answers for itself": (
        "    for fd in range(3, 60):\n        try:\n            os.write(fd, b'\\0\\0\\0\\x04nope')\n"
        "        except OSError:\n            pass\n    y += 1\n", ""),
}  # fmt: skip


def test_what_is_sly_loses_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks twice as fast as ATen, so that each gets as far as it can."""
    plain, fair, *others = candidates(PROBLEM, CPU)
    body = fair.text.replace("def forward(", "def honest(")
    bad: dict[str, Candidate] = {}
    for (name, (lines, _)), config in zip(SLY.items(), others, strict=False):
        text = f"{body}\n\n{HEAD}def forward(x, w, bias, padding, shape, groups):\n"
        text += f"    y = honest(x, w, bias, padding, shape, groups)\n{lines}    return y\n"
        bad[name] = Candidate(PROBLEM, config.config, CPU, given=text)
    monkeypatch.setattr("convgen.tune.tuner.gain_of", lambda *given: Interval(2.0, 2.0, 2.0))
    view = Recorder()
    (outcome,) = tuner(tmp_path, view, legal=lambda p, t: [plain, *bad.values()], effort="full").run([ONE])
    assert outcome.status == "tuned" and outcome.entry is not None and outcome.entry.kernel == plain.label
    for name, one in bad.items():
        assert view.causes[one.label] in ("wrong", "crashed"), name
        assert SLY[name][1] in view.said[one.label], (name, view.said[one.label])


def test_what_takes_no_time_computes_nothing() -> None:
    """A result that was there before: less than a launch of nothing is no time."""
    bench = CpuBench(1)
    bench.floor_us = 1e6
    text, one = module_of(PROBLEM, "untuned"), candidates(PROBLEM, CPU)[1]
    assert text is not None
    bench.open(PROBLEM, text, 0)
    assert "a launch of nothing takes" in bench.attempt(one.label, one.text, 1e9)["said"]
    found = bench.race(((one.label, one.text),), 1, 1, 0.0)
    assert found[one.label]["cause"] == "wrong"


def test_what_is_timed_is_what_a_module_runs(tmp_path: Path) -> None:
    """Operands require gradients as in training; none comes twice; no gradients are made; all are cold and right."""
    seen = tmp_path / "seen"
    text = candidates(PROBLEM, CPU)[1].text.replace("def forward(", "def honest(") + (
        "\n\ndef forward(x, w, bias, padding, shape, groups):\n"
        f"    with open({str(seen)!r}, 'a') as file:\n"
        "        print(x.requires_grad, w.requires_grad, torch.is_grad_enabled(), torch.get_num_threads(),\n"
        "              x.data_ptr(), float(w.sum()), file=file)\n"
        "    return honest(x, w, bias, padding, shape, groups)\n"
    )
    bench, untuned = CpuBench(1), module_of(PROBLEM, "untuned")
    assert untuned is not None
    bench.open(PROBLEM, untuned, 0)
    assert "us" in bench.attempt("one", text, 1e9)
    lines = [line.split() for line in seen.read_text().splitlines()]
    assert {tuple(line[:4]) for line in lines} == {("True", "True", "False", "1")}
    assert len({line[5] for line in lines}) == len(lines) > 4
    assert len({line[4] for line in lines}) > 4


@pytest.mark.usefixtures("forked", "brief")
def test_what_was_measured_before_is_not_measured_again(tmp_path: Path) -> None:
    list(tuner(tmp_path, Recorder(), legal=first_three).run([ONE]))
    (tmp_path / "d.json").unlink()
    view = Recorder()
    (outcome,) = tuner(tmp_path, view, legal=first_three).run([ONE])
    assert view.labels == [] and outcome.status == "tuned" and outcome.resumed == outcome.entry.tried  # type: ignore[union-attr]
    (again,) = tuner(tmp_path, view, legal=first_three).run([ONE])
    assert again.status == ("tuned" if outcome.entry.doubt else "kept")  # type: ignore[union-attr]


@pytest.mark.usefixtures("forked", "brief")
def test_what_is_not_tried_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no time is left for candidates ATen's call stays, and none was tried."""
    monkeypatch.setattr("convgen.tune.tuner.FINALS", 1.0)
    view = Recorder()
    (outcome,) = tuner(tmp_path, view, legal=first_three, seconds=1000.0).run([ONE])
    assert view.labels == [] and outcome.entry is not None
    assert outcome.entry.kernel == "aten" and outcome.entry.tried == 0 and "0 of " in outcome.entry.doubt


@pytest.mark.usefixtures("forked", "brief")
def test_measurements_of_other_versions_and_templates_are_not_used(tmp_path: Path) -> None:
    plain = candidates(PROBLEM, CPU)[0]
    for given, source in (({"torch": "1.0.0"}, plain.source), ({"torch": "2.13.0"}, "0" * 12)):
        append(tmp_path / "t.jsonl", Trial(key_of(PROBLEM), plain.label, 1e-3, "", "", given, source))
    (outcome,) = tuner(tmp_path, Recorder(), legal=lambda p, t: [plain]).run([ONE])
    assert outcome.resumed == 0


def test_without_time_nothing_is_claimed(tmp_path: Path) -> None:
    (outcome,) = tuner(tmp_path, Recorder(), seconds=1e-9).run([ONE])
    assert outcome.status == "not reached" and outcome.entry is None


@pytest.mark.usefixtures("forked", "brief")
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


def between(median: float, off: float = 0.01) -> Interval:
    return Interval(median, median - off, median + off)


@pytest.mark.parametrize(
    ("first", "second", "module", "said"),
    [
        (between(1.01), None, None, ("ATen", False)),  # not worth it
        (between(1.20), between(1.22), between(1.1), ("kernel", False)),
        (between(1.20), between(1.22), between(0.95), ("ATen", False)),  # its module is slower
        (between(1.20), between(1.22), between(1.02, 0.05), ("ATen", True)),  # its module may be faster
        (between(1.20), between(1.00), between(1.1), ("ATen", True)),
        (between(1.20), between(1.60), between(1.1), ("kernel", True)),  # a noise that neither sitting saw
        (between(1.10, 0.15), between(1.1), between(1.1), ("ATen", True)),
        (between(1.03), between(1.03), between(1.02), ("kernel", True)),  # faster, whether worth it nobody knows
    ],
)
def test_what_is_stored_is_what_its_intervals_say(
    first: Interval, second: Interval | None, module: Interval | None, said: tuple[str, bool]
) -> None:
    verdict = judged("kernel", first, second, module)
    assert (verdict.label, bool(verdict.doubt)) == said


def test_of_kernels_that_tie_the_ranking_says_which() -> None:
    slow, fast, other = [100.0] * 9, [80.0] * 9, [81.0] * 9
    records = {"a": {"laps": slow}, "b": {"laps": other}, "c": {"laps": fast}, ATEN: {"laps": slow}}
    assert challenger(records, ("a", "b", "c")) == "b" and challenger(records, ("c", "b", "a")) == "c"
    assert challenger({"a": {"cause": "wrong", "said": ""}, ATEN: records[ATEN]}, ("a",)) is None
    near = {ATEN: {"laps": [82.5] * 9}, "b": {"laps": other}, "c": {"laps": fast}}
    assert challenger(near, ("b", "c")) == "c"  # one that is not worth storing stands for none that is


def test_a_choice_among_kernels_is_sure_where_the_race_says_so() -> None:
    def race(a: float, b: float, off: float = 0.0) -> dict[str, dict[str, list[float]]]:
        """`a` is off in either direction from round to round."""
        return {
            "a": {"laps": [a * (1 + off * (-1) ** i) for i in range(20)]},
            "b": {"laps": [b] * 20},
            ATEN: {"laps": [100.0] * 20},
        }

    order = ("a", "b")
    assert rivals(race(80.0, 81.0), "a", order) == rivals(race(90.0, 80.0), "b", order) == ""
    assert "a may be as fast" in rivals(race(83.0, 80.0, off=0.05), "b", order)
    assert rivals(race(83.0, 80.0, off=0.05), "b", ("b", "a")) == ""  # whatever is ranked behind it may tie
    assert "b may be" in rivals(race(81.0, 80.0, off=0.08), "a", order)
    assert rivals(race(82.0, 80.0), "a", order) == ""  # it stands for a faster one that is as good as tied


def test_on_a_gpu_the_family_is_what_is_to_be_beaten() -> None:
    records = {ATEN: {"laps": [1.0] * 8}, "aten last=1": {"laps": [3.0] * 8}, "aten": {"laps": [2.0] * 8}}
    assert against_family(records) == {ATEN: {"laps": [2.0] * 8, "label": "aten"}}
    assert against_family({ATEN: records[ATEN], "pointer": records["aten"]}) == {"pointer": records["aten"]}


def test_an_interval_holds_the_median_as_often_as_it_says() -> None:
    rng, held = random.Random(0), 0
    for _ in range(400):
        found = of_values([rng.gauss(1.0, 0.1) ** 3 for _ in range(21)])  # skewed, as times are
        held += found.low <= 1.0 <= found.high
    assert held >= 0.99 * 400
    assert of_ratios([2.0] * 10, [1.0] * 12) == Interval(2.0, 2.0, 2.0)


def test_two_tuners_share_a_database(tmp_path: Path) -> None:
    mine, theirs = Claims(tmp_path / "d.json"), Claims(tmp_path / "d.json")
    theirs._me = [theirs._me[0], os.getppid()]
    assert mine.take("one") and mine.take("one") and not theirs.take("one") and theirs.take("two")
    mine.drop("one")
    assert theirs.take("one")
    theirs._me = [theirs._me[0], 2**30]  # a process that is gone
    theirs.drop("one")
    assert theirs.take("three") and mine.take("three")


def first_three(problem: Problem, target: Target) -> list[Candidate]:
    return candidates(problem, target)[:3]


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
import signal
import time
from functools import partial
from convgen.commands import main as cli
from convgen.tune import tuner

signal.signal(signal.SIGINT, signal.default_int_handler)  # which who is started in the background doesn't have
append, left = tuner.append, iter((2, 1, 0))

def held(*given):
    append(*given)
    if next(left) == 0:
        while True:
            time.sleep(0.01)

tuner.append = held
first_three = lambda problem, target: tuner.candidates(problem, target)[:3]
tuner.Tuner = partial(tuner.Tuner, legal=first_three)
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL] if not ALL else [signal.SIGINT, signal.SIGKILL])
@pytest.mark.usefixtures("forked", "brief")
def test_ended_in_between_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    file = tmp_path / "layer.yaml"
    file.write_text(LAYER)
    words = ["tune", str(file), "--threads", "1", "--effort", "quick", "--json"]
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path))
    device = this_cpu(1)
    update(tmp_path / "devices" / device.file_name, device, {}, CEILINGS)
    trials = tmp_path / "trials" / f"{device.file_name}l"
    held = [sys.executable, "-c", UNTIL, *words]
    running = subprocess.Popen(held, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while (count := len(list(read_trials(trials)))) < 3:
        assert running.poll() is None, running.communicate()
        time.sleep(0.05)
    running.send_signal(number)
    out, error = running.communicate(timeout=1800)
    assert running.returncode == (130 if number == signal.SIGINT else -number), error
    if number == signal.SIGINT:
        assert "goes on" in error and isinstance(json.loads(out), list)
    assert len(list(read_trials(trials))) == count == 3
    monkeypatch.setattr("convgen.tune.tuner.Tuner", partial(Tuner, legal=first_three))
    results = json.loads(CliRunner().invoke(cli, words, catch_exceptions=False).stdout)
    assert [r["status"] for r in results] == ["tuned"] * 3
    assert sum(r["resumed"] for r in results) == count
    made = read_database(tmp_path / "devices" / device.file_name)
    assert made is not None and len(made.entries) == 3


def test_a_race_has_the_rounds_that_an_interval_takes() -> None:
    """Also where there is no time: the survivors of a race that broke are raced alone."""
    bench = CpuBench(1)
    text = module_of(PROBLEM, "untuned")
    assert text is not None
    bench.open(PROBLEM, text, 0)
    one = candidates(PROBLEM, CPU)[1]
    found = bench.race(((one.label, one.text),), 1, 1, 0.0)
    assert len(found[one.label]["laps"]) == len(found[ATEN]["laps"]) == LEAST


def test_a_small_product_of_one_type_leaves_the_others_large(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    multiply = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        made.append(tuple(a.shape))
        return multiply(a, b, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    ceilings(CpuClock(torch.get_num_threads()), ("float16", "float32"), size=300, elements=64)
    assert set(made) == {(256, 256), (300, 300)}
