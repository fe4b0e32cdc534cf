"""Whole modules for a GPU on virtual ranks, their kernels in Triton's interpreter: random layers against a reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from modules import Case, assert_counted, assert_true, draw, on_gpu, run

from convgen.passes import fuse_layouts
from convgen.schedule.verify import verify
from convgen.verify.program import global_tensors, reference

LAYERS = 90


@pytest.fixture
def eager() -> Iterator[None]:
    """Fuse whatever can be, however little it pays: small layers have few channels."""
    least, most = fuse_layouts.LEAST_PART, fuse_layouts.MOST_BOXES
    fuse_layouts.LEAST_PART, fuse_layouts.MOST_BOXES = 1, 8
    yield
    fuse_layouts.LEAST_PART, fuse_layouts.MOST_BOXES = least, most


def assert_right(case: Case) -> None:
    verify(case.schedule, case.space)
    given = global_tensors(case.layer)
    ran = run(case, given)
    assert_true(case, ran, reference(case.layer.conv, given))
    assert_counted(case, ran)


@pytest.mark.parametrize("part", range(6))
def test_random_layers(part: int) -> None:
    for seed in range(part, LAYERS, 6):
        assert_right(on_gpu(draw(seed, most=6)))


@pytest.mark.parametrize("part", range(6))
def test_random_layers_fused(part: int, eager: None) -> None:
    for seed in range(1000 + part, 1000 + LAYERS, 6):
        assert_right(on_gpu(draw(seed, most=6)))


@pytest.mark.parametrize("algorithm", ["stationary-x", "stationary-y", "stationary-w", "spatial", "integrated"])
def test_named_algorithms_fused(algorithm: str, eager: None) -> None:
    for seed in range(6):
        assert_right(on_gpu(draw(seed, algorithm=algorithm, least=2, most=6)))


def test_everything_is_drawn(eager: None) -> None:
    seen: Counter[str] = Counter()
    for seed in range(1000, 1000 + LAYERS):
        case = on_gpu(draw(seed, most=6))
        for _, step in case.schedule.steps():
            seen[f"{getattr(step, 'form', 'whole')} {getattr(step, 'kind', 'conv')}"] += 1
        seen["parts conv"] += 0
    for form in ("parts all_gather", "parts conv", "rim exchange", "whole all_gather", "whole exchange", "whole slice"):
        assert seen[form] >= 4, seen


def test_another_batch(eager: None) -> None:
    """One module for any number of samples, fewer than ranks included."""
    case = on_gpu(draw(3, algorithm="stationary-x", least=4, most=6))
    for batch in (1, 7):
        assert_right(case.with_batch(batch))
