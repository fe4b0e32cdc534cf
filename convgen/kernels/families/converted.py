"""Tensors whose channels are not last: a first launch makes them last, and then it is a convolution by boxes.

That launch reads and writes what the convolution reads once; results are written as they shall lie. So copies are the
copy engine's where pixels that lie side by side are shifted by taps and begin anywhere. [KERNELS: 5]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from convgen.kernels.config import Config
from convgen.kernels.families import box
from convgen.kernels.inner import ArrangedWords
from convgen.kernels.problem import Problem
from convgen.kernels.words import CHANNEL, Words
from convgen.kernels.work import Work
from convgen.operations.convolution import READS
from convgen.spec.target import Target

NAME = "converted"
TEMPLATE = "converted.py.jinja"
NEEDS = ("boxes",)
SINGLE_CHANNELS = False


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the family can't; None if it can."""
    if problem.epilogue and problem.phase == "backward_data":
        return "steps behind backward-data"
    if problem.channels_last:
        return "channels are last"
    return box.refusal(_converted(problem), target)


def _converted(problem: Problem) -> Problem:
    return replace(problem, memory_format="channels_last")


def configs(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth a try: those of boxes."""
    return (replace(config, family=NAME) for config in box.configs(_converted(problem), target))


def default(problem: Problem, target: Target) -> Config:
    """The configuration of an untuned problem."""
    return replace(box.default(_converted(problem), target), family=NAME)


def conditions(problem: Problem) -> list[str]:
    """The conditions on extents: those of boxes."""
    return box.conditions(_converted(problem))


def words(problem: Problem) -> type[Words]:
    return ConvertedWords


def _turned(problem: Problem) -> list[str]:
    """The tensors among x, w and y that the phase reads and must convert; a w of one tap lies as it should."""
    return [t for t in READS[problem.phase] if t != "w" or problem.taps > 1]


def work(problem: Problem, config: Config) -> Work:
    """The work of the launch of products; the operands are also read and written once before."""
    p, inner = problem, _converted(problem)
    parts = {"x": p.x_parts, "w": p.x_parts * p.y_parts, "y": p.y_parts}
    elements = sum(p.elements[t] * parts[t] for t in _turned(p))
    return replace(box.work(inner, config), launches=1, more_bytes=2 * elements * p.element_bytes)


class ConvertedWords(ArrangedWords):
    """Words for what is converted: batches of matrices of channels and pixels."""

    @property
    def inner(self) -> Problem:
        return _converted(self.problem)

    @property
    def writer(self) -> Words | None:
        return Words(self.problem, even=self.even)

    @property
    def converted(self) -> list[str]:
        """Names of the operands that are copied into the order in which boxes read them."""
        return ["w" if t == "w" else self.pointer(t) for t in _turned(self.problem)]

    @property
    def passed_inside(self) -> str:
        """Arguments of the convolution by boxes."""
        words = [f"{t}_last" if t in self.converted else t for t in self.tensors(1)]
        rim = ["rim._replace(buffer=rims)"] if self.problem.rim is not None else []
        return ", ".join([*words, "s", *rim])

    def matrices(self) -> list[str]:
        """For each operand that is converted: from, to, number of matrices, rows, columns; empty operands are left
        out."""
        p, lines = self.problem, list[str]()
        for tensor in _turned(p):
            if tensor == "w":
                lines.append(
                    f"(w, w_last, s.filters * {p.y_parts}, s.channels * {p.x_parts}, {p.taps}),".replace(" * 1,", ",")
                )
                continue
            name, parts = self.pointer(tensor), self.parts(tensor)
            channels = "s.channels" if CHANNEL[tensor] == "c" else "s.filters"
            block = p.rim is not None and tensor == ("y" if p.phase == "backward_data" else "x")
            rows = "math.prod(rim.own[1::2])" if block else f"math.prod(s.{tensor})"
            many = "s.n" if parts == 1 else f"s.n * {parts}"
            lines.append(f"({name}, {name}_last, {many}, {channels}, {rows}),")
            if block:
                lines.append(f"*turned_rim(rim, rims, s.n, {channels}, {self.rims}),")
        return lines
