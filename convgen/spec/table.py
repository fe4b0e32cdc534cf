"""CSV files of layers, one layer a row: 2-D, with square kernels, transposed or not (tuning/layers)."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convgen.errors import InputError
from convgen.spec.build import layer_from_dict
from convgen.spec.layer import Layer
from convgen.spec.names import did_you_mean, identifier
from convgen.spec.source import Source
from convgen.spec.text import read_text, shown

COLUMNS = ("name", "N", "C", "H", "W", "F", "K", "S", "P")
OPTIONAL = ("groups", "layer", "output_padding")
KINDS = ("conv2d", "conv_transpose2d")
_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)


def read_csv(
    path: str | Path,
    *,
    grid: Mapping[str, int],
    algorithm: str = "auto",
    dtype: str = "float32",
    target: str = "cpu",
    memory_format: str | None = None,
    machine: str | None = None,
    options: Mapping[str, str] | None = None,
    bias: bool = False,
) -> list[Layer]:
    """The layers of a CSV file, all laid out alike.

    Lines that begin with # are comments; then a header with COLUMNS in any order and optionally `groups`, `layer`
    (conv2d where it is empty, or conv_transpose2d) and `output_padding`; then a layer a row. Names become Python
    identifiers.

    Args:
        path: the file.
        grid: axis -> ranks, as in a layer file; the other arguments are as there, too.
    Raises:
        InputError: the file, a row or one of the arguments can't work; names file and line, or the option.
    """
    common: dict[str, Any] = {
        "grid": dict(grid),
        "algorithm": algorithm,
        "dtype": dtype,
        "target": target,
        "options": dict(options or {}),
        "bias": bias,
    } | {key: value for key, value in (("memory_format", memory_format), ("machine", machine)) if value is not None}
    file = str(path)
    header, rows = _rows(read_text(path), file)
    layers: list[Layer] = []
    lines: dict[str, int] = {}
    for line, cells in rows:
        where = f"{file}:{line}"
        row = _layer_of(dict(zip(header, cells, strict=True)), where)
        name: str = row["name"]
        if name in lines:
            fact = f"the name {shown(name)} stands twice, first on line {lines[name]}"
            raise InputError(fact, where=where, hint="a name a layer; what is no letter or digit counts as _")
        lines[name] = line
        try:
            layers.append(layer_from_dict(row | common, Source(file, {(): line})))
        except InputError as error:
            if error.path and error.path[0] in common:
                error.where = f"--{error.path[0]}"
            raise
    return layers


def _rows(text: str, file: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header, and each row with the number of its line."""
    header: list[str] = []
    rows: list[tuple[int, list[str]]] = []
    for number, line in enumerate(re.split("\r\n|\n|\r", text), 1):
        where = f"{file}:{number}"
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            cells = [cell.strip() for cell in next(csv.reader([line], strict=True))]
        except csv.Error as error:
            fact = f"not CSV: {error}"
            raise InputError(fact, where=where, hint="cells without quotes, commas between them") from None
        if not header:
            _check_header(cells, where)
            header = cells
        elif len(cells) != len(header):
            fact = f"the row has {len(cells)} cells, the header {len(header)}"
            raise InputError(fact, where=where, hint=f"a cell each for {', '.join(header)}")
        else:
            rows.append((number, cells))
    if not rows:
        fact = "the file holds no layers" if header else "the file is empty"
        raise InputError(fact, where=f"{file}:1", hint=f"a header {','.join(COLUMNS)}, then a layer a row")
    return header, rows


def _check_header(header: list[str], where: str) -> None:
    known = COLUMNS + OPTIONAL
    for column in header:
        if column not in known:
            hint = did_you_mean(column, known, f"columns: {', '.join(known)}")
            raise InputError(f"unknown column {shown(column)}", where=where, hint=hint)
        if header.count(column) > 1:
            raise InputError(f"column {column} stands twice", where=where, hint="remove one of the two")
    if missing := [c for c in COLUMNS if c not in header]:
        fact = f"column {', '.join(missing)} is missing"
        raise InputError(fact, where=where, hint=f"the header {','.join(COLUMNS)}, and groups if you like")


def _layer_of(cells: dict[str, str], where: str) -> dict[str, Any]:
    number: dict[str, int] = {"groups": 1}
    kind = cells.get("layer") or "conv2d"
    if kind not in KINDS:
        raise InputError(f"layer is {shown(kind)}", where=where, hint=did_you_mean(kind, KINDS, " or ".join(KINDS)))
    for column, cell in cells.items():
        if column == "name":
            if not cell:
                raise InputError("a layer without a name", where=where, hint="write one in column name")
        elif column == "layer" or (column == "output_padding" and not cell):
            continue
        elif not _DIGITS.fullmatch(cell):
            fact = f"{column} is {shown(cell)}, not a whole number"
            raise InputError(fact, where=where, hint="digits only, 18 at most")
        else:
            number[column] = int(cell)
    return {
        "name": identifier(cells["name"]),
        "layer": kind,
        "input": [number[c] for c in ("N", "C", "H", "W")],
        "out_channels": number["F"],
        "kernel_size": number["K"],
        "stride": number["S"],
        "padding": number["P"],
        "groups": number["groups"],
    } | ({"output_padding": number["output_padding"]} if "output_padding" in number else {})
