"""Small local layers drawn at random, by ATen and by a module, against sums tap by tap in float64.

`python bench/local_fuzz.py` says what is drawn, and draws many.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from convgen.emit.paste import shared_runtime
from convgen.kernels.load import load_text

PHASES = ("forward", "backward_data", "backward_filter")
DTYPES = ("float32", "float32", "bfloat16", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Case:
    """A local problem: numbers of a group, and how its tensors lie in memory."""

    number: int
    dtype: str
    form: str  # contiguous, channels_last, or odd: contiguous, with any stride where an extent is 1
    batch: int
    groups: int
    channels: int
    filters: int
    x: tuple[int, ...]
    y: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    bias: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def memory_format(self) -> torch.memory_format:
        last = {2: torch.channels_last, 3: torch.channels_last_3d} if self.form == "channels_last" else {}
        return last.get(len(self.x), torch.contiguous_format)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "x": (self.batch, self.groups * self.channels, *self.x),
            "w": (self.groups * self.filters, self.channels, *self.kernel),
            "y": (self.batch, self.groups * self.filters, *self.y),
        }

    @property
    def kind(self) -> str:
        """Which of the kinds that templates/runtime/local.py lists, if it is wrong."""
        sides = list(zip(self.x, self.y, self.kernel, self.stride, self.padding, self.dilation, strict=True))
        if any(all(not 0 <= i * s - p + j * d < x for i in range(y) for j in range(k)) for x, y, k, s, p, d in sides):
            return "windows that all miss x"
        if self.y[-1] == 1 and self.stride[-1] > 1 and self.channels == 1:
            return "one last pixel and a stride"
        if any(d * (k - 1) + 1 > x for x, _, k, _, _, d in sides):
            return "a window longer than x"
        if any(p and d * (k - 1) + 1 + s > x for x, _, k, s, p, d in sides):
            return "a window nearly as long as x"
        return "another"


def draw(seed: int, number: int) -> Case:
    rng = random.Random(f"{seed} {number}")
    dims = rng.choice((1, 2, 2, 3, 3))
    while True:
        x = tuple(rng.randint(1, {1: 12, 2: 8, 3: 6}[dims]) for _ in range(dims))
        kernel = tuple(rng.randint(1, 4) for _ in x)
        stride = tuple(rng.choice((1, 1, 1, 2, 3)) for _ in x)
        dilation = tuple(rng.choice((1, 1, 1, 1, 2, 3)) for _ in x)
        padding = tuple(rng.choice((0, 0, 1, 2, 3, 4)) for _ in x)
        spans = [n + 2 * p - d * (k - 1) - 1 for n, p, d, k in zip(x, padding, dilation, kernel, strict=True)]
        if min(spans) >= 0:
            break
    counts = (1, 1, 2, 3, 5, 8, 16) if rng.random() < 0.7 else (1, 2, 4, 16, 24, 32, 48)
    return Case(
        number=number,
        dtype=rng.choice(DTYPES),
        form=rng.choice(("contiguous", "odd") if dims == 1 else ("contiguous", "channels_last", "odd")),
        batch=rng.randint(1, 4),
        groups=rng.choice((1, 1, 1, 2, 3)),
        channels=rng.choice(counts),
        filters=rng.choice(counts),
        x=x,
        y=tuple(n // s + 1 for n, s in zip(spans, stride, strict=True)),
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        bias=rng.random() < 0.3,
    )


# ---- One case ------------------------------------------------------------------------------------------------------


def laid(value: Tensor, case: Case, rng: random.Random) -> Tensor:
    """A tensor as the case has its operands in memory."""
    made = torch.empty(value.shape, dtype=case.torch_dtype, memory_format=case.memory_format).copy_(value)
    if case.form != "odd":
        return made
    pairs = zip(made.shape, made.stride(), strict=True)
    return made.as_strided(made.shape, [rng.choice((1, step)) if n == 1 else step for n, step in pairs])


@cache
def runtime() -> ModuleType:
    """What a generated module convolves with."""
    return load_text(shared_runtime().text)


@cache
def layer_of(case: Case) -> Any:
    sides = zip(case.x, case.y, case.kernel, case.stride, case.padding, case.dilation, strict=True)
    shapes = case.shapes()
    spec = {
        "name": "fuzz", "layer": "conv", "grid": {"N": 1}, "options": {"sums": "ordered"}, "input": shapes["x"],
        "out_channels": shapes["w"][0], "groups": case.groups,
    }  # fmt: skip
    return runtime().Layer(
        spec, "", file="", device="cpu", dtype=case.torch_dtype, memory_format=case.memory_format,
        spatial=tuple(runtime().SpatialRows(*side) for side in sides), stored={},
    )  # fmt: skip


def by_aten(case: Case, phase: str, x: Tensor, w: Tensor, dy: Tensor, bias: Tensor | None) -> Tensor:
    rest = (case.stride, case.padding, case.dilation, False, [0] * len(case.x), case.groups)
    if phase == "forward":
        return torch.ops.aten.convolution(x, w, bias, *rest)
    which = PHASES.index(phase) - 1
    return torch.ops.aten.convolution_backward(dy, x, w, None, *rest, [which == 0, which == 1, False])[which]


def by_module(case: Case, phase: str, x: Tensor, w: Tensor, dy: Tensor, bias: Tensor | None) -> Tensor:
    layer, shapes, padding = layer_of(case), case.shapes(), list(case.padding)
    if phase == "forward":
        return runtime().conv_forward(layer, x, w, bias, padding, shapes["y"])
    if phase == "backward_data":
        return runtime().conv_backward_data(layer, dy, w, padding, shapes["x"])
    return runtime().conv_backward_filter(layer, dy, x, padding, shapes["w"])


WAYS = {"ATen": by_aten, "module": by_module}


def over_limit(case: Case, phase: str, way: str) -> float:
    """Error of a result over what rounding explains."""
    rng, generator = random.Random(case.number), torch.Generator().manual_seed(case.number)
    x, w, dy = (laid(torch.randn(s, generator=generator), case, rng) for s in case.shapes().values())
    bias = torch.randn(case.groups * case.filters, generator=generator).to(case.torch_dtype) if case.bias else None
    bias = bias if phase == "forward" else None
    made = {"forward": dy, "backward_data": x, "backward_filter": w}[phase]
    poison = [torch.full_like(made, math.nan) for _ in range(3)]  # the memory that the result will get
    del poison
    found = WAYS[way](case, phase, x, w, dy, bias)
    error, limit = runtime().error_and_limit(layer_of(case), phase, x, w, dy, bias, case.padding, found)
    return error / limit if limit else math.inf if error else 0.0
