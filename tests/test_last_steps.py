"""Products whose kernels do what the batch norm before them does last, forward and backward: bit for bit the same."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import cases_of
from test_kernels_norms import ADDED, CHAINS, EPS, RECTIFIED, RELU_BACK
from test_networks_gpu import SM_90, loaded
from torch import Tensor, nn

from convgen.algebra.grid import Grid
from convgen.kernels.choose import choose
from convgen.kernels.config import parse_config
from convgen.kernels.facts import facts, launches
from convgen.kernels.load import load_text
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.prologue_gains import prologue_refusal
from convgen.kernels.prologues import Before
from convgen.kernels.source import Kernel, kernel_module
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.operations.convolution import ADD
from convgen.operations.row import EpilogueStep, Prologue
from convgen.packages import runtime_of
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype
from convgen.verify.interpreter import in_interpreter, launch
from convgen.verify.virtual import VirtualTransport, World

STEPS: dict[str, tuple[EpilogueStep, ...]] = {"alone": (), "relu": (RECTIFIED,), "add relu": (ADDED, RECTIFIED)}


def product(phase: Any, batch: int, channels: int, filters: int, dtype: str = "bfloat16") -> Problem:
    dims = tuple(LocalDim(name, n, n, 1, 1, 1, 0) for name, n in (("H", 3), ("W", 5)))
    return Problem(
        phase=phase, batch=batch, channels=channels, filters=filters, dims=dims, dtype=dtype,
        memory_format="channels_last",
    )  # fmt: skip


def last(*tensors: Tensor) -> list[Tensor]:
    return [t.contiguous(memory_format=torch.channels_last) for t in tensors]


def module_of(kernel: Kernel, patch: pytest.MonkeyPatch) -> Any:
    module: Any = load_text(kernel_module([kernel]))
    patch.setattr(module, "launch", launch)
    return module


@pytest.mark.parametrize("seed", cases_of(24, "last steps of norms"))
def test_kernels_do_what_norms_do_last(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they write, and what they make of it, is to the bit what a norm's and a product's kernel make."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    gradient, dtype = bool(seed % 2), rng.choice((torch.bfloat16, torch.float16))
    name = rng.choice(list(CHAINS)[: 2 if gradient else 3])
    n, c, f = rng.randint(1, 6), rng.choice((8, 40, 72, 130)), rng.choice((8, 24, 136))
    read, made = (f, c) if gradient else (c, f)
    steps = STEPS[name]
    before = Before(Prologue(gradient, steps), RELU_BACK if gradient and steps else "")
    p = product("backward_data" if gradient else "forward", n, c, f, str(dtype).removeprefix("torch."))
    config = choose((replace(p, before=before),), SM_90).config
    assert config.family == "gemm"
    if rng.random() < 0.5:  # several tiles of what is made, and several steps
        config = replace(config, tiles=tuple((k, 16 if k != "BP" else size) for k, size in config.tiles))
    adds = gradient and rng.random() < 0.5
    moments: Any = "" if gradient else rng.choice(("batch", "samples"))
    whole = replace(p, before=before, moments=moments, epilogue=ADD if adds else ())
    kernel, plain = Kernel((whole,), config, SM_90), Kernel((replace(whole, before=None),), config, SM_90)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, dy, beside, more = last(*(drawn(n, k, 3, 5).to(dtype) for k in (read, read, read, made)))
    if rng.random() < 0.3:
        x[0, rng.randrange(read), 1, 2] = rng.choice((torch.nan, torch.inf, -torch.inf))
    (w,) = last(drawn(f, c, 1, 1).to(dtype))
    mean, variance = drawn(read), drawn(read).square() + 0.1
    scale, shift = (drawn(read).to(rng.choice((dtype, torch.float32))) for _ in "wb")
    norm: Any = load_text(CHAINS[name].text)
    monkeypatch.setattr(norm, "launch", launch)
    wanted, found, out, again = (torch.full_like(t, torch.nan) for t in (x, x, more, more))
    given: tuple[Any, ...] = mean, variance, scale, shift
    if gradient:
        sums = drawn(3, read)
        norm.dx(x, *given, EPS, dy, name == "relu", sums, x.numel() // read, True, wanted)
        given, operand = (*given, x, sums, found, x.numel() // read), dy
    else:
        others = [beside] if name == "add relu" else []
        norm.apply(x, *given, EPS, others, wanted)
        given, operand = (*given, *others, found), x
    sizes = ((3, 5), (3, 5), (0, 0), c, f, 1)
    own, others = module_of(kernel, monkeypatch), [more] if adds else []
    run = getattr(own, p.phase)
    of_own = run(operand, w, *others, out, own.Sizes(n, *sizes), given, EPS)
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
    apart = module_of(plain, monkeypatch)
    of_plain = getattr(apart, p.phase)(wanted, w, *others, again, apart.Sizes(n, *sizes))
    assert torch.equal(out.view(torch.int16), again.view(torch.int16))
    for a, b in zip(of_own or (), of_plain or (), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


class Bottleneck(nn.Module):
    """Products behind norms with each kind of steps, one with a stride, two that read one value, a frozen one, one
    whose norm has no weights, and one that reads an output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.a, self.bn_a = nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.b, self.bn_b = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.c, self.bn_c = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.down, self.bn_down = nn.Conv2d(16, 24, 1, 2, bias=False), nn.BatchNorm2d(24)
        self.d, self.bn_d = nn.Conv2d(16, 24, 1, bias=False), nn.BatchNorm2d(24)
        self.pool = nn.AvgPool2d(2)
        self.e, self.bn_e = nn.Conv2d(24, 16, 1, bias=False), nn.BatchNorm2d(16, affine=False)
        self.f, self.bn_f = nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.g, self.bn_g = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.f.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.bn(self.stem(x)))
        y = torch.relu(self.bn_a(self.a(x)))
        y = torch.relu(self.bn_b(self.b(y)))
        x = torch.relu(self.bn_c(self.c(y)) + x)
        y = self.pool(torch.relu(self.bn_d(self.d(x))))
        x = torch.relu(self.bn_down(self.down(x)) + y)
        y = self.bn_f(self.f(self.bn_e(self.e(x))))
        return self.bn_g(self.g(y)), y


