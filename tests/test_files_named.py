"""What files may not do: each a case that ran, wrote, crashed or was accepted. Exit 2 and a line, and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import changed_files
import pytest
from scripts import BENCH

from convgen.errors import InputError
from convgen.packages import forget_package, load_package
from convgen.verify.program import load_module

NET = ["--grid", "N=2,H=2"]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return changed_files.givens(tmp_path_factory.mktemp("given"))


def refused(given: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, words: list[str]) -> str:
    """What is said of a file with one change, whose line it names."""
    assert given.text.count(old) >= 1, old
    text = given.text.replace(old, new, 1)
    line = given.text[: given.text.index(old)].count("\n") + 1
    for name, data in {**given.beside, given.file: text}.items():
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    monkeypatch.chdir(folder)
    before = sorted(p.relative_to(folder) for p in folder.parent.rglob("*"))
    code, said = changed_files.call(words)
    assert code == 2, said
    assert sorted(p.relative_to(folder) for p in folder.parent.rglob("*")) == before, "something was written"
    assert f"{given.file}:{line})" in said, said
    assert "boom" not in sys.modules
    return said


GRAPHS = [
    ("network: Net", 'network: "x\\"; import boom #"', "not a Python identifier"),
    ("network: Net", "network: ../x", "not a Python identifier"),
    ("network: Net", "network: /tmp/x", "not a Python identifier"),
    ("network: Net", 'network: ""', "not a Python identifier"),
    ("  output: add", '  "x\\"; import boom #": add', "can't be a name here"),
    ("init: given", 'init: "fill:1);import_boom#"', "init can't be"),
    ("init: uniform:27", "init: uniform:0", "init can't be 'uniform:0'"),
    ("op: relu, args: [", "op: from_file, args: [", "from_file reads a file"),
    ("op: relu, args: [", "op: relu_, args: [", "relu_ changes an operand"),
    ("op: relu, args: [", "op: pin_memory, args: [", "pin_memory is of a device"),
    ("op: relu, args: [", "op: __class__, args: [", "ATen has no operator"),
    ("op: relu, args: [", "op: relu.out, args: [", "changes an operand"),
    ('op: relu, args: ["%norm"]', "op: relu, args: [7]", "relu"),
    ('op: relu, args: ["%norm"]', 'op: relu, args: ["%norm", 1]', "2 arguments, the operator has 1"),
    ("[2, 2], [1, 1], [1, 1], 1]", "[1, 1], [1, 1], [1, 1], 1]", "conv2d makes stem [1009, 8, 16, 16], the file says"),
    ("[2, 2], [1, 1], [1, 1], 1]", "two, [1, 1], [1, 1], 1]", "conv2d"),
    ("[2, 2], [1, 1], [1, 1], 1]", "[2, 2], [1, 1, 1], [1, 1], 1]", "[1, 1, 1] stands in the place of"),
    ("shape: [N, 8, 8, 8], module: stem", "shape: [N, 8, 7, 8], module: stem", "the file says [1009, 8, 7, 8]"),
    ("shape: [4], dtype: int64", "shape: [4], dtype: int32", "makes arange of int64, the file says int32"),
    ("true, 0.1, 1e-05]", "true, 0.1]", "arguments, the operator has 8 or 9"),
    ("0.1, true], shape", "1.5, true], shape", "p can't be 1.5"),
    ("0.1, true], shape", "soon, true], shape", "drop"),
    ("network: Net", "network: class", "is a Python keyword"),
    ("  drop: {kind", "  compute: {kind", "modules have compute of their own"),
    ("  drop: {kind", "  fc.__class__: {kind", "modules have __class__ of their own"),
    ("  drop: {kind", "  state_dict: {kind", "modules have state_dict of their own"),
    ("batch: 4", "batch: 4611686018427387904", "elements"),
    ("format: 1", "format: 2", "this is format 2"),
    ("format: 1", "format: soon", "format can't be 'soon'"),
]


@pytest.mark.parametrize("command", ["compile", "check", "explain", "plan", "network"])
@pytest.mark.parametrize(("old", "new", "fact"), GRAPHS, ids=[new for _, new, _ in GRAPHS])
def test_graphs(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, fact: str,
    command: str,
) -> None:  # fmt: skip
    (folder := tmp_path / "in").mkdir()
    options = {"plan": ["--machine", "cpu", "--ranks", "2", "-o", "p.yaml"], "network": []}.get(command, NET)
    words = [command, "net.yaml", *options, *(["-o", "o"] if command == "compile" else [])]
    said = refused(given["graph"], folder, monkeypatch, old, new, words) if fact != "elements" else ""
    if fact == "elements":  # said of the first value that has too many, not of the batch
        text = given["graph"].text.replace(old, new)
        (folder / "net.yaml").write_text(text, encoding="utf-8")
        monkeypatch.chdir(folder)
        code, said = changed_files.call(words)
        assert code == 2
    assert fact in said


PLANS = [
    ("way: 0", "way: foo", "way can't be 'foo'"),
    ("way: 0", "way: null", "way can't be nothing"),
    ("way: 0", "way: [0]", "way can't be [0]"),
    ("milliseconds: ", "milliseconds: soon #", "milliseconds can't be 'soon'"),
    ("machine: ", "machine: nowhere #", "machine 'nowhere' is unknown"),
    ("grid: {a: 2, b: 2}", "grid: {a: 99999999, b: 2}", "more than 65536"),
    ("grid: {a: 2, b: 2}", "grid: {a: true}", "can't have true ranks"),
    ('running_mean": "[(a,b)]"', 'running_mean": "[(a,b)"', "cannot read '[(a,b)'"),
    ('running_mean": "[(a,b)]"', 'running_mean": "[c]"', "axes are a, b"),
    ('running_mean": "[(a,b)]"', 'running_mean": "[a]"', "both want one layout"),
    ("values:", "values: [1, 2] #", "values can't be [1, 2]"),
    ("rows:", "rows: 3 #", "rows can't be 3"),
    ("rows:", "rows: #", "rows can't be nothing"),
    ("gradients: {x:", "gradients: {x: 3, y:", "x can't be 3"),
    ("format: 1", "format: 9", "this is format 9"),
    ("graph: ", "graph: nowhere.yaml #", "the plan's graph 'nowhere.yaml' is no file"),
]


@pytest.mark.parametrize(("old", "new", "fact"), PLANS, ids=[new for _, new, _ in PLANS])
def test_plans(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, fact: str
) -> None:
    (folder := tmp_path / "in").mkdir()
    plan = given["plan"]
    if old in ("values:", "rows:"):  # without the lines below it
        keep = plan.text.split(old)[0] + (old + "\n" if old == "rows:" else old + "\nrows: []\n")
        plan = replace(plan, text=keep)
    said = refused(plan, folder, monkeypatch, old, new, ["compile", "plan.yaml", "-o", "o"])
    assert fact in said and "  try " in said


def test_a_plan_says_the_file_that_priced_it(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, data in {**given["plan"].beside, "m.yaml": changed_files.MACHINE}.items():
        (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
    (tmp_path / "plans").mkdir()
    monkeypatch.chdir(tmp_path)
    plan = ["plan", "net.yaml", "--machine", "./m.yaml", "--ranks", "2", "-o", "plans/p.yaml"]
    assert changed_files.call(plan)[0] == 0
    assert 'machine: "../m.yaml"' in Path("plans/p.yaml").read_text()
    assert changed_files.call(["compile", "plans/p.yaml", "-o", "o"])[0] == 0
    Path("m.yaml").unlink()
    code, said = changed_files.call(["compile", "plans/p.yaml", "-o", "o"])
    assert code == 2 and "the plan's machine '../m.yaml'" in said and "plans/p.yaml:" in said


@pytest.mark.parametrize("kind", changed_files.ODD)
def test_what_is_no_file_is_refused(given: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """A pipe that nobody writes to, and a device without an end, are not read."""
    for name in ("graph", "layer", "plan", "network", "machine", "schedule", "csv", "tensors", "trace", "database"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        one, work = given[name], tmp_path / name
        for folder in ("run/o", "home/.cache/convgen/devices", "tmp", "bait"):
            (work / folder).mkdir(parents=True)
        for file, data in one.beside.items():
            (work / "run" / file).write_bytes(data.encode() if isinstance(data, str) else data)
        (path := work / "run" / one.file).unlink(missing_ok=True)
        changed_files.make_odd(kind, path)
        code, said, _, effects = changed_files.limited(lambda one=one: changed_files.run(one.commands[0]), work)
        there = kind in ("nothing", "link to nothing") and name == "database"  # none is needed
        assert (code, effects) == (0 if there else 2, []), (name, said)
        assert there or "rror: " in said, said


def test_packages_say_their_format(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, data in {
        **given["graph"].beside,
        "net.yaml": given["graph"].text,
        "layer.yaml": changed_files.LAYER,
    }.items():
        (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
    monkeypatch.chdir(tmp_path)
    assert changed_files.call(["compile", "net.yaml", *NET, "-o", "o"])[0] == 0
    package = load_package(tmp_path / "o" / "Net")
    assert (package.FORMAT, package.SPEC["format"]) == (1, 1)
    forget_package(package)
    assert changed_files.call(["compile", "layer.yaml", "-o", "o"])[0] == 0
    assert load_module(tmp_path / "o" / "tiny.py").SPEC["format"] == 1
    network = tmp_path / "o" / "Net" / "network.py"
    network.write_text(network.read_text().replace("\nFORMAT = 1\n", "\nFORMAT = 2\n"))
    with pytest.raises(InputError, match="Net is of format 2, and this convgen reads up to 1"):
        load_package(tmp_path / "o" / "Net")


def test_batches_are_counted_as_the_graph_says(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by twos, or never, a batch norm's count was one more a step."""
    counted = '"%norm.num_batches_tracked", 1, 1'
    text = given["graph"].text
    assert counted in text
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.constants.safetensors").write_bytes(given["graph"].beside["net.constants.safetensors"])
    for other in (
        text.replace(counted, counted.replace("1, 1", "2, 1")),
        text.replace("  norm.num_batches_tracked: norm_num_batches_tracked\n", ""),
    ):
        assert other != text
        Path("net.yaml").write_text(other, encoding="utf-8")
        for statistics in ("global", "local"):
            code, said = changed_files.call(["check", "net.yaml", *NET, "--statistics", statistics])
            assert code == 0, said


