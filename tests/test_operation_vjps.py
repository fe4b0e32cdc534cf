"""Gradients that operations say as calls of ATen, against torch's of local code: on random blocks, of random operands.

What they keep is no more than autograd's, and what they are given they leave as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from random import Random
from typing import Any

import brute
import pytest
import torch
from network_cases import ALL_CASES
from operation_cases import a_grid, filled, free_roles, normal, shape_of, stored
from small_networks import Made, exported, undropped, unet

from convgen.operations import batch_norm, convolution, elementwise_gradients, fused, max_pooling, rows
from convgen.operations.calls import Elementwise, Slot
from convgen.operations.convolution import Convolution
from convgen.operations.elementwise_gradients import SLOPES, Slope
from convgen.operations.pointwise import FUNCTIONS, SLOPES_OF, Pointwise
from convgen.operations.row import At, Operation, standing
from convgen.spec.aten.describe import describe

DRAWS = 12 * int(os.environ.get("DRAWS", "1"))
Tensors = Sequence[Any]

# Kinds whose operations say a gradient, and leave it to torch in all draws, and in some: operators of ATen as they
# stand, and phases that make no activation.
BY_TORCH, IN_PART = {"apart", "whole"}, {"by number", "convolution", "transposed convolution"}
# Elementwise operators, their other arguments, and where their operands lie.
OPERATORS: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(
        (
            "relu", "sigmoid", "tanh", "silu", "hardswish", "hardsigmoid", "mish", "neg", "abs", "exp", "expm1", "sin",
            "cos", "erf", "exp2", "atan", "selu", "relu6", "log_sigmoid", "square",
            "mul.Tensor", "maximum", "minimum", "where.self",
        ),
        ((), "any"),
    ),
    **dict.fromkeys(("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "div.Tensor"), ((), "positive")),
    "leaky_relu": ((0.2,), "any"), "hardtanh": ((-0.5, 0.7), "any"), "threshold": ((0.1, 3.0), "any"),
    "elu": ((1.3, 1.1, 0.9), "any"), "gelu": (("tanh",), "any"), "softplus": ((2.0, 3.0), "any"),
    "clamp": ((-0.5, None), "any"), "hardshrink": ((0.4,), "any"), "softshrink": ((0.4,), "any"),
    "clamp_min": ((0.1,), "any"), "clamp_max": ((0.1,), "any"),
    "add.Tensor": ((3,), "any"), "sub.Tensor": ((3,), "any"), "rsub.Tensor": ((3,), "any"),
    "add.Scalar": ((2.0, 3), "any"), "sub.Scalar": ((2.0, 3), "any"), "rsub.Scalar": ((2.0, 3), "any"),
    "mul.Scalar": ((2.5,), "any"), "div.Scalar": ((2.5,), "any"), "pow.Tensor_Scalar": ((3,), "any"),
    "mse_loss": ((0,), "any"), "smooth_l1_loss": ((0, 0.5), "any"), "huber_loss": ((0, 0.5), "any"),
    "masked_fill.Scalar": ((2.0,), "any"), "clone": ((None,), "any"), "alias": ((), "any"),
    "_to_copy": (("float32", None, None, None, False, None), "any"),
}  # fmt: skip


@dataclass
class Part:
    """A rank's part of an operation."""

    operation: Operation
    way: int
    at: At
    operands: list[torch.Tensor]


def a_part(draw: Random, operation: Operation, given: Tensors) -> Part | None:
    """Of random roles on a random grid; None where nothing is there."""
    way = draw.randrange(len(operation.signatures))
    signature, grid = operation.signatures[way], a_grid(draw)
    roles = free_roles(draw, signature, grid)
    stands = [brute.stand(grid, r, signature, roles) for r in range(grid.ranks)]
    values = [stored(draw, grid, t) for t in given]
    one = draw.randrange(grid.ranks)
    operands = [brute.fetch(v, [s.reads[k] for s in stands])[one] for k, v in enumerate(values)]
    made = [brute.extents(m) for m in stands[one].makes]
    if not signature.runs_empty and (not any(map(prod, made)) or any(not t.numel() for t in operands)):
        return None
    if not getattr(operation, "logs", False):  # a loss whose gradient torch itself refuses of such
        operands = [_laid_out(draw, t) for t in operands]
    return Part(operation, way, stands[one].at, operands)


