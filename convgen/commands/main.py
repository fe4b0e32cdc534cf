"""The command line: the only room that knows all others.

Results go to stdout, progress and remarks to stderr. Exit codes: 0 done, 1 a check failed, 2 the input is
wrong, 3 a bug of ours.
"""

from __future__ import annotations

import errno
import gc
import sys
import traceback
from importlib.util import find_spec
from typing import Any, NoReturn

import click

from convgen import __version__
from convgen.commands.bench import bench_command
from convgen.commands.calibrate import calibrate_command
from convgen.commands.check import check_command
from convgen.commands.chunks import chunks_command
from convgen.commands.compile import compile_command
from convgen.commands.explain import explain_command
from convgen.commands.import_ import import_command
from convgen.commands.network import network_command
from convgen.commands.papers import papers_command
from convgen.commands.plan import plan_command
from convgen.commands.simulate import simulate_command
from convgen.commands.sw26010 import sw26010
from convgen.commands.tune import INTERRUPTED, tune
from convgen.errors import EXTRAS, InputError, installing


class Commands(click.Group):
    """An interrupted command failed no check: exit code 130, where click has 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="convgen")
def cli() -> None:
    """A compiler for distributed convolutions."""


for command in (
    bench_command, calibrate_command, check_command, chunks_command, compile_command, explain_command, import_command,
    network_command, papers_command, plan_command, simulate_command, sw26010, tune,
):  # fmt: skip
    cli.add_command(command)


def main() -> None:
    """Entry point: errors of the input in one message, ours with how to report them."""
    # Millions of small tuples are made, and few thrown away: the garbage collector took a seventh of the time.
    gc.set_threshold(100_000, 50, 1000)
    try:
        cli(standalone_mode=True)
    except InputError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS or find_spec(package) is not None:
            _report(error)
        click.echo(str(InputError(f"this needs {package}, which is not installed", hint=installing(package))), err=True)
        sys.exit(2)
    except MemoryError as error:
        click.echo(str(InputError(f"there is too little memory: {error}", hint="smaller extents")), err=True)
        sys.exit(2)
    except Exception as error:
        if (
            isinstance(error, OSError) and error.errno == errno.ENOSPC
        ):  # of stdout; files are said where they are written
            click.echo(str(InputError("cannot write the output: no space is left on its device")), err=True)
            sys.exit(2)
        _report(error)


def _report(error: Exception) -> NoReturn:
    """Report a bug of ours, and exit."""
    click.echo("".join(traceback.format_exception(error)), err=True)
    click.echo(
        f"convgen {__version__}: this is a bug of convgen. Please report the text above with the layer file and "
        f"this command: convgen {' '.join(sys.argv[1:])}",
        err=True,
    )
    sys.exit(3)
