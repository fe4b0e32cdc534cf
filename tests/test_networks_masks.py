"""Gradients of rectifiers in the kernels of backward-data: right, where the rule says so, and nowhere else."""

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
from convgen.kernels.choose import choose
from convgen.kernels.facts import facts, launches
from convgen.kernels.families import box, gemm, pointer
from convgen.kernels.of_rows import convolution_files, problem_of
from convgen.kernels.source import Kernel
from convgen.network_compiler import CompiledNetwork, compile_network, compile_text
from convgen.operations.convolution import ADD, LocalConvolution
from convgen.operations.fused import Fused
from convgen.plan.program.edited import read_text
from convgen.program.network_text import show
from convgen.program.verify.network import verify_network
from convgen.spec.exported import graph_of
from convgen.spec.graph_edit import with_dtype
from convgen.verify.interpreter import in_interpreter
from convgen.verify.network import check_network, report_text
from convgen.verify.virtual import VirtualTransport, World

ACTIVATIONS = (nn.ReLU, nn.ReLU6, lambda: nn.LeakyReLU(0.2), nn.Sigmoid, nn.SiLU)


class Drawn(nn.Module):
    """Norms of training, activations and convolutions behind them, some of whose inputs others read."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.channels = channels = 8 * rng.randint(1, 2)
        self.norms, self.acts, self.convs = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self.adds: list[bool] = []
        for _ in range(rng.randint(2, 3)):
            filters, kernel = rng.choice((channels, 8)), rng.choice((1, 2, 3))
            self.norms.append(rng.choice((nn.BatchNorm2d(channels), nn.Identity())))
            self.acts.append(rng.choice(ACTIVATIONS)())
            groups, stride = rng.choice((1, 1, 1, channels)), rng.choice((1, 1, 2))
            groups = 1 if filters % groups else groups
            conv = nn.Conv2d(channels, filters, kernel, stride, kernel // 2, groups=groups, bias=False)
            self.convs.append(conv)
            self.adds.append(filters == channels and stride == 1 and kernel != 2 and rng.random() < 0.4)
            channels = filters

    def forward(self, x: Tensor) -> Tensor:
        for norm, act, conv, adds in zip(self.norms, self.acts, self.convs, self.adds, strict=True):
            before = act(norm(x))
            x = conv(before) + before if adds else conv(before)
        return x


def drawn(seed: int) -> tuple[CompiledNetwork, dict[str, Tensor]]:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    module = Drawn(rng).double()
    shape = (rng.choice((2, 3)), module.channels, rng.choice((5, 6)), rng.choice((4, 5)))
    graph, tensors = graph_of(module, (torch.randn(shape, dtype=torch.float64),), name="drawn")
    graph = with_dtype(graph, rng.choice(("float64", "float32", "bfloat16")))
    return compile_network(graph, Grid((rng.choice((("N", 2), ("N", 2), ("H", 2))),)), target=SM_90), tensors


def masked(one: CompiledNetwork) -> list[Fused]:
    operations = [row.bound.operation for row in one.program.rows]
    return [op for op in operations if isinstance(op, Fused) and op.mask]


@pytest.mark.parametrize("seed", cases_of(4, "test_drawn_networks_are_right"))
def test_drawn_networks_are_right(seed: int) -> None:
    one, tensors = drawn(seed)
    verify_network(one.program)
    report = check_network(one, tensors, interpret=True)
    assert report.ok, report_text(report)


class Each(nn.Module):
    """Every activation, between a pooling and a convolution; then what keeps them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.MaxPool2d(3, 1, 1) for _ in range(9))
        self.acts = nn.ModuleList(a() for a in ACTIVATIONS)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(8))
        self.grouped = nn.Conv2d(8, 8, 1, groups=2, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for norm, act, conv in zip(self.norms, self.acts, self.convs, strict=False):
            x = conv(act(norm(x)))
        twice = torch.relu(self.norms[5](x))
        x = self.convs[5](twice) + twice
        x = self.grouped(torch.relu(self.norms[6](x)))
        out = torch.relu(self.norms[7](x))
        return self.convs[6](out), out


@cache
def each(axis: str, dtype: str = "float32") -> tuple[CompiledNetwork, dict[str, Tensor]]:
    graph, tensors = graph_of(Each().double(), (torch.randn(2, 8, 6, 5, dtype=torch.float64),), name="each")
    return compile_network(with_dtype(graph, dtype), Grid(((axis, 2),)), target=SM_90), tensors


def test_which_rows_are_one() -> None:
    one, _ = each("N")
    assert [op.parts[0].operation.name for op in masked(one)] == ["relu", "hardtanh", "leaky_relu", "sigmoid"]
    assert not masked(each("H")[0]), "a halo's gradient moves between them"
    files = [f for f in convolution_files(one.program, SM_90) if f.masks and f.epilogue != ADD]
    assert len(files) == 2 * 4 and all(  # of float32's products and of TF32's
        "def backward_data(dy: Tensor, w: Tensor, with_0: Tensor, dx" in f.text for f in files
    )


def test_the_program_is_read_back() -> None:
    one, _ = each("N")
    text = show(one.program)
    assert "relu_conv_forward" in text
    again = compile_text(one.graph, read_text(text, "each.txt"), target=SM_90)
    assert show(again.program) == text and len(masked(again)) == 4


def test_the_gradient_is_made_in_one_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass of ATen's over activations is left for them."""
    one, tensors = each("N")
    seen: Counter[str] = Counter()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[func._schema.name.removeprefix("aten::")] += 1
            return func(*args, **(kwargs or {}))

    with loaded(one, tensors, tmp_path) as package:
        in_interpreter(package)
        x = torch.randn(2, 8, 6, 5)

        def step(end: VirtualTransport) -> None:
            mesh = package.init_mesh("cpu", transport=end)
            y, out = package.Network(mesh, parameters="blocks")(package.scatter("x", x, mesh))
            with Counted():
                (y.sum() + out.sum()).backward()

        World(2).run(step)
    assert seen["threshold_backward"] == 2 * 3, seen  # of what others read, groups, and an output
    assert not any(seen[f"{name}_backward"] for name in ("hardtanh", "leaky_relu", "sigmoid")), seen


@pytest.mark.parametrize("family", [box, gemm, pointer])
def test_kernels_with_a_mask_compile_and_spill_nothing(family: Any) -> None:
    one, _ = each("N")
    (epilogue,) = {op.mask for op in masked(one) if op.parts[0].operation.name == "relu"}
    taps = 1 if family is gemm else 3
    held = LocalConvolution(128, 64, 1, ((14, 14, taps, 1, 1, taps // 2),) * 2)
    problem = replace(problem_of(held, "backward_data", 16, "bfloat16", True), epilogue=epilogue)
    assert family.refusal(problem, SM_90) is None
    if family is pointer:
        kernel = Kernel((problem,), next(pointer.configs(problem, SM_90)), SM_90)
    else:
        kernel = choose((problem,), SM_90)
        assert kernel.config.family == family.NAME
    assert all(not facts(one, SM_90).spill_bytes for one in launches(kernel, problem))
