"""A convolution of [SW] 4.2, and which coordinates meet in it.

The letters are the project's: N samples, C channels, F filters, H W, kernel K, stride S, padding P, dilation d ([SW]:
B, N_i, N_o, R C, K, S).
"""

from __future__ import annotations

from dataclasses import dataclass

from convgen.errors import InputError
from convgen.program.nodes import Phase


@dataclass(frozen=True, slots=True)
class Axis:
    """Rows or columns: y's element o reads x's elements S o + d k - P, k < K. What lies outside x is zero.

    `extent` of x, `out` of y; any `out` will do, and P may be negative where y never reads the first elements: a part
    of a distributed image has such sizes.
    """

    extent: int
    out: int
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def span(self) -> int:
        """Elements from the first that y reads to the last, padding included: H + 2P for a whole image, S = 1."""
        return (self.out - 1) * self.stride + self.dilation * (self.kernel - 1) + 1

    @property
    def read(self) -> tuple[int, int]:
        """[first, last) of x inside that span; empty where all of it lies in the padding."""
        first = max(0, -self.padding)
        return first, max(first, min(self.extent, self.span - self.padding))


@dataclass(frozen=True, slots=True)
class ConvProblem:
    """A 2-D convolution without groups.

    Raises:
        InputError: an extent below 1.
    """

    n: int
    c: int
    f: int
    rows: Axis
    columns: Axis

    def __post_init__(self) -> None:
        sizes = [self.n, self.c, self.f]
        for axis in (self.rows, self.columns):
            sizes += [axis.extent, axis.out, axis.kernel, axis.stride, axis.dilation]
        if min(sizes) < 1:
            raise InputError(f"{self} has an extent below 1")

    @classmethod
    def square(
        cls, n: int, c: int, h: int, w: int, f: int, kernel: int = 3, stride: int = 1, padding: int = 1
    ) -> ConvProblem:
        """A whole image, with one kernel size, stride and padding for both axes and no dilation, as [SW] has them.

        H_out = (H + 2P - K) // S + 1; [SW] 4.2.1 leaves 2P out, which VGG needs.

        Raises:
            InputError: an extent below 1, a negative padding, or an output without rows.
        """
        if min(n, c, h, w, f, kernel, stride) < 1 or padding < 0:
            fact = f"conv2d N={n} C={c} H={h} W={w} F={f} K={kernel} S={stride} P={padding} has an extent below 1"
            raise InputError(fact)
        if min(h, w) + 2 * padding < kernel:
            raise InputError(f"the kernel {kernel} is larger than the padded image of {h} x {w}, padding {padding}")
        rows, columns = (
            Axis(extent, (extent + 2 * padding - kernel) // stride + 1, kernel, stride, padding) for extent in (h, w)
        )
        return cls(n, c, f, rows, columns)

    @property
    def h(self) -> int:
        return self.rows.extent

    @property
    def w(self) -> int:
        return self.columns.extent

    @property
    def h_out(self) -> int:
        return self.rows.out

    @property
    def w_out(self) -> int:
        return self.columns.out

    @property
    def taps(self) -> int:
        """K^2 in the paper."""
        return self.rows.kernel * self.columns.kernel

    @property
    def flops(self) -> int:
        """Of one phase, taps in the padding included, as the paper counts."""
        return 2 * self.n * self.f * self.h_out * self.w_out * self.c * self.taps

    def __str__(self) -> str:
        axes = (self.rows, self.columns)
        words = [f"conv2d N={self.n} C={self.c} H={self.h} W={self.w} F={self.f}"]
        letters = (("K", "kernel"), ("S", "stride"), ("P", "padding"), ("d", "dilation"))
        for letter, name in letters:
            down, across = (getattr(axis, name) for axis in axes)
            if letter != "d" or (down, across) != (1, 1):
                words.append(f"{letter}={down}" if down == across else f"{letter}={down}x{across}")
        whole = all(a.out == (a.extent + 2 * a.padding - a.dilation * (a.kernel - 1) - 1) // a.stride + 1 for a in axes)
        return " ".join(words if whole else [*words, f"out={self.h_out}x{self.w_out}"])


@dataclass(frozen=True, slots=True)
class Meeting:
    """Along one axis: the element of `data` that element `out` needs for `tap`.

    data = (out * per_out + tap * per_tap + shift) / divisor, where that is whole and inside [0, extent): padding is
    what falls outside and costs nothing ([SW] 4.2.2, coordinate mapping).
    """

    outs: int
    taps: int
    extent: int
    per_out: int
    per_tap: int
    shift: int
    divisor: int = 1

    def data(self, out: int, tap: int) -> int | None:
        """The element of data, or None in the padding."""
        at, rest = divmod(out * self.per_out + tap * self.per_tap + self.shift, self.divisor)
        return at if not rest and 0 <= at < self.extent else None

    def pairs(self) -> int:
        """(out, tap) that meet an element of data: 3R - 2 for K = 3, P = 1."""
        return sum(self.data(out, tap) is not None for out in range(self.outs) for tap in range(self.taps))

    def needed(self, start: int, width: int, *, one_more: bool) -> list[int]:
        """Elements of data that outs [start, start + width) need, in order.

        Args:
            one_more: and the one after the last, where there is one: the published loop nest reads it.
        """
        found = {self.data(out, tap) for out in range(start, start + width) for tap in range(self.taps)}
        elements = sorted(at for at in found if at is not None)
        if one_more and elements and elements[-1] + 1 < self.extent:
            elements.append(elements[-1] + 1)
        return elements


def meeting(phase: Phase, axis: Axis) -> Meeting:
    """How one axis of a phase runs: what is summed over becomes the tap."""
    k, s, p, d = axis.kernel, axis.stride, axis.padding, axis.dilation
    if phase == "forward":  # x = S y + d k - P
        return Meeting(axis.out, k, axis.extent, s, d, -p)
    if phase == "backward_data":  # y = (x - d k + P) / S
        return Meeting(axis.extent, k, axis.out, 1, -d, p, s)
    return Meeting(k, axis.out, axis.extent, d, s, -p)  # x = S y + d k - P, summed over y
