"""`--correct`: measurements go back into the machine's file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from convgen.errors import InputError
from convgen.files import check_file

if TYPE_CHECKING:
    from convgen.bench.correct import Corrected


def machine_file(name: str) -> Path:
    """The file of a machine that may be corrected.

    Raises:
        InputError: it is one of those that come with convgen, or can't be written.
    """
    if not (name.endswith((".yaml", ".yml")) or "/" in name):
        fact = f"--correct writes into the machine's file, and {name} is one that comes with convgen"
        raise InputError(fact, hint="the path of a file of your own: convgen calibrate -o machine.yaml, or a copy")
    path = Path(name)
    check_file(path, "--correct")
    return path


def put_back(path: Path, corrected: Sequence[Corrected]) -> None:
    """Write corrections beside those that were measured before, and say so."""
    from convgen.bench.correct import as_steps, corrected_text, merged
    from convgen.cost.machine_file import read_machine
    from convgen.cost.steps_file import write_steps

    if corrected:
        write_steps(path, read_machine(path).steps.updated(as_steps(corrected)))
    click.echo(corrected_text(merged(corrected), str(path)), err=True)
