"""docs/networks.md: its Python runs, block after block, on four processes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_cases import on_processes

import convgen

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/networks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT))
    from examples.resnet import small_resnet

    package = convgen.from_torch(small_resnet(), (torch.zeros(8, 3, 32, 32),), "H=2,N=2", name="small_resnet")

    def program(_: int) -> None:
        sys.modules["small_resnet"] = package
        torch.manual_seed(0)  # every rank draws the same
        names: dict[str, Any] = {"torch": torch, "small_resnet": small_resnet}
        for code in BLOCKS:
            exec(compile(code, "docs/networks.md", "exec"), names)

    assert len(BLOCKS) > 5
    on_processes(program, 4)
