"""A local problem as a module has it: the layer of one rank whose only convolution it is.

What is timed is what a module runs: the module's own text around the kernel, which makes rows by hand where ATen is
wrong without, and ATen's plain call just as a module that was not tuned calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from convgen.compiler import compile_layer
from convgen.kernels.problem import Problem
from convgen.spec.reader import layer_from_dict
from convgen.tune.baseline import pads_alike


def module_of(p: Problem, name: str, kernels: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """A module of one rank that convolves this problem; None where no layer's is just this.

    Args:
        name: of the layer.
        kernels: by phase; where none is named, it is ATen's plain call.
    """
    if p.x_parts * p.y_parts > 1 or p.rim is not None or not pads_alike(p) or not p.flops:
        return None
    made = layer_from_dict(
        {
            "name": name,
            "layer": f"conv{len(p.dims)}d",
            "input": [p.batch, p.groups * p.channels, *(d.x for d in p.dims)],
            "out_channels": p.groups * p.filters,
            "kernel_size": [d.kernel for d in p.dims],
            "stride": [d.stride for d in p.dims],
            "padding": [d.below for d in p.dims],
            "dilation": [d.dilation for d in p.dims],
            "groups": p.groups,
            "bias": p.bias,
            "dtype": p.dtype,
            "memory_format": p.memory_format,
            "grid": {"N": 1},
            "algorithm": "sample",
            "target": "cpu",
        }
    )
    return compile_layer(replace(made, options=replace(made.options, kernels=tuple(kernels.items())))).module()
