"""Random numbers are a function of (seed, step, call, global index): every layout draws the same ones, and dropout's
backward pass draws its mask again instead of keeping it.

Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC'11, Philox4x32-10.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import cos, log, pi, prod, sqrt
from typing import Any, Literal

from convgen.algebra.signature import WHOLE, Operand, Signature
from convgen.late import torch
from convgen.operations.autocast import ASKED
from convgen.operations.row import At, Derived, Operation, numbered, numbers, on_device, own

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
EVALUATION = 1 << 31  # the steps of calls in evaluation begin here
ROUNDS = 10
MOST_DIMS = 5  # the most dimensions of a tensor for which a kernel draws
DRAWS: list[Any] = []  # a package's module of kernels that draw, if there is one
BY_HAND = 32  # for so few elements Python's integers take less time than calls of ATen
DIGITS = {"float64": 32, "float32": 24, "float16": 11, "bfloat16": 8}  # binary digits of uniform numbers below 1


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox's ten rounds on four words of 32 bits."""
    a, b, c, d = counter
    k, m = key
    for _ in range(ROUNDS):
        p, q = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (q >> 32 & WORD) ^ b ^ k, q & WORD, (p >> 32 & WORD) ^ d ^ m, p & WORD
        k, m = k + WEYL[0] & WORD, m + WEYL[1] & WORD
    return a, b, c, d


def kernels_of(shape: tuple[int, ...], at: At) -> tuple[Any, Any]:
    """The module of kernels that draw, and the arguments of a rank's block; None where ATen draws."""
    draws = DRAWS[0] if DRAWS and len(shape) <= MOST_DIMS and not ASKED.types else None
    return draws, [at.blocks[i] for i in numbered(len(shape))]


def words(shape: tuple[int, ...], at: At, drawn: Any, call: int) -> tuple[Any, Any, Any, Any]:
    """Four words of 32 bits, as int64, for each element of this rank's block, by the element's number in the whole.

    A product of two words may pass 2**63; in two's complement its shifted and masked bits are right nonetheless, and
    bits above 32 are masked once a round.

    Args:
        drawn: (seed, step).
        call: the number of the place in the program that draws.
    """
    blocks = [at.blocks[i] for i in numbered(len(shape))]
    here = [hi - lo for lo, hi in blocks]
    if (few := few_words(shape, at, drawn, call)) is not None:
        return tuple(torch.tensor(few, dtype=torch.int64).view(*here, 4).unbind(-1))
    cut = max((d for d, n in enumerate(shape) if blocks[d] != (0, n)), default=0)  # behind it numbers follow
    steps = [prod(shape[d + 1 :]) for d in range(len(shape))]
    lo, hi = blocks[cut] if shape else (0, 1)
    number = numbers((lo * steps[cut], hi * steps[cut]) if shape else (0, 1), drawn).view(here[cut:])
    for d in range(cut):
        number = number + (numbers(blocks[d], drawn) * steps[d]).view(-1, *[1] * (len(shape) - 1 - d))
    ones, (seed, step) = [1] * number.dim(), drawn
    rounds = on_device(tuple(r * w & WORD for r in range(ROUNDS) for w in WEYL), torch.int64, drawn.device)
    keys = (rounds.view(ROUNDS, 2) + torch.stack([seed, seed >> 32]) & WORD).view(ROUNDS, 2, *ones)
    times = on_device(MULTIPLIERS, torch.int64, drawn.device).view(2, *ones)
    # Philox's rounds do a and c at once, and b and d: for few elements it is the number of ATen's calls that costs.
    even = torch.stack([number & WORD, (step & WORD).expand(number.shape)])
    odd = torch.stack([number >> 32, torch.full_like(number, call)])
    for key in keys.unbind():
        products = (even * times).flip(0)
        even = (products >> 32).bitwise_xor_(odd).bitwise_xor_(key).bitwise_and_(WORD)
        odd = products
    (a, c), (b, d) = even, odd & WORD
    return a, b, c, d


def some_words(which: Iterable[int], drawn: Any, call: int) -> list[tuple[int, int, int, int]]:
    """The words of the elements with these numbers, in Python's integers."""
    seed, step = drawn.tolist()
    key = (seed & WORD, seed >> 32 & WORD)
    return [philox((i & WORD, i >> 32, step & WORD, call), key) for i in which]


def few_words(shape: tuple[int, ...], at: At, drawn: Any, call: int) -> list[tuple[int, int, int, int]] | None:
    """The words of a rank's block in Python's integers, if it has few elements and is on a CPU; else None."""
    if drawn.device.type != "cpu":
        return None
    if (key := ("numbers", shape)) not in at.known:
        at.known[key] = _few_numbers(shape, [at.blocks[i] for i in numbered(len(shape))])
    which = at.known[key]
    return None if which is None else some_words(which, drawn, call)


def _few_numbers(shape: tuple[int, ...], blocks: Sequence[tuple[int, int]]) -> list[int] | None:
    """The numbers in the whole of a block's elements, if these are few; else None."""
    if prod(hi - lo for lo, hi in blocks) > BY_HAND:
        return None
    steps = [prod(shape[d + 1 :]) for d in range(len(shape))]
    return [sum(i * n for i, n in zip(one, steps, strict=True)) for one in product(*(range(*b) for b in blocks))]


def two_words(shape: tuple[int, ...], at: At, drawn: Any, call: int, *, both: bool = True) -> tuple[Any, Any]:
    """The first two words of each element; a kernel makes the second only if `both`."""
    draws, box = kernels_of(shape, at)
    if draws is not None:
        return draws.words(shape, box, drawn, call, both)
    return words(shape, at, drawn, call)[:2]


