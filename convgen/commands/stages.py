"""Looking inside a compilation: the schedule or program after each stage, and how long each takes, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from convgen.commands.inputs import need
from convgen.errors import InputError
from convgen.spec.names import did_you_mean

if TYPE_CHECKING:
    from convgen.program.network import Program
    from convgen.program.nodes import Schedule

EVERY = "every"


class Bare(click.Command):
    """A command whose `--dump-ir` stands alone or has a pass behind `=`; the next word is never its value, but a
    file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        given = [f"--dump-ir={EVERY}" if word == "--dump-ir" else word for word in args[:end]]
        return super().parse_args(ctx, given + args[end:])


class Dump:
    """Prints the schedule, or a network's program, after each pass, or after one: text that reads back, its heading a
    comment."""

    def __init__(self, wanted: str, stages: Sequence[str], show: Callable[[Any], str]) -> None:
        """Refuse an unknown pass. Raises InputError: there is no such pass."""
        if wanted not in (EVERY, *stages):
            hint = did_you_mean(wanted, stages, f"of {', '.join(stages)}")
            raise InputError(f"--dump-ir={wanted}: no pass has that name", hint=hint)
        self.wanted, self.show, self.before = wanted, show, None

    def __call__(self, stage: str, made: Schedule | Program | None) -> None:
        name = stage.partition("{")[0]
        if made is not None and self.wanted in (EVERY, name):
            same = made is self.before and name != self.wanted
            text = "" if same else f"\n{self.show(made).rstrip()}"
            click.echo(f"# {made.name} after {stage}{': as before' if same else ''}{text}", err=True)
        self.before = made


class Times:
    """Adds up the seconds of each stage, over all layers."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock, self.last = clock, clock()
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str, made: Schedule | Program | None = None) -> None:
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
    """The options of a compiling command that show how it compiles."""
    for option in (
        click.option("--time-passes", is_flag=True, help="Print the milliseconds of each stage."),
        click.option("--dump-ir", metavar="[=PASS]", help="Print the schedule after every pass, or after one."),
    ):
        command = option(command)
    return command


def looking(dump_ir: str | None, time_passes: bool, *, of_networks: bool = False) -> tuple[Sequence[Any], Times | None]:
    """The listeners that are told of stages, and the one of them that takes times. Raises InputError: there is no such
    pass."""
    times = Times() if time_passes else None
    if dump_ir is None:
        dump = None
    elif of_networks:
        need("torch", "a network's operators are ATen's, which needs torch")
        from convgen.network_compiler import PROGRAMS
        from convgen.program.network_text import show as show_network

        dump = Dump(dump_ir, PROGRAMS, show_network)
    else:
        from convgen.compiler import SCHEDULES
        from convgen.program.text import show

        dump = Dump(dump_ir, SCHEDULES, show)
    return [told for told in (times, dump) if told is not None], times
