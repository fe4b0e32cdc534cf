"""From a problem and a configuration to what convolves on a CPU: ATen's calls, and what is copied around them.

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
from convgen.kernels.families.cpu import arranged
from convgen.kernels.problem import Problem
from convgen.spec.target import CPU

TEMPLATES = {"aten": "arranged", "arranged": "arranged", "product": "product", "unfolded": "unfolded"}


def cpu_source(problem: Problem, config: Config) -> str:
    """The function of a phase."""
    template = TEMPLATES[config.family]
    chosen = arranged.default(problem, CPU) if config.family == "aten" else config
    return environment().get_template(f"kernels/cpu_{template}.py.jinja").render(p=problem, config=chosen)


def cpu_helpers(families: Sequence[str]) -> str:
    """Functions that those of the families share."""
    used = {TEMPLATES[f] for f in families}
    template = environment().get_template("kernels/cpu_helpers.py.jinja")
    return template.render(
        pieces=bool(used & {"arranged", "unfolded"}), fills="arranged" in used, rows="product" in used
    ).rstrip("\n")


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
    parts = (head, cpu_helpers([config.family]), cpu_source(problem, config))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"
