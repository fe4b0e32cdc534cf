"""Random local problems, their operands with NaN around them, and the float64 reference: what kernel tests share."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from convgen.kernels.config import Config
from convgen.kernels.load import load_text
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.source import Kernel, kernel_module
from convgen.spec.target import Target, read_target
from convgen.verify.interpreter import launch
from convgen.verify.program import TORCH_DTYPES

SM_90 = read_target("cuda:sm_90").known()
GUARD = 64  # elements of NaN before and behind an operand; a multiple of 16 bytes
LETTERS = {1: "W", 2: "HW", 3: "DHW"}
PHASES = ("forward", "backward_data", "backward_filter")


def random_dim(rng: random.Random, name: str, most: int, *, plain: bool = False) -> LocalDim:
    """A spatial dimension of a rank: any rows of x with any rows of y, padding of either sign."""
    kernel = rng.choice((1, 2, 3, 3, 4, 5))
    stride, dilation = rng.choice((1, 1, 2, 2, 3)), rng.choice((1, 1, 1, 2, 3))
    if plain:
        stride = dilation = 1
    x, below = rng.randint(1, most), rng.randint(-2, 4)
    return LocalDim(name, x, rng.randint(1, most), kernel, stride, dilation, below)


def random_problem(rng: random.Random, phase: str, **fixed: Any) -> Problem:
    """A small local problem in float64 unless told otherwise."""
    dims = rng.choice((1, 2, 2, 2, 3))
    most = {1: 14, 2: 7, 3: 4}[dims]
    grouped = rng.random() < 0.3
    values: dict[str, Any] = {
        "phase": phase,
        "batch": rng.randint(1, 3),
        "channels": rng.choice((1, 2, 3, 5, 8, 17, 20)),
        "filters": rng.choice((1, 2, 3, 5, 8, 17, 20)),
        "groups": rng.choice((2, 3)) if grouped else 1,
        "dims": tuple(random_dim(rng, name, most) for name in LETTERS[dims]),
        "dtype": "float64",
        "memory_format": "contiguous" if dims == 1 or rng.random() < 0.5 else "channels_last",
        "bias": phase == "forward" and rng.random() < 0.5,
        "x_parts": 1 if grouped else rng.choice((1, 1, 2, 3)),
        "y_parts": 1 if grouped else rng.choice((1, 1, 2, 3)),
    }
    return Problem(**(values | fixed))


def three_by_three(phase: str, rows: int = 6, columns: int = 7, **changes: Any) -> Problem:
    """Two samples of 20 channels, 3x3 with a padding of 1, to 24 filters; in float32, channels last."""
    dims = (LocalDim("H", rows, rows, 3, 1, 1, 1), LocalDim("W", columns, columns, 3, 1, 1, 1))
    values: dict[str, Any] = {
        "phase": phase, "batch": 2, "channels": 20, "filters": 24, "dims": dims, "dtype": "float32",
        "memory_format": "channels_last",
    }  # fmt: skip
    return Problem(**(values | changes))


# ---- Operands ------------------------------------------------------------------------------------------------------


def shapes(p: Problem) -> dict[str, tuple[int, ...]]:
    """Logical shapes: N C rows, F C taps, N F rows; parts are side by side."""
    kernel = tuple(d.kernel for d in p.dims)
    channels, filters = p.channels * p.x_parts, p.filters * p.y_parts
    return {
        "x": (p.batch, p.groups * channels, *(d.x for d in p.dims)),
        "w": (p.groups * filters, channels, *kernel),
        "y": (p.batch, p.groups * filters, *(d.y for d in p.dims)),
    }


def operands(p: Problem, seed: int = 0, *, integers: bool = False) -> dict[str, Tensor]:
    """x, w, dy and bias, already rounded to the problem's type."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"x": shapes(p)["x"], "w": shapes(p)["w"], "dy": shapes(p)["y"], "bias": (shapes(p)["y"][1],)}
    made = {}
    for name, shape in sizes.items():
        if integers:
            value = torch.randint(-3, 4, shape, generator=generator)
        else:
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
        made[name] = value.to(TORCH_DTYPES[p.dtype])
    return made


