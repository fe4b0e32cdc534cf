"""`convgen bench` on processes: what is counted and named is the program's; nothing here looks at a clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from convgen.algebra.grid import Grid
from convgen.bench.marks import Mark, Recorder, sums
from convgen.bench.report import bench_json, bench_text, bench_trace, farthest, scaled, scaling_text
from convgen.bench.rounds import parts, took
from convgen.bench.run import (
    COMPUTING,
    MOVING,
    PLAIN,
    STEP,
    Beside,
    Effort,
    Subject,
    bench,
    beside,
    timelines_of,
    weak_batch,
)
from convgen.bench.samples import of_samples
from convgen.bench.ways import DDP, MODULE
from convgen.calibrate.team import Team
from convgen.commands.main import cli
from convgen.cost.machines import load_machine
from convgen.cost.network import volume
from convgen.cost.timeline import simulate
from convgen.errors import InputError
from convgen.network_compiler import MEANWHILE, CompiledNetwork, compile_network
from convgen.passes.contract import NetworkPass
from convgen.program.network import label
from convgen.spec.graph_edit import with_dtype
from convgen.spec.network_graph import network_graph
from convgen.spec.network_reader import network_from_dict
from convgen.verify.processes import spawn

ROOT = Path(__file__).resolve().parent.parent
CPU = load_machine("cpu")
NODES: list[dict[str, Any]] = [
    {"name": "a", "kind": "conv", "out_channels": 8, "kernel_size": 3, "padding": 1},
    {"name": "norm", "kind": "batch_norm"},
    {"kind": "relu"},
    {"name": "b", "kind": "conv", "out_channels": 8, "kernel_size": 3, "padding": 1, "bias": True},
    {"kind": "max_pool", "kernel_size": 2},
    {"kind": "flatten"},
    {"name": "fc", "kind": "linear", "out_features": 4},
]
HALOS: tuple[NetworkPass, ...] = (MEANWHILE[2],)


def network(grid: dict[str, int], passes: Sequence[NetworkPass] | None = (), samples: int = 4) -> CompiledNetwork:
    graph = network_graph(network_from_dict({"name": "small", "input": [samples, 4, 16, 16], "nodes": NODES}))
    return compile_network(graph, Grid(tuple(grid.items())), machine=CPU, passes=passes)


@dataclass(frozen=True)
class Bench:
    """What each process runs, and what it gives back as plain data."""

    subjects: tuple[Subject, ...]
    skip: tuple[str, ...] = ()

    def __call__(self, _: int) -> list[dict[str, Any]]:
        team, found = Team(torch.device("cpu")), list[dict[str, Any]]()
        for subject in self.subjects:
            with tempfile.TemporaryDirectory() as folder:
                one = bench(team, subject, Path(folder), CPU, Effort(2, 1, 2), self.skip)
            found.append(bench_json(one) | {"text": bench_text(one), "trace": json.loads(bench_trace(one))})
        return found


def ran(ranks: int, subjects: Sequence[Subject], *skip: str) -> list[dict[str, Any]]:
    first, *others = spawn(Bench(tuple(subjects), skip), ranks)
    for one in others:  # each rank has the same result
        assert json.dumps(one) == json.dumps(first)
    return first


CASES: dict[str, tuple[dict[str, int], Any]] = {
    "samples": ({"N": 2}, None),
    "halos split": ({"H": 2}, HALOS),
    "channels": ({"C": 2}, ()),
    "filters in chunks": ({"F": 2}, (MEANWHILE[1],)),
}


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[CompiledNetwork, dict[str, Any]]]:
    compiled = {name: network(grid, passes) for name, (grid, passes) in CASES.items()}
    found = ran(2, [Subject(one, {}) for one in compiled.values()], "collectives")
    return {name: (one, data) for (name, one), data in zip(compiled.items(), found, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_volume(name: str, measured: dict[str, Any]) -> None:
    """Of a program with what travels meanwhile: every collective once, with its step's name."""
    compiled, data = measured[name]
    said: dict[tuple[str, str, int], int] = {}
    for phase, steps in volume(compiled.program).items():
        for step in steps:
            key = phase, step["step"].partition(":")[0], max(step["bytes_sent_per_rank"])
            said[key] = said.get(key, 0) + 1
    found: dict[tuple[str, str, int], int] = {}
    for one in data["collectives"]:
        key = one["phase"], one["step"], one["sent_bytes"]
        found[key] = found.get(key, 0) + 1
        assert one["total_bytes"] >= one["sent_bytes"] > 0
    assert sorted(n for _, _, n in found) == sorted(n for _, _, n in said)
    assert sum(n * k for (_, _, n), k in found.items()) == sum(n * k for (_, _, n), k in said.items())