def test_machines_that_take_for_ever_are_refused(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("layer.yaml").write_text(given["machine"].beside["layer.yaml"], encoding="utf-8")
    Path("m.yaml").write_text(changed_files.MACHINE.replace("launch_s: 1e-5", "launch_s: 9e18"), encoding="utf-8")
    code, said = changed_files.call(["explain", "layer.yaml", "--machine", "m.yaml"])
    assert code == 2 and "hours, more than plans add up" in said


def test_what_runs_and_what_writes_is_seen(tmp_path: Path) -> None:
    """The draws would tell: a file beside -o, a process, a text of a file that runs, and a command that ends wrong."""
    for folder in ("run/o", "home", "tmp", "bait", "beside"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "bait" / "boom.py").touch()

    def wrong() -> int:
        Path("o/right").touch()
        Path("wrong").touch()
        subprocess.run(["true"], check=False)
        __import__("boom")
        raise ValueError("no line")

    code, said, _, effects = changed_files.limited(wrong, tmp_path)
    assert code == 3 and "Traceback" in said
    assert [e.split()[0] for e in effects] == ["import", "open", "subprocess.Popen"] and "wrong" in effects[1]


def test_grids_are_bounded(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, data in given["plan"].beside.items():
        (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
    (tmp_path / "layer.yaml").write_text(changed_files.LAYER.replace("{N: 2, H: 2}", "{N: 99999999}"), encoding="utf-8")
    (tmp_path / "l.csv").write_text(changed_files.CSV, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words: list[list[str]] = [["explain", f, "--grid", "N=99999999"] for f in ("net.yaml", "l.csv")]
    for one in (*words, ["explain", "layer.yaml"]):
        code, said = changed_files.call(one)
        assert code == 2 and "ranks, more than 65536" in said, said


@pytest.mark.parametrize("name", ["machine", "layer", "layers", "network", "schedule", "program"])
def test_newer_formats_are_refused(
    given: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = given[name]
    for file, data in one.beside.items():
        (tmp_path / file).write_bytes(data.encode() if isinstance(data, str) else data)
    monkeypatch.chdir(tmp_path)
    bare = one.text.replace("# format 1\n", "").replace("format: 1\n", "")
    said_one, newer = (
        ("# format 1\n", "# format 2\n") if name in ("schedule", "program") else ("format: 1\n", "format: 2\n")
    )
    if name == "layers":
        assert said_one in one.text, "the program says it where it writes"
    for text, wanted in ((bare, 0), (said_one + bare, 0), (newer + bare, 2)):
        Path(one.file).write_text(text, encoding="utf-8")
        words = [w.replace("check", "explain") for w in one.commands[0]] if name != "network" else list(one.commands[2])
        code, said = changed_files.call(words)
        assert code == wanted, said
        assert wanted == 0 or ("this is format 2" in said and f"{one.file}:1" in said), said


def test_a_short_draw_of_mutations() -> None:
    """Every format, a few, in processes of their own; `make fuzz minutes=n` takes as many as fit."""
    words = [sys.executable, str(BENCH / "fuzz_files.py"), "--draws", "3"]
    environment = os.environ | {"PYTHONPATH": str(changed_files.ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    counts = re.findall(r"^(\w+): 3 runs in \d+ s: \d taken, \d refused, 0 wrong$", ran.stdout, re.MULTILINE)
    assert counts == list(changed_files.FORMATS)
