"""Measured kernels by device: `tuning/devices/NAME.json`, and the user's own beside it in the cache folder.

There is a file for each device, with a line for each entry, sorted, so that a change reads as a diff. A file is written
whole or not at all, under a lock, together with what is there by then: tuners that run at the same time keep each
other's entries.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from convgen.errors import ConvgenError, InputError
from convgen.kernels.config import parse_config
from convgen.knobs import cache_folder
from convgen.resources import data_file
from convgen.spec.formats import check_format
from convgen.spec.target import read_target
from convgen.spec.text import TwiceError, once, open_bytes
from convgen.tune.device import Device
from convgen.tune.key import problem_of

FORMAT = 1
LOCK_S = 60.0


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _kernel(text: str) -> str:
    try:
        parse_config(text)
    except ConvgenError as error:
        raise ValueError(str(error)) from None
    return text


def _target(text: str) -> str:
    try:
        read_target(text).known()
    except (ConvgenError, KeyError, ValueError) as error:
        raise ValueError(f"no target: {error}") from None
    return text


Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _between(found: tuple[float, float, float]) -> tuple[float, float, float]:
    if not found[1] <= found[0] <= found[2]:
        raise ValueError(f"{found[0]} is not between {found[1]} and {found[2]}")
    return found


Between = Annotated[tuple[Milliseconds, Milliseconds, Milliseconds], AfterValidator(_between)]  # median, low, high


class Entry(_Form):
    """The fastest correct kernel that was found for a problem.

    Attributes:
        kernel: its family and configuration.
        ms, p20, p80: median, and 20th and 80th percentile, of a race against ATen and the runners-up.
        aten_ms: ATen's median in the same race; None where ATen can't do the problem. ratio: that over ms.
        gain: ATen's time over the kernel's in paired rounds, or over the best kernel's if ATen's plain call stays:
            median, and the ends of its interval over all sittings. None in entries of older files.
        module: the untuned module's time over the tuned one's, likewise; None if it was not run.
        doubt: why the entry is not sure, so that it is measured again next time; empty if it is sure.
        share: the share of the roofline: the least time that flops, bytes or a launch take, over ms.
        bound: which of these bounds it.
        error: largest error over the largest |result|, against float64.
        tried: how many configurations were measured; of: how many are legal.
        effort: the search's.
        versions: those of the packages on which the time depends.
        source: the digest of the kernel as it was printed.
    """

    kernel: Annotated[str, AfterValidator(_kernel)]
    ms: Milliseconds
    p20: Milliseconds
    p80: Milliseconds
    aten_ms: Milliseconds | None
    ratio: Milliseconds | None
    gain: Between | None = None
    module: Between | None = None
    doubt: str = ""
    share: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    bound: Literal["floor", "memory", "compute"]
    error: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    tried: Annotated[int, Field(ge=0)]
    of: Annotated[int, Field(ge=1)]
    effort: Literal["quick", "full"]
    versions: dict[str, str]
    source: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]

    @model_validator(mode="after")
    def _consistent(self) -> Entry:
        wanted = None if self.aten_ms is None else self.aten_ms / self.ms
        if (wanted is None) != (self.ratio is None) or (wanted and self.ratio and abs(self.ratio / wanted - 1) > 0.01):
            raise ValueError(f"ratio {self.ratio} is not aten_ms / ms")
        if not self.p20 <= self.ms <= self.p80:
            raise ValueError(f"ms {self.ms} is not between p20 {self.p20} and p80 {self.p80}")
        return self


class Ceilings(_Form):
    """A device's ceilings: products in each type, bytes read and written, and the least time of a launch."""

    flops_per_s: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    floor_us: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    def best(self, other: Ceilings | None) -> Ceilings:
        """The better of two measurements in each number: what a busy machine reached is no ceiling."""
        if other is None:
            return self
        dtypes = {**self.flops_per_s, **other.flops_per_s}
        return Ceilings(
            flops_per_s={d: max(self.flops_per_s.get(d, 0.0), other.flops_per_s.get(d, 0.0)) for d in dtypes},
            bytes_per_s=max(self.bytes_per_s, other.bytes_per_s),
            floor_us=min(self.floor_us, other.floor_us),
        )


