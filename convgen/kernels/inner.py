"""A convolution by boxes inside of a phase whose tensors lie otherwise: what it reads is arranged for it by a launch."""

from __future__ import annotations

from functools import cached_property

from convgen.kernels.boxes import BoxWords
from convgen.kernels.config import Config
from convgen.kernels.environment import environment
from convgen.kernels.problem import Problem
from convgen.kernels.words import Words

TURNED = 64  # rows and columns of a tile of matrices that are turned


class InnerWords(BoxWords):
    """The convolution by boxes: a kernel inside of the phase's.

    Attributes:
        outer: words of the phase where its result lies as they say, not as boxes.
    """

    outer: Words | None = None

    @property
    def entry(self) -> str:
        return f"{self.problem.phase}_of_boxes"

    @property
    def by_pointers(self) -> Words | None:
        return self.outer if self.outer is not None and self.problem.phase != "backward_filter" else super().by_pointers

    def weight_made(self) -> tuple[str, str]:
        return self.outer.weight() if self.outer is not None else super().weight_made()


class ArrangedWords(Words):
    """Words of a phase that has such a convolution inside."""

    @cached_property
    def inner(self) -> Problem:
        """The convolution by boxes, of channels last."""
        raise NotImplementedError

    @property
    def outer(self) -> Words | None:
        """Where the result of the convolution inside lies, if not as boxes."""
        raise NotImplementedError

    def products(self, name: str, config: Config) -> str:
        """The kernel by boxes, and the function that launches it."""
        p = self.inner
        words = InnerWords(p, float32=self.float32, rims=self.rims)
        words.outer = self.outer
        template = environment().get_template("kernels/box.py.jinja")
        return template.render(name=name, p=p, t=words, bias=p.bias, split=config.split, config=config).rstrip("\n")
