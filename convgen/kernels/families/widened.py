"""Few filters, or few channels of x's gradient: blocks of pixels become filters, which fill a matrix instruction.

M pixels of y side by side in its last dimension, of F filters each, lie in memory as one pixel of M F filters. They
read K + M - 1 rows of x where one reads K, so that a convolution with a stride of M, K + M - 1 taps and M F filters
makes them; of its taps each filter has K, and zeros. A product of 16 filters leaves shared memory four times as much to
do as the matrix units; of 64, K/(K + M - 1) of the products are asked for, and shared memory keeps up. A launch before
lays w out, M times; a filter gradient's goes behind and adds what the M filters have of each tap. x's gradient is such
a convolution of dy, whose taps run the other way. A NaN or an infinity, times those zeros, is a NaN: it reaches the
other pixels of the blocks that read it, as those of a Winograd tile do. [KERNELS: 5]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from convgen.kernels.config import Config
from convgen.kernels.families import box
from convgen.kernels.inner import ArrangedWords
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.sharing import second_sum
from convgen.kernels.words import Words, times
from convgen.kernels.work import Work
from convgen.spec.target import Target

NAME = "widened"
TEMPLATE = "widened.py.jinja"
NEEDS = ("boxes",)
SINGLE_CHANNELS = False
MOST_FILTERS = 32  # with more filters a product is wide enough
LARGEST_BLOCK = 16


def few(problem: Problem) -> int:
    """The number of filters of the result, or of channels of x's gradient."""
    return problem.channels if problem.phase == "backward_data" else problem.filters


def block(problem: Problem) -> int:
    """The pixels of a block: as many as make about 64 filters."""
    return next((n for most, n in ((4, LARGEST_BLOCK), (8, 8), (16, 4)) if few(problem) <= most), 2)


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can.

    Blocks are those of the rank with most to do, so rows are a multiple of what any rank's would be.
    """
    last, vectors = problem.dims[-1], any(kind != "element" for s in problem.epilogue for kind, _ in s.operands)
    if not problem.channels_last or problem.rim is not None or problem.groups > 1:
        return "groups, a halo, or channels that are not last"
    if few(problem) > MOST_FILTERS or vectors:
        return f"{few(problem)} filters, or steps behind with a number a filter"
    if last.kernel == 1 or last.stride * last.dilation > 1:
        return "one tap, a stride or a dilation of the last dimension"
    if problem.phase == "backward_data" and any(d.stride > 1 for d in problem.dims):
        return "a stride"
    rows = 2 if few(problem) > LARGEST_BLOCK else LARGEST_BLOCK
    if not last.x or last.x % rows or last.y % rows:
        return f"{last.x} and {last.y} rows, no multiples of {rows}"
    return box.refusal(widened(problem), target)


def widened(problem: Problem) -> Problem:
    """The convolution of blocks."""
    m, *others, last = block(problem), *problem.dims
    if problem.phase == "backward_data":
        dims = [replace(d, x=d.y, y=d.x, below=d.dilation * (d.kernel - 1) - d.below) for d in others]
        wide = LocalDim(last.name, last.y, last.x // m, last.kernel + m - 1, m, 1, last.kernel - 1 - last.below)
        return replace(
            problem, phase="forward", channels=problem.filters, filters=m * problem.channels, dims=(*dims, wide),
            x_parts=problem.y_parts, y_parts=problem.x_parts,
        )  # fmt: skip
    wide = replace(last, y=last.y // m, kernel=last.kernel + m - 1, stride=m)
    return replace(problem, filters=m * problem.filters, dims=(*others, wide))


def _of_box(config: Config) -> Config:
    return replace(config, family=NAME)


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth a try: those of boxes, the default first."""
    yield default(problem, target)
    yield from map(_of_box, box.configs(widened(problem), target))


def default(problem: Problem, target: Target) -> Config:
    """The configuration of an untuned problem: of the sizes of boxes, the one of the least estimated time."""
    return box.least(problem, target, map(_of_box, box.sizes(widened(problem), target)), work)


def conditions(problem: Problem) -> list[str]:
    """The conditions on extents: whole blocks of the last dimension's pixels; in other dimensions those of boxes."""
    m = block(problem)
    return [f"s.x[-1] % {m} == s.y[-1] % {m} == 0", *box.conditions(replace(problem, dims=problem.dims[:-1]))]