def bottleneck(grid: dict[str, int], statistics: Any, low: str) -> tuple[CompiledNetwork, dict[str, Tensor]]:
    manual_seed: Any = torch.manual_seed
    manual_seed(0)
    module = Bottleneck()
    for name, t in module.named_parameters():
        if "bn" in name:
            nn.init.uniform_(t, 0.5, 1.5)
    graph, constants = graph_of(module.train(), (torch.randn(4, 3, 6, 6),), name="bottleneck")
    tensors, rest = {**constants, **module.state_dict()}, {"statistics": statistics, "target": SM_90, "autocast": low}
    if low:
        return compile_network(graph, Grid(tuple(grid.items())), **rest), tensors
    one = compile_network(with_dtype(graph, "bfloat16"), Grid(tuple(grid.items())), **rest)
    return one, {k: t.bfloat16() if t.is_floating_point() else t for k, t in tensors.items()}


@pytest.mark.parametrize(
    ("grid", "statistics", "low"),
    [
        ({"N": 1}, "global", ""),
        ({"N": 2}, "global", ""),
        ({"N": 2}, "local", "bfloat16"),
        ({"H": 2}, "global", "float16"),
        ({"C": 2}, "global", ""),
    ],
)
def test_a_step_is_the_same_to_the_bit(grid: dict[str, int], statistics: str, low: str, tmp_path: Path) -> None:
    """With parameters of the low type, and with those of float32 under autocast."""
    one, tensors = bottleneck(grid, statistics, low)
    files = [file for file in one.kernels if file.before]
    with loaded(one, tensors, tmp_path) as package:
        table: dict[Any, Any] = getattr(runtime_of(package), "PROLOGUES", {})
        assert bool(table) == bool(files) == ("C" not in grid)
        count = Counter[str]()

        def counted(kernel: Any, *args: Any, **more: Any) -> None:
            count[kernel.fn.__name__] += 1
            launch(kernel, *args, **more)

        in_interpreter(package, counted)

        def run(end: VirtualTransport) -> dict[str, Tensor]:
            mesh = package.init_mesh("cpu", transport=end)
            model = package.Network(mesh).train()
            model.load_full(dict(tensors))
            x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))
            x = (x if low else x.bfloat16()).requires_grad_()
            given = package.scatter("x", x, mesh)
            found: dict[str, Tensor] = {}
            for step in range(2):
                with torch.autocast("cpu", getattr(torch, low or "bfloat16"), enabled=bool(low)):
                    outs = model(given)
                sum((t.float().square().sum() for t in outs), torch.zeros(())).backward()
                found |= {f"{step} {k}": t.clone() for k, t in model.full_gradients().items()}
                found |= {f"{step} out {k}": t.detach().clone() for k, t in enumerate(outs)}
                model.zero_grad()
            return found | {k: getattr(t, "_local_tensor", t).clone() for k, t in model.named_buffers()}

        ranks = one.program.grid.ranks
        ours, launched = World(ranks).run(run), Counter(count)
        table.clear()
        count.clear()
        plain = World(ranks).run(run)
    for a, b in zip(ours, plain, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), name
    fewer = {name: count[name] - launched[name] for name in ("norm_apply", "norm_dx")}
    # a, c, d and g behind norms with weights; gradients of a, c, d, f and g, whose norms have some.
    wanted = {"norm_apply": 4, "norm_dx": 5} if files else {"norm_apply": 0, "norm_dx": 0}
    assert fewer == {name: n * ranks * 2 for name, n in wanted.items()}
    assert sum(launched.values()) == sum(count.values()) - sum(fewer.values())


