# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (parts of torch are private or have no types)
"""The state that a kernel must leave as it was: torch's settings, functions that others call, the process's
children."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import torch

from convgen.tune.operands import Wrong

# Modules whose functions a kernel could replace for everyone; only a few of torch's, as torch replaces some itself.
SHARED: tuple[Any, ...] = (torch, torch.nn.functional, torch.ops.aten, time)
OF_TORCH = ("addmm", "bmm", "convolution", "empty", "empty_like", "matmul", "mm", "zeros")


class Settings:
    """This process's settings when this is made; `check` finds what has changed since, and puts it back."""

    def __init__(self) -> None:
        self.values = _values()
        self.functions = [{n: f for n, f in vars(o).items() if o is not torch or n in OF_TORCH} for o in SHARED]
        self.begin()

    def begin(self) -> None:
        """Begin to watch: processes that run by now, or have ended, aren't a kernel's. A forked process calls this
        first."""
        self.there, self.ended = _children(), _ended_children()

    def check(self) -> None:
        """Put back what has changed. Raises Wrong: something had."""
        found, changed = _values(), list[str]()
        if found != self.values:
            changed += [name for name, value in self.values.items() if found[name] != value]
            _set(self.values)
        for one, before in zip(SHARED, self.functions, strict=True):
            now = vars(one)
            for name, value in before.items():
                if now.get(name, value) is not value:
                    changed.append(f"{getattr(one, '__name__', one)}.{name}")
                    setattr(one, name, value)
        if changed:
            raise Wrong(f"changed {', '.join(changed[:4])} of its process")
        if _children() - self.there or _ended_children() != self.ended:
            raise Wrong("started a process")


def _values() -> dict[str, Any]:
    mkldnn: Any = torch.backends.mkldnn
    return {
        "threads": torch.get_num_threads(),
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "default type": torch.get_default_dtype(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "mkldnn's availability": mkldnn.is_available(),
    }


def _set(values: dict[str, Any]) -> None:
    if torch.get_num_threads() != values["threads"]:
        torch.set_num_threads(values["threads"])
    torch._C._set_mkldnn_enabled(values["mkldnn"])
    torch.use_deterministic_algorithms(values["deterministic algorithms"])
    torch.set_grad_enabled(values["gradients"])
    torch.set_default_dtype(values["default type"])
    torch.set_float32_matmul_precision(values["matmul precision"])


def _ended_children() -> tuple[float, ...]:
    """The resources that ended child processes have used; even the smallest has touched some memory."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime, used.ru_stime, used.ru_minflt


def _children() -> set[str]:
    """The numbers of this process's children; on Linux alone."""
    try:
        tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
        return {pid for path in tasks for pid in path.read_text().split()}
    except OSError:
        return set()
