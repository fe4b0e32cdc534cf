"""Import the text of a kernel module. Triton reads a kernel's source back from its file, so there has to be one."""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def _folder() -> Path:
    made = tempfile.mkdtemp(prefix="convgen-kernels-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


@cache
def load_text(text: str) -> ModuleType:
    """The module of this text; the same text gives the same module."""
    name = f"convgen_kernels_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    path = _folder() / f"{name}.py"
    own = path.with_suffix(f".{os.getpid()}")  # forked processes share the folder: none may read half a file
    own.write_text(text, encoding="utf-8")
    own.replace(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