def to_tf32(value: Tensor) -> Tensor:
    """float32 rounded to 11 bits, ties to even, by arithmetic on its mantissa."""
    mantissa, exponent = torch.frexp(value.double())
    return torch.ldexp((mantissa * 2**11).round(), exponent - 11).float()


def reference(p: Problem, given: dict[str, Tensor]) -> Tensor:
    """y, dx or dw in float64, by ATen and explicit padding."""
    x, w, dy = (given[n].detach().double() for n in ("x", "w", "dy"))
    x.requires_grad_(p.phase == "backward_data")
    w.requires_grad_(p.phase == "backward_filter")
    padding: list[int] = []
    for d in reversed(p.dims):
        above = (d.y - 1) * d.stride + d.dilation * (d.kernel - 1) + 1 - d.below - d.x
        padding += [d.below, above]
    # A crop wider than the tensor is a crop of what padding first makes.
    wide = [max(v, 0) for v in padding]
    cut = torch.nn.functional.pad(torch.nn.functional.pad(x, wide), [min(v, 0) for v in padding])
    convolve = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[len(p.dims) - 1]
    stride, dilation = tuple(d.stride for d in p.dims), tuple(d.dilation for d in p.dims)
    bias = given["bias"].double() if p.bias else None
    y = convolve(cut, w, bias, stride=stride, dilation=dilation, groups=p.groups)
    if p.phase == "forward":
        return y
    y.backward(dy)
    gradient = x.grad if p.phase == "backward_data" else w.grad
    assert gradient is not None
    return gradient


def in_memory(p: Problem, value: Tensor, parts: int) -> Tensor:
    """Elements in memory order, flat: parts one behind the other, each in the problem's format."""
    pieces = value.chunk(parts, dim=1) if parts > 1 else (value,)
    return torch.cat([(t.movedim(1, -1) if p.channels_last and t.dim() > 1 else t).reshape(-1) for t in pieces])


def from_memory(p: Problem, flat: Tensor, shape: tuple[int, ...], parts: int) -> Tensor:
    """The inverse of in_memory."""
    part = (shape[0], shape[1] // parts, *shape[2:])
    order = (part[0], *part[2:], part[1]) if p.channels_last else part
    pieces = [t.view(order).movedim(-1, 1) if p.channels_last else t.view(part) for t in flat.chunk(parts)]
    return torch.cat(pieces, dim=1)


def guarded(flat: Tensor) -> Tensor:
    """The same elements with NaN on both sides of them."""
    buffer = torch.full((flat.numel() + 2 * GUARD,), torch.nan, dtype=flat.dtype)
    buffer[GUARD : GUARD + flat.numel()] = flat
    return buffer[GUARD : GUARD + flat.numel()]


class Guarded:
    """torch, for a generated module, whose new tensors are NaN between NaN: what is read before it is written shows."""

    def __init__(self) -> None:
        self.wholes: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: int | tuple[int, ...], **kwargs: Any) -> Tensor:
        count = torch.Size((shape,) if isinstance(shape, int) else shape).numel()
        whole = torch.full((count + 2 * GUARD,), torch.nan, **kwargs)
        self.wholes.append(whole)
        return whole[GUARD : GUARD + count].view(shape)

    def check(self) -> None:
        """Nothing was written beside them."""
        assert all(w[:GUARD].isnan().all() and w[len(w) - GUARD :].isnan().all() for w in self.wholes)


@dataclass(frozen=True)
class Surrounded:
    """An activation cut into a rank's own block and boxes around it."""

    block: Tensor
    buffer: Tensor
    boxes: Tensor
    own: tuple[int, ...]


