"""Phases of a layer's module as CUDA graphs: the numbers of phases without, and nothing that a call leaves is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modules import Case, draw
from recorded_graphs import as_recorded, fake_graphs
from runtime_parts import ROOT
from sampling import cases_of
from test_stream_lanes import DEVICE, Stream

from convgen.verify.virtual import VirtualTransport, World

from runtime import graphs  # isort: skip
from runtime.mesh import shared  # isort: skip

assert (ROOT / "templates").is_dir(), "which runtime_parts has put on the path"


def plain(tensor: Any) -> Any:
    return getattr(tensor, "_block", getattr(tensor, "_local_tensor", tensor))


def gradients(made: Any) -> list[Any]:
    return [plain(p.grad) for p in made._parameters.values() if p is not None]


def phases(case: Case, end: VirtualTransport, seed: int) -> None:
    """Calls of a module and of its graphs: the same, and nothing that one leaves is overwritten by the next."""
    module: Any = case.module
    mesh = module.init_mesh("cpu", transport=as_recorded(end))
    how = ("dtensors", "blocks")[seed % 2]
    eager, copy = (module.Conv(mesh, seed=seed, parameters=how) for _ in range(2))
    generator, learns = torch.Generator().manual_seed(seed), seed % 3 > 0
    shape = case.layer.conv.shape("x")
    first, *later = [
        module.scatter("x", torch.randn(shape, generator=generator, dtype=torch.float64), mesh) for _ in range(3)
    ]
    graphed = copy.graphed(first.requires_grad_(learns))
    assert first.grad is None and all(p.grad is None for p in copy._parameters.values() if p is not None)
    pairs: list[Any] = []
    for given in later:
        one, other = given.clone().requires_grad_(learns), given.clone().requires_grad_(learns)
        ys = graphed(one), eager(other)
        for y in ys:
            (y * y.detach().cos()).sum().backward()
        pairs += [ys, (one.grad, other.grad)]
        torch.testing.assert_close(gradients(copy), gradients(eager), rtol=0, atol=0)
    for pair in pairs:
        torch.testing.assert_close(*pair, rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(graphed(first), eager(first), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")  # of blocks without elements
@pytest.mark.parametrize("seed", cases_of(12, "test_phases_are_those_without_a_graph"))
def test_phases_are_those_without_a_graph(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw(seed)
    fake_graphs(case.module, monkeypatch)
    World(case.layer.grid.ranks).run(lambda end: phases(case, end, seed))


def test_what_a_phase_can_not_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in map(draw, range(40)) if c.layer.grid.ranks == 1 and c.layer.conv.bias)
    module: Any = case.module

    def run(end: VirtualTransport) -> None:
        mesh = module.init_mesh("cpu", transport=as_recorded(end))
        x = module.scatter("x", torch.randn(case.layer.conv.shape("x")), mesh)
        layer = module.Conv(mesh, parameters="blocks")
        with pytest.raises(RuntimeError, match="this is compiled for cpu"):
            layer.graphed(x)
        fake_graphs(module, monkeypatch)
        graphed = layer.graphed(x)
        for wrong in (x[:0], x.float()):
            with pytest.raises(ValueError, match="a graph has one shape"):
                graphed(wrong)
        with pytest.raises(ValueError, match="requires a gradient"):
            graphed(x.clone().requires_grad_())
        y, _ = graphed(x), graphed(x)
        with pytest.raises(RuntimeError, match="called again before"):
            y.sum().backward()
        layer.bias = torch.nn.Parameter(layer.bias.detach().clone())
        with pytest.raises(RuntimeError, match="record it again"):
            graphed(x)

    World(1).run(run)


def test_settings_that_read_on_the_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place = SimpleNamespace(ranks=(0,), transport=None)
    graphs.refuse_graphs("net", "cuda", place)  # type: ignore[arg-type]
    monkeypatch.setenv("CONVGEN_CHECK_LOCAL", "1")
    with pytest.raises(RuntimeError, match="CONVGEN_CHECK_LOCAL=1 reads"):
        graphs.refuse_graphs("net", "cuda", place)  # type: ignore[arg-type]


def test_other_backends_than_nccl_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place = SimpleNamespace(ranks=(0, 1), transport=SimpleNamespace(process_group=None))
    for name in ("nccl", "gloo"):
        world = SimpleNamespace(_get_backend=lambda _, name=name: SimpleNamespace(name=lambda: name))
        monkeypatch.setattr(graphs.dist, "group", SimpleNamespace(WORLD=world))
        if name == "nccl":
            graphs.refuse_graphs("net", "cuda", place)  # type: ignore[arg-type]
        else:
            with pytest.raises(RuntimeError, match="this is gloo"):
                graphs.refuse_graphs("net", "cuda", place)  # type: ignore[arg-type]


def test_lanes_on_which_a_graph_went_end_before_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded stream that is not waited for, and a wait for one that is not recorded, are errors of CUDA's."""
    DEVICE.__init__()
    main, recorded, idle = Stream(), Stream(), Stream()
    DEVICE.current = main
    end, lanes = torch.nn.Module(), (SimpleNamespace(stream=recorded), SimpleNamespace(stream=idle), SimpleNamespace())
    monkeypatch.setitem(shared, "lanes", {end: dict(enumerate(lanes))})
    monkeypatch.setattr(torch.cuda, "stream", DEVICE.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: DEVICE.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: DEVICE.current is recorded)
    graphs.land(end)
    assert len(main.given) == len(recorded.given) == 1 and not idle.given
