"""Convolution in its three phases, and transposed convolution, which is another phase's sum read from the other side.

    y[n, f, o] += x[n, c, o*S - P + d*k] * w[f, c, k]

forward sums over c and k, backward-data over f and k, backward-filter over n and o. With groups there are two ways:
G, C and F as nests (C is (G, C/g): blocks are whole groups, or parts of one), or channels as rows that filters read,
exact for blocks that cut groups. Source: [CF] Eqs. 1 to 3; DESIGN sections 1 and 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from convgen.algebra.conv import Conv
from convgen.algebra.relations import Ratio, ReadBy, Taps
from convgen.algebra.signature import WHOLE, Made, Operand, Signature
from convgen.operations.row import At, Work, touched

Phase = Literal["forward", "backward_data", "backward_filter"]


@dataclass(frozen=True)
class Convolution:
    """One phase of a convolution of x[N, C, ...] with w[F, C/g, ...] to y[N, F, ...]."""

    phase: Phase
    conv: Conv

    @property
    def name(self) -> str:
        return f"conv_{self.phase}"

    @property
    def kernel(self) -> tuple[int, ...]:
        return tuple(s.kernel for s in self.conv.spatial)

    @property
    def taps(self) -> tuple[Taps, ...]:
        return tuple(Taps(s.kernel, s.stride, s.pad_lo, s.dilation) for s in self.conv.spatial)

    @property
    def signatures(self) -> tuple[Signature, ...]:
        sides = ("y", "x") if self.phase == "backward_filter" else ("x",) if self.phase == "backward_data" else ("y",)
        nested = [self._signature(side, nested=True) for side in sides]
        if self.conv.groups == 1 or self.phase == "backward_filter":
            return tuple(nested)
        return (*nested, self._signature(sides[0], nested=False))

    def _signature(self, blocks: str, *, nested: bool) -> Signature:
        """`blocks`: the activation whose rows are blocks; the other's are windows."""
        g, c, f = self.conv.groups, self.conv.channels // self.conv.groups, self.conv.filters // self.conv.groups
        letters = self.conv.letters
        grouped = g > 1 and nested
        channels, filters, reads, of_w = (Made(("C",)), Made(("F",)), Made(("C",)), Made(("F",)))
        extents = {"N": self.conv.batch, "C": c, "F": f}
        if grouped:
            channels, filters, of_w = Made(("G", "C")), Made(("G", "F")), Made(("G", "F"))
            extents |= {"G": g}
        elif g > 1 and self.phase == "forward":
            extents = {"N": self.conv.batch, "F": self.conv.filters}
            channels, reads, of_w = Made(("F",), Ratio(1, f, c)), WHOLE, Made(("F",), Ratio(1, f, f))
        elif g > 1:
            extents = {"N": self.conv.batch, "C": self.conv.channels}
            filters, reads, of_w = Made(("C",), Ratio(1, c, f)), WHOLE, Made(("C",), Ratio(1, c, f))
        extents |= {s.name: s.out if blocks == "y" else s.extent for s in self.conv.spatial}

        def rows(side: str) -> tuple[Made, ...]:
            if side == blocks:
                return tuple(Made((s,)) for s in letters)
            return tuple(Made((s,), t if side == "x" else ReadBy(t)) for s, t in zip(letters, self.taps, strict=True))

        x = Operand(
            "x",
            (self.conv.batch, self.conv.channels, *(s.extent for s in self.conv.spatial)),
            (Made(("N",)), channels, *rows("x")),
        )
        y = Operand(
            "y",
            (self.conv.batch, self.conv.filters, *(s.out for s in self.conv.spatial)),
            (Made(("N",)), filters, *rows("y")),
        )
        w = Operand("w", (self.conv.filters, c, *self.kernel), (of_w, reads, *(WHOLE,) * len(self.taps)))
        ins, out = {"forward": ((x, w), y), "backward_data": ((y, w), x), "backward_filter": ((y, x), w)}[self.phase]
        return Signature(tuple(extents.items()), ins, (out,))

    def local(self, way: int, at: At, *operands: Any) -> tuple[Any, ...]:
        import torch

        signature, dims = self.signatures[way], tuple(range(2, 2 + len(self.taps)))
        cut = self.conv.groups > 1 and "G" not in signature.extent
        stride, dilation = ([getattr(t, side) for t in self.taps] for side in ("stride", "dilation"))
        zeros = [0] * len(dims)
        grow = torch.nn.functional.pad

        def whole_groups(lo: int, hi: int, size: int) -> tuple[int, int]:
            """First group of a block of whole or cut groups, and how many it touches."""
            return lo // size, -(-hi // size) - lo // size

        def convolved(x: Any, w: Any, groups: int) -> Any:
            return torch.convolution(x, w, None, stride, zeros, dilation, False, zeros, groups)

        if self.phase == "forward":
            x, w = grow(operands[0], at.padding(0, dims)), operands[1]
            if not cut:
                return (convolved(x, w, self._groups_of(at)),)
            lo, hi = at.blocks["F"]
            first, count = whole_groups(lo, hi, self.conv.filters // self.conv.groups)
            start = lo - first * (self.conv.filters // self.conv.groups)
            return (convolved(x, w, count)[:, start : start + hi - lo],)
        if self.phase == "backward_data":
            dy, w = grow(operands[0], at.padding(0, dims)), operands[1]
            groups = self._groups_of(at)
            if cut:
                lo, hi = at.blocks["C"]
                first, groups = whole_groups(lo, hi, self.conv.channels // self.conv.groups)
            full = torch.convolution(dy, w, None, stride, zeros, dilation, True, zeros, groups)
            sides: list[int] = []
            for d, letter, taps in reversed(list(zip(dims, self.conv.letters, self.taps, strict=True))):
                below = at.blocks[letter][0] - (at.windows[0][d][0] * taps.stride - taps.pad)
                sides += [-below, below + at.extent(letter) - full.shape[d]]
            dx = grow(full, sides)
            if not cut:
                return (dx,)
            start = lo - first * (self.conv.channels // self.conv.groups)
            return (dx[:, start : start + hi - lo],)
        dy, x = operands
        if way == 0:
            x = grow(x, at.padding(1, dims))
        else:  # rows of x are the block: what dy's rows read besides is another rank's, here zeros
            dy = grow(dy, at.padding(0, dims))
            sides = []
            for d, letter, taps in reversed(list(zip(dims, self.conv.letters, self.taps, strict=True))):
                lo, hi = taps.window(*at.windows[0][d])
                sides += [at.blocks[letter][0] - lo, hi - at.blocks[letter][1]]
            x = grow(x, sides)
        w_shape = [
            dy.shape[1],
            self.conv.channels // self.conv.groups if self._groups_of(at) > 1 else x.shape[1],
            *self.kernel,
        ]
        mask, groups = [False, True, False], self._groups_of(at)
        empty = dy.new_empty(w_shape)
        found = torch.ops.aten.convolution_backward(
            dy, x, empty, None, stride, zeros, dilation, False, zeros, groups, mask
        )
        return (found[1],)

    def _groups_of(self, at: At) -> int:
        return at.extent("G") if "G" in at.blocks else 1

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        """The sum as it stands, tap by tap, in float64."""
        import torch

        x_rows, y_rows = [s.extent for s in self.conv.spatial], [s.out for s in self.conv.spatial]
        g, letters = self.conv.groups, self.conv.letters
        of = dict(
            zip({"forward": "xw", "backward_data": "yw", "backward_filter": "yx"}[self.phase], operands, strict=True)
        )
        out = {"forward": "y", "backward_data": "x", "backward_filter": "w"}[self.phase]
        shape = {
            "x": [self.conv.batch, self.conv.channels, *x_rows],
            "w": [self.conv.filters, self.conv.channels // g, *self.kernel],
            "y": [self.conv.batch, self.conv.filters, *y_rows],
        }
        whole = {t: of[t] if t in of else torch.zeros(shape[t], dtype=operands[0].dtype) for t in "xwy"}
        lo = [max(t.pad, 0) for t in self.taps]
        spans = [(o - 1) * t.stride + t.reach + 1 for o, t in zip(y_rows, self.taps, strict=True)]
        begin = [p - t.pad for p, t in zip(lo, self.taps, strict=True)]
        sides = [
            n
            for b, p, s, h in reversed(list(zip(begin, lo, spans, x_rows, strict=True)))
            for n in (p, max(0, b + s - p - h))
        ]
        framed = torch.nn.functional.pad(whole["x"], sides).unflatten(1, (g, -1))
        w, y = whole["w"].unflatten(0, (g, -1)), whole["y"].unflatten(1, (g, -1))
        framed, w, y = framed.clone(), w.clone(), y.clone()
        low = "".join(letters).lower()
        x_of, y_of = f"ngc{low}", f"ngf{low}"
        for tap in torch.cartesian_prod(*(torch.arange(k) for k in self.kernel)).reshape(-1, len(self.taps)).tolist():
            rows = tuple(
                slice(b + t.dilation * k, b + t.dilation * k + (o - 1) * t.stride + 1, t.stride)
                for b, t, k, o in zip(begin, self.taps, tap, y_rows, strict=True)
            )
            here = (slice(None), slice(None), slice(None), *rows)
            at_tap = (slice(None), slice(None), slice(None), *tap)
            if out == "y":
                y += torch.einsum(f"{x_of},gfc->{y_of}", framed[here], w[at_tap])
            elif out == "x":
                framed[here] += torch.einsum(f"{y_of},gfc->{x_of}", y, w[at_tap])
            else:
                w[at_tap] += torch.einsum(f"{y_of},{x_of}->gfc", y, framed[here])
        if out == "y":
            return (y.flatten(1, 2),)
        if out == "w":
            return (w.flatten(0, 1),)
        inside = tuple(slice(p, p + h) for p, h in zip(lo, x_rows, strict=True))
        return (framed.flatten(1, 2)[(slice(None), slice(None), *inside)],)

    def work(self, way: int, at: At) -> Work:
        """Two flops a product; padding and rows that nobody reads count as read."""
        signature = self.signatures[way]
        rows = prod(at.extent(s) for s in self.conv.letters)
        if "G" in signature.extent or self.conv.groups == 1:
            pairs = self._groups_of(at) * at.extent("C") * at.extent("F")
        else:
            pairs = (
                at.extent("F") * (self.conv.channels // self.conv.groups)
                if "F" in at.blocks
                else at.extent("C") * (self.conv.filters // self.conv.groups)
            )
        return Work(2 * at.extent("N") * pairs * rows * prod(self.kernel), touched(at, signature))
