# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# (parts of torch have no types)
"""Operands as in a training step: cold, since other layers ran in between, and never the same twice.

Several sets of operands are taken in turn, so many that they don't fit a core's cache. All belong to one convolution
whose result is known: samples are rolled, and before each call one operand is multiplied by a factor that was never
used before, so that a remembered result is wrong. NaN lies around each operand.
"""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from convgen.kernels.problem import Problem
from convgen.operations.convolution import READS
from convgen.tune.operands import TOLERANCE, Operands, Wrong, logical

COLD_BYTES = 1 << 25  # bytes of all sets: more than a core's own caches hold
MOST_SETS = 24
GUARD = 1024  # elements of NaN before and behind each operand
FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}


class Set:
    """One set of operands: x, w, dy and bias as a module gets them, and the result for the factor by which one is
    multiplied."""

    def __init__(self, p: Problem, base: Operands, roll: int) -> None:
        self.roll = roll
        self.flat: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, given in base.given.items():
            value = given.roll(roll, 0) if name in ("x", "dy") else given
            flat = torch.full((value.numel() + 2 * GUARD,), math.nan, dtype=value.dtype)
            inner = flat[GUARD:-GUARD]
            whole = inner if name == "bias" else logical(inner, base.shapes[name], p.channels_last)[0]
            whole.copy_(value)
            self.flat[name] = flat
            self.tensors[name] = whole.detach().requires_grad_(name != "dy")  # as in training, leaves
        wide = torch.float64 if p.dtype == "float64" else torch.float32
        wanted = base.reference.to(wide)
        self.wanted = (wanted if p.phase == "backward_filter" else wanted.roll(roll, 0)).contiguous(
            memory_format=FORMATS[len(p.dims)] if p.channels_last else torch.contiguous_format
        )
        self.factor = 1.0


class Rotation:
    """The sets of a problem.

    Args:
        most: the largest error, over the largest |result|, that a result may have.
    Attributes:
        turned: the operand that is multiplied: the smaller one that the phase reads.
    """

    def __init__(self, p: Problem, seed: int, most: float | None = None) -> None:
        self.problem, self.base = p, Operands(p, "cpu", seed)
        self.most = TOLERANCE[p.dtype] if most is None else most
        sets = max(2, min(MOST_SETS, math.ceil(COLD_BYTES / max(p.bytes, 1))))
        self.sets = [Set(p, self.base, i % max(p.batch, 1)) for i in range(sets)]
        self._read = ["dy" if o == "y" else o for o in READS[p.phase]]
        self.turned = min(self._read, key=lambda n: self.base.given[n].numel())
        self._turned_names = (self.turned, *(["bias"] if p.bias and p.phase == "forward" else []))
        self._drawn, self._next = random.Random(seed), 0

    @torch.no_grad()
    def next(self) -> Set:
        """The set that was used longest ago, with a new factor."""
        one = self.sets[self._next]
        self._next = (self._next + 1) % len(self.sets)
        # The factors change only exponents and signs of 16-bit numbers.
        narrow = self.problem.element_bytes == 2
        size = 2.0 ** self._drawn.randint(-3, 3) if narrow else 0.5 + self._drawn.random()
        one.factor = size if self._drawn.random() < 0.5 else -size
        self._turn(one)
        return one

    def _turn(self, one: Set) -> None:
        for name in self._turned_names:
            one.tensors[name].copy_(self._given(name, one)).mul_(one.factor)

    def _given(self, name: str, one: Set) -> Tensor:
        """A set's operand before it was multiplied."""
        given = self.base.given[name]
        return given.roll(one.roll, 0) if name in ("x", "dy") and one.roll else given

    @torch.no_grad()
    def check(self, one: Set, result: object) -> float:
        """The error of a result, over the largest |result|. Raises Wrong if it isn't this set's result."""
        wanted = one.wanted
        if not isinstance(result, Tensor) or result.shape != wanted.shape:
            raise Wrong(f"a result of shape {tuple(getattr(result, 'shape', ()))} instead of {tuple(wanted.shape)}")
        form = FORMATS[len(self.problem.dims)] if self.problem.channels_last else torch.contiguous_format
        if result.dtype != self.base.given["x"].dtype or not result.is_contiguous(memory_format=form):
            raise Wrong("a result of another memory format or type")
        low, high = torch.sub(result.to(wanted.dtype), wanted, alpha=one.factor).aminmax()
        error = max(-float(low), float(high)) / (self.base.scale * abs(one.factor))
        if not error <= self.most:
            raise Wrong(f"error {error:.2e} of the largest |result|, at most {self.most:.1e}")
        for name, flat in one.flat.items():
            if not (flat[:GUARD].isnan().all() and flat[-GUARD:].isnan().all()):
                raise Wrong(f"written outside of {name}")
        return error

    @torch.no_grad()
    def check_operands(self, one: Set) -> None:
        """Check the operands that the phase reads. Raises Wrong: a call has written to one."""
        for name in self._read:
            found, given = one.tensors[name], self.base.given[name]
            if name in self._turned_names:
                same = torch.equal(found, self._given(name, one) * one.factor)
            elif name in ("x", "dy") and one.roll:
                same = torch.equal(found[one.roll :], given[: -one.roll])
                same = same and torch.equal(found[: one.roll], given[-one.roll :])
            else:
                same = torch.equal(found, given)
            if not same:
                raise Wrong(f"written to {name}")