class Frozen(nn.Module):
    """A product behind a norm, none of whose operands wants a gradient, before one that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn_a = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.b, self.bn_b = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.last = nn.Conv2d(16, 8, 1, bias=False)
        for t in (*self.a.parameters(), *self.bn_a.parameters(), *self.b.parameters(), *self.bn_b.parameters()):
            t.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.bn_b(self.b(torch.relu(self.bn_a(self.a(x)))))))


class Sloping(nn.Module):
    """A leaky rectifier of a norm's sum, whose gradient reads its result, and a sum that could be written over that."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.leaky_relu(self.bn(self.a(x)) + x, 0.1)
        return self.b(y + x)


def steps_of(module: nn.Module, folder: Path, run: Any) -> None:
    """On a rank, of a package for a GPU in the interpreter, and of the module."""
    manual_seed: Any = torch.manual_seed
    manual_seed(0)
    graph, constants = graph_of(module.train(), (torch.randn(2, 8, 4, 4),), name=type(module).__name__.lower())
    one = compile_network(with_dtype(graph, "bfloat16"), Grid((("N", 1),)), target=SM_90)
    tensors = {k: t.bfloat16() if t.is_floating_point() else t for k, t in {**constants, **module.state_dict()}.items()}
    with loaded(one, tensors, folder) as package:
        in_interpreter(package)

        def program(end: VirtualTransport) -> None:
            mesh = package.init_mesh("cpu", transport=end)
            model = package.Network(mesh).train()
            model.load_full(dict(tensors))
            for (name, t), like in zip(model.named_parameters(), module.parameters(), strict=True):
                assert t.shape == like.shape, name
                t.requires_grad_(like.requires_grad)
            x = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
            run(package, mesh, model, x)

        World(1).run(program)