@pytest.mark.parametrize("name", CASES)
def test_measured_and_simulated_steps_are_the_same_ones(name: str, measured: dict[str, Any]) -> None:
    """What one of them has and the other has not would be off without being so."""
    compiled, data = measured[name]
    step = simulate(compiled.program, CPU, "float32")
    assert data["ways"][0]["simulated_s"] == step.end_s
    assert data["off"] == pytest.approx(step.end_s / data["ways"][0]["step"]["seconds"] - 1)
    for one in data["steps"]:
        assert one["measured"] > 0, one
    priced = {(one["phase"], one["name"]) for one in data["steps"] if one["what"] == "row" and one["simulated"] > 0}
    products = {label(row) for row in compiled.program.rows if row.bound.operation.is_product}
    assert priced >= {(phase, name) for phase in ("forward", "backward") for name in products}
    moved = {one["name"] for one in data["steps"] if one["what"] == "collective"}
    assert moved >= {one.name.partition(" (")[0] for one in step.travelled}  # and slices, which move nothing
    assert sum(one["simulated"] for one in data["steps"] if one["what"] == "collective") == pytest.approx(
        step.exposed_s
    )


@pytest.mark.parametrize("name", CASES)
def test_a_trace_has_both_tracks(name: str, measured: dict[str, Any]) -> None:
    compiled, data = measured[name]
    events = data["trace"]["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {threads[rank, 0] for rank in (0, 1)} == {"measured"}
    assert {threads[rank, 1] for rank in (0, 1)} == {"simulated: compute"}
    spans = [e for e in events if e["ph"] == "X"]
    own = [e for e in spans if e["tid"] == 0]
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in spans)
    assert {(e["pid"], e["args"]["phase"]) for e in own} == {(r, p) for r in (0, 1) for p in ("forward", "backward")}
    step = simulate(compiled.program, CPU, "float32")
    assert len(spans) - len(own) == sum(2 if span.rank < 0 else 1 for span in step.spans)


def test_skipped_parts_and_others_run_in_the_same_rounds() -> None:
    subject = Subject(
        network({"N": 2}, None), {}, against={"rows": (network({"H": 2}, ()), {})}, torchs=("ddp", "module")
    )
    (data,) = ran(2, [subject], "collectives", "compute", "overlap")
    ways = {one["way"]: one for one in data["ways"]}
    assert list(ways) == [STEP, PLAIN, "rows", DDP, MODULE, COMPUTING, MOVING]
    for one in ways.values():
        for part in ("forward", "backward", "step"):
            assert len(one[part]["by_rank"]) == 2
            assert one[part]["p20"] <= one[part]["seconds"] <= one[part]["p80"]
    assert all((ways[name]["simulated_s"] is not None) == (name in (STEP, PLAIN, "rows")) for name in ways)
    for word in (*ways, "collective alone", "MB/s", "rows compute", "the simulated step is"):
        assert word in data["text"]


def test_fewer_ranks_than_there_are_wait() -> None:
    """Scaling over grids; the first has nothing to move."""
    grids = [network({"N": n}, ()) for n in (1, 2)]
    one, two = ran(2, [Subject(c, {}) for c in grids])
    assert one["collectives"] == [] and "no collectives" in one["text"]
    assert one["ways"][0]["step"]["by_rank"][1] == 0 < one["ways"][0]["step"]["by_rank"][0]
    alone = f"{one['ways'][0]['step']['by_rank'][0] * 1e3:.3f}"
    assert f"{alone} to {alone}" in one["text"]  # of the ranks that have a part in it
    assert two["collectives"] != []


