"""Pooling over windows that may overlap, with padding: AlexNet, ResNet-50 and GoogLeNet have 3 x 3 windows of stride 2.

[SW] 4.4 speaks of tiles that don't overlap (run.py); its networks of Table 3 need more. A CPE takes as many rows as LDM
holds. Backward it makes rows of dx from all windows that reach into them, so that nothing is added in memory; rows of x
and dy on the edges of blocks are read more than once. The first of equal largest elements gets the gradient, as in
PyTorch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from convgen.errors import InputError
from convgen.sw26010.gemm.plan import Dtype
from convgen.sw26010.machine.core_group import LANES, SLOT_BYTES
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.machine.printing import print_program
from convgen.sw26010.operations.task import HEADER, TASK_LDM_BYTES, Place, busiest, itemsize


@dataclass(frozen=True, slots=True)
class Windows:
    """Pooling of x [N, C, H, W] by K x K windows, S apart. In an average, padding counts as zeros.

    Raises:
        InputError: no window, a padding above half of the kernel, or rows that don't fit into LDM.
    """

    n: int
    c: int
    h: int
    w: int
    kernel: int
    stride: int
    padding: int = 0
    kind: Literal["max", "average"] = "max"
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        shape = f"{self.n} x {self.c} x {self.h} x {self.w} by {self.kernel}, stride {self.stride}"
        if min(self.n, self.c, self.h, self.w, self.kernel, self.stride) < 1 or self.padding < 0:
            raise InputError(f"cannot pool {shape}, padding {self.padding}")
        if 2 * self.padding > self.kernel or min(self.h, self.w) + 2 * self.padding < self.kernel:
            fact = f"cannot pool {shape}: padding {self.padding} leaves a window without elements, or none"
            raise InputError(fact, hint=f"a padding up to {self.kernel // 2}, and a kernel up to the padded image")
        if max(self._forward_bytes(1), self._backward_bytes(1)) > TASK_LDM_BYTES:
            raise InputError(f"cannot pool {shape}: the rows of one window don't fit into LDM", hint="a narrower image")

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        h, w = ((extent + 2 * self.padding - self.kernel) // self.stride + 1 for extent in (self.h, self.w))
        return self.n, self.c, h, w

    def rows_of(self, outs: int) -> int:
        """Rows of x that `outs` rows of windows read at most."""
        return min(self.h, (outs - 1) * self.stride + self.kernel)

    def outs_of(self, lines: int) -> int:
        """Rows of windows that reach into `lines` rows of dx, at most."""
        return min(self.out_shape[2], (lines + self.kernel - 2) // self.stride + 1)

    def _forward_bytes(self, outs: int) -> int:
        return SLOT_BYTES * (self.rows_of(outs) * self.w + outs * self.out_shape[3])

    def _backward_bytes(self, lines: int) -> int:
        outs = self.outs_of(lines)
        x = self.rows_of(outs) * self.w if self.kind == "max" else 0
        return SLOT_BYTES * (x + outs * self.out_shape[3] + lines * self.w)

    @property
    def together(self) -> int:
        """Rows of y that a CPE makes at once."""
        return _most(self.out_shape[2], self._forward_bytes)

    @property
    def together_backward(self) -> int:
        """Rows of dx that a CPE makes at once."""
        return _most(self.h, self._backward_bytes)


def _most(rows: int, needed: Callable[[int], int]) -> int:
    """The most rows that LDM holds, at least 1. Every row more needs more of LDM, a slot at least."""
    most = min(rows, TASK_LDM_BYTES // SLOT_BYTES)
    return max(1, bisect_right(range(1, most + 1), TASK_LDM_BYTES, key=needed))


@dataclass(frozen=True, slots=True)
class Pool:
    """Pooling forward, from x to y; or backward, from dy to dx. Backward of the maximum reads x, too."""

    windows: Windows
    backward: bool = False

    @property
    def reads(self) -> tuple[Place, ...]:
        if not self.backward:
            return (self._planes("x"),)
        return (*((self._planes("x"),) if self.windows.kind == "max" else ()), self._planes("dy"))

    @property
    def writes(self) -> tuple[Place, ...]:
        return (self._planes("dx" if self.backward else "y"),)

    def _planes(self, name: str) -> Place:
        w = self.windows
        shape = w.out_shape if name.endswith("y") else (w.n, w.c, w.h, w.w)
        return Place(name, shape, w.dtype, (w.n * w.c, shape[2] * shape[3]))

    def program(self) -> str:
        windows = self.windows
        _, _, h_out, w_out = windows.out_shape
        together = windows.together_backward if self.backward else windows.together
        outs = windows.outs_of(together)
        context: dict[str, object] = {
            "header": HEADER,
            "title": windows.kind.capitalize(), "planes": windows.n * windows.c,
            "h": windows.h, "w": windows.w, "h_out": h_out, "w_out": w_out,
            "kernel": windows.kernel, "stride": windows.stride, "padding": windows.padding,
            "together": together, "floats": windows.dtype == "float32",
        }  # fmt: skip
        if self.backward:
            more = {"finds": windows.kind == "max", "rows": windows.rows_of(outs), "outs": outs}
            return print_program("windows_backward", context | more)
        return print_program("windows", context | {"kind": windows.kind, "rows": windows.rows_of(together)})

    def cost(self) -> Counts:
        """Sums over the blocks of one plane, times the planes."""
        counts = Counts()
        counts.add(_of_plane(self.windows, backward=self.backward), self.windows.n * self.windows.c)
        return counts

    @property
    def rounds(self) -> int:
        """Two for every block of the busiest CPE: one for what comes together, one for what goes."""
        return 2 * busiest(self.cost().put_ops)


def _blocks(windows: Windows) -> Iterator[tuple[int, int]]:
    """(rows of x read, rows of y) of every block of a plane, forward."""
    h_out, step = windows.out_shape[2], windows.together
    for out in range(0, h_out, step):
        outs = min(step, h_out - out)
        first = max(0, out * windows.stride - windows.padding)
        last = min(windows.h, (out + outs - 1) * windows.stride - windows.padding + windows.kernel)
        yield last - first, outs


def _blocks_backward(windows: Windows) -> Iterator[tuple[int, int, int]]:
    """(rows of x read, rows of dy read, rows of dx) of every block of a plane, backward."""
    k, s, p, step = windows.kernel, windows.stride, windows.padding, windows.together_backward
    for at in range(0, windows.h, step):
        lines = min(step, windows.h - at)
        out, end = max(0, -(-(at + p - k + 1) // s)), min(windows.out_shape[2], (at + lines - 1 + p) // s + 1)
        rows = min(windows.h, (end - 1) * s - p + k) - max(0, out * s - p)
        yield (rows, end - out, lines) if end > out else (0, 0, lines)


def _of_plane(windows: Windows, *, backward: bool) -> Counts:
    _, _, _, w_out = windows.out_shape
    size = itemsize(windows.dtype)
    one, taps = Counts(), windows.kernel**2
    floats = windows.dtype == "float32"
    if not backward:
        x, y = windows.rows_of(windows.together) * windows.w, windows.together * w_out
        for rows, outs in _blocks(windows):
            one.add_get(rows * windows.w * size, rows * windows.w * size)
            one.add_put(outs * w_out * size, outs * w_out * size)
            vectors = taps * -(-outs * w_out // LANES)
            one.add(Counts(vmax=vectors) if windows.kind == "max" else Counts(vadd=vectors))
            one.convert += (-(-x // LANES) + -(-y // LANES)) * floats
    else:
        finds, lines_most = windows.kind == "max", windows.together_backward
        outs_most = windows.outs_of(lines_most)
        for rows, outs, lines in _blocks_backward(windows):
            one.add_put(lines * windows.w * size, lines * windows.w * size)
            one.convert += -(-lines_most * windows.w // LANES) * floats
            if not outs:
                continue
            one.add_get(outs * w_out * size, outs * w_out * size)
            one.convert += -(-outs_most * w_out // LANES) * floats
            vectors = taps * -(-outs * w_out // LANES)
            one.add(Counts(vmax=2 * vectors) if finds else Counts(vadd=vectors))
            if finds:
                one.add_get(rows * windows.w * size, rows * windows.w * size)
                one.convert += -(-windows.rows_of(outs_most) * windows.w // LANES) * floats
    return one
