# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportAttributeAccessIssue=false
# (what torch leaves untyped)
"""TF32 for comparisons: its rounding on a CPU device, and torch's switches for it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# ATen's operators that multiply, also within gradients, each with the half-open range of its arguments that are
# factors.
PRODUCTS: Mapping[str, tuple[int, int]] = {
    "convolution": (0, 2), "convolution_backward": (0, 3), "mm": (0, 2), "bmm": (0, 2), "mv": (0, 2), "dot": (0, 2),
    "addmm": (1, 3), "baddbmm": (1, 3), "addmv": (1, 3),
}  # fmt: skip


def to_tf32(value: Tensor) -> Tensor:
    """The nearest number of 11 bits, ties to even, in the tensor's own type."""
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp((mantissa * 2**11).round(), exponent - 11).to(value.dtype)


class RoundedFactors(TorchDispatchMode):
    """Rounds the factors of products and convolutions to TF32, forward and backward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lo, hi = PRODUCTS.get(func.overloadpacket.__name__, (0, 0))
        given = [
            to_tf32(a) if lo <= k < hi and isinstance(a, Tensor) and a.is_floating_point() else a
            for k, a in enumerate(args)
        ]
        return func(*given, **(kwargs or {}))


@contextmanager
def without_tf32() -> Generator[None]:
    """Torch's switches are off: float32 is multiplied as float32."""
    switches: list[Any] = [torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul]
    before = [one.fp32_precision for one in switches]
    try:
        for one in switches:
            one.fp32_precision = "ieee"
        yield
    finally:
        for one, precision in zip(switches, before, strict=True):
            one.fp32_precision = precision
