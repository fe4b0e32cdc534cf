"""What a pass is, what it may know, and how passes run one after the other: of layers' schedules and of networks."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from convgen.algebra.space import Space
from convgen.errors import InputError
from convgen.program.network import Program
from convgen.program.nodes import Schedule
from convgen.spec.names import did_you_mean
from convgen.spec.target import CPU, Target
from convgen.spec.text import shown

# Called after a stage, with its name and the schedule or program it left, if any: verifies, prints, or takes the time.
After = Callable[[str, Any], None]


@dataclass(frozen=True, slots=True)
class Context:
    """What a pass may know beside the schedule.

    Attributes:
        space: which part of every value each rank holds.
        target: what the module is made for.
    """

    space: Space
    target: Target = CPU


@dataclass(frozen=True)
class Pass(ABC):
    """A rewriting, named as the command line says it; its fields are its options.

    A pass is pure, hands back the same object where nothing changes, and has nothing left to do when run twice.
    """

    name: ClassVar[str]

    def __str__(self) -> str:
        """`hold-x{choice=stored}`: the options that are not the defaults."""
        given = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return self.name + (f"{{{' '.join(given)}}}" if given else "")


class SchedulePass(Pass):
    """A rewriting of a layer's schedule."""

    @abstractmethod
    def run(self, schedule: Schedule, context: Context) -> Schedule:
        """The schedule rewritten, or the same object."""


class NetworkPass(Pass):
    """A rewriting of a network's program."""

    @abstractmethod
    def run(self, program: Program) -> Program:
        """The program rewritten, or the same object."""


P = TypeVar("P", bound=Pass)
Rewritten = TypeVar("Rewritten", Schedule, Program)


def run_passes(
    passes: Sequence[P], given: Rewritten, run: Callable[[P, Rewritten], Rewritten], after: Sequence[After] = ()
) -> Rewritten:
    """Run the passes in their order, and tell each of `after` what each pass made.

    Args:
        run: runs one of them.
    """
    for one in passes:
        given = run(one, given)
        tell(after, str(one), given)
    return given


def tell(after: Sequence[After], stage: str, made: Schedule | Program | None) -> None:
    """Tell everyone that a stage is done."""
    for told in after:
        told(stage, made)


_PASS = re.compile(r"([a-z-]+)(?:\{([^{}]*)\})?")


def with_options(passes: Sequence[P], text: str) -> tuple[P, ...]:
    """The same passes, one of them with the options that a text such as `fuse-layouts{least_part=32}` gives it.

    Raises:
        InputError: no such pass, no such option, or no such value.
    """
    given = read_pass(passes, text)
    return tuple(given if p.name == given.name else p for p in passes)


def read_pass(passes: Sequence[P], text: str) -> P:
    """One of the passes, with the options that a text gives it. Raises InputError: as `with_options` does."""
    match = _PASS.fullmatch(text.strip())
    if match is None:
        raise InputError(f"cannot read the pass {shown(text)}", hint="fuse-layouts{least_part=32}")
    names = [p.name for p in passes]
    if match[1] not in names:
        hint = did_you_mean(match[1], names, f"of {', '.join(names)}")
        raise InputError(f"no pass is named {shown(match[1])}", hint=hint)
    return _given(passes[names.index(match[1])], match[2] or "")


def _given(one: P, text: str) -> P:
    kinds = get_type_hints(type(one))
    known = [f.name for f in fields(one)]
    values: dict[str, Any] = {}
    for word in text.split():
        key, _, value = word.partition("=")
        if key not in known:
            fact = f"pass {one.name} has no option {shown(key)}"
            raise InputError(fact, hint=f"of {', '.join(known)}" if known else one.name)
        choices, is_text = get_args(kinds[key]), kinds[key] is str
        is_number = value.isascii() and value.isdecimal() and len(value) < 10
        if not (value in choices if choices else is_text or is_number):
            wanted = " or ".join(choices) if choices else "a number"
            fact = f"{one.name}: {key} can't be {shown(value)}"
            raise InputError(fact, hint=f"{one.name}{{{key}=...}} with {wanted}")
        values[key] = value if choices or is_text else int(value)
    return replace(one, **values)
