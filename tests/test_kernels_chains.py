"""Kernels of chains of rows element by element: right in the interpreter, alone and in networks, without spills."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import triton
from sampling import cases_of
from test_networks_gpu import SM_90, loaded, step_on_no_device
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from convgen.algebra.grid import Grid
from convgen.algebra.signature import Operand
from convgen.errors import InputError
from convgen.kernels.chains import ChainFile
from convgen.kernels.facts import Launch, facts
from convgen.kernels.load import load_text
from convgen.network_compiler import compile_network, compile_text
from convgen.operations.calls import Elementwise, Slot
from convgen.operations.chains import MADE, ChainStep, ElementChain, how_it_lies, shape_beside
from convgen.operations.evaluated_norm import EvaluatedNorm
from convgen.operations.pointwise import affine, bias
from convgen.operations.row import Operation
from convgen.plan.program.edited import read_text
from convgen.program.network_text import show
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype
from convgen.verify.interpreter import in_interpreter, launch
from convgen.verify.network import check_network, report_text
from convgen.verify.virtual import World

ONES = {
    "relu": ("relu", ()), "silu": ("silu", ()), "sigmoid": ("sigmoid", ()), "hardswish": ("hardswish", ()),
    "hardsigmoid": ("hardsigmoid", ()), "relu6": ("hardtanh", (0.0, 6.0)), "leaky": ("leaky_relu", (0.1,)),
    "double": ("mul.Tensor", (2.0,)), "less": ("sub.Tensor", (0.5, 1)), "third": ("div.Tensor", (3.0,)),
    "same": ("div.Tensor", (1.0,)), "gelu": ("gelu", ("none",)), "gelu_tanh": ("gelu", ("tanh",)),
}  # fmt: skip
TWOS = {"add.Tensor": (1,), "sub.Tensor": (1,), "mul.Tensor": (), "div.Tensor": ()}


def shapes_beside(shape: tuple[int, ...], trailing: bool) -> list[tuple[int, ...]]:
    if trailing:
        return [shape, shape, shape[-1:], shape[-1:], (*[1] * (len(shape) - 1), shape[-1]), (1,)]
    n, c, *pixels = shape
    ones = (1,) * len(pixels)
    return [shape, shape, (c, *ones), (n, c, *ones), (n, 1, *pixels), (n, 1, *ones), (1,)]


def drawn_chain(
    rng: random.Random, shape: tuple[int, ...], trailing: bool = False
) -> tuple[ElementChain, list[Operation], list[Operand]]:
    """A chain, its rows, and its operands."""
    steps: list[ChainStep] = []
    rows: list[Operation] = []
    operands = [Operand("x", shape, ())]
    for n in range(rng.randint(2, 5)):
        first = MADE if n else 0
        if rng.random() < 0.4:
            op, numbers = ONES[rng.choice(list(ONES))]
            row, sources = Elementwise(op, (Slot(0), *numbers), shape, (shape,)), (first,)
        elif rng.random() < 0.3 and not trailing:
            norm = EvaluatedNorm(shape, 0.1, rng.random() < 0.5, rng.random() < 0.5)
            row = rng.choice((affine(shape), bias(shape), norm, norm))
            _, *vectors = row.signatures[0].inputs
            sources = (first, *range(len(operands), len(operands) + len(vectors)))
            operands += vectors
        else:
            other = rng.choice(shapes_beside(shape, trailing))
            operands.append(Operand("", other, ()))
            pair, sources = (shape, other), (first, len(operands) - 1)
            op = rng.choice(list(TWOS))
            if rng.random() < 0.5 and "div" not in op:  # by what may be near 0
                pair, sources = pair[::-1], sources[::-1]
            row = Elementwise(op, (Slot(0), Slot(1), *TWOS[op]), shape, pair)
        step = row.element_step()
        assert step is not None
        (y,) = row.signatures[0].results
        wide = [shape_beside(one, y) for one in row.signatures[0].inputs]
        lies = [how_it_lies(one, shape, trailing=trailing) for one in wide if one is not None]
        steps.append(ChainStep(step, sources, tuple(at for at in lies if at is not None)))
        rows.append(row)
    return ElementChain(tuple(steps), trailing), rows, operands


def made_by(chain: ElementChain, rows: list[Operation], operands: list[Tensor]) -> Tensor:
    """By ATen, row by row."""
    made: Any = None
    for step, row in zip(chain.steps, rows, strict=True):
        given = [made if k == MADE else operands[k] for k in step.sources]
        (made,) = row.local(0, None, *given)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("seed", cases_of(40, "chain kernels"))
def test_kernels_are_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    trailing = rng.random() < 0.4
    shape = rng.choice(((3, 5, 7, 5), (2, 70, 9, 13), (1, 16, 3, 2, 4), (2, 130, 4, 3), (2, 3, 31, 33)))
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    if trailing:
        shape, last = rng.choice(((70, 40), (3, 9, 70), shape)), torch.contiguous_format
    chain, rows, drawn = drawn_chain(rng, shape, trailing)
    dtype = rng.choice((torch.float64, torch.float32, torch.bfloat16))
    operands = [torch.randn(one.shape) for one in drawn]
    operands = [t.abs() if one.name == "variance" else t for one, t in zip(drawn, operands, strict=True)]
    operands = [torch.where(t.abs() < 0.3, t.sign() + 0.3, t).to(dtype) for t in operands]  # which may be divided by
    operands = [t.contiguous(memory_format=last) if t.dim() == len(shape) else t for t in operands]
    wide = [t.double().requires_grad_(one.gradient) for one, t in zip(drawn, operands, strict=True)]
    wanted = [one.gradient and rng.random() < 0.7 for one in drawn]
    wanted[rng.choice([k for k, one in enumerate(drawn) if one.gradient])] = True
    dy = torch.randn(shape).to(dtype).contiguous(memory_format=last)
    want = made_by(chain, rows, wide)
    learns = [t for t in wide if t.requires_grad]
    found_of = dict(
        zip(map(id, learns), torch.autograd.grad(want, learns, dy.double(), allow_unused=True), strict=True)
    )
    gradients = [found_of.get(id(t)) for t in wide]
    module = load_text(ChainFile("chain_1", chain, "all of it").text)
    monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(module, "PIECES", rng.choice((1, 2, 256)))  # few have several tiles each
    y = torch.empty_like(dy)
    module.make([t if t.shape == y.shape else t.contiguous() for t in operands], y)
    reads = chain.reads(wanted)
    given = [t if k in reads else None for k, t in enumerate((*operands, y))]
    found = module.make_back(dy, [t if t is None or t.shape == y.shape else t.contiguous() for t in given], wanted)
    # ATen's hardsigmoid takes a sixth in float32.
    tolerance = {torch.float64: 1e-7, torch.float32: 3e-4, torch.bfloat16: 6e-2}[dtype]

    def near(got: Tensor, wanted: Tensor) -> bool:
        apart = (got.double().reshape(wanted.shape) - wanted).abs()
        if dtype == torch.bfloat16:  # an activation that rounding has put on its other side
            return float((apart / (wanted.abs().max() + 1) > tolerance).double().mean()) < 0.01
        return float(apart.max() / (wanted.abs().max() + 1)) < tolerance

    assert near(y, want.detach())
    for got, wanted_one, want_it in zip(found, gradients, wanted, strict=True):
        assert (got is not None) == want_it
        if got is not None:
            assert near(got, torch.zeros(got.numel()) if wanted_one is None else wanted_one)


def test_a_step_of_two_reads_what_its_gradients_need() -> None:
    """Of (x * w + r), relu: the result alone says the rectifier's; x and w are for each other."""
    shape = (2, 3, 4, 4)
    rows = [
        Elementwise("mul.Tensor", (Slot(0), Slot(1)), shape, (shape, (3, 1, 1))),
        Elementwise("add.Tensor", (Slot(0), Slot(1), 1), shape, (shape, shape)),
        Elementwise("relu", (Slot(0),), shape, (shape,)),
    ]
    sources = ((0, 1), (MADE, 2), (MADE,))
    lies = (("ncp", "c"), ("ncp", "ncp"), ("ncp",))
    steps = [row.element_step() for row in rows]
    chain = ElementChain(tuple(ChainStep(s, k, at) for s, k, at in zip(steps, sources, lies, strict=True) if s))
    assert chain.reads([True, True, True]) == {0, 1, 3}
    assert chain.reads([True, False, True]) == {1, 3}
    assert chain.reads([False, False, True]) == {3}


