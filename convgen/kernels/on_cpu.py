"""The source of a local convolution on a CPU, from a problem and a configuration: ATen's calls, and copies around them.

A kernel is a function of its phase's name:

    forward(x, w, bias, padding, shape, groups)       bias may be None
    backward_data(dy, w, padding, shape, groups)
    backward_filter(dy, x, padding, shape, groups)

on tensors as the layer stores them, none empty; `padding`: zero rows on both sides of each dimension; `shape`: the
result's.
"""

from __future__ import annotations

from collections.abc import Sequence

from convgen.kernels.config import Config
from convgen.kernels.environment import environment
from convgen.kernels.families import of_cpu
from convgen.kernels.problem import Problem


def cpu_source(problem: Problem, config: Config) -> str:
    """The function of a phase."""
    made = of_cpu(config)
    template = environment().get_template(f"kernels/{made.TEMPLATE}")
    return template.render(p=problem, config=made.printed(problem, config))


def cpu_helpers(configs: Sequence[Config]) -> str:
    """The source of helper functions that kernels of these configurations share."""
    used = {helper for config in configs for helper in of_cpu(config).HELPERS}
    template = environment().get_template("kernels/cpu_helpers.py.jinja")
    return template.render(**{helper: helper in used for helper in ("pieces", "fills", "rows")}).rstrip("\n")


def cpu_module(problem: Problem, config: Config) -> str:
    """A module of nothing but this function: what tuning and tests import."""
    last = {2: "channels_last", 3: "channels_last_3d"}.get(len(problem.dims), "") if problem.channels_last else ""
    head = f"""from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

aten = torch.ops.aten
STRIDE, DILATION = {[d.stride for d in problem.dims]}, {[d.dilation for d in problem.dims]}
MEMORY_FORMAT = torch.{last or "contiguous_format"}
"""
    parts = (head, cpu_helpers([config]), cpu_source(problem, config))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"