def surround(p: Problem, value: Tensor, rng: random.Random, count: int) -> Surrounded:
    """Cut an activation's rows at random into `count` boxes and a block; each in a guarded buffer."""
    regions = [[(0, n) for n in value.shape[2:]]]
    while len(regions) < count + 1:
        region = rng.choice([r for r in regions if any(hi - lo > 1 for lo, hi in r)] or [None])  # type: ignore[list-item]
        if region is None:
            break
        d = rng.choice([i for i, (lo, hi) in enumerate(region) if hi - lo > 1])
        at = rng.randint(region[d][0] + 1, region[d][1] - 1)
        regions.remove(region)
        regions += [[*region[:d], half, *region[d + 1 :]] for half in ((region[d][0], at), (at, region[d][1]))]
    rng.shuffle(regions)

    def piece(region: list[tuple[int, int]]) -> Tensor:
        return in_memory(p, value[(slice(None), slice(None), *(slice(lo, hi) for lo, hi in region))], 1)

    own, *boxes = regions
    parts = [piece(r) for r in boxes]
    starts = [sum(t.numel() for t in parts[:i]) for i in range(len(parts))]
    lines = [[start, *(lo for lo, _ in r), *(hi - lo for lo, hi in r)] for start, r in zip(starts, boxes, strict=True)]
    table = torch.tensor(lines, dtype=torch.int64).reshape(len(boxes), 1 + 2 * len(p.dims))
    buffer = torch.cat(parts) if parts else torch.empty(0, dtype=value.dtype)
    return Surrounded(guarded(piece(own)), guarded(buffer), table, tuple(v for lo, hi in own for v in (lo, hi - lo)))


def interpret(
    p: Problem,
    config: Config,
    given: dict[str, Tensor],
    *,
    seed: int = 0,
    boxes: int = 3,
    target: Target = SM_90,
    text: str = "",
) -> Tensor:
    """Run a kernel in Triton's interpreter; its result's logical tensor. The output is NaN beforehand.

    Args:
        text: of a module, instead of one that is made for this very problem.
    """
    read = {"forward": "x", "backward_data": "dy", "backward_filter": "x"}[p.phase]
    rim = surround(p, given[read], random.Random(seed), boxes) if p.rim is not None else None
    if rim is not None:
        p = replace(p, rim=len(rim.boxes))
    module: Any = load_text(text or kernel_module([Kernel((p,), config, target)]))
    module.launch, module.torch = launch, (around_sums := Guarded())
    parts = {"x": p.x_parts, "dy": p.y_parts, "w": 1}
    tensors = {n: guarded(in_memory(p, given[n], parts[n])) for n in ("x", "w", "dy")}
    if rim is not None:
        tensors[read] = rim.block
    name, out_parts = {"forward": ("y", p.y_parts), "backward_data": ("x", p.x_parts), "backward_filter": ("w", 1)}[
        p.phase
    ]
    shape = shapes(p)[name]
    whole = torch.full((GUARD + torch.Size(shape).numel() + GUARD,), torch.nan, dtype=TORCH_DTYPES[p.dtype])
    out = whole[GUARD : len(whole) - GUARD]
    sizes = module.Sizes(
        p.batch, tuple(d.x for d in p.dims), tuple(d.y for d in p.dims), tuple(d.below for d in p.dims),
        p.channels, p.filters, p.groups,
    )  # fmt: skip
    order = {"forward": ("x", "w"), "backward_data": ("dy", "w"), "backward_filter": ("dy", "x")}[p.phase]
    args = [tensors[n] for n in order] + ([guarded(given["bias"])] if p.bias else []) + [out, sizes]
    around = (rim.buffer, rim.boxes, rim.own, tuple(map(tuple, rim.boxes.tolist()))) if rim is not None else ()
    getattr(module, p.phase)(*args, *([module.Rim(*around)] if around else []))
    counters = [held for held in getattr(module, "COUNTERS", {}).values() if held.device.type == "cpu"]
    assert not any(held.any() for held in counters), "a counter is not left zero"
    around_sums.check()
    assert whole[:GUARD].isnan().all(), "written before the result"
    assert whole[len(whole) - GUARD :].isnan().all(), "written behind the result"
    return from_memory(p, out, shape, out_parts)
