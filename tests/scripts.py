"""Scripts of bench/ and docs/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.append(str(BENCH))  # where they find what they share


def bench_script(name: str) -> ModuleType:
    """bench/NAME.py."""
    return script(BENCH / f"{name}.py")


def script(path: Path) -> ModuleType:
    """Run as a module of the file's name, under which its dataclasses are found."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
