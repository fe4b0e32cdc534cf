"""Candidates for a local problem: every legal configuration of every family, by closed form, in the model's order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from convgen.kernels.config import Config
from convgen.kernels.families import families
from convgen.kernels.problem import Problem
from convgen.kernels.source import Kernel, kernel_module
from convgen.spec.target import Target
from convgen.tune.database import Ceilings
from convgen.tune.model import modelled_us


@dataclass(frozen=True)
class Candidate:
    """A configuration of a problem, with the module that it prints.

    Attributes:
        given: the module's text, where it is not printed from the templates.
    """

    problem: Problem
    config: Config
    target: Target
    given: str = field(default="", repr=False)

    @property
    def label(self) -> str:
        return str(self.config)

    @property
    def kernel(self) -> Kernel:
        return Kernel((self.problem,), self.config, self.target)

    @cached_property
    def text(self) -> str:
        return self.given or kernel_module([self.kernel])

    @cached_property
    def source(self) -> str:
        return digest(self.text)


def digest(text: str) -> str:
    """Twelve digits by which a printed kernel is recognised."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def source_of(problem: Problem, config: Config, target: Target) -> str:
    """The digest of a kernel as it is printed today."""
    return Candidate(problem, config, target).source


def candidates(problem: Problem, target: Target) -> list[Candidate]:
    """Every legal configuration once, families in their order, each family's default first."""
    found: dict[Config, None] = {}
    for family in families(target):
        if family.refusal(problem, target) is None:
            found |= dict.fromkeys(family.configs(problem, target))
    return [Candidate(problem, c, target) for c in found]


def ranked(found: Sequence[Candidate], ceilings: Ceilings) -> list[tuple[float, Candidate]]:
    """Modelled microseconds and candidates, least first; ties keep their order."""
    timed = [(modelled_us(c.problem, c.config, c.target, ceilings), c) for c in found]
    return sorted(timed, key=lambda pair: pair[0])
