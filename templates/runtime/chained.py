# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped)
"""Chains of elementwise rows, done by a package's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from convgen.operations.chains import ElementChain

from .travel import CHANNELS_LAST


class ChainKernel:
    """A chain's kernels.

    Args:
        module: with them.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def takes(self, chain: ElementChain, operands: Sequence[Tensor], *, copies: bool = False) -> bool:
        """Whether the kernels can run the chain: all operands are of one type, and one operand of the result's shape
        lies in memory with channels last. With `copies` the operands may be copied there, so their memory doesn't
        matter."""
        first = _whole(chain, operands)[0]
        last, kind = _memory(chain, first), str(first.dtype).removeprefix("torch.")
        lies = copies or any(t.is_contiguous(memory_format=last) for t in _whole(chain, operands))
        alike = all(t.dtype == first.dtype for t in operands) and chain.casts <= {kind}
        return lies and alike and first.numel() > 0

    def lying(self, chain: ElementChain, operands: Sequence[Tensor]) -> list[Tensor]:
        """Operands in the memory format that the kernels read; an operand in another one is copied."""
        found: list[Tensor] = []
        for t, lies in zip(operands, chain.lies, strict=True):
            memory = _memory(chain, t) if lies == "ncp" else torch.contiguous_format
            found.append(t.detach().contiguous(memory_format=memory))
        return found

    def made(self, chain: ElementChain, operands: Sequence[Tensor]) -> Tensor:
        given = self.lying(chain, operands)
        y = torch.empty_like(_whole(chain, given)[0])
        self.module.make(given, y)
        return y

    def kept(
        self, chain: ElementChain, wanted: Sequence[bool], operands: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """The result; and for backward what the gradients read, the operands' shapes, and this object."""
        operands = self.lying(chain, operands)
        y, reads = self.made(chain, operands), chain.reads(wanted)
        found = [t if k in reads else None for k, t in enumerate((*operands, y))]
        return (y,), (*found, tuple([tuple(t.shape) for t in operands]), self)

    def back(
        self, chain: ElementChain, wanted: Sequence[bool], kept: Sequence[Any], dy: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of operands."""
        *read, shapes, _ = kept
        dy = dy.detach().contiguous(memory_format=_memory(chain, dy))
        made = self.module.make_back(dy, read, wanted)
        return tuple([g if g is None else g.to(dy.dtype).view(s) for g, s in zip(made, shapes, strict=True)])


def _memory(chain: ElementChain, t: Tensor) -> torch.memory_format:
    """The format with channels last, or the contiguous one where the chain goes along the last dimension."""
    return torch.contiguous_format if chain.trailing else CHANNELS_LAST[t.dim()]


def _whole(chain: ElementChain, operands: Sequence[Tensor]) -> list[Tensor]:
    """The operands that have an element for each element of the result."""
    return [t for t, lies in zip(operands, chain.lies, strict=True) if lies == "ncp"]
