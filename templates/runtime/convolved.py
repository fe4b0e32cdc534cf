# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false
# (what torch leaves untyped, and calls by another signature than it declares)
"""A network's convolutions on a GPU: kernels in the place of ATen's, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convgen.operations.convolution import MAKES, READS, LocalConvolution, Phase

from .blocks import Unmapped


class LocalKernels:
    """The kernels of a local convolution, a function a phase.

    Args:
        module: with the kernels, for channels that are last in memory or not.
    """

    def __init__(self, module: Any, local: LocalConvolution, last: bool) -> None:
        self.module, self.local = module, local
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        self.format = formats[len(local.dims) + 2] if last else torch.contiguous_format

    def __call__(self, phase: Phase, *operands: Tensor) -> Tensor:
        return Convolved.apply(self, phase, *operands)

    def made(self, phase: Phase, *operands: Tensor) -> Tensor:
        """What a phase makes; the first operand is an activation."""
        c, samples = self.local, operands[0].shape[0]
        xs, ys, taps, _, _, below = zip(*c.dims, strict=True)
        shapes = {
            "x": (samples, c.groups * c.channels, *xs),
            "w": (c.groups * c.filters, c.channels, *taps),
            "y": (samples, c.groups * c.filters, *ys),
        }
        out = torch.empty(
            shapes[MAKES[phase]], dtype=operands[0].dtype, device=operands[0].device, memory_format=self.format
        )
        if not all(t.numel() for t in (*operands, out)):
            return out.zero_()
        sizes = self.module.Sizes(samples, xs, ys, below, c.channels, c.filters, c.groups)
        getattr(self.module, phase)(*[self._dense(t) for t in operands], out, sizes)
        return out

    def _dense(self, tensor: Tensor) -> Tensor:
        """A tensor as kernels take it: it begins at 16 bytes, as a view of a larger one may not."""
        tensor = tensor.detach().contiguous(memory_format=self.format)
        return tensor.clone() if tensor.data_ptr() % 16 else tensor


class Convolved(Unmapped):
    """A phase by its kernel; gradients are the other phases of the same convolution."""

    @staticmethod
    def forward(ctx: Any, kernels: LocalKernels, phase: Phase, *operands: Tensor) -> Tensor:
        ctx.kernels, ctx.phase = kernels, phase
        ctx.save_for_backward(*operands)
        return kernels.made(phase, *operands)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dmade: Tensor) -> Any:
        tensors = dict(zip(READS[ctx.phase], ctx.saved_tensors, strict=True)) | {MAKES[ctx.phase]: dmade}
        wants = dict(zip(READS[ctx.phase], ctx.needs_input_grad[2:], strict=True))
        found: dict[str, Tensor] = {}
        for phase, made in MAKES.items():
            if wants.get(made):
                found[made] = ctx.kernels.made(phase, *[tensors[t] for t in READS[phase]])
        return None, None, *[found.get(t) for t in READS[ctx.phase]]
