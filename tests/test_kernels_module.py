"""Whole modules for a GPU on virtual ranks, their kernels in Triton's interpreter: random layers and a reference."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from modules import Case, assert_counted, assert_true, draw, on_gpu, run
from passing import eager
from sampling import ALL, draws
from test_module_contract import assert_opchecks

from convgen.compiler import Compiled, compile_layer
from convgen.program.text import show
from convgen.program.verify import verify
from convgen.spec.reader import layer_from_dict
from convgen.verify.check import check
from convgen.verify.program import global_tensors, reference

LAYERS = draws(48)


def fused(case: Case) -> Case:
    """The same case for a GPU, whatever layouts can be fused in it."""
    case = on_gpu(case)
    return replace(case, passes=eager(case.layer))


def assert_right(case: Case) -> None:
    verify(case.schedule, case.space)
    given = global_tensors(case.layer)
    ran = run(case, given)
    assert_true(case, ran, reference(case.layer.conv, given))
    assert_counted(case, ran)


@pytest.mark.parametrize("part", range(6))
def test_random_layers(part: int) -> None:
    for seed in range(part, LAYERS // 2, 6):
        assert_right(on_gpu(draw(seed, most=6)))


@pytest.mark.parametrize("part", range(6))
def test_random_layers_fused(part: int) -> None:
    for seed in range(1000 + part, 1000 + LAYERS, 6):
        assert_right(fused(draw(seed, most=6)))


@pytest.mark.parametrize("algorithm", ["stationary-x", "stationary-y", "stationary-w", "spatial", "integrated"])
def test_named_algorithms_fused(algorithm: str) -> None:
    for seed in range(draws(2)):
        assert_right(fused(draw(seed, algorithm=algorithm, least=2, most=6)))


def even_layer(algorithm: str, memory_format: str, kernel: int, stride: int, dtype: str) -> Compiled:
    """Channels that divide: what collectives deliver is in equal parts."""
    grid = {"stationary-x": {"N": 2, "C": 2}, "stationary-y": {"N": 1, "F": 3}, "stationary-w": {"C": 2, "F": 2}}
    spec = {
        "name": f"even_{algorithm}_{memory_format}_{kernel}_{stride}_{dtype}".replace("-", "_"),
        "layer": "conv2d",
        "input": [3, 12, 5, 6],
        "out_channels": 6,
        "kernel_size": kernel,
        "stride": stride,
        "padding": kernel // 2,
        "bias": True,
        "dtype": dtype,
        "memory_format": memory_format,
        "grid": grid[algorithm],
        "algorithm": algorithm,
        "target": "cuda",
    }
    layer = layer_from_dict(spec)
    return compile_layer(layer, passes=eager(layer))


@pytest.mark.parametrize(
    ("algorithm", "memory_format"),
    [
        (algorithm, memory_format)
        for i, algorithm in enumerate(("stationary-x", "stationary-y", "stationary-w"))
        for j, memory_format in enumerate(("contiguous", "channels_last"))
        if ALL or (i + j) % 2 == 0  # each format with some algorithm
    ],
)
def test_parts(algorithm: str, memory_format: str) -> None:
    for kernel, stride, dtype in ((3, 1, "float64"), (3, 2, "bfloat16"), (1, 1, "float32"), (1, 2, "tfloat32")):
        compiled = even_layer(algorithm, memory_format, kernel, stride, dtype)
        assert "as=parts" in show(compiled.schedule)
        report = check(compiled, interpret=True)
        assert report.ok, report


def test_everything_is_drawn() -> None:
    seen: Counter[str] = Counter()
    for seed in range(1000, 1400):
        if seed >= 1048 and seen["parts all_gather"] and seen["parts conv"]:
            break
        for _, step in fused(draw(seed, most=6)).schedule.steps():
            seen[f"{getattr(step, 'form', 'whole')} {getattr(step, 'kind', 'conv')}"] += 1
    for form in ("rim exchange", "whole all_gather", "whole exchange", "whole slice", "whole all_to_all"):
        assert seen[form] >= 2, seen
    assert seen["parts all_gather"] and seen["parts conv"], seen


def test_another_batch() -> None:
    """One module for any number of samples, fewer than ranks included."""
    case = fused(draw(3, algorithm="stationary-x", least=4, most=6))
    for batch in (1, 7):
        assert_right(case.with_batch(batch))


def test_a_rank_without_samples_has_a_filter_gradient_of_zeros() -> None:
    """Its boxes would be copied from tensors without elements."""
    spec = {
        "name": "a_sample_for_two", "layer": "conv2d", "input": [4, 16, 8, 8], "out_channels": 16, "kernel_size": 3,
        "padding": 1, "dtype": "bfloat16", "memory_format": "channels_last", "grid": {"N": 2}, "algorithm": "sample",
        "target": "cuda:sm_90",
    }  # fmt: skip
    compiled = compile_layer(layer_from_dict(spec))
    case = Case(compiled.layer, {}, {})
    case.__dict__["schedule"] = compiled.schedule
    assert "def backward_filter_box(" in case.source
    case = case.with_batch(1)
    given = global_tensors(case.layer)
    wanted = reference(case.layer.conv, given)["dw"]
    for ran in run(case, given):
        assert (ran.blocks["dw"].double() - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_opcheck_of_a_gpu_module() -> None:
    """Held values may be parts and rims: their fakes have the same shapes."""
    seen: set[str] = set()
    for seed in range(4000, 4200):
        case = fused(draw(seed, least=2, most=3))
        held = {case.schedule.forms().get(v, "") for v in case.schedule.held()}
        if held - seen - {""}:
            seen |= held
            assert_opchecks(case)
    assert "rim" in seen, seen
