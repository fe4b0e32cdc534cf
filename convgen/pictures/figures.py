"""Pictures: what can be drawn, and matplotlib with settings under which the same figure is the same bytes."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from convgen.errors import InputError, installing

FORMATS = ("png", "svg", "pdf")
_SETTINGS: dict[str, Any] = {
    "svg.hashsalt": "convgen",
    "svg.fonttype": "none",  # text stays text: it can be searched, and tests read it
    "pdf.fonttype": 42,
    "hatch.linewidth": 0.7,
}
# No dates and no version of the tool in the file.
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def plot_format(path: Path) -> str:
    """The format that a file's suffix asks for.

    Raises:
        InputError: the suffix is of no format that can be drawn.
    """
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        said = f"'.{suffix}'" if suffix else "no suffix"
        raise InputError(
            f"cannot draw {path.name}: {said} names no format of a plot", hint="a file that ends in .png, .svg or .pdf"
        )
    return suffix


def matplotlib() -> Any:
    """The package, with what drawing needs of it.

    Raises:
        InputError: it is not installed.
    """
    try:
        for module in ("backends.backend_agg", "figure", "font_manager", "lines", "patches", "textpath"):
            import_module(f"matplotlib.{module}")
        return import_module("matplotlib")
    except ImportError:
        raise InputError("a plot needs matplotlib", hint=installing("matplotlib", "plot")) from None


@contextmanager
def settings(mpl: Any) -> Generator[None]:
    """Set matplotlib's defaults and our settings, whatever the user's own configuration says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield


def save_figure(figure: Any, path: Path, dpi: int) -> None:
    """Write a figure in the format that the suffix names.

    Raises:
        InputError: the file can't be written.
    """
    kind = plot_format(path)
    try:
        with settings(matplotlib()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a font without some character is no reason to fail
            figure.savefig(path, format=kind, dpi=dpi, metadata=_METADATA[kind])
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}", hint="a file in a folder you may write to") from None
