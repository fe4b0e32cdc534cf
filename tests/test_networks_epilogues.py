"""What follows a network's convolutions on GPUs, in their kernels: right, where the rule says so, and nowhere else."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import cases_of
from test_networks_gpu import SM_90, loaded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from convgen.algebra.grid import Grid
from convgen.cost.machines import load_machine
from convgen.cost.network_memory import network_memory
from convgen.cost.rows import program_cost
from convgen.network_compiler import CompiledNetwork, compile_network, compile_text
from convgen.operations.convolution import Convolution
from convgen.operations.fused import Fused
from convgen.packages import kernel_modules
from convgen.passes.fuse_epilogues import FuseEpilogues
from convgen.passes.start_halos import StartHalos
from convgen.plan.program.edited import read_text
from convgen.program.network import Program
from convgen.program.network_text import show
from convgen.program.other_sizes import program_like
from convgen.program.verify.network import verify_network
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype
from convgen.verify.interpreter import launch
from convgen.verify.network import check_network, report_text
from convgen.verify.virtual import VirtualTransport, World

ACTIVATIONS = (nn.ReLU, nn.SiLU, nn.ReLU6, nn.Sigmoid, nn.Hardswish, lambda: nn.LeakyReLU(0.1), nn.GELU, nn.Identity)


class Residual(nn.Module):
    """Convolutions, norms by running statistics, activations, and sums with what came before."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.channels = channels = 8 * rng.randint(1, 3)
        self.layers, self.adds = nn.ModuleList(), list[bool]()
        for _ in range(rng.randint(1, 3)):
            filters = rng.choice((channels, 8))
            kernel, groups = rng.choice((1, 3)), rng.choice((1, 1, 1, 2, channels if filters == channels else 1))
            bias, padding = rng.random() < 0.5, kernel // 2
            parts: list[nn.Module] = [nn.Conv2d(channels, filters, kernel, 1, padding, groups=groups, bias=bias)]
            if rng.random() < 0.5:
                norm = nn.BatchNorm2d(filters)
                nn.init.normal_(norm.running_mean)  # type: ignore[arg-type]
                nn.init.uniform_(norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]
                parts.append(norm.eval())
            parts += [rng.choice(ACTIVATIONS)()] * (rng.random() < 0.3)
            self.layers.append(nn.ModuleList([nn.Sequential(*parts), rng.choice(ACTIVATIONS)()]))
            self.adds.append(filters == channels and rng.random() < 0.5)
            channels = filters

    def forward(self, x: Tensor) -> Tensor:
        for pair, adds in zip(self.layers, self.adds, strict=True):
            convolved, activation = pair  # type: ignore[misc]
            y = convolved(x)
            x = activation(y + x if adds else y)
        return x


@cache
def drawn(seed: int) -> tuple[CompiledNetwork, dict[str, Tensor]]:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    module = Residual(rng).double().eval()
    shape = (rng.choice((2, 3)), module.channels, rng.choice((4, 6)), rng.choice((4, 5)))
    graph, tensors = graph_of(module, (torch.randn(shape, dtype=torch.float64),))
    graph = with_dtype(graph, rng.choice(("float64", "float32", "bfloat16")))
    grid = Grid((rng.choice((("N", 2), ("H", 2), ("H", 2), ("C", 2))),))
    return compile_network(graph, grid, target=SM_90), tensors


def fused(one: CompiledNetwork) -> list[Fused]:
    operations = [row.bound.operation for row in one.program.rows]
    return [op for op in operations if isinstance(op, Fused) and op.epilogue]


@pytest.mark.parametrize("seed", cases_of(10, "test_drawn_networks_are_right"))
def test_drawn_networks_are_right(seed: int) -> None:
    one, tensors = drawn(seed)
    verify_network(one.program)
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)


def test_draws_have_everything() -> None:
    seen: Counter[str] = Counter()
    for seed in range(11):
        one, _ = drawn(seed)
        for op in fused(one):
            assert op.epilogue
            seen.update(kind for step in op.epilogue for kind in (*(k for k, _ in step.operands), step.back))
            seen["depthwise"] += op.parts[0].operation.conv.groups > 2  # type: ignore[union-attr]
        own = [row.derived for row in one.program.rows if isinstance(row.bound.operation, Fused)]
        seen["rows of their own"] += any(own)
        seen["apart"] += sum(isinstance(row.bound.operation, Convolution) for row in one.program.rows)
    wanted = ("element", "channel", "sum", "result", "input", "depthwise", "rows of their own", "apart")
    assert all(seen[what] >= 2 for what in wanted), seen


