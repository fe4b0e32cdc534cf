"""Few channels and a stride: blocks of rows become channels, and then it is a convolution by boxes without a stride.
Without a stride, where boxes can't copy so few, their number is made one that they can.

Of S x S rows, S the strides, a first launch makes one row with S S C channels, padding and unused lanes zero. yh reads
x's rows S yh - pad + kh: with kh = S t + a, tap t of block yh + t and its row a. So a filter of K rows has K/S taps,
rounded up, and a sum of 7 x 7 x 3 at stride 2 has 4 x 4 x 16 addends. Where x's gradient or w's is asked for, a last
launch takes from the blocks' what x or w has. [KERNELS: 5.1 C]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from convgen.kernels.config import Config, ceil_div
from convgen.kernels.families import box
from convgen.kernels.inner import ArrangedWords
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.words import Words, times
from convgen.kernels.work import Work
from convgen.spec.target import Target

NAME = "stem"
TEMPLATE = "stem.py.jinja"
NEEDS = ("boxes",)
SINGLE_CHANNELS = False
MOST_CHANNELS = 128  # the most channels of a block


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can."""
    if problem.epilogue and problem.phase == "backward_data":
        return "steps behind backward-data"
    if problem.rim is not None or problem.x_parts * problem.groups > 1:
        return "groups, channels in parts and rims"
    if any(d.dilation > 1 and d.kernel > 1 for d in problem.dims):
        return "a dilation"
    block = prod(d.stride for d in problem.dims)
    lies = block == 1 and problem.channels * problem.element_bytes % 16 == 0  # boxes can, as it is
    if lies or problem.taps == 1 or problem.channels * block > MOST_CHANNELS:
        return f"blocks of {block} rows with {problem.channels} channels, and {problem.taps} taps"
    return box.refusal(blocks(problem), target)


def blocks(problem: Problem) -> Problem:
    """The convolution of blocks."""
    dims = tuple(_block_dim(d) for d in problem.dims)
    return replace(problem, dims=dims, channels=block_channels(problem), memory_format="channels_last")


def _block_dim(d: LocalDim) -> LocalDim:
    taps = ceil_div(d.kernel, d.stride)
    return LocalDim(d.name, d.y + taps - 1, d.y, taps, 1, 1, 0)


def block_channels(problem: Problem) -> int:
    """The channels of a block, rounded up to a multiple of 16 bytes."""
    vector = 16 // problem.element_bytes
    return ceil_div(problem.channels * prod(d.stride for d in problem.dims), vector) * vector


