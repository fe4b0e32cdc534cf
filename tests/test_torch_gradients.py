"""Gradients through a module as torch has them: of gradients, by func.grad, of gather and scatter, under autocast."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from generate import algorithm_problem
from modules import Case, draw, make
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.verify.program import global_tensors
from convgen.verify.virtual import VirtualTransport, World

CONV = Conv(
    4, 6, 8, (Spatial("H", 7, kernel=3, pad_lo=1, pad_hi=1), Spatial("W", 6, kernel=3, pad_lo=1, pad_hi=1)), bias=True
)
_cases: dict[str, Case] = {}


def named(name: str, algorithm: str, grid: dict[str, int], conv: Conv = CONV, **changes: Any) -> Case:
    if name not in _cases:
        problem = algorithm_problem(algorithm, conv, Grid(tuple(grid.items())))
        _cases[name] = make(problem, name, random.Random(name), **changes)
    return _cases[name]


def whole_conv(case: Case, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """The layer on one device."""
    conv = case.layer.conv
    x = torch.nn.functional.pad(x, [p for s in reversed(conv.spatial) for p in (s.pad_lo, s.pad_hi)])
    run = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[len(conv.spatial) - 1]
    stride, dilation = tuple(s.stride for s in conv.spatial), tuple(s.dilation for s in conv.spatial)
    return run(x, w, bias, stride=stride, dilation=dilation, groups=conv.groups)


def penalty(y: Tensor, given: dict[str, Tensor]) -> Tensor:
    return (y.sin() * given["dy"]).sum()


@pytest.mark.parametrize("seed", range(12))
def test_gradients_of_gradients(seed: int) -> None:
    """The gradient of a loss of dx, dw, db and y, by x, w, bias, against one device: random layouts and roles."""
    case = draw(7000 + seed, least=2)
    layer = case.module
    given = global_tensors(case.layer)
    names = [n for n in ("x", "w", "bias") if n in given]
    weights = {
        n: torch.randn(given[n].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) for n in names
    }

    def second(loss: Tensor, leaves: list[Tensor], read: Any) -> list[Tensor]:
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        of_them = sum(((read(n, g) ** 2) * weights[n]).sum() for n, g in zip(names, first, strict=True))
        return list(torch.autograd.grad(of_them, leaves))

    leaves = [given[n].clone().requires_grad_() for n in names]
    y = whole_conv(case, leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None)
    truth = second(penalty(y, given), leaves, lambda _, g: g)

    def program(end: VirtualTransport) -> list[Tensor]:
        mesh = layer.init_mesh(transport=end)
        own = [layer.scatter(n, given[n], mesh).requires_grad_() for n in names]
        y = layer.conv(own[0], own[1], own[2] if len(own) > 2 else None, mesh=mesh)
        gradient = {"x": "dx", "w": "dw", "bias": "dbias"}
        made = second(penalty(layer.gather("y", y, mesh), given), own, lambda n, g: layer.gather(gradient[n], g, mesh))
        return [layer.gather(gradient[n], g, mesh) for n, g in zip(names, made, strict=True)]

    for ran in World(case.layer.grid.ranks).run(program):
        for n, got, expected in zip(names, ran, truth, strict=True):
            scale = float(expected.abs().max()) or 1.0
            assert float((got - expected).abs().max()) <= 1e-11 * scale, f"{n} of\n{case}"


def test_gradcheck_of_third_order() -> None:
    """On one rank the Functions are as differentiable as torch's own."""
    conv = Conv(1, 2, 2, (Spatial("W", 4, kernel=2, pad_lo=1, pad_hi=0),), bias=True)
    case = named("thrice", "sample", {"N": 1}, conv, dtype="float64", memory_format="contiguous")

    def program(end: VirtualTransport) -> bool:
        mesh = case.module.init_mesh(transport=end)
        x, w, b = (case.module.scatter(n, global_tensors(case.layer)[n], mesh) for n in ("x", "w", "bias"))
        leaves = [t.requires_grad_() for t in (x, w, b)]

        def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return case.module.conv(x, w, b, mesh=mesh)

        def first(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(loss(x, w, b).pow(3).sum(), (x, w, b), create_graph=True)

        return torch.autograd.gradcheck(loss, leaves) and torch.autograd.gradgradcheck(first, leaves)

    assert World(1).run(program) == [True]


def test_func_grad_and_vmap() -> None:
    """torch.func's transforms on plain blocks, a module's too: each rank's blocks of what one device has."""
    case = named("func", "stationary-w", {"C": 2, "F": 2}, dtype="float64", memory_format="contiguous")
    layer, given = case.module, global_tensors(case.layer)
    many = torch.randn(3, *given["x"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return penalty(whole_conv(case, x, w, b), given)

    expected = grad(loss, (0, 1, 2))(given["x"], given["w"], given["bias"])
    expected_many = torch.stack([whole_conv(case, x, given["w"], given["bias"]) for x in many])
    expected_each = vmap(grad(loss, 1), (0, None, None))(many, given["w"], given["bias"])

    def program(end: VirtualTransport) -> None:
        mesh = layer.init_mesh(transport=end)
        x, w, b = (layer.scatter(n, given[n], mesh) for n in ("x", "w", "bias"))

        def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return penalty(layer.gather("y", layer.conv(x, w, b, mesh=mesh), mesh), given)

        for n, g, e in zip(("dx", "dw", "dbias"), grad(ours, (0, 1, 2))(x, w, b), expected, strict=True):
            torch.testing.assert_close(layer.gather(n, g, mesh), e, rtol=1e-12, atol=1e-12)
        xs = torch.stack([layer.scatter("x", one, mesh) for one in many])
        ys = vmap(lambda x: layer.conv(x, w, b, mesh=mesh))(xs)
        for y, e in zip(ys, expected_many, strict=True):
            torch.testing.assert_close(layer.gather("y", y, mesh), e, rtol=1e-12, atol=1e-12)
        last = vmap(lambda x: layer.conv(x, w, b, mesh=mesh), in_dims=4, out_dims=1)(xs.movedim(0, 4))
        assert torch.equal(last.movedim(1, 0), ys)
        for g, e in zip(vmap(grad(ours, 1), (0, None, None))(xs, w, b), expected_each, strict=True):
            torch.testing.assert_close(layer.gather("dw", g, mesh), e, rtol=1e-12, atol=1e-12)
        module = layer.Conv(mesh)
        module.load_full(given["w"], given["bias"])
        parameters = {n: p.to_local().detach() for n, p in module.named_parameters()}
        made = grad(lambda p: layer.gather("y", functional_call(module, p, (x,)), mesh).square().sum())(parameters)
        y = torch.autograd.functional.vjp(
            lambda w: whole_conv(case, given["x"], w, given["bias"]).square().sum(), given["w"]
        )[1]
        torch.testing.assert_close(layer.gather("dw", made["weight"], mesh), y, rtol=1e-12, atol=1e-12)

    World(4).run(program)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, of forward mode
def test_jvp_is_refused() -> None:
    case = named("forward_mode", "sample", {"N": 1}, dtype="float64", memory_format="contiguous")
    layer, given = case.module, global_tensors(case.layer)
    mesh = World(1).run(lambda end: layer.init_mesh(transport=end))[0]  # forward mode's levels are one for all threads
    x, w, b = (layer.scatter(n, given[n], mesh) for n in ("x", "w", "bias"))
    key = layer.mesh_key(mesh)
    for call in (
        lambda x: layer.conv(x, w, b, mesh=mesh),
        lambda x: layer.gather("x", x, mesh),
        lambda x: layer.scatter("x", x, mesh),
        lambda x: torch.ops.convgen.forward_mode_forward(x, w, b, key, 4),
    ):
        with pytest.raises(RuntimeError, match=r"jvp|forward.mode"):
            jvp(call, (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(RuntimeError, match=r"jvp|forward.mode"):
            layer.conv(dual, w, b, mesh=mesh)


@pytest.mark.parametrize("seed", range(8))
def test_gradients_of_gather_and_scatter(seed: int) -> None:
    """A loss computed from gathered values by every rank alike, of tensors that every rank has whole."""
    case = draw(7100 + seed, least=2)
    layer, given = case.module, global_tensors(case.layer)
    names = [n for n in ("x", "w", "bias") if n in given]
    leaves = [given[n].clone().requires_grad_() for n in names]
    penalty(whole_conv(case, *leaves, *[None] * (3 - len(leaves))), given).backward()

    def program(end: VirtualTransport) -> tuple[list[Tensor], int, int]:
        mesh = layer.init_mesh(transport=end)
        whole = [given[n].clone().requires_grad_() for n in names]
        parts = [layer.scatter(n, v, mesh) for n, v in zip(names, whole, strict=True)]
        before = len(end.sent)
        y = layer.conv(*parts, *[None] * (3 - len(parts)), mesh=mesh)
        loss = penalty(layer.gather("y", y, mesh), given)
        loss.backward()
        assert not layer.scatter("x", given["x"], mesh).requires_grad
        return [v.grad for v in whole if v.grad is not None], before, len(end.sent)

    for grads, before, _ in World(case.layer.grid.ranks).run(program):
        assert before == 0  # scatter sends nothing
        for got, leaf in zip(grads, leaves, strict=True):
            assert leaf.grad is not None
            torch.testing.assert_close(got, leaf.grad, rtol=1e-11, atol=1e-11)


def test_the_gradient_of_gather_sends_nothing() -> None:
    case = named("func", "stationary-w", {"C": 2, "F": 2}, dtype="float64", memory_format="contiguous")
    layer, given = case.module, global_tensors(case.layer)

    def program(end: VirtualTransport) -> list[str]:
        mesh = layer.init_mesh(transport=end)
        w = layer.scatter("w", given["w"], mesh).requires_grad_()
        layer.gather("w", w, mesh).square().sum().backward()
        torch.testing.assert_close(w.grad, 2 * w.detach())
        whole = given["w"].clone().requires_grad_()
        layer.scatter("w", whole, mesh).square().sum().backward()
        torch.testing.assert_close(whole.grad, 2 * given["w"])
        return [s.collective for s in end.sent]

    assert World(4).run(program) == [["all_gather", "all_gather"]] * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_autocast_reaches_the_layer(dtype: str) -> None:
    """What autocast left in another type is taken in the layer's, and gradients go back in theirs."""
    case = named(f"cast_{dtype}", "stationary-x", {"N": 2, "C": 2}, dtype=dtype, memory_format="contiguous")
    layer, given = case.module, global_tensors(case.layer)

    def program(end: VirtualTransport) -> None:
        mesh = layer.init_mesh(transport=end)
        module = layer.Conv(mesh)
        x = layer.scatter("x", given["x"], mesh).float().requires_grad_()
        other = x.detach().bfloat16().requires_grad_()
        w, b = module.weight.to_local().detach(), module.bias.to_local().detach()
        with torch.autocast("cpu", torch.bfloat16):
            for one in (x, other):
                y = module(one)
                assert y.dtype == layer.DTYPE
                y.float().sum().backward()
                assert one.grad is not None
                assert one.grad.dtype == one.dtype
            key = layer.mesh_key(mesh)
            assert torch.equal(getattr(torch.ops.convgen, f"{layer.NAME}_forward")(other, w, b, key, 4), y)
        assert module.weight.grad.dtype == layer.DTYPE
        with pytest.raises(ValueError, match=r"x, .* got torch\.float16"):
            module(x.half())

    World(4).run(program)
