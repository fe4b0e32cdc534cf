"""The types of click's options that name what is written, and what commands print and draw.

Types check while the command line is read, so that a command does not print an answer and then fail at its last step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from convgen.errors import InputError
from convgen.files import check_file, check_folder, said
from convgen.pictures.figures import matplotlib, plot_format

if TYPE_CHECKING:
    from convgen.pictures.canvas import Canvas

    PathType = click.ParamType[Path]
else:
    PathType = click.ParamType  # a class without a type parameter before click 8.4


class OutputFile(PathType):
    """The name of a file that can be written.

    Args:
        suffixes: its name must end in one of these; any name by default.
    """

    name = "file"

    def __init__(self, suffixes: Sequence[str] = ()) -> None:
        self.suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        self.check_name(path, _option(param))
        check_file(path, _option(param))
        return path

    def check_name(self, path: Path, option: str) -> None:
        if self.suffixes and path.suffix not in self.suffixes:
            raise InputError(
                f"{option}: cannot write {said(path)}: its name does not end in {' or '.join(self.suffixes)}",
                hint=f"{option} {path.with_suffix(self.suffixes[0])}" if path.name else f"{option} FILE",
            )


class Picture(OutputFile):
    """The name of a picture that can be drawn."""

    def check_name(self, path: Path, option: str) -> None:
        plot_format(path)
        matplotlib()


class OutputFolder(PathType):
    """A folder that can be written to, or made."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if not value:
            raise InputError(f"{_option(param)} is empty", hint=f"{_option(param)} DIR; . is the working folder")
        check_folder(Path(value), _option(param))
        return Path(value)


def _option(param: click.Parameter | None) -> str:
    return param.opts[0] if param is not None else "output"


def show(as_json: bool, data: Callable[[], object], text: Callable[[], str]) -> None:
    """Print the data as JSON, or the text."""
    click.echo(json.dumps(data(), indent=1) if as_json else text())


def draw(file: Path | None, page: Callable[[], Canvas]) -> None:
    """Draw a page into a file, if one is asked for, and say so."""
    if file is not None:
        page().save(file)
        click.echo(str(file), err=True)
