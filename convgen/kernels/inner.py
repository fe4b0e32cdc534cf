"""A convolution by boxes inside of a phase whose tensors lie otherwise in memory: another launch arranges what it
reads."""

from __future__ import annotations

from convgen.kernels.boxes import BoxWords
from convgen.kernels.config import Config
from convgen.kernels.environment import environment
from convgen.kernels.problem import Problem
from convgen.kernels.sharing import second_sum
from convgen.kernels.words import Words


class InnerWords(BoxWords):
    """The convolution by boxes: a kernel inside of the phase's.

    Attributes:
        writer: the phase's words, if the result lies as they say; None if it lies as boxes.
        of_phase: the phase's name; the convolution inside may be another phase.
    """

    writer: Words | None = None
    of_phase = ""

    def products(self, name: str, config: Config) -> str:
        """The kernel by boxes, and the function that launches it."""
        p, template = self.problem, environment().get_template("kernels/box.py.jinja")
        return template.render(name=name, p=p, t=self, bias=p.bias, split=config.split, config=config).rstrip("\n")

    @property
    def entry(self) -> str:
        return f"{self.of_phase or self.problem.phase}_of_boxes"

    @property
    def by_pointers(self) -> Words | None:
        return (
            self.writer if self.writer is not None and self.problem.phase != "backward_filter" else super().by_pointers
        )

    def weight_made(self) -> tuple[str, str]:
        return self.writer.weight() if self.writer is not None else super().weight_made()


class ArrangedWords(Words):
    """Words of a phase that has such a convolution inside."""

    @property
    def inner(self) -> Problem:
        """The convolution by boxes, of channels last."""
        raise NotImplementedError

    @property
    def writer(self) -> Words | None:
        """Words that say where the inner convolution's result lies; None if it lies as boxes."""
        raise NotImplementedError

    sums_kept = False  # whether a launch behind adds a filter gradient's pieces and takes w's gradient from them

    def products(self, name: str, config: Config) -> str:
        """The kernel by boxes, and the function that launches it."""
        words = InnerWords(self.inner, float32=self.float32, rims=self.rims, open=self.open, alike=self.alike)
        words.writer, words.of_phase = self.writer, self.problem.phase
        words.sums_kept = self.sums_kept and second_sum(self.inner, config) > 1
        return words.products(name, config)
