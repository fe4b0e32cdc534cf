"""The schedule's nodes. Grammar:

    schedule   ::= name, grid, stored types, roles, and three sections of steps
    section    ::= forward | backward_data | backward_filter
    step       ::= Convolve | Convert | AddBias | SumBias
    value      ::= a name, defined once in the whole schedule, with one type (a Layout)

`%x %w %y %dy %bias` are given; `%y %dx %dw %db` are results. A section may read values of an earlier one: a
backward section that reads one of forward's values makes the module hold it. There are no pointers, no loops and
no data-dependent control flow. A collective says what holds afterwards, not how it is done; its form says how the
result lies in memory, where a convolution reads or writes that directly instead of an unpacked or packed copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from convgen.algebra.conv import PHASES, Phase
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Kind
from convgen.algebra.roles import Roles

# whole: a tensor. parts: its channels in equal parts, one behind the other, as an all_gather delivers and a
# reduce_scatter takes them. rim: of a window the boxes around the rank's own block, as an exchange delivers them.
Form = Literal["whole", "parts", "rim"]
FORMS: tuple[Form, ...] = ("whole", "parts", "rim")
GIVEN = ("x", "w", "bias", "dy")
TENSOR_OF = {"x": "x", "dx": "x", "w": "w", "dw": "w", "y": "y", "dy": "y", "bias": "bias", "db": "bias"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolve:
    """The local convolution of one phase: `inputs` are (x, w[, bias]), (dy, w) or (dy, x).

    An input in the form of a rim surrounds the block `own`.
    """

    result: str
    type: Layout
    phase: Phase
    inputs: tuple[str, ...]
    rows: Literal["output", "input"] = "output"
    own: tuple[str, ...] = ()
    form: Form = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Convert:
    """Turn `source` into another layout of the same tensor; a collective over `over` unless a slice."""

    result: str
    type: Layout
    kind: Kind
    source: str
    over: Axes = ()
    form: Form = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddBias:
    """Add the bias, once, to whole sums."""

    result: str
    type: Layout
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SumBias:
    """This rank's addend of the bias gradient: dy summed over samples and rows."""

    result: str
    type: Layout
    source: str


Step = Convolve | Convert | AddBias | SumBias


def reads(step: Step) -> tuple[str, ...]:
    """Names of the values that a step reads."""
    match step:
        case Convolve():
            return (*step.inputs, *step.own)
        case AddBias():
            return (step.source, "bias")
        case Convert() | SumBias():
            return (step.source,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A layer's whole algorithm on a grid."""

    name: str
    grid: Grid
    stored: tuple[tuple[str, Layout], ...]  # x, w, y, and bias if there is one
    roles: tuple[tuple[Phase, Roles], ...]
    forward: tuple[Step, ...]
    backward_data: tuple[Step, ...]
    backward_filter: tuple[Step, ...]
    hold_x: Literal["gathered", "stored"] = field(default="gathered")

    def section(self, phase: Phase) -> tuple[Step, ...]:
        return {
            "forward": self.forward,
            "backward_data": self.backward_data,
            "backward_filter": self.backward_filter,
        }[phase]

    def steps(self) -> Iterator[tuple[Phase, Step]]:
        for phase in PHASES:
            for step in self.section(phase):
                yield phase, step

    def types(self) -> dict[str, Layout]:
        """Type of every value, the given ones included."""
        stored = dict(self.stored)
        types = {name: stored[TENSOR_OF[name]] for name in GIVEN if TENSOR_OF[name] in stored}
        types |= {step.result: step.type for _, step in self.steps()}
        return types

    def forms(self) -> dict[str, Form]:
        """Form of every value that is not whole."""
        steps = (s for _, s in self.steps() if isinstance(s, (Convolve, Convert)))
        return {s.result: s.form for s in steps if s.form != "whole"}

    def defined_in(self) -> dict[str, Phase]:
        """The phase that makes each value; given ones are left out."""
        return {step.result: phase for phase, step in self.steps()}

    def held(self) -> tuple[str, ...]:
        """Values of forward that a backward phase reads, in order: what the module keeps besides x and w."""
        made = {step.result for step in self.forward}
        backward = (*self.backward_data, *self.backward_filter)
        return tuple(dict.fromkeys(n for step in backward for n in reads(step) if n in made))
