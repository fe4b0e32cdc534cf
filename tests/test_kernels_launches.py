"""What a launch of a kernel is prepared with on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from kernel_cases import PHASES, SM_90, three_by_three
from triton.tools.tensor_descriptor import TensorDescriptor

from convgen.kernels.families import box, depthwise, gemm, packed, pointer
from convgen.kernels.load import load_text
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.source import Kernel, kernel_module


@pytest.mark.parametrize("phase", PHASES)
def test_a_launch_is_prepared_without_tritons_functions_and_views_are_made_once(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = three_by_three(phase, channels=16, filters=16)
    p = replace(p, dims=tuple(replace(d, x=8, y=8, stride=1) for d in p.dims))
    config = box.default(p, SM_90)
    module: Any = load_text(kernel_module([Kernel((p,), config, SM_90)]))

    def refuse(*_: int) -> int:
        raise AssertionError("triton.cdiv takes microseconds")

    monkeypatch.setattr(triton, "cdiv", refuse)
    ran: list[Any] = []
    module.launch = lambda *args, **_: ran.append(args)
    x, w, y = (torch.empty(n) for n in (2 * 64 * 16, 16 * 16 * 9, 2 * 64 * 16))
    given = {"forward": (x, w, y), "backward_data": (y, w, x), "backward_filter": (y, x, w)}[phase]
    counts = []
    for _ in range(2):
        getattr(module, phase)(*given, module.Sizes(2, (8, 8), (8, 8), (1, 1), 16, 16, 1))
        counts.append(module.view_of_memory.cache_info().misses)
    assert ran and counts[0] == counts[1] > 0
    views = [a for args in ran for a in args if isinstance(a, TensorDescriptor)]
    assert len(views) >= 2 * counts[0] and all(v.strides[-1] == 1 for v in views)


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("family", "taps", "groups"), [(gemm, 1, 1), (pointer, 3, 1), (packed, 3, 1), (depthwise, 3, 2)]
)
def test_pixels_that_a_kernel_cant_number_are_refused(
    family: Any, taps: int, groups: int, phase: Any, memory_format: str
) -> None:
    rows = tuple(LocalDim(name, 2**11, 2**11, taps, 1, 1, taps // 2) for name in "HW")
    p = Problem(
        phase=phase, batch=2**9, channels=1, filters=1, groups=groups, dims=rows, dtype="bfloat16",
        memory_format=memory_format,
    )  # fmt: skip
    if by_sample := family is gemm and memory_format == "contiguous":  # a sample's are numbered
        p = replace(p, batch=1, dims=tuple(replace(d, x=2**16, y=2**16) for d in rows))
    if family.refusal(p, SM_90) is not None:
        return
    module: Any = load_text(kernel_module([Kernel((p,), replace(family.default(p, SM_90), split=1), SM_90)]))
    extents = tuple(d.x for d in p.dims)
    sizes = module.Sizes(p.batch, extents, extents, tuple(d.below for d in p.dims), 1, 1, groups)
    count = 2**32 if by_sample else 2**31
    with pytest.raises(ValueError, match=f"^{count} pixels on one rank"):
        getattr(module, phase)(*[torch.empty(1, device="meta")] * 3, sizes)
