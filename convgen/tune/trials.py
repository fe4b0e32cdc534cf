"""Every measurement that was ever made, a line each: an interrupted search goes on from it, and studies read it.

There is one file for each device in the cache folder, to which lines are only appended. Each line is written by one
call, so that lines of tuners that run at the same time don't mix; a line that was cut off is skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from convgen.errors import InputError
from convgen.knobs import cache_folder
from convgen.spec.text import open_bytes
from convgen.tune.device import Device


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration of one problem, measured or failed.

    Attributes:
        us: microseconds of a launch; None if it failed.
        cause: a failure's cause: wrong, crashed, hung, error, compile, spills; empty otherwise.
        said: what the failure said.
        source: the digest of the kernel as it was printed.
    """

    key: str
    kernel: str
    us: float | None
    cause: str
    said: str
    versions: dict[str, str]
    source: str


def trials_path(device: Device) -> Path:
    return cache_folder() / "trials" / f"{device.file_name}l"


def append(path: Path, trial: Trial) -> None:
    """Add a line.

    Raises:
        InputError: the file can't be written.
    """
    line = json.dumps(asdict(trial)) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(handle).st_size
            cut = size and os.pread(handle, 1, size - 1) != b"\n"  # a killed process has left part of a line
            os.write(handle, (("\n" if cut else "") + line).encode())
        finally:
            os.close(handle)
    except OSError as error:
        raise InputError(
            f"{path} can't be written: {error.strerror}", hint="CONVGEN_CACHE=FOLDER keeps every measurement"
        ) from error


def read_trials(path: Path) -> Iterator[Trial]:
    """The trials of all whole lines, in the order in which they were written.

    Raises:
        InputError: the file is there, and can't be read.
    """
    try:
        text = open_bytes(path, -1).decode(errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(
            f"{path} can't be read: {error.strerror}", hint="move it away, or CONVGEN_CACHE=FOLDER"
        ) from error
    for line in text.splitlines():
        try:
            data: dict[str, Any] = json.loads(line)
            yield Trial(**data)
        except (ValueError, TypeError, RecursionError):
            continue
