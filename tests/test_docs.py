"""The docs show what the commands print today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from generate import DRAWS
from scripts import script

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n# (convgen/spec/aten/\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# Studies' tables take long: DRAWS=2 looks at them as well.
PLACES = (ROOT / "docs").rglob("*.md") if DRAWS > 1 else (ROOT / "docs").glob("*.md")
PAGES = sorted(p for p in PLACES if "```console" in p.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_console_blocks_are_fresh(page: Path) -> None:
    (ROOT / "build").mkdir(exist_ok=True)  # where blocks write
    text = page.read_text(encoding="utf-8")
    assert script(ROOT / "docs" / "refresh.py").refreshed(text) == text, "python docs/refresh.py rewrites them"


def test_contributings_describer_is_the_one_in_use() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ((file, code),) = re.findall(
        r"^```python\n# (convgen/spec/aten/\w+\.py)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
    assert code in (ROOT / file).read_text(encoding="utf-8")
