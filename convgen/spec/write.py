"""A Layer back to plain data, in the layer file's own keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convgen.algebra.conv import Conv
from convgen.spec.layer import Axes, Layer, Options


def convolution_data(name: str, conv: Conv) -> dict[str, Any]:
    """The keys of a layer file that describe a convolution."""
    return {
        "name": name,
        "layer": conv.name,
        "input": list(conv.shape("x")),
        "out_channels": conv.filters,
        "kernel_size": [s.kernel for s in conv.spatial],
        "stride": [s.stride for s in conv.spatial],
        "padding": [[s.pad_lo, s.pad_hi] for s in conv.spatial],
        **({"output_padding": [s.output_padding for s in conv.spatial]} if conv.transposed else {}),
        "dilation": [s.dilation for s in conv.spatial],
        "groups": conv.groups,
        "bias": conv.bias,
    }


def layer_to_dict(layer: Layer) -> dict[str, Any]:
    """The layer's normal form: lists, mappings, text and numbers, with everything said.

    `layer_from_dict` makes an equal layer from it, and it is a layer file once written as YAML or JSON. Optional keys
    that were not given (machine; algorithm or distribution; roles) are left out.
    """
    conv, options = layer.conv, layer.options
    data = convolution_data(layer.name, conv) | {
        "dtype": layer.dtype,
        "memory_format": layer.memory_format,
        "grid": layer.grid.plain,
    }
    if layer.distribution is None:
        data["algorithm"] = layer.algorithm
    else:
        d = layer.distribution
        data["distribution"] = {"x": entries(d.x), "w": entries(d.w), "y": entries(d.y)}
        if layer.roles:
            data["roles"] = {phase: dict(roles) for phase, roles in layer.roles}
    data["target"] = layer.target.text
    if layer.machine is not None:
        data["machine"] = layer.machine
    kernels = {"kernels": dict(options.kernels)} if options.kernels else {}
    data["options"] = {"hold_x": options.hold_x, "sums": options.sums, **kernels}
    for key in ("core_groups", "plan"):
        if layer.target.is_mesh or getattr(options, key) != getattr(Options(), key):
            data["options"][key] = getattr(options, key)
    return data


def entries(dimensions: Sequence[Axes]) -> list[str | list[str]]:
    return ["*" if not axes else axes[0] if len(axes) == 1 else list(axes) for axes in dimensions]