@dataclass(frozen=True)
class Dropout(Operation):
    """The tensor x with a share p of its elements 0 and the others divided by 1 - p; all are 0 where p is 1.

    Operands are x and a buffer of two int64, (seed, step). `call` numbers the places of a program that draw, so that
    they draw differently.
    """

    shape: tuple[int, ...]
    p: float
    call: int = 0

    draws = True
    in_evaluation = "same"

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        x, y = (Operand(name, self.shape, own(*names)) for name in "xy")
        drawn = Operand("seed", (2,), (WHOLE,), gradient=False, integer=True)
        return (Signature(tuple(zip(names, self.shape, strict=True)), (x, drawn), (y,)),)

    @cached_property
    def gradients(self) -> Mapping[str, Derived]:
        """The gradient's row, which draws the same mask again."""
        return {"x": Derived(self, ("dy", "seed"))}

    @property
    def _least(self) -> int:
        """The least word that keeps its element: elements with lower words are dropped."""
        return round(self.p * 2**32)

    @property
    def _kept(self) -> float:
        """The share of elements that stay, by which they are divided; 1 where none stays."""
        return 1 - self.p or 1.0

    def mask(self, at: At, drawn: Any, like: Any) -> Any:
        """The mask, with ones where x stays, in like's type, for a target that draws no numbers itself."""
        return (words(self.shape, at, drawn, self.call)[0] >= self._least).to(like.dtype)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        x, drawn = operands
        draws, box = kernels_of(self.shape, at)
        if draws is not None:
            return (self._dropped(draws, box, x, drawn),)
        return (x * (words(self.shape, at, drawn, self.call)[0] >= self._least) / self._kept,)

    def _dropped(self, draws: Any, box: Any, x: Any, drawn: Any) -> Any:
        return draws.dropped(x, self.shape, box, drawn, self.call, self._least, self._kept)

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return True

    def kept(self, way: int, at: At, wanted: Sequence[bool], *operands: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        x, drawn = operands
        if kernels_of(self.shape, at)[0] is not None:
            return self.local(way, at, x, drawn), (None, drawn)  # enough to draw the mask again
        there = words(self.shape, at, drawn, self.call)[0] >= self._least
        return (x * there / self._kept,), (there, None)

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        there, drawn = kept
        if there is None:
            return self._dropped(*kernels_of(self.shape, at), dys[0], drawn), None
        return dys[0] / self._kept * there, None

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The result element by element, in Python's integers."""
        x, drawn = operands
        kept = torch.tensor([w >= self._least for w, *_ in some_words(range(x.numel()), drawn, self.call)]).reshape(
            self.shape
        )
        return (torch.where(kept, x / self._kept, torch.zeros_like(x)),)


@dataclass(frozen=True)
class Drawn(Operation):
    """Numbers that are drawn for each element; the seed is the only operand."""

    shape: tuple[int, ...]

    draws = True

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        drawn = Operand("seed", (2,), (WHOLE,), gradient=False, integer=True)
        y = Operand("y", self.shape, own(*names), gradient=False)
        return (Signature(tuple(zip(names, self.shape, strict=True)), (drawn,), (y,), runs_empty=True),)


@dataclass(frozen=True)
class Bernoulli(Drawn):
    """Ones with probability p, else zeros: masks of channels, or of samples (stochastic depth).

    Attributes:
        dtype: as torch prints it.
    """

    p: float
    call: int = 0
    dtype: str = "float64"

    in_evaluation = "fill"

    @property
    def _least(self) -> int:
        """The least word that makes a zero: lower words make ones."""
        return round(self.p * 2**32)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        (drawn,), kind = operands, getattr(torch, self.dtype)
        few = None if kernels_of(self.shape, at)[0] is not None else few_words(self.shape, at, drawn, self.call)
        if few is not None:
            here = [at.extent(i) for i in numbered(len(self.shape))]
            return (torch.tensor([w < self._least for w, *_ in few], dtype=kind).view(here),)
        one, _ = two_words(self.shape, at, drawn, self.call, both=False)
        return ((one < self._least).to(kind),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The result element by element, in Python's integers."""
        drawn = some_words(range(prod(self.shape)), operands[0], self.call)
        ones = [float(w < self._least) for w, *_ in drawn]
        return (torch.tensor(ones, dtype=getattr(torch, self.dtype)).reshape(self.shape),)


@dataclass(frozen=True)
class Noise(Drawn):
    """Uniform numbers in [0, 1), or normal ones (Box and Muller, from two words).

    Attributes:
        dtype: as torch prints it. Uniform numbers of a shorter type are those of a longer one, cut.
    """

    kind: Literal["uniform", "normal"]
    call: int = 0
    dtype: str = "float64"

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        one, two = two_words(self.shape, at, operands[0], self.call, both=self.kind == "normal")
        if self.kind == "uniform":
            digits = DIGITS[self.dtype]
            y = (one >> 32 - digits).to(torch.float64) / 2**digits
        else:
            y = torch.sqrt(-2 * torch.log((one.double() + 1) / 2**32)) * torch.cos(two.double() * (2 * pi / 2**32))
        return (y.to(getattr(torch, self.dtype)),)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The result element by element, in Python's numbers."""
        drawn = some_words(range(prod(self.shape)), operands[0], self.call)
        if self.kind == "uniform":
            digits = DIGITS[self.dtype]
            y = [(a // 2 ** (32 - digits)) / 2**digits for a, *_ in drawn]
        else:
            y = [sqrt(-2 * log((a + 1) / 2**32)) * cos(2 * pi * b / 2**32) for a, b, *_ in drawn]
        return (torch.tensor(y, dtype=torch.float64).reshape(self.shape).to(getattr(torch, self.dtype)),)
