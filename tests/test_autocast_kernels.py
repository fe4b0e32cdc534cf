"""Networks of float32 compiled for autocast on a GPU: kernels of the low type run under it, ATen without it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from sampling import cases_of
from test_networks_gpu import SM_90, Drawn, loaded
from test_networks_tf32 import interpreted
from torch import Tensor, nn
from torch.nn.functional import silu

from convgen.algebra.grid import Grid
from convgen.kernels.facts import facts, launches
from convgen.network_compiler import compile_network
from convgen.packages import load_package
from convgen.spec.exported import graph_of
from convgen.verify.interpreter import in_interpreter
from convgen.verify.network import check_network, report_text
from convgen.verify.virtual import World


@pytest.mark.parametrize("seed", cases_of(3, "test_drawn_networks_under_autocast"))
def test_drawn_networks_under_autocast(seed: int) -> None:
    """Forward, gradients and steps of training in the interpreter are within what one device is under autocast; ranks
    send what is said."""
    rng = random.Random(f"autocast kernels {seed}")
    torch.manual_seed(seed)
    module = Drawn(rng)
    x = torch.randn(2, module.channels, 12, rng.choice((9, 12)))
    graph, tensors = graph_of(module, (x,), name="drawn")
    grid = Grid(tuple(rng.choice(({"N": 2}, {"H": 2}, {"C": 2}, {"N": 2, "W": 2})).items()))
    one = compile_network(graph, grid, target=SM_90, autocast="bfloat16")
    assert one.kernels and {k.dtype for k in one.kernels} == {"bfloat16"} and not any(k.switched for k in one.kernels)
    report = check_network(one, tensors, interpret=True)
    assert report.ok and report.dtype == "bfloat16", report_text(report)
    assert max(c.error for c in report.compared) > 2.0**-10


class Scaled(nn.Module):
    """A convolution whose kernel takes a rectifier in, and one behind which a scale of float32 widens its result."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.scale = nn.Parameter(torch.full((16, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.b(silu(torch.relu(self.a(x))))


def test_what_runs_is_of_the_low_type(tmp_path: Any) -> None:
    """Under autocast kernels run, each of operands of its type; without it, and under another, none does; results are
    the module's in type and in number."""
    torch.manual_seed(1)
    module, x = Scaled(), torch.randn(2, 16, 12, 12)
    graph, tensors = graph_of(module, (x,), name="scaled")
    one = compile_network(graph, Grid((("H", 2),)), target=SM_90, autocast="bfloat16")
    folder = tmp_path / "scaled"
    folder.mkdir()
    for name, text in one.package().files.items():
        (folder / name).write_text(text)
    package = load_package(folder)
    ran = interpreted(package)

    def on_rank(end: Any, low: torch.dtype | None) -> tuple[Tensor, dict[str, Tensor]]:
        mesh = package.init_mesh("cpu", transport=end)
        model = package.Network(mesh)
        model.load_full(module.state_dict() | tensors)
        with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
            y = package.gather("output", model(package.scatter("x", x, mesh)), mesh)
        y.square().mean().backward()
        return y.detach(), model.full_gradients()

    for low, tolerance in ((torch.bfloat16, 2.0**-5), (torch.float16, 2.0**-8), (None, 1e-5)):
        module.zero_grad()
        with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
            wanted = module(x)
        wanted.square().mean().backward()
        exact = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        ran.clear()
        for y, gradients in World(2).run(lambda end, low=low: on_rank(end, low)):
            assert y.dtype == wanted.dtype
            assert float((y - wanted.detach()).norm() / wanted.detach().norm()) < tolerance
            for n, g in gradients.items():
                assert g.dtype == torch.float32 and float((g - exact[n]).norm() / exact[n].norm()) < 4 * tolerance, n
        assert any("convolution_" in name for name in ran) == (low == torch.bfloat16), ran


def test_a_bias_where_nothing_is_kept(tmp_path: Any) -> None:
    """Of a grouped convolution, which has no epilogue: without autocast ATen adds it, with gradients or without."""
    torch.manual_seed(1)
    module, x = nn.Conv2d(16, 16, 1, groups=4), torch.randn(2, 16, 4, 4)
    graph, tensors = graph_of(module, (x,), name="grouped")
    one = compile_network(graph, Grid((("N", 1),)), target=SM_90, autocast="float16")
    with loaded(one, module.state_dict() | tensors, tmp_path) as package:
        in_interpreter(package)

        def on_rank(end: Any) -> None:
            mesh = package.init_mesh("cpu", transport=end)
            model = package.Network(mesh)
            model.load_full(module.state_dict() | tensors)
            for low in (False, True):
                with torch.autocast("cpu", torch.float16, enabled=low):
                    wanted = module(x).detach()
                    ys = [model(package.scatter("input", x, mesh)).detach()]
                    with torch.no_grad():
                        ys.append(model(package.scatter("input", x, mesh)))
                for y in ys:
                    torch.testing.assert_close(y, wanted, rtol=0, atol=2e-3 if low else 1e-6)

        World(1).run(on_rank)


def test_kernels_compile_without_a_device() -> None:
    graph, _ = graph_of(Scaled(), (torch.zeros(2, 16, 12, 12),), name="scaled")
    plain, low = (
        compile_network(graph, Grid((("N", 2),)), target=SM_90, autocast=kind).kernels for kind in ("", "float16")
    )
    assert len(low) < len(plain)  # float32 has TF32's beside it
    for kernel in low[0].kernels:
        assert kernel.problem.dtype == "float16"
        assert all(facts(one, SM_90).registers for one in launches(kernel, kernel.problem))
