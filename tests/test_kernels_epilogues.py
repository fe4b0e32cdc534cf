"""What a network does behind a convolution, as steps of its kernel: families against float64, in the interpreter."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kernel_cases import GUARD, SM_90, from_memory, guarded, in_memory, operands, reference, shapes
from sampling import draws
from test_kernels_truth import DRAWS
from torch import Tensor

from convgen.kernels.epilogues import keeps
from convgen.kernels.facts import facts, launches
from convgen.kernels.load import load_text
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.source import Kernel, kernel_module
from convgen.operations.averaged import Averaged
from convgen.operations.batch_norm import Centred
from convgen.operations.calls import Elementwise, Slot
from convgen.operations.evaluated_norm import EvaluatedNorm
from convgen.operations.pointwise import Pointwise, affine, bias
from convgen.operations.row import At, Epilogue, EpilogueStep, Operation
from convgen.verify.interpreter import launch
from convgen.verify.program import TORCH_DTYPES

NAMES = [name for name in DRAWS if name not in ("tiled", "aten")]
NOWHERE = At({}, (), ())


@dataclass(frozen=True)
class Behind:
    """An operation behind a convolution: what is before is its operand k."""

    operation: Operation
    k: int
    others: tuple[tuple[int, ...], ...]

    @property
    def step(self) -> EpilogueStep:
        step = self.operation.as_epilogue(self.k)
        assert step is not None
        return step


def drawn(rng: random.Random, shape: tuple[int, ...]) -> Behind:
    """One that a network may have."""
    vector, rows = (shape[1],), (1,) * (len(shape) - 2)
    a, b = Slot(0), Slot(1)
    k = rng.choice((0, 1))
    pair = (shape, shape)
    wide = ((shape, (shape[1], *rows)), ((shape[1], *rows), shape))[k]
    ones: list[Behind] = [
        Behind(bias(shape), 0, (vector,)),
        Behind(affine(shape), 0, (vector, vector)),
        Behind(Centred(Averaged(shape, (1,))), 0, ((3, shape[1]),)),
        Behind(EvaluatedNorm(shape, 1e-3), 0, (vector,) * 4),
        Behind(EvaluatedNorm(shape, 1e-3, weight=False, bias=False), 0, (vector,) * 2),
        Behind(Pointwise("relu", shape, (shape,)), 0, ()),
        Behind(Elementwise("relu", (a,), shape, (shape,)), 0, ()),
        Behind(Elementwise("silu", (a,), shape, (shape,)), 0, ()),
        Behind(Elementwise("sigmoid", (a,), shape, (shape,)), 0, ()),
        Behind(Elementwise("hardswish", (a,), shape, (shape,)), 0, ()),
        Behind(Elementwise("hardsigmoid", (a,), shape, (shape,)), 0, ()),
        Behind(Elementwise("hardtanh", (a, 0.0, 6.0), shape, (shape,)), 0, ()),
        Behind(Elementwise("leaky_relu", (a, 0.1), shape, (shape,)), 0, ()),
        Behind(Elementwise("mul.Tensor", (a, 0.5), shape, (shape,)), 0, ()),
        Behind(Elementwise("add.Tensor", (a, b, 1), shape, pair), k, (shape,)),
        Behind(Elementwise("sub.Tensor", (a, b, 1), shape, pair), k, (shape,)),
        Behind(Elementwise("mul.Tensor", (a, b), shape, wide), k, (wide[1 - k],)),
    ]
    return rng.choice(ones)


def chain(rng: random.Random, p: Problem) -> list[Behind]:
    return [drawn(rng, shapes(p)["y"]) for _ in range(rng.randint(1, 3))]


def ran(p: Problem, config: Any, given: dict[str, Tensor], others: list[Tensor], keep: bool) -> list[Tensor]:
    """y, and the sum before the steps where it is kept; all that is not written is NaN."""
    module = load_text(kernel_module([Kernel((p,), config, SM_90)]))
    module.launch = launch
    count, dtype = torch.Size(shapes(p)["y"]).numel(), TORCH_DTYPES[p.dtype]
    wholes = [torch.full((count + 2 * GUARD,), torch.nan, dtype=dtype) for _ in range(2 if keep else 1)]
    outs = [whole[GUARD : GUARD + count] for whole in wholes]
    given_ones = [guarded(in_memory(p, given[n], 1)) for n in ("x", "w")]
    given_ones += [guarded(given["bias"])] if p.bias else []
    given_ones += [guarded(in_memory(p, t, 1) if t.shape == shapes(p)["y"] else t.reshape(-1)) for t in others]
    given_ones += [outs[-1]] if keeps(p.epilogue) else []  # y itself, where it is not kept
    rows = (tuple(getattr(d, side) for d in p.dims) for side in ("x", "y", "below"))
    module.forward(*given_ones, outs[0], module.Sizes(p.batch, *rows, p.channels, p.filters, p.groups))
    for whole in wholes:
        assert whole[:GUARD].isnan().all() and whole[GUARD + count :].isnan().all(), "written beside the result"
    return [from_memory(p, out, shapes(p)["y"], 1) for out in outs]


def case(name: str, seed: int) -> tuple[Problem, list[Behind], random.Random] | None:
    rng = random.Random(f"{name} behind {seed}")
    family, draw, _ = DRAWS[name]
    p = replace(draw(rng, "forward"), x_parts=1, y_parts=1, rim=None)
    behind = chain(rng, p)
    p = replace(p, epilogue=tuple(b.step for b in behind))
    return None if family.refusal(p, SM_90) is not None else (p, behind, rng)


ROUNDING = {"float64": 1e-12, "float32": 3e-6, "tfloat32": 3e-6, "bfloat16": 2.0**-7, "float16": 2.0**-10}


@pytest.mark.parametrize("name", NAMES)
def test_a_family_does_what_stands_behind_it(name: str) -> None:
    done = 0
    for seed in range(60):
        found = case(name, seed)
        if found is None or done == draws(5):
            continue
        p, behind, rng = found
        done += 1
        given = operands(p, seed, integers=p.dtype != "float64")
        generator = torch.Generator().manual_seed(seed)
        others = [
            (torch.randn(s, generator=generator, dtype=torch.float64).abs() + 0.5).to(TORCH_DTYPES[p.dtype])
            for b in behind
            for s in b.others
        ]
        keep = keeps(p.epilogue) and rng.random() < 0.5
        got = ran(p, DRAWS[name][0].default(p, SM_90), given, others, keep)
        want, rest = reference(p, given), [t.double() for t in others]
        summed = want
        for b in behind:
            mine, rest = rest[: len(b.others)], rest[len(b.others) :]
            mine.insert(b.k, want)
            (want,) = b.operation.local(0, standing(want.shape), *mine)
        for one, right in zip(got, (want, summed), strict=False):
            assert one.shape == right.shape
            scale = max(float(right.abs().max()) if right.numel() else 0.0, float(summed.abs().max()), 1.0)
            error = (one.double() - right).abs().nan_to_num(torch.inf)
            most = float(error.max()) if error.numel() else 0.0
            assert most <= 8 * ROUNDING[p.dtype] * scale, f"{most} of {scale}: {p}"
    assert done == draws(5)


def standing(shape: torch.Size) -> At:
    return At({f"d{i}": (0, n) for i, n in enumerate(shape)}, (), ())


def test_draws_have_everything() -> None:
    seen: Counter[str] = Counter()
    for name in NAMES:
        for seed in range(60):
            if (found := case(name, seed)) is not None:
                p, behind, _ = found
                seen[name] += 1
                seen["kept"] += keeps(p.epilogue)
                seen["not kept"] += not keeps(p.epilogue)
                seen[p.memory_format] += 1
                for b in behind:
                    seen[b.operation.name] += 1
                    seen.update(kind for kind, _ in b.step.operands)
    assert all(n >= 3 for n in seen.values()) and len(seen) > 20, seen


RESIDUAL: Epilogue = (
    EpilogueStep("({x} - {0}) * {1} + {2}", (("channel", 3),)),
    EpilogueStep("{x} + {0}", (("element", 1),), "sum"),
    EpilogueStep("tl.where({x} < 0, 0.0, {x})", back="result"),
)


def spilling(seed: int) -> Problem:
    """Of a network: a residual behind a norm, or a rectifier's gradient behind backward-data."""
    rng = random.Random(seed)
    kernel, rows, stride = rng.choice((1, 1, 3)), rng.choice((7, 14, 28, 56)), rng.choice((1, 1, 2))
    phase = rng.choice(("forward", "backward_data"))
    mask = Pointwise("relu", (1,), ((1,),)).back_of_result()
    assert mask is not None
    return Problem(
        phase=phase,
        batch=rng.choice((1, 8, 32)),
        channels=rng.choice((64, 128, 256, 512)),
        filters=rng.choice((64, 128, 256, 1024)),
        dims=tuple(LocalDim(name, rows * stride, rows, kernel, stride, 1, kernel // 2) for name in "HW"),
        dtype=rng.choice(("bfloat16", "bfloat16", "float32")),
        memory_format=rng.choice(("channels_last", "channels_last", "contiguous")),
        epilogue=RESIDUAL if phase == "forward" else (mask,),
    )


KNOWN = Problem(  # that spilled with 128 sums a thread
    phase="forward", batch=8, channels=128, filters=512, dims=tuple(LocalDim(n, 28, 28, 1, 1, 1, 0) for n in "HW"),
    dtype="bfloat16", memory_format="channels_last", epilogue=RESIDUAL,
)  # fmt: skip


@pytest.mark.parametrize("p", [KNOWN, *map(spilling, range(draws(40)))], ids=lambda p: p.phase)
def test_what_stands_behind_a_kernel_spills_nothing(p: Problem) -> None:
    from convgen.kernels.choose import choose

    found = [facts(one, SM_90) for one in launches(choose((p,), SM_90), p)]
    assert all(not f.spill_bytes and f.shared_bytes <= 232448 for f in found)
    assert any(f.matrix_instructions for f in found)


@pytest.mark.parametrize("name", ["pointer", "box", "gemm"])
def test_a_family_makes_the_gradient_of_what_made_x(name: str) -> None:
    """Behind backward-data: of its sum, and of x, what a step before the convolution gets."""
    done = 0
    for seed in range(60):
        rng = random.Random(f"{name} back {seed}")
        family, draw, _ = DRAWS[name]
        p = replace(draw(rng, "backward_data"), x_parts=1, y_parts=1, rim=None)
        shape, a = shapes(p)["x"], Slot(0)
        operation = rng.choice((
            Pointwise("relu", shape, (shape,)),
            Elementwise("relu", (a,), shape, (shape,)),
            Elementwise("hardtanh", (a, -0.5, 1.5), shape, (shape,)),
            Elementwise("leaky_relu", (a, 0.1), shape, (shape,)),
            Elementwise("sigmoid", (a,), shape, (shape,)),
        ))  # fmt: skip
        step = operation.back_of_result()
        assert step is not None
        p = replace(p, epilogue=(step,))
        if family.refusal(p, SM_90) is not None or done == draws(10):
            continue
        done += 1
        given, dtype = operands(p, seed, integers=p.dtype != "float64"), TORCH_DTYPES[p.dtype]
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        (made,) = operation.local(0, standing(shape), drawn)
        made = made.to(dtype)  # what the convolution read
        module = load_text(kernel_module([Kernel((p,), family.default(p, SM_90), SM_90)]))
        module.launch = launch  # type: ignore[attr-defined]
        whole = torch.full((made.numel() + 2 * GUARD,), torch.nan, dtype=dtype)
        out = whole[GUARD : GUARD + made.numel()]
        read = [guarded(in_memory(p, t, 1)) for t in (given["dy"], given["w"], made)]
        rows = (tuple(getattr(d, side) for d in p.dims) for side in ("x", "y", "below"))
        module.backward_data(*read, out, module.Sizes(p.batch, *rows, p.channels, p.filters, p.groups))
        assert whole[:GUARD].isnan().all() and whole[GUARD + made.numel() :].isnan().all(), "written beside the result"
        dx = reference(p, given)
        want, got = operation.from_result(dx, made.double()), from_memory(p, out, shape, 1).double()
        scale = max(float(dx.abs().max()), 1.0) if dx.numel() else 1.0
        assert not got.numel() or float((got - want).abs().max()) <= 2 * ROUNDING[p.dtype] * scale, (p, operation)
    assert done
