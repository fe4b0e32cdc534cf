"""torch.compile and torch.export around a module: parameters of both kinds, DTensors, gather, another batch."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from modules import Case
from sampling import ALL
from torch import Tensor
from torch_cases import EVEN, RAGGED, layer, on_processes, x_and_dy

from convgen.verify.program import global_tensors
from convgen.verify.virtual import World

CASES = {
    "dtensors": (layer("stationary-x", "N2 C2", EVEN), "dtensors"),
    "blocks": (layer("stationary-w", "F2 C2", RAGGED), "dtensors"),
}


class Net(torch.nn.Module):
    def __init__(self, case: Case, mesh: Any, parameters: str) -> None:
        super().__init__()
        self.layer, self.conv, self.mesh = case.module, case.module.Conv(mesh, parameters=parameters), mesh

    def forward(self, x: Tensor, batch: int = EVEN.batch) -> Tensor:
        y = self.conv(x.sin(), batch).relu()
        return self.layer.gather("y", y, self.mesh, batch=batch).square().mean()


def gradients(net: Any, module: Net, x: Tensor, batch: int) -> list[Tensor]:
    module.zero_grad()
    own = x.clone().requires_grad_()
    loss = net(own, batch)
    loss.backward()
    grads = [own.grad, *(p.grad.to_local() for p in module.parameters())]
    return [loss.detach(), *(g.clone() for g in grads)]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's, of any Function
@pytest.mark.parametrize(
    ("backend", "kind"),
    [(backend, kind) for i, backend in enumerate(("eager", "aot_eager")) for j, kind in enumerate(CASES)
     if ALL or i == j],  # both of both
)  # fmt: skip
def test_in_one_graph_with_gathers_and_another_batch(backend: str, kind: str) -> None:
    case, parameters = CASES[kind]
    m = case.module
    x, _ = x_and_dy(case)

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        net = Net(case, mesh, parameters)
        compiled = torch.compile(net, backend=backend, fullgraph=True)
        for batch in (4, 8, 4, 12):
            block = m.scatter("x", torch.cat([x] * 3)[:batch], mesh, batch=batch)
            pairs = zip(gradients(compiled, net, block, batch), gradients(net, net, block, batch), strict=True)
            for got, expected in pairs:
                torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)

    on_processes(program, 4)


@pytest.mark.skipif(not ALL, reason="inductor takes half a minute; make check runs it")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
def test_inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    case = layer("sample", "N1", EVEN)  # of one rank: what travels is opaque to a compiler anyway
    mesh = World(1).run(lambda end: case.module.init_mesh(transport=end))[0]
    net = Net(case, mesh, "blocks")
    compiled = torch.compile(net, fullgraph=True)
    block = case.module.scatter("x", x_and_dy(case)[0], mesh)
    for got, expected in zip(gradients(compiled, net, block, 4), gradients(net, net, block, 4), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
def test_inductors_cuda_graphs_go_around_the_ops() -> None:
    """What an op keeps from its first call would lie in memory that they take back."""
    from torch._inductor.utils import is_cudagraph_unsafe_fx_node

    case = layer("sample", "N1", EVEN)
    names = [f"{case.layer.name}_{op}" for op in ("forward", "backward", "scatter", "gather")]
    graph = torch.fx.Graph()
    for name in names:
        assert is_cudagraph_unsafe_fx_node(graph.call_function(getattr(torch.ops.convgen, name).default))
    assert not is_cudagraph_unsafe_fx_node(graph.call_function(torch.ops.aten.relu.default))


def test_dtensors_through_compile() -> None:
    case, _ = CASES["dtensors"]
    m = case.module
    x, _ = x_and_dy(case)

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        net = m.Conv(mesh)
        given = torch.distributed.tensor.distribute_tensor(x, mesh, m.placements("x", mesh))
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        got, expected = compiled(given), net(given)
        assert got.placements == expected.placements
        assert torch.equal(got.to_local(), expected.to_local())
        wrong = torch.distributed.tensor.distribute_tensor(x, mesh, [torch.distributed.tensor.Replicate()] * 2)
        with pytest.raises(Exception, match=r"pass (x|{name})\.redistribute\(mesh"):
            compiled(wrong)

    on_processes(program, 4)


def test_export_is_refused() -> None:
    """An exported program would have the rank and the batch baked in."""
    case, _ = CASES["dtensors"]
    m = case.module
    x, _ = x_and_dy(case)

    def program(rank: int) -> None:
        mesh = m.init_mesh("cpu")
        net, block = m.Conv(mesh, parameters="blocks"), m.scatter("x", x, mesh)
        for strict in (False, True):
            with pytest.raises(Exception, match="an exported program would hold this rank's place"):
                torch.export.export(net, (block,), strict=strict)

    on_processes(program, 4)


def test_a_mesh_that_is_gone_takes_no_other_along() -> None:
    """Two meshes that say the same of themselves: the first one's end leaves the second's place known to a compiler."""
    case = layer("sample", "N1", EVEN)
    m, given = case.module, global_tensors(case.layer)
    first, mesh = (World(1).run(lambda end: m.init_mesh(transport=end))[0] for _ in range(2))
    del first
    gc.collect()
    x, w, bias = (m.scatter(n, given[n], mesh) for n in ("x", "w", "bias"))
    compiled = torch.compile(lambda x: m.conv(x, w, bias, mesh=mesh), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), m.conv(x, w, bias, mesh=mesh))