@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 3, 1, 1), (1, 3, 1, 1), (2, 1, 4, 5), (1,), (), (2, 3, 4, 5)])
def test_how_an_operand_lies(shape: tuple[int, ...]) -> None:
    assert how_it_lies(shape, (2, 3, 4, 5)) is not None


@pytest.mark.parametrize("shape", [(4, 5), (1, 3, 4, 5), (2, 3, 4, 1), (2, 3, 1, 5)])
def test_what_kernels_leave(shape: tuple[int, ...]) -> None:
    assert how_it_lies(shape, (2, 3, 4, 5)) is None


@pytest.mark.parametrize("op", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_what_is_no_number_is_as_atens(op: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is infinite, or so large that another factor is nothing."""
    row = Elementwise(ONES[op][0], (Slot(0), *ONES[op][1]), (2, 10), ((2, 10),))
    other = Elementwise("mul.Tensor", (Slot(0), Slot(1)), (2, 10), ((2, 10), (10,)))
    steps = [ChainStep(row.element_step(), (0,), ("ncp",)), ChainStep(other.element_step(), (MADE, 1), ("ncp", "c"))]  # type: ignore[arg-type]
    module = load_text(ChainFile("chain_1", ElementChain(tuple(steps), trailing=True), "").text)
    monkeypatch.setattr(module, "launch", launch)
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e15, -1e15, 1e4, -1e4, 30.0, -30.0, 0.0]).to(dtype).repeat(2, 1)
    w = torch.ones(10, dtype=dtype)
    wide = x.double().requires_grad_()
    want = made_by(ElementChain(tuple(steps)), [row, other], [wide, w.double()])
    (wanted,) = torch.autograd.grad(want.sum(), wide)
    y = torch.empty_like(x)
    module.make([x, w], y)
    dx, _ = module.make_back(torch.ones_like(x), [x, w, y], [True, False])
    assert torch.allclose(y.double(), want.detach(), equal_nan=True)
    assert torch.allclose(dx.double(), wanted, equal_nan=True)


@pytest.mark.parametrize(
    ("op", "numbers", "back"),
    [
        ("leaky_relu", (0.1,), "result"), ("leaky_relu", (-0.5,), "input"), ("hardtanh", (0.0, 6.0), "result"),
        ("hardtanh", (-0.7, 0.7), "input"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_result_that_does_not_say_what_it_is_of_is_not_asked(
    op: str, numbers: tuple[float, ...], back: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rectifier that goes down on both sides, and bounds that bfloat16 rounds towards 0."""
    row = Elementwise(op, (Slot(0), *numbers), (2, 8), ((2, 8),))
    step = row.as_epilogue(0)
    assert step is not None and step.back == back and (row.back_of_result() is None) == (back == "input")
    other = Elementwise("mul.Tensor", (Slot(0), Slot(1)), (2, 8), ((2, 8), (8,)))
    steps = [ChainStep(other.element_step(), (0, 1), ("ncp", "c")), ChainStep(row.element_step(), (MADE,), ("ncp",))]  # type: ignore[arg-type]
    chain = ElementChain(tuple(steps), trailing=True)
    module = load_text(ChainFile("chain_1", chain, "").text)
    monkeypatch.setattr(module, "launch", launch)
    x = torch.tensor([-9.0, -2.0, -0.5, -0.25, 0.25, 0.5, 2.0, 9.0]).to(dtype).repeat(2, 1)
    w = torch.ones(8, dtype=dtype)
    wide = x.clone().requires_grad_()
    want = made_by(chain, [other, row], [wide, w])
    (wanted,) = torch.autograd.grad(want.sum(), wide)
    y = torch.empty_like(x)
    module.make([x, w], y)
    dx, _ = module.make_back(torch.ones_like(x), [x, w, y], [True, False])
    assert torch.equal(y, want.detach()) and dx is not None and torch.equal(dx, wanted)


def test_bounds_are_of_float64_where_that_is_computed_in() -> None:
    row = Elementwise("hardtanh", (Slot(0), -0.7, 0.7), (2, 8), ((2, 8),))
    other = Elementwise("mul.Tensor", (Slot(0), Slot(1)), (2, 8), ((2, 8), (8,)))
    steps = [ChainStep(other.element_step(), (0, 1), ("ncp", "c")), ChainStep(row.element_step(), (MADE,), ("ncp",))]  # type: ignore[arg-type]
    module = load_text(ChainFile("chain_1", ElementChain(tuple(steps), trailing=True), "").text)
    constants: dict[str, Any] = {"DOUBLE": True, "BR": 32, "BC": 8}
    signature = {"x0": "*fp64", "x1": "*fp64", "out": "*fp64", "R": "i32", "C": "i32"} | dict.fromkeys(
        constants, "constexpr"
    )
    source = ASTSource(module.chain_forward, signature, constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "0.69999999999999996" in made.asm["ttir"] and "0.69999998" not in made.asm["ttir"]


@pytest.mark.parametrize(("seed", "shape"), [(4, (1 << 22, 64)), (0, (1 << 17, 8, 2, 2))])
def test_any_number_of_rows_and_samples_is_launched(seed: int, shape: tuple[int, ...]) -> None:
    """A GPU's launches have 65,535 programs at most along their second and third dimensions."""
    chain, _, drawn = drawn_chain(random.Random(seed), shape, trailing=len(shape) == 2)
    assert chain.by_sample == (len(shape) > 2)
    module, held = load_text(ChainFile("chain_1", chain, "").text), list[Launch]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "launch", lambda f, grid, *args, **more: held.append(Launch(f, grid, args, more)))
        given = [torch.empty(one.shape, dtype=torch.bfloat16, device="meta") for one in drawn]
        module.make(given, given[0])
        module.make_back(given[0], [*given, given[0]], [True, *[False] * (len(given) - 1)])
    assert len(held) == 2 and all(max((*one.grid, 1)[1:]) < 1 << 16 < one.grid[0] for one in held)


def test_kernels_spill_nothing() -> None:
    for seed in range(6):
        shape: tuple[int, ...] = (2, 256, 128, 128) if seed < 4 else (1 << 15, 256)
        chain, _, drawn = drawn_chain(random.Random(seed), shape, seed >= 4)
        shapes = [one.shape for one in drawn]
        module, held = load_text(ChainFile("chain_1", chain, "").text), list[Launch]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                module, "launch", lambda f, grid, *args, held=held, **more: held.append(Launch(f, grid, args, more))
            )
            given = [torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes]
            last = torch.channels_last if len(shape) == 4 else torch.contiguous_format
            given = [t.contiguous(memory_format=last) if prod(t.shape) == prod(shape) else t for t in given]
            module.make(given, given[0])
            module.make_back(given[0], [*given, given[0]], [True] * len(given))
        assert [one.name for one in held] == ["chain_forward", "chain_backward"]
        for one in held:
            found = facts(one, SM_90.known())
            assert found.spill_bytes == 0 and found.widest_global_load_bytes == 16, (seed, one.name)


# ---- In networks ----


class Drawn(nn.Module):
    """Pooled convolutions between which elements are computed with vectors, gates and each other."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.channels = c = 8 * rng.randint(1, 2)
        self.kinds = [[rng.choice(("gate", "scale", "pixel", "number", "add", "act")) for _ in range(4)] for _ in "abc"]
        self.convs = nn.ModuleList(nn.Conv2d(c, c, rng.choice((1, 3)), padding="same") for _ in "abc")
        self.gates = nn.ModuleList(nn.Conv2d(c, c, 1) for _ in "abc")
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(c, 1, 1)) for _ in "abc")

    def forward(self, x: Tensor) -> Tensor:
        for kinds, conv, gate, scale in zip(self.kinds, self.convs, self.gates, self.scales, strict=True):
            y = nn.functional.max_pool2d(conv(x), 3, 1, 1)
            for kind in kinds:
                if kind == "gate":
                    y = y * torch.sigmoid(gate(x.mean((2, 3), keepdim=True)))
                elif kind == "scale":
                    y = scale * y
                elif kind == "pixel":
                    y = y / (1.5 + x.square().mean(1, keepdim=True))
                elif kind == "number":
                    y = y / 2.5 - 0.25
                else:
                    y = y + x if kind == "add" else nn.functional.silu(y)
            x = y
        return x


@pytest.mark.parametrize("seed", cases_of(12, "chains in networks"))
def test_drawn_networks_are_right(seed: int) -> None:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    module = Drawn(rng)
    shape = (rng.choice((1, 3, 4)), module.channels, rng.choice((4, 5)), rng.choice((3, 6)))
    graph, tensors = graph_of(module, (torch.randn(shape),), name="drawn")
    graph = with_dtype(graph, rng.choice(("float64", "float32", "bfloat16")))
    grid = Grid(tuple(rng.choice(({"N": 2}, {"H": 2}, {"N": 2, "W": 2}, {"C": 2})).items()))
    one = compile_network(graph, grid, target=SM_90)
    assert one.chains
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)


class Scaled(nn.Module):
    """ConvNeXt's layer scale and residual."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Conv2d(16, 16, 3, padding=1), nn.Parameter(torch.ones(16, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.max_pool2d(self.a(x), 3, 1, 1)
        return x + 0.5 * (self.scale * y)


def test_a_network_launches_them(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, tensors = graph_of(Scaled(), (torch.randn(4, 16, 6, 6),), name="scaled")
    one = compile_network(with_dtype(graph, "bfloat16"), Grid((("N", 2),)), target=SM_90)
    assert [file.said for file in one.chains] == ["mul, mul, add"]
    with loaded(one, tensors, tmp_path) as package:
        found: list[Launch] = []
        step_on_no_device(package, monkeypatch, launched=found)
    names = [one.name for one in found if one.name.startswith("chain_")]
    assert Counter(names) == {"chain_forward": 2, "chain_backward": 2}  # on two ranks


class Feature(nn.Module):
    """Linear layers with activations behind their biases, and norms along the last dimension, as ConvNeXt has them."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.channels = c = 8 * rng.randint(1, 3)
        acts = (nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.ReLU(), nn.Hardswish())
        self.norms = nn.ModuleList(nn.LayerNorm(c) for _ in "ab")
        self.wide = nn.ModuleList(nn.Linear(c, 16, bias=rng.random() < 0.8) for _ in "ab")
        self.acts = nn.ModuleList(rng.choice(acts) for _ in "ab")
        self.back = nn.ModuleList(nn.Linear(16, c) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        for norm, wide, act, back in zip(self.norms, self.wide, self.acts, self.back, strict=True):
            x = x + back(act(wide(norm(x))))
        return x


@pytest.mark.parametrize("seed", cases_of(12, "chains of features"))
def test_biases_of_linear_layers(seed: int) -> None:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    module = Feature(rng)
    shape = rng.choice(((4, module.channels), (4, 6, module.channels), (2, 4, 3, module.channels)))
    graph, tensors = graph_of(module, (torch.randn(shape),), name="drawn")
    autocast = rng.choice(("", "", "bfloat16"))
    graph = graph if autocast else with_dtype(graph, rng.choice(("float64", "float32", "bfloat16")))
    grid = Grid((("N", 2),))
    one = compile_network(graph, grid, rng.choice((None, "auto")), target=SM_90, autocast=autocast)
    report = check_network(one, {**tensors, **module.state_dict()}, interpret=True)
    assert report.ok, report_text(report)


def test_a_bias_has_its_gradient_of_the_chain(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no pass reads the gradient behind an activation for it; norms stay as ATen's are."""
    module = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    graph, tensors = graph_of(module, (torch.randn(4, 6, 16),), name="features")
    one = compile_network(with_dtype(graph, "bfloat16"), Grid((("N", 2),)), target=SM_90)
    assert [file.said for file in one.chains] == ["add, gelu"]
    with loaded(one, {**tensors, **module.state_dict()}, tmp_path) as package:
        found: list[Launch] = []
        step_on_no_device(package, monkeypatch, launched=found)
    names = [one.name for one in found if one.name.startswith("chain_")]
    assert Counter(names) == {"chain_forward": 2, "chain_backward": 2}  # on two ranks


def test_a_vector_over_channels_is_no_row_of_pixels() -> None:
    """Of one sample of one row as wide as it has channels, whose vectors look like either."""
    shape = (1, 5, 1, 5)
    (y,), (_, vector) = (getattr(bias(shape).signatures[0], side) for side in ("results", "inputs"))
    assert shape_beside(vector, y) == (1, 5, 1, 1) and how_it_lies((1, 5, 1, 1), shape) == "nc"
    turned = replace(bias(shape).signatures[0].inputs[0], dims=tuple(reversed(y.dims)))
    assert shape_beside(turned, y) is None


def test_chains_under_autocast(tmp_path: Any) -> None:
    """What has the narrow type by then is a chain's, forward and backward, as without autocast."""
    module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    graph, tensors = graph_of(module.train(), (torch.randn(4, 16),), name="narrow")
    one = compile_network(graph, Grid((("N", 2),)), target=SM_90)
    launched: list[str] = []

    def counted(kernel: Any, *args: Any, **constants: Any) -> None:
        launched.extend([kernel.fn.__name__] if kernel.fn.__name__.startswith("chain_") else [])
        launch(kernel, *args, **constants)

    with loaded(one, {**tensors, **module.state_dict()}, tmp_path) as package:
        in_interpreter(package, counted)

        def step(end: Any) -> tuple[Tensor, Any]:
            mesh = package.init_mesh("cpu", transport=end)
            model = package.Network(mesh).train()
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
            with torch.autocast("cpu", torch.bfloat16):
                y = model(package.scatter("input", x, mesh))
            y.float().square().sum().backward()
            return y, model.full_gradients()

        (y, gradients), _ = World(2).run(step)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        want = module(x)
    want.float().square().sum().backward()
    assert Counter(launched) == {"chain_forward": 2, "chain_backward": 2}
    torch.testing.assert_close(y, want[:2], rtol=0.05, atol=0.02)
    for name, p in module.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=0.1, atol=0.1)


def test_a_chain_in_a_text() -> None:
    """Rows that are one in a text that is read back are one; not where another row reads what lies between."""
    feature = Feature(random.Random(1))
    for module, shape in ((Scaled(), (4, 16, 6, 6)), (feature, (4, 6, feature.channels))):
        graph, _ = graph_of(module, (torch.randn(shape),), name="read_back")
        one = compile_network(graph, Grid((("N", 2),)), target=SM_90)
        assert one.chains
        text = show(one.program)
        assert compile_text(graph, read_text(text, "chains.txt"), target=SM_90).program == one.program

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(x)
            return torch.relu(y) + y

    graph, _ = graph_of(Twice(), (torch.randn(4, 16, 6, 6),), name="twice")
    text = show(compile_network(graph, Grid((("N", 2),))).program)
    relu = next(line for line in text.splitlines() if " = relu " in line)
    sigmoid = next(line for line in text.splitlines() if " = sigmoid " in line)
    joined = relu.replace("relu %sigmoid", "sigmoid_relu %x")
    with pytest.raises(InputError, match="more reads what lies between"):
        compile_text(graph, read_text(text.replace(sigmoid + "\n", "").replace(relu, joined), "s"), target=SM_90)