class Database(_Form):
    """A device's file.

    Attributes:
        ceilings: the best that were measured.
    """

    format: Literal[1] = FORMAT
    device: str
    target: Annotated[str, AfterValidator(_target)]
    ceilings: Ceilings | None = None
    entries: dict[str, Entry] = {}

    def text(self) -> str:
        """The file's text; the same entries give the same bytes."""
        head = {"format": self.format, "device": self.device, "target": self.target}
        lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
        ceilings = None if self.ceilings is None else self.ceilings.model_dump()
        lines.append(f' "ceilings": {json.dumps(ceilings)}')
        rows = [f"  {json.dumps(k)}: {json.dumps(self.entries[k].model_dump())}" for k in sorted(self.entries)]
        lines.append(' "entries": {' + ("\n" + ",\n".join(rows) + "\n }" if rows else "}"))
        return "{\n" + ",\n".join(lines) + "\n}\n"


def shipped_folder() -> Path:
    return data_file("tuning") / "devices"


def user_folder() -> Path:
    return cache_folder() / "devices"


def read_database(path: Path) -> Database | None:
    """A device's file; None if there is none.

    Raises:
        InputError: the file is something else, or broken; the message says where.
    """
    try:
        text = open_bytes(path, -1).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise _refused(path, 0, f"can't be read: {why}") from None
    try:
        data = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise _refused(path, error.lineno, f"is no JSON: {error.msg} at column {error.colno}") from None
    except TwiceError as error:
        raise _refused(path, _line(text, error.args[0], last=True), f"has {error.args[0]} twice") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, or too many nested brackets
        raise _refused(path, 0, f"is no table of measured kernels: {error}") from None
    try:
        check_format(cast("dict[str, object]", data).get("format", FORMAT) if isinstance(data, dict) else FORMAT)
        made = Database.model_validate(data)
    except InputError as error:
        raise _refused(path, _line(text, "format"), f"is no table of measured kernels: {error.fact}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = " in ".join(str(part) for part in reversed(first["loc"])) or "the whole"
        raise _refused(
            path, _line_of(text, first["loc"]), f"is no table of measured kernels: {place}: {first['msg']}"
        ) from None
    for key in made.entries:
        try:
            problem_of(key)
        except InputError as error:
            raise _refused(path, _line(text, key), f"is no table of measured kernels: {error.fact}") from None
    return made


def _line_of(text: str, loc: tuple[int | str, ...]) -> int:
    """The line of the innermost key that stands in the text as a key."""
    return next((n for part in reversed(loc[:2]) if (n := _line(text, str(part)))), 1)


def _line(text: str, key: str, *, last: bool = False) -> int:
    found = [i for i, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith(json.dumps(key) + ":")]
    return found[-1 if last else 0] if found else 0


def _refused(path: Path, line: int, fact: str) -> InputError:
    return InputError(
        f"{path} {fact}",
        where=f"{path}:{line}" if line else str(path),
        hint="mend it, or move it away; it was left as it is",
    )


def update(path: Path, device: Device, entries: Mapping[str, Entry], ceilings: Ceilings | None = None) -> Database:
    """Put entries into a device's file, which is made if there is none; those of other problems stay.

    Raises:
        InputError: the file can't be read, is another device's, or can't be written. It is left as it was.
    """
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_S):
            there = read_database(path) or Database(device=device.name, target=device.target)
            if (there.device, there.target) != (device.name, device.target):
                fact = f"is of {there.device} ({there.target}), not of {device.name} ({device.target})"
                raise _refused(path, _line(path.read_text(encoding="utf-8"), "device"), fact)
            known = ceilings.best(there.ceilings) if ceilings is not None else there.ceilings
            made = there.model_copy(update={"entries": {**there.entries, **entries}, "ceilings": known})
            replace_text(path, made.text())
            return made
    except Timeout:
        raise InputError(
            f"{path} was locked by another tuner for {LOCK_S:.0f} s", hint="the same command again"
        ) from None
    except OSError as error:
        raise InputError(
            f"{path} can't be written: {error.strerror}", hint="--into FOLDER, or CONVGEN_CACHE"
        ) from error


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, also when the machine stops."""
    made = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with made.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    finally:
        made.unlink(missing_ok=True)
