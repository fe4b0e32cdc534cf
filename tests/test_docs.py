"""The docs show what the commands print today."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from random import Random
from types import ModuleType

import operation_cases
import pytest
from sampling import ALL
from scripts import script

ROOT = Path(__file__).resolve().parent.parent

# Studies' tables take long: make check looks at them as well.
PLACES = (ROOT / "docs").rglob("*.md") if ALL else (ROOT / "docs").glob("*.md")
PAGES = sorted(p for p in (ROOT / "README.md", *PLACES) if "```console" in p.read_text(encoding="utf-8"))


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


def test_digits_of_errors_hang_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that differ in them alone stay; verdicts, counts, figures and names are compared."""
    refresh = script(ROOT / "docs" / "refresh.py")
    block = """```console
$ convgen check it
  outputs        1    3.66e-16     1.0e-10  ok  (output)
  change        70   {}    1.0e-10  ok  ({})
  {} steps, 2.4e-04 s
```"""
    old = block.format("4.66e-13", "11.mix.weight", 3)

    def kept(*others: object, verdict: str = "ok") -> bool:
        printed = block.format(*others).replace(" ok ", f" {verdict} ").splitlines()[2:-1]
        monkeypatch.setattr(refresh, "run", lambda _: "\n".join(printed))
        return bool(refresh.refreshed(old) == old)

    assert kept("4.66e-13", "11.mix.weight", 3) and kept("  5e-13", "2.bias", 3)
    assert not kept("4.66e-13", "11.mix.weight", 4) and not kept("4.66e-3", "11.mix.weight", 3)
    assert not kept("4.66e-13", "11.mix.weight", 3, verdict="WRONG")
    refresh.run = lambda _: "\n".join(old.replace("2.4e-04", "2.5e-04").splitlines()[2:-1])
    assert refresh.refreshed(old) != old


def test_contributings_describer_is_the_one_in_use() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ((file, code),) = re.findall(
        r"^```python\n# (convgen/spec/aten/\w+\.py)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
    assert code in (ROOT / file).read_text(encoding="utf-8")


def test_contributings_operation_is_right_on_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    codes = re.findall(r"(?ms)^```python\n# (convgen/operations|tests/operation_cases)[^\n]*\n(.*?)^```$", text)
    assert [where for where, _ in codes] == ["convgen/operations", "tests/operation_cases"]
    module = ModuleType("convgen.operations.power_pooling")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look
    exec(compile(codes[0][1], module.__name__, "exec"), module.__dict__)
    names = {**vars(operation_cases), "PowerPool": module.__dict__["PowerPool"]}
    exec(compile(codes[1][1], "operation_cases", "exec"), names)
    for seed in range(8):
        draw = Random(f"contributing {seed}")
        operation_cases.check(draw, *names["power_pool"](draw))
