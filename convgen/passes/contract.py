"""What a pass is, what it may know, and how passes run one after the other."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, get_args, get_type_hints

from convgen.algebra.space import Space
from convgen.errors import InputError
from convgen.program.nodes import Schedule
from convgen.spec.target import CPU, Target

# Told a stage and the schedule that there is after it, if any: verifies it, prints it, or takes the time.
After = Callable[[str, Schedule | None], None]


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
    """A rewriting of schedules, named as the command line says it; its fields are its options.

    A pass is pure, hands back the same object where nothing changes, and has nothing left to do when run twice.
    """

    name: ClassVar[str]

    @abstractmethod
    def run(self, schedule: Schedule, context: Context) -> Schedule:
        """The schedule rewritten, or the same object."""

    def __str__(self) -> str:
        """`hold-x{choice=stored}`: the options that are not the defaults."""
        given = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return self.name + (f"{{{' '.join(given)}}}" if given else "")


def run_passes(passes: Sequence[Pass], schedule: Schedule, context: Context, after: Sequence[After] = ()) -> Schedule:
    """Run the passes in their order, and tell each of `after` what each pass made."""
    for one in passes:
        schedule = one.run(schedule, context)
        tell(after, str(one), schedule)
    return schedule


def tell(after: Sequence[After], stage: str, schedule: Schedule | None) -> None:
    """Tell everyone that a stage is done."""
    for told in after:
        told(stage, schedule)


_PASS = re.compile(r"([a-z-]+)(?:\{([^{}]*)\})?")


def with_options(passes: Sequence[Pass], text: str) -> tuple[Pass, ...]:
    """The same passes, one of them with the options that a text such as `fuse-layouts{least_part=32}` gives it.

    Raises:
        InputError: no such pass, no such option, or no such value.
    """
    match = _PASS.fullmatch(text.strip())
    if match is None:
        raise InputError(f"cannot read the pass {text!r}", hint="fuse-layouts{least_part=32}")
    if match[1] not in (names := [p.name for p in passes]):
        raise InputError(f"no pass is named {match[1]}", hint=f"of {', '.join(names)}")
    return tuple(_given(p, match[2] or "") if p.name == match[1] else p for p in passes)


def _given(one: Pass, text: str) -> Pass:
    kinds = get_type_hints(type(one))
    known = [f.name for f in fields(one)]
    values: dict[str, Any] = {}
    for word in text.split():
        key, _, value = word.partition("=")
        if key not in known:
            fact = f"pass {one.name} has no option {key}"
            raise InputError(fact, hint=f"of {', '.join(known)}" if known else one.name)
        choices = get_args(kinds[key])
        if not (value in choices if choices else value.isascii() and value.isdecimal() and len(value) < 10):
            wanted = " or ".join(choices) if choices else "a number"
            raise InputError(f"{one.name}: {key} can't be {value!r}", hint=f"{one.name}{{{key}=...}} with {wanted}")
        values[key] = value if choices else int(value)
    return replace(one, **values)
