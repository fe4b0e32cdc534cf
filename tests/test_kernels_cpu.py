"""Ways to convolve on a CPU: each equals the float64 reference, whatever it rearranges."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from kernel_cases import LETTERS, PHASES, TORCH_DTYPES, operands, reference, shapes

from convgen.kernels.config import parse_config
from convgen.kernels.families import CPU_FAMILIES
from convgen.kernels.load import load_text
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.source import Kernel, kernel_module
from convgen.spec.target import CPU


def cpu_dim(rng: random.Random, name: str) -> LocalDim:
    """Padding alike on both sides, as a CPU's module has it."""
    kernel, stride, dilation = rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 1, 2))
    below, x = rng.randint(0, 2), rng.randint(5, 8)
    return LocalDim(
        name, x, (x + 2 * below - dilation * (kernel - 1) - 1) // stride + 1, kernel, stride, dilation, below
    )


def cpu_problem(rng: random.Random, phase: str, dtype: str = "float64") -> Problem:
    dims = rng.choice((1, 2, 2, 2, 3))
    pointwise = rng.random() < 0.3
    made = [LocalDim(n, 5, 5, 1, 1, 1, 0) if pointwise else cpu_dim(rng, n) for n in LETTERS[dims]]
    return Problem(
        phase=phase,  # type: ignore[arg-type]
        batch=rng.randint(1, 4),
        channels=rng.choice((1, 3, 5, 17)),
        filters=rng.choice((1, 3, 6, 20)),
        groups=rng.choice((1, 1, 1, 2)),
        dims=tuple(made),
        dtype=dtype,
        memory_format="contiguous" if dims == 1 or rng.random() < 0.5 else "channels_last",
        bias=phase == "forward" and rng.random() < 0.5,
    )


def run(p: Problem, config: object, given: dict[str, torch.Tensor]) -> torch.Tensor:
    module = load_text(kernel_module([Kernel((p,), config, CPU)]))  # type: ignore[arg-type]
    form = {(True, 2): torch.channels_last, (True, 3): torch.channels_last_3d}.get(
        (p.channels_last, len(p.dims)), torch.contiguous_format
    )
    t = {n: v.contiguous(memory_format=form) for n, v in given.items() if n != "bias"}
    shape = shapes(p)[{"forward": "y", "backward_data": "x", "backward_filter": "w"}[p.phase]]
    padding = [d.below for d in p.dims]
    if p.phase == "forward":
        found = module.forward(t["x"], t["w"], given["bias"] if p.bias else None, padding, shape, p.groups)
    elif p.phase == "backward_data":
        found = module.backward_data(t["dy"], t["w"], padding, shape, p.groups)
    else:
        found = module.backward_filter(t["dy"], t["x"], padding, shape, p.groups)
    assert found.shape == shape and found.is_contiguous(memory_format=form)
    return found


@pytest.mark.parametrize("phase", PHASES)
def test_every_way_is_the_convolution(phase: str) -> None:
    rng, seen = random.Random(hash_free(phase)), set[str]()
    for _ in range(40):
        p = cpu_problem(rng, phase)
        given = operands(p)
        wanted = reference(p, given)
        for family in CPU_FAMILIES:
            if family.refusal(p, CPU) is None:
                configs = list(family.configs(p, CPU))
                for config in rng.sample(configs, min(4, len(configs))):
                    error = (run(p, config, given) - wanted).abs().max().item() / max(1.0, wanted.abs().max().item())
                    assert error < 1e-12, (p, str(config))
                    assert parse_config(str(config)) == config
                    seen.add(family.NAME)
    assert seen == {f.NAME for f in CPU_FAMILIES}


def hash_free(text: str) -> int:
    return sum(map(ord, text))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("phase", PHASES)
def test_other_types_are_as_accurate_as_aten(phase: str, dtype: str) -> None:
    rng = random.Random(7)
    for _ in range(6):
        p = cpu_problem(rng, phase, dtype)
        given = operands(p)
        wanted = reference(p, given)
        scale = max(1.0, wanted.abs().max().item())
        for family in CPU_FAMILIES:
            if family.refusal(p, CPU) is None:
                for config in list(family.configs(p, CPU))[:6]:
                    error = (run(p, config, given).double() - wanted).abs().max().item() / scale
                    assert error < {"float32": 2e-6, "bfloat16": 2.0**-7}[dtype], (p, str(config))


def test_configurations_differ_in_what_they_do() -> None:
    p = Problem(
        phase="forward", batch=8, channels=12, filters=20,
        dims=(LocalDim("H", 6, 6, 3, 1, 1, 1), LocalDim("W", 6, 6, 3, 1, 1, 1)),
        dtype="float32", memory_format="contiguous",
    )  # fmt: skip
    found = [c for f in CPU_FAMILIES for c in (f.configs(p, CPU) if f.refusal(p, CPU) is None else ())]
    assert len(found) == len(set(found)) > 100
    padded = {(math.ceil(12 / c.tile["C"]), c.tile["C"]) for c in found if c.family == "arranged"}
    assert len({a * b for a, b in padded}) == len(padded)
    assert TORCH_DTYPES[replace(p, dtype="tfloat32").dtype] == torch.float32
