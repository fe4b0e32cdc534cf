"""templates/runtime as the plain Python that it is, and Layers of it without a module."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from modules import Case

from convgen.algebra.layout import Layout as Stored
from convgen.emit.module import MEMORY_FORMATS
from convgen.spec.write import layer_to_dict

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "templates"))

from runtime.layer import Layer  # noqa: E402
from runtime.layout import Layout, PaddedWindow, SpatialRows, Window  # noqa: E402


@cache
def layer_of(case: Case) -> Layer:
    """What the case's module would say of its layer."""
    conv, layer = case.layer.conv, case.layer
    return Layer(
        layer_to_dict(layer),
        "",
        file="",
        device="cpu",
        dtype=case.dtype,
        memory_format=getattr(torch, MEMORY_FORMATS[layer.memory_format, len(conv.spatial)]),
        spatial=tuple(
            SpatialRows(x.extent, y.extent, s.kernel, s.stride, s.pad_lo, s.dilation)
            for s, x, y in zip(conv.spatial, conv.dims("x")[2:], conv.dims("y")[2:], strict=True)
        ),
        stored={name: layout_of(case, layout) for name, layout in case.schedule.stored},
    )


def layout_of(case: Case, layout: Stored) -> Any:
    """A layout of the algebra as a module has it."""
    rows = tuple(w is not None for w in layout.windows)
    if not any(rows):
        return Layout(layout.tensor, layout.axes)
    return (Window if case.space.virtual_padding else PaddedWindow)(layout.tensor, layout.axes, rows)
