"""Batch norms without a momentum, while a module is traced. Their running statistics are the mean over all batches, for
which torch's forward reads the count as a Python number; torch.export can't trace that. Here the count stays a tensor.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@contextmanager
def cumulative_averages(module: torch.nn.Module) -> Generator[None]:
    """In training, batch norms without a momentum compute the same without a Python number."""
    from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

    found = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.momentum is None and m.track_running_stats]
    written: list[Any] = [m for m in found if m.training and "forward" not in vars(m)]
    for one in written:
        one.forward = partial(_forward, one)
    try:
        yield
    finally:
        for one in written:
            del one.forward


def _forward(of: Any, x: Tensor) -> Tensor:
    import torch

    of._check_input_dim(x)
    of.num_batches_tracked.add_(1)
    given, share = x.detach(), 1 / of.num_batches_tracked.to(of.running_mean.dtype)
    dims = [0, *range(2, x.dim())]
    for held, now in ((of.running_mean, given.mean(dims)), (of.running_var, given.var(dims, correction=1))):
        held.copy_(held + share * (now - held))
    return torch.nn.functional.batch_norm(x, None, None, of.weight, of.bias, True, 0.0, of.eps)
