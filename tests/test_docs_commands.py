"""Commands of the README and of the networks page run as they stand, in a folder where the examples are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from convgen.commands.main import cli

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # its language, its lines
# What measures for minutes, wants a GPU, or is what torchrun runs; and a plan of 64 ranks, which takes a minute.
ELSEWHERE = re.compile(r"convgen tune|--target cuda( |$)|--ranks 64|convgen compile plan.yaml|LAYER|FILE|--interpret")


def blocks(page: str, among: str = "") -> list[list[str]]:
    """Lines of a page's blocks that begin with `convgen`, without remarks."""
    found: list[list[str]] = []
    for language, block in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        if language:
            continue
        lines = [re.split(r"\s{2,}#", line)[0] for line in block.splitlines() if line.startswith("convgen ")]
        lines = [line for line in lines if not ELSEWHERE.search(line)]
        if lines and among in block:
            found.append(lines)
    return found


README = blocks("README.md")
CASES = [*README, *blocks("docs/networks.md", "examples/resnet.py")]


@pytest.mark.parametrize("lines", CASES, ids=lambda lines: lines[0].split()[1])
def test_commands_run_as_they_stand(lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("examples", "tuning"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    for line in lines:
        done = CliRunner().invoke(cli, shlex.split(line)[1:])
        assert done.exit_code == 0, f"{line}\n{done.output}{done.exception or ''}"


def test_there_are_commands() -> None:
    assert len(README) >= 4 and sum(map(len, README)) >= 15
    assert not any("torchvision" in line for lines in CASES for line in lines)  # which nothing installs