@pytest.mark.parametrize("grad", [True, False])
def test_products_that_keep_nothing(grad: bool, tmp_path: Path) -> None:
    """A frozen beginning in training, and training without gradients, which renews running statistics."""
    module = Frozen()

    def run(package: Any, mesh: Any, model: Any, x: Tensor) -> None:
        assert runtime_of(package).PROLOGUES
        with torch.set_grad_enabled(grad):
            y = model(package.scatter("x", x, mesh))
            wanted = module(x.float())
        assert (y.float() - wanted).norm() < 0.05 * wanted.norm()
        for name, t in module.named_buffers():
            found = model.get_buffer(name)
            torch.testing.assert_close(getattr(found, "_local_tensor", found).float(), t.float(), rtol=0.02, atol=0.02)
        if grad:
            y.float().square().sum().backward()
            wanted.square().sum().backward()
            made, exact = model.full_gradients()["last.weight"].float(), module.last.weight.grad
            assert exact is not None and (made - exact).norm() < 0.05 * exact.norm()

    steps_of(module, tmp_path, run)


def test_what_a_norm_reads_again_is_not_written_over(tmp_path: Path) -> None:
    module = Sloping()

    def run(package: Any, mesh: Any, model: Any, x: Tensor) -> None:
        x = x.abs() * 4  # a sum with it has another sign than what the rectifier made
        given = package.scatter("x", x, mesh).requires_grad_()
        model(given).float().square().sum().backward()
        module(x.float()).square().sum().backward()
        for name, t in module.named_parameters():
            found = model.full_gradients()[name].float()
            assert t.grad is not None and (found - t.grad).norm() < 0.05 * t.grad.norm(), name

    steps_of(module, tmp_path, run)


def test_a_norm_that_makes_a_nan_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the product behind it writes what it makes."""
    monkeypatch.setenv("CONVGEN_COMPARE", "1")

    def run(package: Any, mesh: Any, model: Any, x: Tensor) -> None:
        x[0, 0, 0, 0] = 3e38  # of which a product is infinite, and less its mean no number
        with pytest.raises(
            RuntimeError, match="the first NaN of this call: rank 0: row %bn_a, whose operands have none"
        ):
            model(package.scatter("x", x, mesh))

    steps_of(Frozen(), tmp_path, run)


@pytest.mark.parametrize("rows", [56, 28, 14, 7])
def test_kernels_of_bottlenecks_spill_nothing(rows: int) -> None:
    """ResNet-50's products of 16 samples, as they are behind norms and their gradients."""
    wide = 64 * 56 // rows
    for phase, c, f, name in (
        ("forward", wide, 4 * wide, "relu"),
        ("forward", 4 * wide, wide, "add relu"),
        ("backward_data", wide, 4 * wide, "alone"),
        ("backward_data", 4 * wide, wide, "relu"),
    ):
        back = RELU_BACK if phase == "backward_data" and name == "relu" else ""
        before = Before(Prologue(phase == "backward_data", STEPS[name]), back)
        dims = tuple(LocalDim(d, rows, rows, 1, 1, 1, 0) for d in "HW")
        kernel = choose((replace(product(phase, 16, c, f), dims=dims, before=before),), SM_90)
        kernel = replace(kernel, problems=(replace(kernel.problem, moments="batch" if phase == "forward" else ""),))
        for one in launches(kernel, kernel.problem):
            assert not facts(one, SM_90).spill_bytes, (str(kernel.config), name, phase)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": "float32"}, "two bytes"),
        ({"memory_format": "contiguous"}, "two bytes"),
        ({"groups": 2}, "two bytes"),
        ({"x_parts": 2}, "parts"),
        ({"before": None}, "nothing stands before it"),
        ({"channels": 512, "filters": 2048, "dims": (LocalDim("H", 7, 7, 1, 1, 1, 0),) * 2, "batch": 16}, "us apart"),
    ],
)
def test_what_does_not_pay_is_refused(change: dict[str, Any], why: str) -> None:
    p = replace(product("backward_data", 4, 64, 64), before=Before(Prologue(True, ())))
    config = parse_config("gemm BP=64 BC=64 BF=64 warps=4 stages=4")
    assert prologue_refusal(p, config, SM_90) is None
    assert why in (prologue_refusal(replace(p, **change), config, SM_90) or "")