def test_each_way_is_simulated_in_its_own_type() -> None:
    """A file beside another may have another type, as a plan says one."""
    wide = network({"N": 2}, ())
    narrow = compile_network(with_dtype(wide.graph, "bfloat16"), Grid((("N", 2),)), machine=CPU, passes=())
    ways: Any = dict.fromkeys((STEP, "narrow"))
    found = timelines_of(Subject(wide, {}, against={"narrow": (narrow, {})}), CPU, ways)
    assert {name: one.end_s for name, one in found.items()} == {
        STEP: simulate(wide.program, CPU, "float32").end_s,
        "narrow": simulate(narrow.program, CPU, "bfloat16").end_s,
    }


def test_a_network_of_other_samples_is_what_would_be_compiled() -> None:
    four, eight = (network({"N": 2, "H": 2}, (), samples) for samples in (4, 8))
    grown = of_samples(four, 8)
    assert grown.program == eight.program and grown.graph == eight.graph
    assert grown.package().files == eight.package().files
    fixed = replace(four, graph=four.graph.at())
    with pytest.raises(InputError, match="of 4 samples, and no other"):
        of_samples(fixed, 8)


def test_weak_scaling_has_whole_samples() -> None:
    assert [weak_batch(8, ranks, 4) for ranks in (1, 2, 3, 4)] == [2, 4, 6, 8]
    assert weak_batch(2, 1, 4) is None and weak_batch(6, 1, 4) is None


def test_the_slowest_rank_of_each_round_counts() -> None:
    found = took(np.array([[1.0, 5.0, 3.0], [4.0, 2.0, 6.0]]))
    assert found.median == 5.0 and found.by_rank == (3.0, 4.0)
    both = parts(np.array([[[1.0, 2.0]], [[2.0, 0.5]]]))
    assert (both["forward"].median, both["backward"].median, both["step"].median) == (2.0, 2.0, 3.0)


def test_marks_have_their_own_time() -> None:
    """A wait inside of a row is the wait's; a row's gradients are one."""

    class Ticks:
        at = 0

        def now(self) -> int:
            self.at += 1
            return self.at

        def settle(self) -> None: ...

        def between(self, start: int, end: int) -> int:
            return end - start

    recorder: Any = Recorder.__new__(Recorder)
    vars(recorder).update(_clock=Ticks(), phase="backward", _open=[], _done=[])
    with recorder.noted("local", "conv (boundary)"):
        assert recorder.current == "conv (boundary)"
        with recorder.noted("wait", "conv.x"):
            pass
    with recorder.noted("vjp", "conv"), recorder.noted("local", "conv.dw"):
        pass
    found = sums(recorder.taken(0))
    assert found == {
        ("backward", "row", "conv"): 2 + 2 + 1,  # from 1 to 4 without 2 to 3; from 5 to 8
        ("backward", "collective", "conv.x"): 1,
    }
    assert recorder.taken(0) == []


def test_what_is_off_is_on_the_side_of_the_step() -> None:
    some = [Beside("forward", "row", n, s, m) for n, s, m in (("a", 5.0, 1.0), ("b", 1.0, 3.0), ("c", 1.0, 2.0))]
    late, early = farthest(some, -0.3), farthest(some, 0.3)
    assert late is not None and late.name == "b" and early is not None and early.name == "a"
    assert farthest(some[:1], -0.3) is None


def test_a_row_is_of_its_slowest_rank_and_a_collective_of_the_last() -> None:
    compiled = network({"N": 2}, ())
    step = simulate(compiled.program, CPU, "float32")
    every = [
        [[Mark("local", "a", "forward", 0, 1, own), Mark("move", "norm_moments", "forward", 0, 1, 2 - own)]]
        for own in (0.5, 1.5)
    ]
    found = {(one.phase, one.what, one.name): one.measured for one in beside(step, every)}
    assert found["forward", "row", "a"] == 1.5 and found["forward", "collective", "norm_moments"] == 0.5


