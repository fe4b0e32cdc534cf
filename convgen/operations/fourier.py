"""Fourier transforms along one dimension, which a rank needs whole. Complex numbers are pairs of real tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log2, pi, prod
from typing import Any, Literal

from convgen.algebra.signature import Operand, Signature
from convgen.late import torch
from convgen.operations.row import At, Operation, Work, numbered, own, touched


@dataclass(frozen=True)
class Fourier(Operation):
    """Sums over j of z_j exp(-2 pi i j k / length), or of the other sign, along dimension d of z = re + i im.

    Attributes:
        kind: what it reads and makes. `real`: from re alone, half of the result, whose rest is the mirror image;
            `complex`: from z, the result; `back`: from such a half, real numbers.
        scale: 0 for the sums, 1 for the sums over the root of `length`, 2 for the sums over `length`.
        length: the number of terms of the transform: the operand's rows, or for `back` the result's.
    """

    shape: tuple[int, ...]
    d: int
    kind: Literal["real", "complex", "back"]
    forward: bool
    scale: int
    length: int

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        names = numbered(len(self.shape))
        dims = own(*(None if d == self.d else i for d, i in enumerate(names)))
        extents = tuple((i, n) for d, (i, n) in enumerate(zip(names, self.shape, strict=True)) if d != self.d)
        rows = {"real": self.length // 2 + 1, "complex": self.length, "back": self.length}[self.kind]
        out = tuple(rows if d == self.d else n for d, n in enumerate(self.shape))
        reads = ("re",) if self.kind == "real" else ("re", "im")
        makes = ("y",) if self.kind == "back" else ("y_re", "y_im")
        inputs = tuple(Operand(name, self.shape, dims) for name in reads)
        return (Signature(extents, inputs, tuple(Operand(name, out, dims) for name in makes)),)

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        how = self._how(self.forward)
        if self.kind == "real":
            z = torch.fft.rfft(operands[0], **how)
        elif self.kind == "back":
            return (torch.fft.irfft(torch.complex(*operands), **how),)
        else:
            z = (torch.fft.fft if self.forward else torch.fft.ifft)(torch.complex(*operands), **how)
        return z.real, z.imag

    def _how(self, forward: bool) -> dict[str, Any]:
        """Torch's arguments for the scale, for a transform of either sign."""
        norm = ("backward", "ortho", "forward") if forward else ("forward", "ortho", "backward")
        return {"n": self.length, "dim": self.d, "norm": norm[self.scale]}

    def has_vjp(self, way: int, at: At, *operands: Any) -> bool:
        return self.kind != "back" or self.shape[self.d] == self.length // 2 + 1

    def vjp(self, way: int, at: At, wanted: Sequence[bool], kept: Sequence[Any], *dys: Any) -> tuple[Any, ...]:
        """The gradient: the same sums with the other sign; for `back`, terms that stand for a mirror image, too, count
        twice."""
        if self.kind == "back":
            dz = torch.fft.rfft(dys[0], **self._how(True))
            twice = dz.narrow(self.d, 1, (self.length - 1) // 2) if self.length > 2 else dz[:0]
            twice.mul_(2)
            return dz.real if wanted[0] else None, dz.imag if wanted[1] else None
        there = next(dy for dy in dys if dy is not None)
        dz = torch.complex(*(torch.zeros_like(there) if dy is None else dy for dy in dys))
        forward = self.kind == "complex" and not self.forward
        dz = (torch.fft.fft if forward else torch.fft.ifft)(dz, **self._how(forward))
        return tuple(g if asked else None for g, asked in zip((dz.real, dz.imag), wanted, strict=False))

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The product with the matrices of cosines and sines."""
        re = operands[0].movedim(self.d, -1)
        im = operands[1].movedim(self.d, -1) if len(operands) > 1 else torch.zeros_like(re)
        n, rows = self.length, re.shape[-1]
        terms = rows if self.kind == "back" else n
        made = self.signatures[0].results[0].shape[self.d]
        turns = (torch.arange(terms)[:, None] * torch.arange(made) % n).double() * (2 * pi / n)
        cos, sin = torch.cos(turns).to(re), torch.sin(turns).to(re) * (-1 if self.forward else 1)
        if self.kind == "back":  # what is missing is the mirror image of all but the first and, of even n, the last
            times = torch.full((rows, 1), 2.0).to(re)
            times[0] = 1
            times[n // 2 :] = 1 if n % 2 == 0 else 2
            times = times if n > 1 else torch.ones_like(times)
            cos, sin = cos * times, sin * times
        over = (1, n**0.5, n)[self.scale]
        y_re, y_im = (re @ cos - im @ sin) / over, (re @ sin + im @ cos) / over
        found = tuple(y.movedim(-1, self.d) for y in (y_re, y_im))
        return found[:1] if self.kind == "back" else found

    def work(self, way: int, at: At) -> Work:
        """The work of a fast transform, 5 n log2 n flops; for real numbers half of it."""
        others = prod(at.extent(i) for i, _ in self.signatures[way].extents)
        flops = int((5 if self.kind == "complex" else 2.5) * self.length * max(log2(self.length), 1))
        return Work(flops * others, touched(at, self.signatures[way]))
