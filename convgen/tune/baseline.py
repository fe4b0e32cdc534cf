# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (triton and parts of torch have no types)
"""ATen's ways to a problem's result, with which kernels are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from convgen.kernels.problem import Problem
from convgen.tune.operands import Operands, above, logical, result_of, side_by_side, sides

FORMATS = ("channels_last", "contiguous")


@contextmanager
def accuracy(dtype: str) -> Generator[None]:
    """A context in which cuDNN, in benchmark mode, and cuBLAS have the accuracy of a type: TF32 only in tfloat32.

    It sets the older flags, which can't be read where the newer fp32_precision was set otherwise; tuning doesn't set
    that. ATen's error is recorded beside convgen's.
    """
    tf32, matmul = dtype == "tfloat32", torch.backends.cuda.matmul
    before = matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction = tf32, False
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, benchmark_limit=0, allow_tf32=tf32):
            yield
    finally:
        matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction = before


def pads_alike(p: Problem) -> bool:
    """Whether ATen, which pads both sides alike, can do the problem without padding by hand."""
    return all(d.below >= 0 and 0 <= d.below - hi < d.stride for d, hi in zip(p.dims, above(p), strict=True))


def aten_calls(p: Problem, bias: Tensor | None = None) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """ATen's calls from x, w, dy to the result: the convolution, and a matrix product where that is the same."""
    calls = {"convolution": aten_convolution(p, bias)}
    if p.is_pointwise and p.groups == 1 and bias is None:
        calls["matmul"] = aten_matmul(p)
    return calls


def aten_convolution(p: Problem, bias: Tensor | None = None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    alike, both, pad = pads_alike(p), sides(p), torch.nn.functional.pad
    stride, dilation, zeros = [d.stride for d in p.dims], [d.dilation for d in p.dims], [0] * len(p.dims)
    padding = [d.below for d in p.dims] if alike else zeros
    rest = (stride, padding, dilation, False, zeros, p.groups)
    back = torch.ops.aten.convolution_backward

    def forward(x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
        return torch.ops.aten.convolution(x if alike else pad(x, both), w, bias, *rest)

    def backward_data(x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
        if alike:
            return back(dy, x, w, None, *rest, [True, False, False])[0]
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        rows = [d.x + d.below + hi for d, hi in zip(p.dims, above(p), strict=True)]
        like = torch.empty(
            (*x.shape[:2], *rows), dtype=x.dtype, device=x.device,
            memory_format=torch.channels_last if last else torch.contiguous_format,
        )  # fmt: skip
        wide = back(dy, like, w, None, *rest, [True, False, False])[0]
        if min(both) < 0:
            return pad(wide, [-n for n in both])
        return wide[(..., *(slice(d.below, d.below + d.x) for d in p.dims))]  # a view, which costs nothing

    def backward_filter(x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
        return back(dy, x if alike else pad(x, both), w, None, *rest, [False, True, False])[1]

    return {"forward": forward, "backward_data": backward_data, "backward_filter": backward_filter}[p.phase]


def aten_matmul(p: Problem) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The matrix product for 1x1 at stride 1: pixels by channels where channels are last, else channels by pixels for
    each sample."""

    def rows(t: Tensor) -> Tensor:
        return t.movedim(1, -1).reshape(-1, t.shape[1])

    def run(x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
        weight, last = w.flatten(1), x.movedim(1, -1).is_contiguous() and dy.movedim(1, -1).is_contiguous()
        if p.phase == "backward_filter":  # contiguous: a product for each sample, then their sum
            product = rows(dy).T @ rows(x) if last else (dy.flatten(2) @ x.flatten(2).mT).sum(0)
            return product.view(w.shape)
        read, matrix = (x, weight.T) if p.phase == "forward" else (dy, weight)
        if last:
            flat = rows(read) @ matrix
            return flat.view(read.shape[0], *read.shape[2:], -1).movedim(-1, 1)
        return (matrix.T @ read.flatten(2)).unflatten(2, read.shape[2:])

    return run


def aten_variants(work: Operands) -> dict[str, tuple[bool, Callable[[], Tensor]]]:
    """ATen's calls by label: whether channels are last, and the call with the copies of parts before and after it."""
    p = work.problem
    name, parts = result_of(p)

    def bound(call: Callable[[Tensor, Tensor, Tensor], Tensor], last: bool) -> Callable[[], Tensor]:
        tensors = {n: logical(work.flat(n, last), work.shapes[n], last, work.parts(n)) for n in work.shapes}
        wholes = {n: t[0] if t.shape[0] == 1 else empty_like_whole(t, work.shapes[n], last) for n, t in tensors.items()}
        unpacked = [n for n, t in tensors.items() if t.shape[0] > 1 and n != name]

        def run() -> Tensor:
            for n in unpacked:
                side_by_side(wholes[n], work.parts(n)).copy_(tensors[n])
            result = call(wholes["x"], wholes["w"], wholes["dy"])
            return work.written(last).copy_(side_by_side(result, parts)) if parts > 1 else result

        return run

    return {
        f"{kind} {form}": (form == "channels_last", bound(call, form == "channels_last"))
        for kind, call in aten_calls(p, work.given["bias"] if p.bias else None).items()
        for form in FORMATS
    }


def empty_like_whole(pieces: Tensor, shape: tuple[int, ...], last: bool) -> Tensor:
    """A tensor of zeros to which parts are unpacked; ATen may read it even where it is no operand."""
    return logical(torch.zeros(math.prod(shape), dtype=pieces.dtype, device=pieces.device), shape, last)[0]