def _laid_out(draw: Random, t: torch.Tensor) -> torch.Tensor:
    """Some with the channels last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(t.dim())
    return t if last is None or draw.random() < 0.5 else t.contiguous(memory_format=last)


def of_torch(part: Part, wanted: Sequence[bool], asked: Sequence[bool], dys: Tensors) -> tuple[list[Any], int]:
    """Gradients of those asked for, and bytes that autograd keeps for those wanted."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    leaves = [t.clone().requires_grad_(w) for t, w in zip(part.operands, wanted, strict=True)]
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        made = part.operation.local(part.way, part.at, *leaves)
    pairs = [(y, dy) for y, dy in zip(made, dys, strict=True) if dy is not None and y.requires_grad]
    found: list[Any] = [None] * len(leaves)
    some = [k for k, one in enumerate(asked) if one]
    if pairs and some:
        ys, given = zip(*pairs, strict=True)
        for k, g in zip(
            some, torch.autograd.grad(ys, [leaves[k] for k in some], given, allow_unused=True), strict=True
        ):
            found[k] = g
    return found, sum(s.nbytes() for s in storages.values())


def bytes_of(kept: Tensors) -> int:
    """Of the memory that tensors lie in, each once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept if isinstance(t, torch.Tensor)}
    return sum(found.values())


def same(found: torch.Tensor, right: torch.Tensor, within: float) -> bool:
    """By the largest entry; what is no number is none in both."""
    assert (found.shape, found.dtype) == (right.shape, right.dtype)
    finite = right.isfinite()
    scale = max(1.0, float(right[finite].abs().max())) if bool(finite.any()) else 1.0
    return torch.allclose(found, right, rtol=0, atol=within * scale, equal_nan=True)


def check_vjp(draw: Random, part: Part, within: float = 1e-12) -> list[bool]:
    """Of each gradient, whether it has torch's bits."""
    operation, way, at, operands = part.operation, part.way, part.at, part.operands
    signature = operation.signatures[way]
    smooth = [o.gradient and t.is_floating_point() for o, t in zip(signature.inputs, operands, strict=True)]
    wanted = [one and draw.random() < 0.8 for one in smooth]
    if not any(wanted):
        wanted = smooth
    asked = [one and draw.random() < 0.8 for one in wanted]
    if not any(asked):
        asked = wanted
    before = [t.clone() for t in operands]
    with torch.no_grad():
        right = operation.local(way, at, *operands)
        made, kept = operation.kept(way, at, wanted, *operands)
        over = operation.local_over(way, at, *[t.clone(memory_format=torch.preserve_format) for t in operands])
    exact = within == 1e-12 and operation.name != "attention"  # where a mask has a gradient torch takes another way
    for results in (made, over):
        for y, other in zip(results, right, strict=True):
            assert same(y, other, 0 if exact else within), operation
    dys = [
        None if not o.gradient or (k and draw.random() < 0.3) else _laid_out(draw, normal(draw, y.shape).to(y.dtype))
        for k, (o, y) in enumerate(zip(signature.results, made, strict=True))
    ]
    given = [None if dy is None else dy.clone() for dy in dys]
    keeping = [t.clone() if isinstance(t, torch.Tensor) else t for t in kept]
    with torch.no_grad():
        found = operation.vjp(way, at, asked, kept, *dys)
    for t, was in zip((*operands, *dys, *kept), (*before, *given, *keeping), strict=True):
        assert not isinstance(t, torch.Tensor) or torch.equal(torch.nan_to_num(t), torch.nan_to_num(was)), operation
    expected, saved = of_torch(part, wanted, asked, dys)
    bits: list[bool] = []
    assert len(found) == len(operands), operation
    for g, other, one, x in zip(found, expected, asked, operands, strict=True):
        assert one or g is None, f"{operation}: a gradient that nobody asked for"
        if one:
            other = torch.zeros_like(x) if other is None else other
            assert g is not None and not g.requires_grad, operation
            assert same(g, other, within), f"{operation}, way {way}, {at}, asked {asked}: {g} and not {other}"
            bits.append(torch.equal(g, other))
    # A few numbers a channel are kept as they come; of prelu's operand autograd has signs where w is frozen.
    few = [
        t for o, t in zip((*signature.inputs, *signature.results), (*operands, *made), strict=True) if o.name in "mp"
    ]
    least = saved + bytes_of(few) + (bytes_of(operands) if operation.name == "prelu" and not all(wanted) else 0)
    assert bytes_of(kept) <= least, f"{operation}, wanted {wanted}: {bytes_of(kept)} bytes kept, torch keeps {saved}"
    return bits


