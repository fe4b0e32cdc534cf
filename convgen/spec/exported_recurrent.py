"""Recurrent layers while a module is traced: torch finds their shapes from every step, here from the first step alone.

torch.export records one call for a layer, however many steps it has. To find its shapes torch makes a few calls for
each step, on tensors without values: two dozen layers of 32 steps take a minute.
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
    """Fake tensors go through the first step of recurrent layers only; tensors with values as ever."""
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
    if not callable(kernel):  # it is the name of another key
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
