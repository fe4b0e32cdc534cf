"""The scripts of bench/: they import what there is, the pages name those that there are, and what they share."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from scripts import BENCH, bench_script

ROOT = BENCH.parent
OPTIONAL = ("jax",)  # what a script may want that isn't installed with convgen
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ({optional}):
            raise
"""


def test_every_script_imports_what_there_is() -> None:
    """A name of the package that a script wants and that has gone is found here, not when somebody runs the script."""
    names = [path.stem for path in sorted(BENCH.glob("*.py"))]
    code = f"import sys; sys.path.insert(0, {str(BENCH)!r})" + IMPORT_ALL.replace("({optional})", repr(OPTIONAL))
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_pages_name_scripts_that_there_are() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile", *(ROOT / "tests").glob("*.py")]
    named = {
        file for p in pages for file in re.findall(r"\bbench/[a-z0-9_/]+\.(?:py|yaml|jsonl(?:\.gz)?)", p.read_text())
    }
    assert len(named) > 30
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_models_of_the_table_are_in_the_zoo() -> None:
    command = [sys.executable, "-W", "ignore", str(BENCH / "networks.py"), "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert len(names) == len(set(names)) > 600  # of all libraries together
    page = (ROOT / "docs" / "studies" / "breadth.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| ([\w.]+) \| \d+ calls", page, re.MULTILINE)) <= set(names)


@pytest.fixture
def rows() -> ModuleType:
    return bench_script("rows")


def test_the_same_rows_are_the_same_bytes(rows: ModuleType, tmp_path: Path) -> None:
    given, files = [{"a": 1, "b": "é"}, {"a": 2}], (tmp_path / "one.jsonl.gz", tmp_path / "two.jsonl.gz")
    for row in given:
        rows.add(files[0], row)
    assert rows.rows_of(files[0]) == given  # a process that ended before it packed
    files[1].write_bytes(gzip.compress(gzip.decompress(files[0].read_bytes()), 1, mtime=7))
    for file in files:
        rows.packed(file)
        assert rows.rows_of(file) == given
    assert files[0].read_bytes() == files[1].read_bytes()
    plain = tmp_path / "rows.jsonl"
    assert rows.rows_of(plain) == []
    rows.add(plain, given[0])
    assert rows.rows_of(plain) == given[:1] and plain.read_text(encoding="utf-8").endswith("}\n")


def test_bounds_are_stored_as_they_are_packed(rows: ModuleType, tmp_path: Path) -> None:
    stored = BENCH / "landscapes" / "bounds_sm_90.jsonl.gz"
    again = tmp_path / stored.name
    again.write_bytes(stored.read_bytes())
    rows.packed(again)
    assert rows.rows_of(again) == rows.rows_of(stored) and stored.read_bytes()[:8] == again.read_bytes()[:8]


def test_lines_by_room() -> None:
    lines = bench_script("lines")
    files = (
        "convgen/plan/exact.py",
        "convgen/knobs.py",
        "templates/a.jinja",
        "docs/studies/b.md",
        "docs/b.png",
        "README.md",
    )
    rooms = ["convgen/plan", "convgen/*.py", "templates", "docs", None, None]
    assert [lines.room_of(file) for file in files] == rooms
    table = lines.table(Counter(bench=10, **{"convgen/plan": 3}), Counter(bench=12))
    assert [line.split() for line in table] == [
        ["convgen/plan", "3", "+3"], ["bench", "10", "-2"], ["all", "13", "+1"],
    ]  # fmt: skip


def test_lines_without_git_say_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = bench_script("lines")
    monkeypatch.setattr(sys, "argv", ["lines.py", "no-such-commit"])
    assert lines.main() == 0 and "not known" in capsys.readouterr().out
    monkeypatch.setenv("PATH", "")
    assert lines.main() == 0 and "not known" in capsys.readouterr().out