def is_smooth(operation: Operation) -> bool:
    """Whether an operand can have a gradient."""
    return all(any(o.gradient for o in side) for s in operation.signatures for side in (s.inputs, s.results))


def says_its_gradient(kind: str) -> bool:
    operation, _ = ALL_CASES[kind](Random(f"says {kind}"))
    return type(operation).has_vjp is not Operation.has_vjp and is_smooth(operation) and kind not in BY_TORCH


def parts_of(draw: Random, kind: str, draws: int) -> list[Part]:
    """Those that have a gradient of their own: all that have one, but for kinds that leave some to torch."""
    found = [a_part(draw, *ALL_CASES[kind](draw)) for _ in range(draws)]
    smooth = [p for p in found if p is not None and is_smooth(p.operation)]
    own = [p for p in smooth if p.operation.has_vjp(p.way, p.at, *p.operands)]
    assert len(own) == len(smooth) or kind in IN_PART
    return own


@pytest.mark.parametrize("kind", [*filter(says_its_gradient, ALL_CASES)])
def test_gradients_are_those_of_torch(kind: str) -> None:
    draw = Random(f"vjp {kind}")
    parts = parts_of(draw, kind, DRAWS)
    assert parts
    bits = [b for part in parts for b in check_vjp(draw, part)]
    print(f"{kind}: {sum(bits)} of {len(bits)} gradients have torch's bits")


@pytest.mark.parametrize("op", SLOPES)
def test_each_operator_of_elements(op: str) -> None:
    """Broadcast, twice the same operand, a number in an operand's place."""
    assert op in OPERATORS or op in FUNCTIONS
    if op not in OPERATORS:
        return  # a function alone, of the next test
    draw, (numbers, where) = Random(f"slopes {op}"), OPERATORS[op]
    for k in range(2 * DRAWS):
        shape, count = shape_of(draw, draw.randint(1, 4), 5), len(SLOPES[op])
        slots: list[Any] = [*map(Slot, range(count))]
        if count == 2 and k % 4 == 1 and None not in SLOPES[op]:
            slots[1] = Slot(0)
        if op in ("mul.Tensor", "div.Tensor", "add.Tensor") and k % 4 == 2:
            slots[1] = 2.5
        shapes = [shape] * (1 + max(s.k for s in slots if isinstance(s, Slot)))
        if len(shapes) > 1 and draw.random() < 0.5 and "loss" not in op:
            shapes[draw.randrange(1, len(shapes))] = tuple(draw.choice((1, n)) for n in shape[draw.randrange(4) :])
        smooth = tuple(SLOPES[op][j] is not None for j in range(len(shapes)))
        operation = Elementwise(op, (*slots, *numbers), shape, tuple(shapes), smooth)
        _, given = filled(draw, operation, normal)
        given = [t.abs() + 0.1 if where == "positive" else t for t in given]
        if None in SLOPES[op]:
            mask = SLOPES[op].index(None)
            given[mask] = given[mask] > 0
        if op in ("maximum", "minimum") and len(given) > 1:
            given[0].round_(), given[1].round_()
        part = a_part(draw, operation, given)
        if part is not None:
            assert operation.has_vjp(part.way, part.at, *part.operands)
            check_vjp(draw, part)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_function_of_elements(function: str) -> None:
    draw, count = Random(f"pointwise {function}"), len(SLOPES[SLOPES_OF[function][0]])
    for _ in range(DRAWS):
        shape = shape_of(draw, draw.randint(1, 4), 5)
        settings = (0.2,) if function == "leaky_relu" and draw.random() < 0.5 else ()
        operation, given = filled(draw, Pointwise(function, shape, (shape,) * count, (), settings), normal)
        if function in ("sqrt", "div"):
            given = [t.abs() + 0.1 for t in given]
        part = a_part(draw, operation, given)
        if part is not None:
            check_vjp(draw, part)


SHORT = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
OF_SHORT = (
    "convolution", "transposed convolution", "centred", "coefficients", "normalise", "pointwise", "elementwise",
    "bias, affine, prelu", "linear, matrix product", "max pool", "average pool", "softmax", "sum, mean", "concatenate",
    "view", "permute", "expand", "pad", "upsample", "dropout", "squared error", "embedding", "rows as one", "attention",
)  # fmt: skip


