"""A local problem as the only convolution of a module: that of a layer on one rank.

So the timed code is a module's: its own text around the kernel, which pads rows by hand where ATen would be wrong, and
ATen's plain call just as an untuned module makes it.
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
        name: the layer's.
        kernels: the kernel of each phase; ATen's plain call for phases without one.
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
