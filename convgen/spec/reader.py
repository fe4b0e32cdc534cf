"""Reads and writes layers: what the rest of convgen calls.

read_layer(path)        a YAML layer file -> Layer
read_layers(path)       a YAML layer file, or a plan with layers -> [Layer]
read_csv(path, ...)     a CSV file of layers -> [Layer]
layer_from_dict(data)   plain data -> Layer
layer_to_dict(layer)    Layer -> plain data with every key written out
locate(error, source)   fills in file and line of an error from further down
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convgen.errors import InputError
from convgen.spec.build import layer_from_dict
from convgen.spec.formats import KEY, without_format
from convgen.spec.layer import Layer
from convgen.spec.names import did_you_mean
from convgen.spec.source import Source, locate
from convgen.spec.table import read_csv
from convgen.spec.text import as_list, shown
from convgen.spec.write import layer_to_dict
from convgen.spec.yaml import Document, read_yaml

__all__ = ["layer_from_dict", "layer_to_dict", "locate", "read_csv", "read_layer", "read_layers"]

PLAN_KEYS = ("plan", KEY, "memory_bytes", "layers", "others")


def read_layer(path: str | Path) -> Layer:
    """The layer that a YAML file describes (README, A layer file).

    Args:
        path: the file; its name as given goes into messages.
    Raises:
        InputError: the file can't be read, isn't YAML 1.2, or describes no layer that can work; says what,
            where, the numbers, and what would work.
    """
    document = read_yaml(path)
    return _layer(document)


def read_layers(path: str | Path) -> list[Layer]:
    """The layers of a YAML file: the one of a layer file, or all that a plan lays out (`convgen plan -o`).

    Raises:
        InputError: as `read_layer`.
    """
    document = read_yaml(path)
    if "nodes" in document.data:
        fact = f"{path} is a network, whose layers have no grid yet"
        hint = f"convgen plan {path} --machine M --ranks P -o plan.yaml, and that file"
        raise locate(InputError(fact, ("nodes",), hint=hint), document.source)
    if "layers" not in document.data:
        return [_layer(document)]
    source = document.source
    _check_format(document)
    for key in document.data:
        if key not in PLAN_KEYS:
            hint = did_you_mean(key, PLAN_KEYS, f"keys of a plan are {', '.join(PLAN_KEYS)}")
            raise locate(InputError(f"unknown key {shown(key)}", (key,), hint=hint), source)
    entries = as_list(document.data["layers"])
    if not entries:
        error = InputError("a plan's layers is no list of layers", ("layers",), hint="a file that convgen plan wrote")
        raise locate(error, source)
    layers: list[Layer] = []
    for i, entry in enumerate(entries):
        lines = {p[2:]: line for p, line in source.lines.items() if p[:2] == ("layers", i)}
        layers.append(layer_from_dict(entry, Source(source.file, lines)))
    return layers


def _layer(document: Document) -> Layer:
    return layer_from_dict(_check_format(document), document.source)


def _check_format(document: Document) -> dict[str, Any]:
    """A file's data without its format's number."""
    try:
        return without_format(document.data)
    except InputError as error:
        raise locate(error, document.source) from None