# ---- The command ----


LAYER = """
name: one
layer: conv2d
input: [4, 8, 16, 16]
out_channels: 8
kernel_size: 3
padding: 1
grid: {H: 2}
algorithm: spatial
"""
NETWORK = """
name: small
input: [4, 4, 8, 8]
nodes:
  - {name: a, kind: conv, out_channels: 4, kernel_size: 3, padding: 1}
"""


def launched(folder: Path, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "-m", "convgen", "bench", *arguments], cwd=folder, env=environment, capture_output=True, text=True,
        check=False, timeout=600,
    )  # fmt: skip


def test_scaling_over_grids_under_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(NETWORK)
    words = "small.yaml --grid N=1 --grid H=2 --weak --rounds 2 --warm 1 --machine cpu --device cpu --json --plot p.svg"
    done = launched(tmp_path, *words.split())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(b["ranks"], b["samples"]) for b in found["strong"]] == [(1, 4), (2, 4)]
    assert [(b["ranks"], b["samples"]) for b in found["weak"]] == [(1, 2), (2, 4)]
    assert (tmp_path / "p.svg").stat().st_size > 10_000


def test_a_layer_under_a_launcher(tmp_path: Path) -> None:
    """As the network of one row that is simulated: with the input's gradient."""
    (tmp_path / "one.yaml").write_text(LAYER)
    done = launched(tmp_path, *["one.yaml", "--rounds", "2", "--warm", "1", "--device", "cpu", "--trace", "t.json"])
    assert done.returncode == 0, done.stderr
    assert "gradients of inputs too" in done.stdout.splitlines()[0] and "exchange" in done.stdout
    assert {e["pid"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]} == {0, 1}
    other = launched(tmp_path, "one.yaml", "--device", "cpu", ranks=1)
    assert other.returncode != 0 and other.stderr.count("compiled for 2 ranks, and here are 1 processes") == 1


def test_scaling_is_of_samples_a_second() -> None:
    def of(ranks: int, samples: int, seconds: float) -> Any:
        subject, step = Subject(network({"N": ranks}, (), samples), {}), parts(np.array([[[seconds, 0.0]]]))
        return SimpleNamespace(subject=subject, ways={STEP: step}, simulated={})

    one, two, grown = of(1, 4, 4.0), of(2, 4, 2.5), of(2, 8, 5.0)
    assert scaled(one, two) == pytest.approx((1.6, 0.8)) and scaled(one, grown) == pytest.approx((1.6, 0.8))
    lines = scaling_text([one, two], [one, grown]).splitlines()
    assert lines[0].startswith("strong scaling") and lines[2].split()[-2:] == ["x", "80%"]
    assert lines[4].startswith("weak scaling")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no launcher has started any"),
        ("", "--grid N=4; a layer's file and a plan say theirs, and take no --grid"),
        ("--plot p.svg", "--plot draws steps over ranks"),
        ("--grid N=2 --weak", "--weak: scaling wants several grids"),
        ("--grid N=1 --grid N=2 --trace t.json", "--trace is of one grid"),
        ("one.yaml --statistics local", "--statistics is of batch norms, and one.yaml is a layer's file"),
        ("--grid N=2 --machine nowhere", "nowhere"),
        ("--grid N=2 --correct cpu", "cpu is one that comes with convgen"),
        ("--grid N=2 --correct m.yaml --machine cpu", "--correct m.yaml and --machine cpu"),
    ],
)
def test_refused(words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.yaml").write_text(NETWORK)
    (tmp_path / "one.yaml").write_text(LAYER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if words:
        monkeypatch.setenv("WORLD_SIZE", "2")
    file = [] if words.startswith("one.yaml") else ["small.yaml"]
    with pytest.raises(InputError) as caught:
        CliRunner().invoke(cli, ["bench", *file, *words.split()], catch_exceptions=False, standalone_mode=False)
    assert said in str(caught.value)