class Block(nn.Module):
    """[ResNet]'s, with norms by running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + x)


def compiled(module: nn.Module, *shape: int, dtype: str = "float32", **grid: int) -> CompiledNetwork:
    graph, _ = graph_of(module, (torch.randn(shape),))
    return compile_network(with_dtype(graph, dtype), Grid(tuple(grid.items())), target=SM_90)


def test_a_block_is_two_launches(tmp_path: Path) -> None:
    """In evaluation: one a convolution; without epilogues ATen goes over its result three times more, and four."""
    one = compiled(Block().eval(), 2, 8, 6, 5, N=2)
    apart = replace(one, program=one.plain, other=one.other)
    assert [op.name for op in fused(one)] == [
        "conv_forward_evaluated_norm_relu",
        "conv_forward_evaluated_norm_add_relu",
    ]
    assert fused(apart)  # the plain program has them as well

    class Counted(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, Tensor) and made.shape == (1, 8, 6, 5):
                self.ops[func.overloadpacket.__name__] += 1
            return made

    ran: list[Any] = []

    def counted(kernel: Any, *args: Any, **constants: Any) -> None:
        ran.append(kernel)
        launch(kernel, *args, **constants)

    with loaded(one, {}, tmp_path) as package:
        package.NET.device = "cpu"
        for module in kernel_modules(package):
            module.launch = counted

        def step(end: VirtualTransport) -> Counter[str]:
            mesh = package.init_mesh("cpu", transport=end)
            network = package.Network(mesh).eval()
            x = package.scatter("x", torch.ones(2, 8, 6, 5), mesh)
            with torch.no_grad(), Counted() as mode:
                network(x)
            return mode.ops

        ops = World(2).run(step)[0]
    assert not {"relu", "add", "sub", "mul", "addcmul", "native_batch_norm", "convolution"} & set(ops), ops
    assert len(set(ran)) == 2 and len(ran) <= 2 * 2 * 2  # of two ranks; one may be two launches


def test_text_price_and_memory_are_those_of_what_runs() -> None:
    one = compiled(Block().eval(), 4, 8, 6, 5, N=2)
    text = show(one.program)
    assert "= conv_forward_evaluated_norm_add_relu %" in text and " relu %" not in text
    graph, _ = graph_of(Block().eval(), (torch.randn(4, 8, 6, 5),))
    graph = with_dtype(graph, "float32")
    again = compile_text(graph, read_text(text, "block.txt"), target=SM_90)
    assert show(again.program) == text
    apart = compile_network(graph, one.program.grid)  # for a CPU
    machine = load_machine("cuda")
    fast, slow = (program_cost(p, machine, "float32").seconds for p in (one.program, apart.program))
    assert fast < slow
    assert network_memory(one.program).peak < network_memory(apart.program).peak
    assert FuseEpilogues().run(apart.program) is not apart.program
    assert FuseEpilogues().run(one.program) is one.program


class ReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.relu(y) + y


class Gated(nn.Module):
    """A number a sample and channel is no vector over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * x.mean((2, 3), keepdim=True)


@pytest.mark.parametrize("module", [ReadTwice, Gated])
def test_what_the_rule_leaves_stays_apart(module: Any) -> None:
    assert not fused(compiled(module(), 4, 8, 6, 5, N=2))


def test_partial_sums_stay_apart() -> None:
    assert not fused(compiled(Block().eval(), 2, 8, 6, 5, C=2))


def test_a_norm_in_training_stays_apart() -> None:
    """Its statistics read what the convolution makes."""
    assert not fused(compiled(Block(), 2, 8, 6, 5, N=2))


class Clipped(nn.Module):
    """Bounds that bfloat16 rounds towards 0: what is clipped then seems to lie between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.pool = nn.Conv2d(16, 16, 3, padding=1), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(nn.functional.hardtanh(self.a(x), -0.7, 0.7))


def test_gradients_of_what_is_clipped_are_zeros() -> None:
    torch.manual_seed(0)
    module = Clipped().bfloat16()
    graph, tensors = graph_of(module, (torch.randn(2, 16, 8, 8).bfloat16() * 2,))
    compiled = compile_network(graph, Grid((("N", 2),)), target=SM_90)
    assert next(row.bound.operation.name for row in compiled.program.rows) == "conv_forward_add_hardtanh"
    report = check_network(compiled, tensors, interpret=True)
    assert report.ok, report_text(report)


class Rows(nn.Module):
    """Halos, and gradients that send fewer channels of dy than of dx."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv2(nn.functional.silu(self.conv1(x))))


def in_pieces(dtype: str, **grid: int) -> tuple[CompiledNetwork, dict[str, Tensor]]:
    """Every halo in flight that may be."""
    graph, tensors = graph_of(Rows().double(), (torch.randn(1, 8, 8, 3, dtype=torch.float64),))
    one = compile_network(with_dtype(graph, dtype), Grid(tuple(grid.items())))
    program, other = (FuseEpilogues().run(StartHalos().run(p)) for p in (one.plain, for_many(one)))
    return replace(one, program=program, other=other, target=SM_90), tensors


def for_many(one: CompiledNetwork) -> Program:
    return program_like(one.plain, one.any_sizes.many)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_pieces_while_a_halo_travels_have_the_steps_too(dtype: str) -> None:
    one, tensors = in_pieces(dtype, H=2)
    rows = [row for row in one.program.rows if isinstance(row.bound.operation, Fused)]
    assert len(rows) == 2 and all(row.early == 0 and row.split for row in rows)
    assert any(row.derived for row in rows)
    verify_network(one.program)
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)


def test_ranks_without_a_kernel_compute_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those do whose blocks cut groups: ATen's convolution, then what follows it."""
    one, tensors = in_pieces("float64", H=2)
    monkeypatch.setattr("convgen.network_compiler.convolution_files", lambda *_: ())
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)
