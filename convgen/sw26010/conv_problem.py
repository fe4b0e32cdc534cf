"""A convolution of [SW] 4.2, and which coordinates meet in it.

The letters are the project's: N samples, C channels, F filters, H W, kernel K, stride S, padding P ([SW]: B, N_i, N_o,
R C, K, S).
"""

from __future__ import annotations

from dataclasses import dataclass

from convgen.errors import InputError
from convgen.schedule.nodes import Phase


@dataclass(frozen=True, slots=True)
class ConvProblem:
    """A 2-D convolution, one kernel size, stride and padding for both axes, no dilation, no groups.

    Raises:
        InputError: an extent below 1, a negative padding, or an output without rows.
    """

    n: int
    c: int
    h: int
    w: int
    f: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1

    def __post_init__(self) -> None:
        if min(self.n, self.c, self.h, self.w, self.f, self.kernel, self.stride) < 1 or self.padding < 0:
            raise InputError(f"{self} has an extent below 1")
        if min(self.h_out, self.w_out) < 1:
            raise InputError(f"{self}: the kernel is larger than the padded image")

    @property
    def h_out(self) -> int:
        """(H + 2P - K) // S + 1; [SW] 4.2.1 leaves 2P out, which VGG needs."""
        return (self.h + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def w_out(self) -> int:
        return (self.w + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def flops(self) -> int:
        """Of one phase, taps in the padding included, as the paper counts."""
        return 2 * self.n * self.f * self.h_out * self.w_out * self.c * self.kernel**2

    def __str__(self) -> str:
        return (
            f"conv2d N={self.n} C={self.c} H={self.h} W={self.w} F={self.f} K={self.kernel} S={self.stride} "
            f"P={self.padding}"
        )


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


def meeting(phase: Phase, extent: int, out_extent: int, problem: ConvProblem) -> Meeting:
    """How one axis of a phase runs: what is summed over becomes the tap.

    Args:
        extent, out_extent: of x and y along the axis.
    """
    k, s, p = problem.kernel, problem.stride, problem.padding
    if phase == "forward":  # x = S y + k - P
        return Meeting(out_extent, k, extent, s, 1, -p)
    if phase == "backward_data":  # y = (x - k + P) / S
        return Meeting(extent, k, out_extent, 1, -1, p, s)
    return Meeting(k, out_extent, extent, 1, s, -p)  # x = S y + k - P, summed over y
