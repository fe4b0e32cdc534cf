"""Dropout whose mask is a function of (seed, step, call, global index): every layout draws the same one, and the
backward pass draws it again instead of keeping it.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC'11, Philox4x32-10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from convgen.algebra.signature import WHOLE, Operand, Signature
from convgen.late import torch
from convgen.operations.row import At, Derived, Operation, numbered, numbers, own

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Ten rounds on four words of 32 bits: Python's integers, or tensors of int64 that hold them.

    A product of two words may pass 2**63; what is shifted and masked of it is right in two's complement as well.
    """
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        p, q = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (q >> 32 & WORD) ^ b ^ k, q & WORD, (p >> 32 & WORD) ^ d ^ m, p & WORD
        k, m = k + WEYL[0] & WORD, m + WEYL[1] & WORD
    return a, b, c, d


def words(shape: tuple[int, ...], at: At, drawn: Any, call: int) -> Any:
    """A word of 32 bits for each element of this rank's block, by its number in the whole.

    Args:
        drawn: (seed, step).
        call: which of a program's places that draw.
    """
    number = drawn.new_zeros(())
    for d, n in enumerate(shape):
        number = number * n + numbers(at.blocks[f"d{d}"], drawn).view(-1, *[1] * (len(shape) - 1 - d))
    seed, step = drawn[0], drawn[1]
    return philox((number & WORD, number >> 32, step & WORD, call), (seed & WORD, seed >> 32 & WORD))[0]


def all_words(count: int, drawn: Any, call: int) -> list[int]:
    """The same for a whole of so many elements, in Python's integers."""
    seed, step = drawn.tolist()
    key = (seed & WORD, seed >> 32 & WORD)
    return [philox((i & WORD, i >> 32, step & WORD, call), key)[0] for i in range(count)]


@dataclass(frozen=True)
class Dropout(Operation):
    """x with a share p of its elements 0 and the others divided by 1 - p.

    Operands are x and (seed, step), two int64: a buffer. `call` tells the places of a program that draw apart.
    """

    shape: tuple[int, ...]
    p: float
    call: int = 0

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        x, y = (Operand(name, self.shape, own(*names)) for name in "xy")
        drawn = Operand("seed", (2,), (WHOLE,), gradient=False, integer=True)
        return (Signature(tuple(zip(names, self.shape, strict=True)), (x, drawn), (y,)),)

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        """The same mask, drawn again."""
        return {"x": Derived(self, ("dy", "seed"))}

    @property
    def _least(self) -> int:
        """Words below it drop."""
        return round(self.p * 2**32)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x, drawn = operands
        return (x * (words(self.shape, at, drawn, self.call) >= self._least) / (1 - self.p),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """Element by element, in Python's integers."""
        x, drawn = operands
        kept = torch.tensor([w >= self._least for w in all_words(x.numel(), drawn, self.call)]).reshape(self.shape)
        return (torch.where(kept, x / (1 - self.p), torch.zeros_like(x)),)


@dataclass(frozen=True)
class Bernoulli(Operation):
    """Ones with probability p, else zeros: masks of channels, of samples (stochastic depth). No operand but the seed.

    Attributes:
        dtype: as torch prints it.
    """

    shape: tuple[int, ...]
    p: float
    call: int = 0
    dtype: str = "float64"

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        drawn = Operand("seed", (2,), (WHOLE,), gradient=False, integer=True)
        y = Operand("y", self.shape, own(*names), gradient=False)
        return (Signature(tuple(zip(names, self.shape, strict=True)), (drawn,), (y,)),)

    @property
    def _least(self) -> int:
        """Words below it are ones."""
        return round(self.p * 2**32)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        return ((words(self.shape, at, operands[0], self.call) < self._least).to(getattr(torch, self.dtype)),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """Element by element, in Python's integers."""
        drawn = all_words(prod(self.shape), operands[0], self.call)
        ones = [float(w < self._least) for w in drawn]
        return (torch.tensor(ones, dtype=getattr(torch, self.dtype)).reshape(self.shape),)
