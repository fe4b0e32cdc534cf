"""The interpreter's repairs, index maps, packing kernels, forms of values, and targets."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import sympy
import torch
import triton
import triton.language as tl
from kernel_cases import SM_90, operands, reference
from passing import CUDA, passed
from torch import Tensor

from convgen.algebra.space import Space
from convgen.errors import InputError, InternalError
from convgen.kernels.choose import choose
from convgen.kernels.facts import Launch, facts
from convgen.kernels.index import IndexMap, activation_map, expression, filter_map
from convgen.kernels.load import load_text
from convgen.kernels.pack import copy_module
from convgen.kernels.phases import heaviest_first, taps_of
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.source import kernel_module
from convgen.passes.fuse_layouts import FuseLayouts
from convgen.program.nodes import Convert, Schedule, is_convolution
from convgen.program.text import parse, show
from convgen.program.verify import verify
from convgen.spec.target import read_target
from convgen.verify.interpreter import interpreted, launch

# ---- The interpreter -----------------------------------------------------------------------------------------------


@triton.jit
def product_kernel(a, b, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    acc = tl.zeros((B, B), dtype=tl.float32)
    for k in range(0, n, B):
        left = tl.load(a + i[:, None] * n + k + i[None, :])
        right = tl.load(b + (k + i)[:, None] * B + i[None, :])
        acc = tl.dot(left, right, acc)
    tl.store(out + i[:, None] * B + i[None, :], acc.to(out.dtype.element_ty))


def multiply(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((16, 48), (48, 16)))
    out = torch.full((16, 16), torch.nan, dtype=dtype)
    interpreted(product_kernel)[(1,)](a, b, out, 48, B=16)
    return out, (a.double() @ b.double())


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2**-19), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_products_are_rounded_once(dtype: torch.dtype, unit: float) -> None:
    got, want = multiply(dtype)
    assert float(((got.double() - want).abs() / want.abs().clamp(min=1)).max()) <= unit * 1.01


def test_compilation_after_interpretation() -> None:
    multiply(torch.float32)
    meta = torch.empty(1024, dtype=torch.bfloat16, device="meta")
    found = facts(Launch(product_kernel, (1,), (meta, meta, meta, 48), {"B": 64, "num_warps": 4}), SM_90)
    assert found.matrix_instructions > 0


def test_ranks_may_be_threads() -> None:
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(multiply(torch.float32)[0])) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 6 and all(torch.equal(a, b) for a, b in pairwise(results))


# ---- Index maps ----------------------------------------------------------------------------------------------------


def test_maps_read_as_addresses_do() -> None:
    m = activation_map("hw", "x", "C", last=True, parts=True)
    assert m.text(n="n", xh="xh", xw="xw") == "((n * XH + xh) * XW + xw) * C"
    assert m.text(part="part") == "part * C * N * XH * XW"
    assert filter_map("hw", "C", (3, 3), last=True).text(kh="kh", kw="kw", c="c") == "(kh * 3 + kw) * C + c"
    assert (
        activation_map("w", "y", "F", last=False, parts=False).text(n="n", c="f", yw="yw - 1")
        == "(n * F + f) * YW + yw - 1"
    )


def test_printed_addresses_are_the_maps() -> None:
    """Text evaluated as Python is the offset that the map means."""
    rng = random.Random(0)
    for last in (False, True):
        for parts in (False, True):
            m = activation_map("dhw", "x", "C", last=last, parts=parts)
            names = [c for c, _ in m.order]
            text = m.text(**{n: n for n in names})
            for _ in range(50):
                values = {str(s): rng.randint(1, 9) for s in expression(text).free_symbols}
                strides, place = 1, 0
                for coordinate, extent in reversed(m.order):
                    place += values[coordinate] * strides
                    strides *= values.get(extent, 1)
                assert eval(text, {}, values) == place
    assert sympy.simplify(IndexMap((("a", "A"), ("b", "B"))).offset({"a": 1, "b": "b"}) - expression("B + b")) == 0


# ---- Packing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [1, 2, 3, 4, 5])
def test_copies_of_boxes(dims: int) -> None:
    rng = random.Random(dims)
    kernel: Any = load_text(copy_module(dims)).kernel
    for _ in range(4):
        shape = tuple(rng.randint(1, 6) for _ in range(dims))
        whole = torch.arange(prod(shape), dtype=torch.float32).view(shape)
        boxes = [[sorted((rng.randint(0, n), rng.randint(0, n))) for n in shape] for _ in range(3)]
        boxes = [b for b in boxes if all(hi > lo for lo, hi in b)] or [[[0, n] for n in shape]]
        pieces = [whole[tuple(slice(lo, hi) for lo, hi in b)] for b in boxes]
        lines, start = [], 0
        for piece in pieces:
            lines.append([start, int(piece.reshape(-1)[0]), *piece.shape])
            start += piece.numel()
        table = torch.tensor(lines)
        flat = torch.full((start,), torch.nan)
        grid = (1 + max(p.numel() for p in pieces) // 64, len(boxes), 1)
        launch(kernel, grid, flat, whole, table, *shape[1:], UNPACK=False, BLOCK=64)
        assert torch.equal(flat, torch.cat([p.reshape(-1) for p in pieces]))
        back = torch.full(shape, torch.nan)
        launch(kernel, grid, flat, back, table, *shape[1:], UNPACK=True, BLOCK=64)
        for b in boxes:
            at = tuple(slice(lo, hi) for lo, hi in b)
            assert torch.equal(back[at], whole[at])
        inside = torch.zeros(shape, dtype=torch.bool)
        for b in boxes:
            inside[tuple(slice(lo, hi) for lo, hi in b)] = True
        assert back[~inside].isnan().all()


# ---- Output phases -------------------------------------------------------------------------------------------------


def test_heavy_phases_come_first() -> None:
    dims = (LocalDim("H", 9, 5, 5, 3, 1, 2), LocalDim("W", 9, 5, 3, 2, 1, 1))
    p = Problem(
        phase="backward_data", batch=1, channels=4, filters=4, dims=dims, dtype="float32", memory_format="contiguous"
    )
    weights = [taps_of(dims[0], i // 2) * taps_of(dims[1], i % 2) for i in heaviest_first(p)]
    assert weights == sorted(weights, reverse=True) and sum(weights) == 15
    assert heaviest_first(p) != sorted(heaviest_first(p))


# ---- Forms ---------------------------------------------------------------------------------------------------------

STATIONARY_X = """\
schedule layer on grid(C=2) {
  stored: x[*, C, *, *] w[*, C] y[*, C, *, *]
  roles forward: C=C
  roles backward_data: C=C
  roles backward_filter: C=C
  forward:
    %y_partial = conv_forward %x, %w as=parts            : y[*, *, *, *] partial(C)
    %y = reduce_scatter %y_partial dim=F over=C          : y[*, C, *, *]
  backward_data:
    %dy_gathered = all_gather %dy dim=F over=C as=parts  : y[*, *, *, *]
    %dx = conv_backward_data %dy_gathered, %w            : x[*, C, *, *]
  backward_filter:
    %dw = conv_backward_filter %dy_gathered, %x          : w[*, C]
}
"""
HALO = """\
schedule layer on grid(H=2) {
  stored: x[*, *, H, *] w[*, *] y[*, *, H, *]
  roles forward: H=H
  roles backward_data: H=H
  roles backward_filter: H=H
  forward:
    %x_halo = exchange %x dim=H over=H as=rim                     : x[*, *, H+(1,1), *]
    %y = conv_forward %x_halo, %w own=x                           : y[*, *, H, *]
  backward_data:
    %dy_halo = exchange %dy dim=H over=H as=rim                   : y[*, *, H+(1,1), *]
    %dx = conv_backward_data %dy_halo, %w own=dy                  : x[*, *, H, *]
  backward_filter:
    %dw_partial = conv_backward_filter %dy, %x_halo own=x         : w[*, *] partial(H)
    %dw = all_reduce %dw_partial over=H                           : w[*, *]
}
"""


def space_of(schedule: Schedule, channels: int = 32, filters: int = 64) -> Space:
    from convgen.algebra.conv import Conv, Spatial

    rows = (Spatial("H", 8, 3, pad_lo=1, pad_hi=1), Spatial("W", 8, 3, pad_lo=1, pad_hi=1))
    return Space(Conv(2, channels, filters, rows), schedule.grid, virtual_padding=True)


def plain(schedule: Schedule) -> Schedule:
    def whole(step: Any) -> Any:
        if is_convolution(step):
            return replace(step, form="whole", own=())
        return replace(step, form="whole") if isinstance(step, Convert) else step

    sections = {p: tuple(map(whole, schedule.section(p))) for p, _ in schedule.roles}
    return replace(schedule, **sections)


@pytest.mark.parametrize("text", [STATIONARY_X, HALO])
def test_layouts_are_fused(text: str) -> None:
    schedule = parse(text)
    assert parse(show(schedule)) == schedule
    space = space_of(schedule)
    verify(schedule, space)
    before = plain(schedule)
    verify(before, space)
    assert passed(before, space, FuseLayouts(), target=CUDA) == schedule
    assert passed(schedule, space, FuseLayouts(), target=CUDA) is schedule
    assert passed(before, space, FuseLayouts()) is before


def test_what_does_not_pay_stays_whole() -> None:
    before = plain(parse(STATIONARY_X))
    for channels, filters in ((32, 30), (32, 63), (8, 8)):
        space = space_of(before, channels, filters)
        assert not passed(before, space, FuseLayouts(), target=CUDA).forms().get("dy_gathered")
    assert passed(before, space_of(before, 32, 63), FuseLayouts(), target=CUDA) is before


@pytest.mark.parametrize(
    ("text", "old", "new", "said"),
    [
        (HALO, "own=dy", "", "reads rims of"),
        (STATIONARY_X, "over=C as=parts  : y", "over=C as=rim  : y", "does not come as rim"),
        (HALO, "over=H as=rim                     : x", "over=H as=parts : x", "does not come as parts"),
    ],
)
def test_wrong_forms_are_refused(text: str, old: str, new: str, said: str) -> None:
    assert old in text
    schedule = parse(text.replace(old, new))
    with pytest.raises(InternalError, match=said):
        verify(schedule, space_of(schedule))


def test_parts_read_by_another_step_are_refused() -> None:
    step = "%dw_partial = conv_backward_filter %dy, %x_halo own=x "
    text = HALO.replace(step, step + "as=parts ")
    schedule = parse(text)
    with pytest.raises(InternalError, match="comes as parts"):
        verify(schedule, space_of(schedule))


def test_uneven_parts_are_refused() -> None:
    schedule = parse(STATIONARY_X)
    with pytest.raises(InternalError, match="not in equal parts"):
        verify(schedule, space_of(schedule, 32, 63))


def test_ranks_may_differ_in_groups() -> None:
    """Two groups of few rows beside one group of many: the kernel is sized for the one, and right for both."""
    rows = (LocalDim("W", 40, 40, 3, 1, 1, 1),)
    one = Problem(
        phase="forward", batch=2, channels=5, filters=6, dims=rows, dtype="float64", memory_format="contiguous"
    )
    two = replace(one, groups=2, dims=(LocalDim("W", 6, 6, 3, 1, 1, 1),))
    kernel = choose((one, two), SM_90)
    assert kernel.problem == one and "groups" in kernel.source()
    module = load_text(kernel_module([kernel]))
    module.launch = launch  # type: ignore[attr-defined]
    for p in (one, two):
        given = operands(p)
        out = torch.full_like(reference(p, given), torch.nan)
        sizes = module.Sizes(2, (p.dims[0].x,), (p.dims[0].y,), (1,), 5, 6, p.groups)
        module.forward(given["x"], given["w"], out, sizes)
        assert float((out - reference(p, given)).abs().max()) < 1e-12


# ---- Targets -------------------------------------------------------------------------------------------------------


def test_targets() -> None:
    assert str(read_target("cuda").known()) == "cuda:sm_90" and str(read_target("hip").known()) == "hip:gfx942"
    assert read_target("cuda:sm_80").known().shared_bytes < SM_90.shared_bytes
    for name in ("cuda:sm_75", "hip:gfx1100"):
        with pytest.raises(InputError, match="no kernels are made for") as caught:
            read_target(name).known()
        assert "cuda:sm_90" in str(caught.value) or "gfx942" in str(caught.value)
