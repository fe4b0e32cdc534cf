"""The schedule's nodes. Grammar:

    schedule   ::= name, grid, stored types, roles, and three sections of steps
    section    ::= forward | backward_data | backward_filter
    step       ::= Compute | Convert
    value      ::= a name, defined once in the whole schedule, with one type (a Layout)

`%x %w %y %dy %bias` are given; `%y %dx %dw %db` are results. A section may read values of an earlier one: a
backward section that reads one of forward's values makes the module hold it. There are no pointers, no loops and
no data-dependent control flow. A collective says what holds afterwards, not how it is done; its form says how the
result lies in memory, where a convolution reads or writes that directly instead of an unpacked or packed copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeGuard

from convgen.algebra.conv import PHASES, Phase
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Form, Kind
from convgen.algebra.roles import Roles
from convgen.operations.layer import CONVOLUTIONS, ROWS_OF_X, TRANSPOSED

RESULTS = ("y", "dx", "dw", "db")  # leave the module
GIVEN = ("x", "w", "bias", "dy")
TENSOR_OF = {"x": "x", "dx": "x", "w": "w", "dw": "w", "y": "y", "dy": "y", "bias": "bias", "db": "bias"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """A rank's part of an operation, by one of its signatures (`way`; the first needs no word).

    An input in the form of a rim surrounds the block `own`. A convolution may take the bias as its third input.
    """

    result: str
    type: Layout
    operation: str
    inputs: tuple[str, ...]
    way: str = ""
    own: tuple[str, ...] = ()
    form: Form = "whole"

    @property
    def phase(self) -> Phase:
        """The phase of a convolution."""
        return CONVOLUTIONS[self.operation]

    @property
    def transposed(self) -> bool:
        """Whether a convolution is a transposed one."""
        return self.operation in TRANSPOSED

    @property
    def by_fine_rows(self) -> bool:
        """Whether a convolution's blocks are of the fine activation's rows, so that the coarse one comes in windows."""
        by_x = self.phase == "backward_data" or self.way == ROWS_OF_X
        return by_x != self.transposed


@dataclass(frozen=True, slots=True, kw_only=True)
class Convert:
    """Turn `source` into another layout of the same tensor; a collective over `over` unless a slice."""

    result: str
    type: Layout
    kind: Kind
    source: str
    over: Axes = ()
    form: Form = "whole"


Step = Compute | Convert


def is_convolution(step: Step | None) -> TypeGuard[Compute]:
    """Whether a step is a convolution's phase."""
    return isinstance(step, Compute) and step.operation in CONVOLUTIONS


def reads(step: Step) -> tuple[str, ...]:
    """Names of the values that a step reads."""
    match step:
        case Compute():
            return (*step.inputs, *step.own)
        case Convert():
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

    @property
    def transposed(self) -> bool:
        """Whether it is the schedule of a transposed convolution."""
        return any(is_convolution(step) and step.transposed for _, step in self.steps())

    def types(self) -> dict[str, Layout]:
        """Type of every value, the given ones included."""
        stored = dict(self.stored)
        types = {name: stored[TENSOR_OF[name]] for name in GIVEN if TENSOR_OF[name] in stored}
        types |= {step.result: step.type for _, step in self.steps()}
        return types

    def forms(self) -> dict[str, Form]:
        """Form of every value that is not whole."""
        return {s.result: s.form for _, s in self.steps() if s.form != "whole"}

    def defined_in(self) -> dict[str, Phase]:
        """The phase that makes each value; given ones are left out."""
        return {step.result: phase for phase, step in self.steps()}

    def owned(self) -> frozenset[str]:
        """Values that have memory of their own: results, and sums into which a bias is added; others may be views."""
        written = (s.inputs[0] for s in self.forward if isinstance(s, Compute) and s.operation == "add_bias")
        return frozenset((*RESULTS, *written))

    def held(self) -> tuple[str, ...]:
        """Values of forward that a backward phase reads, in order: what the module keeps besides x and w."""
        made = {step.result for step in self.forward}
        backward = (*self.backward_data, *self.backward_filter)
        return tuple(dict.fromkeys(n for step in backward for n in reads(step) if n in made))
