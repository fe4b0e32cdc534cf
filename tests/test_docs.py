"""The docs show what the commands print today."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n# (convgen/spec/aten/\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_console_blocks_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "docs/refresh.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + "; python docs/refresh.py rewrites them"


def test_contributings_describer_is_the_one_in_use() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ((file, code),) = re.findall(
        r"^```python\n# (convgen/spec/aten/\w+\.py)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL
    )
    assert code in (ROOT / file).read_text(encoding="utf-8")