@pytest.mark.parametrize(("kind", "dtype"), [
    (kind, dtype) for kind in OF_SHORT for dtype in SHORT
    # of bfloat16 oneDNN's are wrong without a word, torch's as well (templates/runtime/local.py)
    if (kind, dtype) != ("transposed convolution", torch.bfloat16)
], ids=str)  # fmt: skip
def test_shorter_types(kind: str, dtype: torch.dtype) -> None:
    """Moments and coefficients are of float32 at least."""
    draw, done = Random(f"short {kind}"), 0
    for part in parts_of(draw, kind, DRAWS):
        names = [o.name for o in part.operation.signatures[part.way].inputs]
        for k, (name, t) in enumerate(zip(names, part.operands, strict=True)):
            if t.is_floating_point():
                wide = name in "mp" and dtype == torch.bfloat16
                part.operands[k] = t.to(torch.float32 if wide else dtype)
        with suppress(NotImplementedError):  # what ATen hasn't of that type
            done += len(check_vjp(draw, part, SHORT[dtype]))
    assert done


def test_types_that_differ() -> None:
    """Of a sum and a product of two types each operand's gradient has its own; of a cast, that of what was cast."""
    draw = Random("types")
    for op, args in (("add.Tensor", (1,)), ("mul.Tensor", ()), ("div.Tensor", ())):
        operation = Elementwise(op, (Slot(0), Slot(1), *args), (3, 4), ((3, 4), (4,)))
        part = a_part(draw, *filled(draw, operation, normal))
        while part is None:
            part = a_part(draw, *filled(draw, operation, normal))
        part.operands[0] = part.operands[0].bfloat16()
        check_vjp(draw, part, 1e-2)


OVER: tuple[Operation, ...] = (
    Elementwise("relu", (Slot(0),), (3, 4), ((3, 4),)),
    Elementwise("add.Tensor", (Slot(0), Slot(1), 1), (3, 4), ((3, 4), (3, 4))),
    Pointwise("relu", (3, 4), ((3, 4),)),
    Pointwise("add", (3, 4), ((3, 4), (3, 4))),
)


@pytest.mark.parametrize("row", OVER, ids=str)
def test_a_result_lies_over_its_operand(row: Operation) -> None:
    draw = Random(str(row))
    part = next(
        p
        for p in (a_part(draw, *filled(draw, row, normal)) for _ in range(50))
        if p and len(p.operands[0]) > 1 and p.operands[0].numel()
    )
    x, *others = part.operands
    (right,) = row.local(0, part.at, x, *others)
    expanded = x[:1].expand(x.shape)  # several elements in one place are left as they are
    (y,) = row.local_over(0, part.at, expanded, *others)
    assert y.data_ptr() != expanded.data_ptr()
    (y,) = row.local_over(0, part.at, x, *others)
    assert y.data_ptr() == x.data_ptr() and torch.equal(y, right)


def test_a_kernel_leaves_it_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Random("kernels")
    part = next(p for p in parts_of(draw, "convolution", 50) if p.operation.convolved(p.way, p.at) is not None)  # type: ignore[attr-defined]
    assert isinstance(part.operation, Convolution)
    here = part.operation.convolved(part.way, part.at)
    monkeypatch.setitem(convolution.KERNELS, ("torch.float64", here), lambda *_: None)
    assert not part.operation.has_vjp(part.way, part.at, *part.operands)


# ---------------------------------------------------------------- what is planted is found
def _slope(op: str, slope: Slope) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setitem(SLOPES, op, (slope, *SLOPES[op][1:]))  # type: ignore[arg-type]

    return plant


def _written_over(patch: pytest.MonkeyPatch) -> None:
    """dy is written over."""
    patch.setattr(elementwise_gradients, "summed_to", lambda dy, shape: dy.mul_(1.5).sum_to_size(shape))


def _never_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(elementwise_gradients, "summed_to", lambda dy, shape: dy)


def _no_mean(patch: pytest.MonkeyPatch) -> None:
    back = batch_norm.centred_back

    def without(*given: Any) -> Any:
        dx, dmean, *others = back(*given)
        return dx, dmean if dmean is None else dmean * 0, *others

    patch.setattr(batch_norm, "centred_back", without)


def _padding_stays(patch: pytest.MonkeyPatch) -> None:
    """Rows of zeros get what rows of x should."""
    own = convolution.with_sides
    patch.setattr(
        convolution, "with_sides", lambda t, sides: own(t.roll(1, -1) if min(sides, default=0) < 0 else t, sides)
    )
    patch.setattr(rows, "unfit", lambda t, have, want: convolution.fit(t.roll(1, -1), want, have))


