"""docs/torch.md: its rows name tests that exist, its Python runs, and its errors read as the module's."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch_cases import on_processes

from convgen.compiler import compile_layer
from convgen.spec.reader import read_layer
from convgen.verify.program import load_module

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/torch.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
FIRST, *OTHERS = [code for kind, code in BLOCKS if kind == "python"]
REFUSALS = next(code for kind, code in BLOCKS if kind == "text" and code.startswith(">>> "))
IMPORTS = """
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
blocks, full = layer.Conv(mesh, parameters="blocks"), StateDictOptions(full_state_dict=True)
"""


@cache
def layer() -> ModuleType:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "res5a_branch2b.py"
        path.write_text(compile_layer(read_layer(ROOT / "examples/res5a_branch2b.yaml")).module())
        return load_module(path)


def on_ranks(program: Callable[[dict[str, Any]], Any]) -> list[Any]:
    """Results of `program(names)`, the names those that the first block leaves."""
    module = layer()

    def run(_: int) -> Any:
        sys.modules["res5a_branch2b"] = module
        names: dict[str, Any] = {"torch": torch}
        exec(compile(FIRST, "docs/torch.md", "exec"), names)
        return program(names)

    return on_processes(run, 4)


def refusals(names: dict[str, Any]) -> str:
    """The calls of the text block, each with what it raises under it."""
    exec(IMPORTS, names)
    lines: list[str] = []
    for line in REFUSALS.splitlines():
        if line.startswith(">>> "):
            with pytest.raises((RuntimeError, ValueError)) as raised:
                eval(line[4:], names)
            lines += [line, f"{raised.type.__name__}: {raised.value}".splitlines()[0]]
    return "\n".join(lines) + "\n"


def test_rows_name_tests_that_exist() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    tables = TEXT.split("## Storing")[1].split("## What it costs")[0]
    assert all("`tests/test_" in row for row in rows if row in tables)
    names = re.findall(r"`(tests/\w+\.py)::(\w+)`", TEXT)
    assert len(names) > 30
    for file, name in names:
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {name}"


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_python_runs(number: int, tmp_path: Path) -> None:
    code = compile(OTHERS[number], "docs/torch.md", "exec")

    def program(names: dict[str, Any]) -> None:
        with contextlib.chdir(tmp_path):
            exec(code, names)

    on_ranks(program)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of forward mode
def test_errors_read_so() -> None:
    assert on_ranks(refusals)[0] == REFUSALS


def test_the_readmes_python_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (code,) = [block for block in blocks if block.startswith("import res5a")]  # networks': tests/test_docs_networks.py

    def program(names: dict[str, Any]) -> None:
        names["w_global"] = torch.randn(96, 64, 3, 3)
        exec(compile(code, "README.md", "exec"), names)

    on_ranks(program)
