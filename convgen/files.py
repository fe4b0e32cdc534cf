"""Files that are written: refused before any work where they cannot be, and written in one way."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from convgen.errors import InputError
from convgen.spec.text import one_line


def check_file(path: Path, option: str) -> None:
    """Refuse what can't become a file, without making it.

    Raises:
        InputError: says why, and what would work.
    """
    hint = f"{option} FILE in a folder that you may write to"
    try:
        if path.is_dir():
            raise InputError(f"{option}: cannot write {said(path)}: it is a folder", hint=hint)
        if path.exists():
            if not os.access(path, os.W_OK):
                raise InputError(f"{option}: cannot write {said(path)}: you may not", hint=hint)
            return
        if not path.parent.is_dir():
            raise InputError(
                f"{option}: cannot write {said(path)}: {said(path.parent)} is no folder",
                hint=hint,
            )
        path.lstat()  # a name that is too long; a link to nowhere stays
    except FileNotFoundError:
        _check_writable(path.parent, path, option, hint)
    except (OSError, ValueError) as error:
        raise InputError(f"{option}: cannot write {said(path)}: {_why(error)}", hint=hint) from None


def check_folder(path: Path, option: str) -> None:
    """Refuse what is no folder to write to and can't be made one, without making it.

    Raises:
        InputError: says why, and what would work.
    """
    hint = f"{option} DIR with a folder that you may write to"
    try:
        there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
        if not there.is_dir():
            fact = f"{option}: cannot write to {said(path)}: {said(there)} is no folder"
            raise InputError(fact, hint=hint)
    except (OSError, ValueError) as error:
        raise InputError(f"{option}: cannot write to {said(path)}: {_why(error)}", hint=hint) from None
    _check_writable(there, path, option, hint)


def _check_writable(folder: Path, path: Path, option: str, hint: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):  # asks the system, which permissions alone do not tell
            pass
    except OSError as error:
        raise InputError(f"{option}: cannot write {said(path)}: {_why(error)}", hint=hint) from None


def write_file(path: Path, text: str | bytes, option: str) -> None:
    """Write a text, or bytes.

    Raises:
        InputError: the disk is full, or the file can no longer be written.
    """
    try:
        # A pipe that nobody reads is refused, where opening it would wait for ever.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        os.set_blocking(handle, True)
        with open(handle, "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
    except OSError as error:
        fact = f"{option}: cannot write {said(path)}: {_why(error)}"
        raise InputError(fact, hint=f"{option} FILE in a folder that you may write to") from None


def keep_input(output: Path, source: str, option: str) -> None:
    """Refuse to write over the file that was read.

    Raises:
        InputError: both are one file.
    """
    if output.exists() and Path(source).exists() and output.samefile(source):
        fact = f"{option}: {said(output)} is the file that is read, and would be lost"
        raise InputError(fact, hint="another name")


def _why(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def said(path: Path) -> str:
    return one_line(str(path), 300)
