"""Where in a person's own source an error comes from: the file, the line with its neighbours, and the module."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import FrameType, TracebackType
from typing import Any

from convgen.errors import Note
from convgen.spec.text import one_line

AROUND = 1  # lines of source that are shown above and below
WIDE = 100  # characters of a line of source
_OURS = str(Path(__file__).resolve().parent.parent)
_FRAME = re.compile(r'File "([^"\n]+)", line ([0-9]+), in (\S+)')


@dataclass(frozen=True, slots=True)
class Place:
    """A line of source.

    Attributes:
        function: the name of the function around it.
        module: path, in the tree of modules, of the nn.Module whose code it is; kind: its class. Both may be "".
    """

    file: str
    line: int
    function: str = ""
    module: str = ""
    kind: str = ""

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    @property
    def text(self) -> str:
        """`net.py:12`, as seen from the working folder where the file is below it."""
        here = os.path.relpath(self.file) if os.path.isabs(self.file) else self.file
        return f"{self.file if here.startswith('..') else here}:{self.line}"

    @property
    def notes(self) -> tuple[Note, ...]:
        """The place, the module, and the line between its neighbours."""
        notes = [Note("at", self.text + f", in {self.function}" * bool(self.function))]
        if self.kind:
            notes.append(Note("module", f"{self.module} ({self.kind})" if self.module else f"{self.kind}, the whole"))
        numbers = range(max(self.line - AROUND, 1), self.line + AROUND + 1)
        around = dedent("\n".join(linecache.getline(self.file, n).rstrip() for n in numbers)).split("\n")
        for n, code in zip(numbers, around, strict=True):
            if code:
                notes.append(Note("      >" if n == self.line else "", f"{n:>4}  {one_line(code, WIDE)}"))
        return tuple(notes)


def place_of(error: BaseException, *, own: bool = False, root: Any = None) -> Place | None:
    """The innermost line that an error came through outside of torch and convgen.

    Args:
        own: whether to prefer a line outside of installed packages.
        root: the nn.Module in whose tree modules are named; by default the outermost one that was running.
    """
    frames = [one for one in _frames(error.__traceback__) if not _is_library(one[0].f_code.co_filename)]
    mine = [one for one in frames if not _is_installed(one[0].f_code.co_filename)]
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return Place(error.filename, error.lineno)
    if not frames:
        return None
    frame, line = ((own and mine) or frames)[-1]
    path, kind = _module_of(error.__traceback__, frame, root)
    return Place(frame.f_code.co_filename, line, frame.f_code.co_name, path, kind)


def place_in(stack: str, module: str = "", kind: str = "") -> Place | None:
    """The innermost line outside of torch and convgen, in a stack written like Python's tracebacks."""
    for file, line, function in reversed(_FRAME.findall(stack)):
        if not _is_library(file):
            return Place(file, int(line), function, module, kind)
    return None


def last_line(error: BaseException) -> str:
    """The last line of Python's words about an error: its type, and the first line of its message."""
    said = traceback.format_exception_only(error)[-1].strip().splitlines()
    return one_line(said[0] if said else type(error).__name__, 200)


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _is_library(file: str) -> bool:
    """Whether a file is torch's, convgen's or the import system's, so that no reader of the message wrote it."""
    parts = Path(file).parts
    inside = any(a == "site-packages" and b in ("torch", "functorch") for a, b in pairwise(parts))
    return inside or file.startswith(("<", _OURS + os.sep)) or _is_standard(file)


def _is_standard(file: str) -> bool:
    return file.startswith(sysconfig.get_path("stdlib") + os.sep) and not _is_installed(file)


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


def _module_of(trace: TracebackType | None, inner: FrameType, root: Any) -> tuple[str, str]:
    """Path and class of the innermost module whose method is running, in the tree of the root, or of the outermost."""
    running: list[Any] = []
    for frame, _ in _frames(trace):
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        first = frame.f_locals.get(names[0]) if names else None
        if callable(getattr(first, "named_modules", None)) and not isinstance(first, type):
            running.append(first)
        if frame is inner:
            break
    if not running:
        return "", ""
    found = running[-1]
    for whole in (running[0] if root is None else root, *running):
        for path, one in whole.named_modules():
            if one is found:
                return path, type(found).__name__
    return "", type(found).__name__