def _of_box(config: Config) -> Config:
    return replace(config, family=NAME)


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth a try: those of boxes."""
    return map(_of_box, box.configs(blocks(problem), target))


def default(problem: Problem, target: Target) -> Config:
    """The configuration of an untuned problem: of the sizes of boxes, the one of the least estimated time."""
    inner = blocks(problem)
    return box.least(inner, target, map(_of_box, box.sizes(inner, target)), lambda _, c: work(problem, c))


def conditions(problem: Problem) -> list[str]:
    """The conditions on extents: none."""
    return []


def words(problem: Problem) -> type[Words]:
    return StemWords


def work(problem: Problem, config: Config) -> Work:
    """The work of the launch of products; blocks, and dy with its channels last, are also written and read."""
    inner = blocks(problem)
    turned = not problem.channels_last and problem.phase != "forward"
    moved = 2 * (inner.elements["x"] + (inner.elements["y"] * problem.y_parts if turned else 0))
    taken = problem.phase != "forward" and not (problem.phase == "backward_filter" and config.split > 1)
    launches = taken + turned + 1  # where pieces are summed, that launch takes w's gradient from that of blocks as well
    return replace(box.work(inner, config), launches=launches, more_bytes=moved * inner.element_bytes)


class StemWords(ArrangedWords):
    """Words for where a block's element lies in x, and a tap of blocks in w; and the other way round."""

    sums_kept = True

    @property
    def inner(self) -> Problem:
        return blocks(self.problem)

    @property
    def writer(self) -> Words | None:
        """y lies as the phase says; gradients are taken from those of blocks by a launch of their own."""
        return Words(self.problem, even=self.even) if self.problem.phase == "forward" and not self.last else None

    @property
    def block_channels(self) -> int:
        return self.inner.channels

    @property
    def row_parameters(self) -> str:
        return self.extent(f"{self.extents('x')}, {self.extents('y')}, {self.pads}")

    @property
    def passed_rows(self) -> str:
        return "*s.x, *s.y, *s.below"

    @property
    def sizes(self) -> str:
        """The sizes of blocks that a kernel gets: samples, rows of blocks and of y, no padding."""
        rows = ", ".join(
            f"s.y[{i}]" + (f" + {d.kernel - 1}" if d.kernel > 1 else "") for i, d in enumerate(self.inner.dims)
        )
        zeros = ", ".join("0" for _ in self.dims)
        return f"Sizes(s.n, ({rows},), s.y, ({zeros},), {self.block_channels}, s.filters, 1)"

    @property
    def block_taps(self) -> int:
        return self.inner.taps

    def of_block(self, *, filters: bool) -> list[str]:
        """Lines that find the number of an element of x, or w, by that of an element of blocks, or of blocks'
        filters."""
        lines = [f"lane, at = i % {self.block_channels}, i // {self.block_channels}"]
        lines += ["c, row = lane % C, lane // C"]
        conditions = [f"(row < {prod(d.stride for d in self.dims)})"]
        for d, local in reversed(list(zip(self.dims, self.inner.dims, strict=True))):
            extent = str(local.kernel) if filters else f"(Y{d.letter.upper()} + {local.kernel - 1})"
            name = d.k if filters else d.x
            pad = "" if filters else f" - {d.pad}"
            lines.append(f"{name} = {times(f'(at % {extent})', d.stride)} + row % {d.stride}{pad}")
            lines.append(f"at, row = at // {extent}, row // {d.stride}")
            conditions.append(f"({name} < {d.taps})" if filters else f"({name} >= 0) & ({name} < {d.x.upper()})")
        conditions[0] = f"(lane < C * {prod(d.stride for d in self.dims)})"
        return [*lines, f"inside = {' & '.join(conditions)}"]

    def to_block(self, *, filters: bool) -> list[str]:
        """Lines that find the number of an element of blocks by that of an element of x or w, and whether there is
        one."""
        lines, lane, scale = ["c, at = i % C, i // C"] if self.last else ["at = i"], "", 1
        place, conditions = list[str](), list[str]()
        for d, local in reversed(list(zip(self.dims, self.inner.dims, strict=True))):
            name = d.k if filters else d.x
            extent = str(d.taps) if filters else d.x.upper()
            lines.append(f"{name} = at % {extent}" + ("" if filters else f" + {d.pad}"))
            lines.append(f"at = at // {extent}")
            lane += f" + {times(f'({name} % {d.stride})', scale)}" if lane else f"{name} % {d.stride}"
            scale *= d.stride
            blocks_there = str(local.kernel) if filters else f"(Y{d.letter.upper()} + {local.kernel - 1})"
            place.insert(0, f"* {blocks_there} + {name} // {d.stride}")
            conditions += [] if filters else [f"({name} >= 0) & ({name} // {d.stride} < {blocks_there})"]
        lines += [] if self.last else ["c, at = at % C, at // C"]
        offset = "at"
        for part in place:
            offset = f"({offset} {part})"
        lines.append(f"block = {offset} * {self.block_channels} + ({lane}) * C + c")
        return [*lines, "inside = " + (" & ".join(conditions) if conditions else "i >= 0")]

    def element(self, tensor: str, *, rim: bool = True) -> str:
        """The address of a block's element of x, or of w."""
        names = [d.k if tensor == "w" else d.x for d in self.dims]
        extents = [str(d.taps) if tensor == "w" else d.x.upper() for d in self.dims]
        text = "at" if self.last else "(at * C + c)"
        for name, extent in zip(names, extents, strict=True):
            text = f"({text} * {extent} + {name})"
        return f"{text} * C + c" if self.last else text