def _more_kept(patch: pytest.MonkeyPatch) -> None:
    """Places of the largest among others."""
    of = max_pooling.MaxPool.kept

    def more(self: Any, way: int, at: At, wanted: Any, *operands: Any) -> Any:
        made, kept = of(self, way, at, wanted, *operands)
        (places,) = kept
        return made, (torch.cat([places.flatten(), places.new_zeros(999)])[: places.numel()].view_as(places),)

    patch.setattr(max_pooling.MaxPool, "kept", more)


def _first_part_alone(patch: pytest.MonkeyPatch) -> None:
    """The gradient of what lies between is that of the whole."""
    patch.setattr(fused.Fused, "vjp", lambda self, way, at, wanted, kept, *dys: tuple(
        dys[0].new_zeros([hi - lo for lo, hi in at.inside[k]]) if one else None for k, one in enumerate(wanted)
    ))  # fmt: skip


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a relu that passes all": (_slope("relu", Slope("", lambda dy, t, n: dy)), "pointwise"),
    "a product's other operand": (_slope("mul.Tensor", Slope("0", lambda dy, t, n: dy * t[0])), "pointwise"),
    "dy written over": (_written_over, "pointwise"),
    "what was broadcast not summed": (_never_summed, "elementwise"),
    "coefficients' mean": (_no_mean, "centred"),
    "padding of a convolution": (_padding_stays, "convolution"),
    "rows that are cut": (_padding_stays, "pad"),
    "more kept": (_more_kept, "max pool"),
    "between two rows": (_first_part_alone, "rows as one"),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, kind = PLANTED[mistake]
    plant(monkeypatch)
    draw = Random(f"planted {mistake}")
    parts = parts_of(draw, kind, 150)
    with pytest.raises((AssertionError, RuntimeError)):
        any(check_vjp(draw, part) is None for part in parts)


# ---------------------------------------------------------------- a network
@pytest.mark.parametrize("made", [undropped, unet], ids=["resnet", "unet"])
def test_a_network_by_its_rows(made: Made) -> None:
    """Forward and backward without autograd, row behind row: the module's gradients."""
    module, x = made()
    graph, tensors = exported(made)
    described = describe(graph.at(graph.batch))
    values: dict[str, Any] = {**tensors, **dict(module.named_buffers()), graph.inputs[0].name: x}
    values |= {name: p.detach() for name, p in module.named_parameters()}
    learnt = {v.name for v in graph.parameters}
    smooth, steps = {*learnt, graph.inputs[0].name}, list[Any]()
    with torch.no_grad():
        for bound in described.rows:
            operation, operands = bound.operation, [values[name] for name in bound.reads]
            signature = operation.signatures[0]
            at = standing(signature, {i: (0, n) for i, n in signature.extents})
            wanted = [o.gradient and n in smooth for o, n in zip(signature.inputs, bound.reads, strict=True)]
            if any(wanted):
                assert operation.has_vjp(0, at, *operands), bound
                results, kept = operation.kept(0, at, wanted, *operands)
                smooth |= {n for n, o in zip(bound.makes, signature.results, strict=True) if n and o.gradient}
                steps.append((bound, at, wanted, kept))
            else:
                results = operation.local(0, at, *operands)
            values |= {name: y for name, y in zip(bound.makes, results, strict=True) if name}
    found = module(x.requires_grad_())
    pairs = list(found.items()) if isinstance(found, dict) else [("output", found)]
    named = dict(graph.outputs)
    draw = Random("network")
    dys = {named[key]: normal(draw, y.shape) for key, y in pairs}
    for key, y in pairs:
        assert same(values[named[key]], y.detach(), 1e-12)
    right = torch.autograd.grad([y for _, y in pairs], [x, *module.parameters()], [dys[named[k]] for k, _ in pairs])

    gradients: dict[str, Any] = dict(dys)
    with torch.no_grad():
        for bound, at, wanted, kept in reversed(steps):
            of_results = [gradients.get(name) for name in bound.makes]
            if all(dy is None for dy in of_results):
                continue
            for name, g in zip(bound.reads, bound.operation.vjp(0, at, wanted, kept, *of_results), strict=True):
                if g is not None:
                    gradients[name] = gradients[name] + g if name in gradients else g
    names = [graph.inputs[0].name, *(name for name, _ in module.named_parameters())]
    for name, g in zip(names, right, strict=True):
        assert same(gradients[name], g, 1e-11), name
