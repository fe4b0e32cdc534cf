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


# An error of rounding, and which tensor has the largest: another processor rounds otherwise.
ROUNDING = re.compile(r"\b\d\.\d\de-1\d(\s+\S+\s+ok\s+)\(\S+\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_console_blocks_are_fresh(page: Path) -> None:
    (ROOT / "build").mkdir(exist_ok=True)  # where blocks write
    text = page.read_text(encoding="utf-8")
    now, then = (ROUNDING.sub(r"#\1#", t) for t in (script(ROOT / "docs" / "refresh.py").refreshed(text), text))
    assert now == then, "python docs/refresh.py rewrites them"


def test_digits_of_rounding_are_not_compared() -> None:
    one, other = (
        f"  outputs   1  {error}     1.0e-10  {verdict}"
        for error, verdict in (("3.66e-16", "ok  (a)"), ("2.74e-16", "ok  (b)"))
    )
    assert ROUNDING.sub("#", one) == ROUNDING.sub("#", other)
    assert ROUNDING.sub("#", one) != ROUNDING.sub("#", other.replace("ok", "WRONG"))


def test_contributings_describer_is_the_one_in_use() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ((file, code),) = re.findall(
        r"^```python\n# (convgen/spec/aten/\w+\.py)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
    assert code in (ROOT / file).read_text(encoding="utf-8")
