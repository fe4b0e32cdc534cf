"""bench/papers.py: which stationary algorithm serves a layer, and published numbers beside simulated ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripts import bench_script

from convgen.cost.machines import load_machine


@pytest.fixture(scope="module")
def study() -> Any:
    return bench_script("papers")


def test_stationary_x_or_y(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """[CF] 4.x and 6.2 by hand: y is larger in 18 of 54 layers of ResNet-50 and in 3 of WRN-50-4's, and in conv3..5
    choosing the
    better layer by layer saves 43 % and nothing; all-x beats all-y, 2.578e8 to 3.252e8 words."""
    study.print_choice()
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[2:]}
    assert rows["resnet50"] == ["54", "19", "18", "17", "2.578e+08", "3.252e+08", "1.458e+08", "43%"]
    assert rows["resnet50_v15"][:4] == ["54", "22", "18", "14"]
    assert rows["wrn50_2"][:4] == ["54", "19", "19", "16"]
    assert rows["wrn50_4"][:4] == ["54", "7", "3", "44"]
    assert [rows[name][-1] for name in ("resnet50_v15", "wrn50_2", "wrn50_4")] == ["40%", "22%", "0%"]


def test_published_speedups_are_the_papers(study: Any) -> None:
    """The factors that [CF] Table 1 prints are those of its times."""
    cells = [study.Entry(cell, 1.0, 1.0, 0.0) for cell in study.cells("cf")]
    published = [by[0] for e, by in study.speedups(cells) if e.cell.ways > 1]
    assert published == pytest.approx([1.7, 2.3, 4.1], abs=0.05)
    assert len(cells) == 6 and len(list(study.cells("sp3"))) == 26


def test_what_the_model_gets_right(study: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """[SP] Table III: 32 samples on one GPU within 10 %, and what two and four gain where nothing is hidden within 5 %,
    with nothing fitted; overlapped more, but never as many times as GPUs."""
    found = study.print_table(study.entries("sp3", load_machine("lassen"), 1))
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(found) == 4
    one, *several = study.speedups(found)
    assert one[0].plain_s == pytest.approx(one[0].cell.published_s, rel=0.1)
    for e, (published, plain, overlapped) in several:
        assert plain == pytest.approx(published, rel=0.05)
        assert published < overlapped < e.cell.ways and e.overlapped_s < e.plain_s
    study.print_brief(found)
    assert len(capsys.readouterr().out.splitlines()) == 4
    study.plot({"sp3": found}, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
