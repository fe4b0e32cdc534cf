"""Layers in and out: what the rest of convgen calls.

read_layer(path)        a YAML layer file -> Layer
read_csv(path, ...)     a CSV file of layers -> [Layer]
layer_from_dict(data)   plain data -> Layer
layer_to_dict(layer)    Layer -> plain data that says everything
locate(error, source)   fills in file and line of an error from further down
"""

from __future__ import annotations

from pathlib import Path

from convgen.spec.build import layer_from_dict
from convgen.spec.layer import Layer
from convgen.spec.source import locate
from convgen.spec.table import read_csv
from convgen.spec.write import layer_to_dict
from convgen.spec.yaml import read_yaml

__all__ = ["layer_from_dict", "layer_to_dict", "locate", "read_csv", "read_layer"]


def read_layer(path: str | Path) -> Layer:
    """The layer that a YAML file describes (DESIGN section 4).

    Args:
        path: the file; its name as given goes into messages.
    Raises:
        InputError: the file can't be read, isn't YAML 1.2, or describes no layer that can work; says what,
            where, the numbers, and what would work.
    """
    document = read_yaml(path)
    return layer_from_dict(document.data, document.source)
