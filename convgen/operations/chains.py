"""Elementwise rows, one behind the other, as one kernel of a GPU, forward and backward.

    h --mul gamma--> --mul noise--> --add x--> y        one launch, which reads h and x and writes y

Operands lie as the result does, or have a number for each channel, sample, channel of each sample, or pixel. Channels
are the second dimension of images and volumes, and last in memory; where vectors lie along the last dimension, as those
of linear layers do, that dimension is the channels. kernels/chains.py prints kernels of these texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from string import Formatter
from typing import Any, NamedTuple

from convgen.algebra.signature import Operand
from convgen.operations.batch_norm import IMAGES
from convgen.operations.element_texts import ElementStep

MADE = -1  # the source of an operand that the step before made
ELEMENT_CHAINS: dict[str, Any] = {}  # a package's kernels, by chains' keys


class ChainStep(NamedTuple):
    """A step of a chain.

    Attributes:
        sources: for each operand, its number among the chain's operands, or MADE.
        lies: for each operand, the letters of what it has several of: n, samples; c, channels; p, pixels.
    """

    step: ElementStep
    sources: tuple[int, ...]
    lies: tuple[str, ...]


@dataclass(frozen=True)
class ElementChain:
    """Steps in order; each but the first reads what the one before made, once.

    Attributes:
        trailing: whether channels are the last dimension.
    """

    steps: tuple[ChainStep, ...]
    trailing: bool = False

    @cached_property
    def key(self) -> str:
        """A text of all that the chain does, which is its key."""
        return "trailing " * self.trailing + "; ".join(
            f"{s.step.text} of {', '.join(f'{k}:{at}' for k, at in zip(s.sources, s.lies, strict=True))}"
            for s in self.steps
        )

    @cached_property
    def lies(self) -> tuple[str, ...]:
        """How each of the chain's operands lies, as in `ChainStep.lies`."""
        found = {k: at for s in self.steps for k, at in zip(s.sources, s.lies, strict=True) if k != MADE}
        return tuple(found[k] for k in sorted(found))

    @cached_property
    def casts(self) -> frozenset[str]:
        """The types to which it casts; its kernel is right for operands of these alone."""
        return frozenset(s.step.casts_to for s in self.steps) - {""}

    @cached_property
    def by_sample(self) -> bool:
        """Whether each program of the kernel takes pixels of one sample."""
        return any("n" in at and "p" not in at for at in self.lies)

    @cached_property
    def reads_result(self) -> bool:
        """Whether the last step's gradient is made from its result."""
        return any("y" in _names(text) for text in self.steps[-1].step.backs)

    def reads(self, wanted: Sequence[bool]) -> set[int]:
        """The numbers of the operands that the wanted gradients read; the number behind the last one is the
        result's."""
        found, values, last = set[int](), set[int](), len(self.steps) - 1
        every = asked_of([s.sources for s in self.steps], wanted)
        for n, (s, asked) in enumerate(zip(self.steps, every, strict=True)):
            for name in {name for text, one in zip(s.step.backs, asked, strict=True) if one for name in _names(text)}:
                if name == "y":
                    values.add(n)
                elif name != "dy":
                    self._read(s.sources[int(name)], n, found, values)
        if last in values and self.reads_result:
            found.add(len(self.lies))
            values.remove(last)
        while values:
            n = values.pop()
            for source in self.steps[n].sources:
                self._read(source, n, found, values)
        return found

    def _read(self, source: int, n: int, found: set[int], values: set[int]) -> None:
        """Note that gradients read an operand of step n, by its source."""
        if source == MADE:
            values.add(n - 1)
        else:
            found.add(source)


def asked_of(sources: Sequence[Sequence[int]], wanted: Sequence[bool]) -> list[list[bool]]:
    """For each step, the operands whose gradients are asked for.

    Args:
        sources: those of each step; wanted: for each operand of the chain, whether its gradient is.
    """
    found, made = list[list[bool]](), False
    for each in sources:
        found.append([made if k == MADE else wanted[k] for k in each])
        made = any(found[-1])
    return found


def _names(text: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(text) if name}


def how_it_lies(shape: Sequence[int], result: Sequence[int], *, trailing: bool = False) -> str | None:
    """The letters of how an operand lies beside a result[N, C, ...], or [..., C]; None where kernels can't read it."""
    wide = (*[1] * (len(result) - len(shape)), *shape)
    has = [n == of for n, of in zip(wide, result, strict=True)]
    if not all(there or n == 1 for there, n in zip(has, wide, strict=True)):
        return None
    if trailing:
        return "ncp" if all(has) else "" if prod(wide) == 1 else "c" if prod(wide[:-1]) == 1 else None
    if all(has[2:]) and prod(result[2:]) > 1:
        letters = "p"
    elif prod(wide[2:]) == 1:
        letters = ""
    else:
        return None
    found = "".join(letter for letter, there in zip("nc", has, strict=False) if there) + letters
    return None if "p" in found and "n" not in found else found


def shape_beside(operand: Operand, result: Operand) -> tuple[int, ...] | None:
    """An operand's shape with as many dimensions as the result has, by the indices of both. None where the indices
    stand in another order, where the operand is made of anything else, or has all elements in fewer dimensions."""
    places = {made.indices: d for d, made in enumerate(result.dims) if made.relation is None and made.indices}
    wide, last = [1] * len(result.shape), -1
    for made, n in zip(operand.dims, operand.shape, strict=True):
        if n == 1:
            continue
        d = places.get(made.indices, -1) if made.relation is None else -1
        if d <= last:
            return None
        wide[d], last = n, d
    return tuple(wide) if len(operand.shape) == len(wide) or tuple(wide) != tuple(result.shape) else None


def chain_of_parts(
    parts: Sequence[tuple[ElementStep | None, Sequence[int], Sequence[Sequence[int] | None], Sequence[int]]],
) -> ElementChain | None:
    """The chain of rows, each given with its element step, its sources, and its operands' shapes beside its result's;
    None where they are no chain."""
    last = tuple(parts[-1][3])
    orders = [trailing for trailing in (False, True) if trailing or len(last) in IMAGES]
    return next(filter(None, (_chain_in(parts, last, trailing) for trailing in orders if len(parts) > 1)), None)


def _chain_in(
    parts: Sequence[tuple[ElementStep | None, Sequence[int], Sequence[Sequence[int] | None], Sequence[int]]],
    last: tuple[int, ...],
    trailing: bool,
) -> ElementChain | None:
    steps: list[ChainStep] = []
    for step, sources, shapes, result in parts:
        lies = [None if shape is None else how_it_lies(shape, last, trailing=trailing) for shape in shapes]
        if step is None or tuple(result) != last or len(step.backs) != len(shapes):
            return None
        known = [at for at in lies if at is not None]
        before = [at for k, at in zip(sources, lies, strict=True) if k == MADE]
        if len(known) != len(lies) or any(at != "ncp" for at in before):
            return None
        steps.append(ChainStep(step, tuple(sources), tuple(known)))
    chain = ElementChain(tuple(steps), trailing)
    has_vector = "c" in chain.lies  # without one nothing says that channels are there
    return chain if "ncp" in chain.lies and (has_vector or not trailing) else None
