"""Recurrent layers while a module is traced: torch makes their shapes of every step, here of the first alone.

What torch.export records is one call a layer, whatever its steps are; made of a few calls a step on tensors without
values, as torch does it, two dozen layers of 32 steps take a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, cast

LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextmanager
def first_steps() -> Generator[None]:
    """Shapes of recurrent layers of fake tensors from their first step; of tensors with values as ever."""
    import torch

    decompositions: dict[Any, Any] = cast("Any", import_module("torch._decomp")).decomposition_table
    ops: list[Any] = [getattr(torch.ops.aten, name).input for name in LAYERS]
    tables: list[dict[Any, Any]] = [op.py_kernels for op in ops]
    places = [(table, key) for table in tables for key in table]
    places += [(decompositions, op) for op in ops if op in decompositions]
    before = [table[key] for table, key in places]
    for (table, key), kernel in zip(places, before, strict=True):
        table[key] = _of_first_step(kernel)
    for op in ops:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for (table, key), kernel in zip(places, before, strict=True):
            table[key] = kernel
        for op in ops:
            op._dispatch_cache.clear()


def _of_first_step(kernel: Any) -> Any:
    """kernel(x, hidden, parameters, has_biases, layers, dropout, train, bidirectional, batch_first)."""
    if not callable(kernel):  # the name of another key
        return kernel
    run: Callable[..., Any] = kernel

    @wraps(run)
    def made(x: Any, *rest: Any) -> Any:
        import torch
        from torch._subclasses.fake_tensor import FakeTensor

        first = bool(rest[7])
        steps = x.shape[1 if first else 0]
        if not isinstance(x, FakeTensor) or not isinstance(steps, int) or steps < 2:
            return run(x, *rest)
        y, *hidden = run(x.narrow(1 if first else 0, 0, 1), *rest)
        y = torch.cat([y.transpose(0, 1) if first else y] * steps)
        return (y.transpose(0, 1) if first else y), *hidden

    return made