def words(problem: Problem) -> type[Words]:
    return WidenedWords


def work(problem: Problem, config: Config) -> Work:
    """The work of the launch of products; another launch lays out filters, or takes dw from blocks' filters."""
    inner = widened(problem)
    numbers = (problem.elements["w"] + inner.elements["w"]) * problem.x_parts * problem.y_parts
    w = box.work(inner, config)
    taken = problem.phase == "backward_filter" and second_sum(inner, config) > 1  # by the launch that adds pieces
    return replace(w, launches=0 if taken else 1, more_bytes=0 if taken else 4 * numbers)


class WidenedWords(ArrangedWords):
    """Words for where an element of blocks' filters lies in w, and where an element of w's gradient lies in theirs."""

    sums_kept = True

    @property
    def inner(self) -> Problem:
        return widened(self.problem)

    @property
    def writer(self) -> Words | None:
        return None  # blocks lie in memory as pixels do

    def kept_pieces(self, config: Config) -> int:
        """How many pieces of a filter gradient the launch behind adds."""
        return second_sum(self.inner, config)

    @property
    def block(self) -> int:
        return block(self.problem)

    @property
    def sizes(self) -> str:
        """The sizes of blocks that a kernel gets."""
        p, m = self.problem, self.block
        if p.phase != "backward_data":
            return f"Sizes(s.n, s.x, (*s.y[:-1], s.y[-1] // {m}), s.below, s.channels, {times('s.filters', m)}, 1)"
        below = ", ".join(f"{d.dilation * (d.taps - 1)} - s.below[{i}]" for i, d in enumerate(self.dims))
        return f"Sizes(s.n, s.y, (*s.x[:-1], s.x[-1] // {m}), ({below},), s.filters, {times('s.channels', m)}, 1)"

    def of_block(self) -> list[str]:
        """Lines that find the number of an element of w by that of an element of blocks' filters, and whether there is
        one."""
        p, m, last = self.problem, self.block, self.dims[-1]
        back = p.phase == "backward_data"
        summed, parts, made = ("F", p.y_parts, "C") if back else ("C", p.x_parts, "F")
        lines = [
            f"{summed.lower()}, at = i % {self._all(summed, parts)}, i // {self._all(summed, parts)}",
            f"tap, at = at % {last.taps + m - 1}, at // {last.taps + m - 1}",
        ]
        for d in reversed(self.dims[:-1]):
            back_from = f"{d.taps - 1} - " if back else ""
            lines += [f"{d.k}, at = {back_from}at % {d.taps}, at // {d.taps}"]
        return [
            *lines,
            f"{made.lower()}, at = at % {made}, at // {made}",
            f"tap, part = tap - at % {m}, at // {m}",
            f"inside = (tap >= 0) & (tap < {last.taps}) & (i < count)",
            f"{last.k} = {f'{last.taps - 1} - tap' if back else 'tap'}",
            f"place = {self._weight('f' if back else 'part * F + f', 'part * C + c' if back else 'c')}",
        ]

    @staticmethod
    def _all(name: str, parts: int) -> str:
        return f"({name} * {parts})" if parts > 1 else name

    def _weight(self, f: str, c: str) -> str:
        """The place in w of filter f and channel c among all, parts included."""
        place = f if f.isidentifier() else f"({f})"
        for d in self.dims:
            place = f"({place} * {d.taps} + {d.k})"
        return f"{place} * {self._all('C', self.problem.x_parts)} + {c}"

    def to_block(self) -> list[str]:
        """Lines that find the number of an element of blocks' filters, for the first pixel of a block, by that of an
        element of w; the next pixel's lies `behind` it."""
        m, last, channels = self.block, self.dims[-1], self._all("C", self.problem.x_parts)
        lines = [f"c, at = i % {channels}, i // {channels}"]
        lines += [f"{d.k}, at = at % {d.taps}, at // {d.taps}" for d in reversed(self.dims)]
        place = f"(at // F * {m} * F + at % F)"
        for d in self.dims:
            place = f"({place} * {d.taps + (m - 1 if d is last else 0)} + {d.k})"
        taps = self.inner.taps
        return [*lines, f"place = {place} * {channels} + c", f"behind = (F * {taps} + 1) * {channels}"]
