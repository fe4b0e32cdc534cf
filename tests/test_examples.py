"""The examples: short, introduced by a line, named like their files, and right on virtual ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from convgen.compiler import compile_layer
from convgen.spec.reader import read_layer
from convgen.verify.check import check

FILES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.yaml"))


def test_they_are_found() -> None:
    assert len(FILES) >= 10


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_example(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 20
    assert lines[0].startswith("# ")
    assert max(map(len, lines)) <= 120
    layer = read_layer(str(file))
    assert layer.name == file.stem
    report = check(compile_layer(layer), transport="virtual", timeout_s=60)
    assert report.ok, report
