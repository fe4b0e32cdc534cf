"""Looking inside a compilation: the schedule after each stage, and how long each takes. Both go to stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from convgen.errors import InputError
from convgen.spec.names import did_you_mean

if TYPE_CHECKING:
    from convgen.program.nodes import Schedule

EVERY = "every"


class Bare(click.Command):
    """A command whose `--dump-ir` stands alone or has a pass behind `=`, never in the next word: that is a file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        given = [f"--dump-ir={EVERY}" if word == "--dump-ir" else word for word in args[:end]]
        return super().parse_args(ctx, given + args[end:])


class Dump:
    """Prints the schedule after each pass, or after one: text that reads back, its heading a comment."""

    def __init__(self, wanted: str) -> None:
        """Raises InputError: there is no such pass."""
        from convgen.compiler import SCHEDULES

        if wanted not in (EVERY, *SCHEDULES):
            hint = did_you_mean(wanted, SCHEDULES, f"of {', '.join(SCHEDULES)}")
            raise InputError(f"--dump-ir={wanted}: no pass has that name", hint=hint)
        self.wanted, self.before = wanted, None

    def __call__(self, stage: str, schedule: Schedule | None) -> None:
        from convgen.program.text import show

        name = stage.partition("{")[0]
        if schedule is not None and self.wanted in (EVERY, name):
            same = schedule is self.before and name != self.wanted
            text = "" if same else f"\n{show(schedule).rstrip()}"
            click.echo(f"# {schedule.name} after {stage}{': as before' if same else ''}{text}", err=True)
        self.before = schedule


class Times:
    """Adds up the seconds of each stage, over all layers."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock, self.last = clock, clock()
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str, schedule: Schedule | None = None) -> None:
        now = self.clock()
        name = stage.partition("{")[0]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now

    def text(self) -> str:
        total = sum(self.seconds.values())
        rows = [*self.seconds.items(), ("total", total)]
        wide = max(len(name) for name, _ in rows)
        share = [f"{s / total:4.0%}" if total else "" for _, s in rows]
        return "\n".join(
            f"{name:<{wide}}  {s * 1e3:9.2f} ms  {part}".rstrip() for (name, s), part in zip(rows, share, strict=True)
        )


def look_options(command: Any) -> Any:
    """Options of a command that compiles, to look at how."""
    for option in (
        click.option("--time-passes", is_flag=True, help="Print the milliseconds of each stage."),
        click.option("--dump-ir", metavar="[=PASS]", help="Print the schedule after every pass, or after one."),
    ):
        command = option(command)
    return command


def looking(dump_ir: str | None, time_passes: bool) -> tuple[Sequence[Any], Times | None]:
    """Who is told of stages, and of them who takes their times. Raises InputError: there is no such pass."""
    times = Times() if time_passes else None
    dump = Dump(dump_ir) if dump_ir is not None else None
    return [told for told in (times, dump) if told is not None], times
