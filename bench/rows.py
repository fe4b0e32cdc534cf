"""Files of rows, a JSON object a line: what studies measure and go on from. A name that ends in .gz is compressed."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def rows_of(file: Path) -> Rows:
    """All rows; none of a file that is not there."""
    if not file.exists():
        return []
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return [json.loads(line) for line in raw.decode("utf-8").splitlines()]


def add(file: Path, row: Mapping[str, Any]) -> None:
    """Write a row behind the others, where it stays if the process ends; `packed` makes one piece of such pieces."""
    line = f"{json.dumps(row)}\n".encode()
    with file.open("ab") as out:
        out.write(compressed(line) if file.suffix == ".gz" else line)


def compressed(raw: bytes) -> bytes:
    """Without a name and a time, and so without what Python's versions write otherwise."""
    made = io.BytesIO()
    with gzip.GzipFile("", "wb", 9, made, mtime=0) as out:
        out.write(raw)
    return made.getvalue()


def packed(file: Path) -> None:
    """Write a compressed file anew: the same rows are the same bytes, whatever they came in."""
    if file.suffix == ".gz" and file.exists():
        raw = gzip.decompress(file.read_bytes())
        file.with_suffix(".part").write_bytes(compressed(raw))
        file.with_suffix(".part").replace(file)
