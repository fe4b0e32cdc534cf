"""convgen.from_torch and convgen.parallelize: a module on ranks, against the module."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_networks import seeded, unet
from torch import Tensor, nn

import convgen
from convgen.algebra.grid import Grid
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.spec.exported import graph_of
from convgen.verify.processes import ProcessFailed, spawn
from convgen.verify.virtual import VirtualTransport, World


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def losses_of(made: Any) -> Tensor:
    return sum(y.square().mean() for y in (made.values() if isinstance(made, dict) else [made]))  # type: ignore[return-value]


def test_importing_convgen_is_cheap() -> None:
    code = "import sys, convgen; assert 'torch' not in sys.modules; print(convgen.parallelize.__module__)"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"convgen.parallel\n"
    assert {"from_torch", "parallelize"} <= set(dir(convgen))
    with pytest.raises(AttributeError, match="no attribute 'bla'"):
        convgen.bla  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_a_module_on_two_processes(tmp_path: Path) -> None:
    """A step of training and evaluation, with another number of samples than the example."""
    module, x = unet()
    other = torch.cat([x, x[:2] + 1])

    def program(rank: int) -> list[float]:
        reference = copy.deepcopy(module)
        model: Any = convgen.parallelize(module, (x,), {"H": 2})
        assert type(model).__name__ == type(module).__name__
        assert set(model.state_dict()) == set(module.state_dict())
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, reference)]
        xs = [other.clone().requires_grad_() for _ in range(2)]
        found = [m(one) for m, one in zip((model, reference), xs, strict=True)]
        for y, optimizer in zip(found, optimizers, strict=True):
            losses_of(y).backward()
            optimizer.step()
        errors = [far(losses_of(found[0]), losses_of(found[1])), far(xs[0].grad, xs[1].grad)]
        state = model.full_state_dict()
        errors += [far(state[n], t) for n, t in reference.state_dict().items()]
        model.eval(), reference.eval()
        errors += [far(losses_of(m(x)), losses_of(reference(x))) for m in (model, copy.deepcopy(model))]
        reference.load_state_dict(state)  # strictly: the same names
        return errors

    for errors in spawn(program, 2):
        assert max(errors) < 1e-11
    assert len(list((tmp_path / "cache" / "networks").iterdir())) == 1  # both compiled, or one did


@pytest.mark.slow
def test_ranks_with_other_weights_are_refused() -> None:
    def program(rank: int) -> None:
        torch.manual_seed(rank)
        convgen.parallelize(nn.Conv2d(3, 4, 3), (torch.zeros(2, 3, 5, 5),), "N=2")

    with pytest.raises(ProcessFailed, match=r"ranks \[1\] have other weights than that of rank 0"):
        spawn(program, 2)


def test_a_package_from_a_module(tmp_path: Path) -> None:
    module, x = nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 6, 6)
    net = convgen.from_torch(module, (x,), "C=2,N=1", name="small")
    assert (net.NAME, net.SPEC["grid"]) == ("small", {"C": 2, "N": 1})
    assert net is convgen.from_torch(module, (x,), {"C": 2, "N": 1}, name="small")
    other = convgen.from_torch(module, (x,), "C=2,N=2", name="small")
    assert other is not net and other.VOLUME != net.VOLUME
    assert module.training and len(list((tmp_path / "cache" / "networks").iterdir())) == 2
    assert convgen.from_torch(nn.ReLU(), (x,)).SPEC["grid"] == {"N": 1}


def test_a_machine_decides_what_travels_under_a_named_algorithm() -> None:
    """The same layout; a CPU's nodes, which are the default, have other messages hidden than Lassen."""
    module, x = unet()
    given = (module, (x,), {"N": 2, "H": 2}, "spatial")
    one, other = (convgen.from_torch(*given, machine=machine) for machine in ("cpu", "lassen"))
    assert one.SCHEDULE == convgen.from_torch(*given).SCHEDULE != other.SCHEDULE
    assert one.NET.values == other.NET.values


def test_what_cant_be_is_refused() -> None:
    module, x = nn.ReLU(), torch.zeros(2, 3)
    with pytest.raises(InputError, match="axis K"):
        convgen.from_torch(module, (x,), {"K": 2})
    with pytest.raises(InputError, match="can't have 0 ranks"):
        convgen.from_torch(module, (x,), {"N": 0})
    with pytest.raises(InputError, match="machine 'lasse' is unknown"):
        convgen.from_torch(module, (x,), {"N": 2}, "sample", machine="lasse")
    with pytest.raises(InputError, match="without names of axes"):
        convgen.parallelize(module, (x,), 3)  # type: ignore[arg-type]


class Several(nn.Module):
    """Arguments that are no tensors, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.requires_grad_(False)

    def forward(self, x: Tensor, scale: float, y: Tensor | None = None) -> tuple[Tensor, ...]:
        made = self.a(x) * scale
        return (self.b(made if y is None else made + y),)


@pytest.mark.slow
def test_arguments_and_outputs_are_the_modules() -> None:
    seeded()
    module, x = Several().eval(), torch.randn(4, 4)

    def program(rank: int) -> list[float]:
        model: Any = convgen.parallelize(module, {"x": x, "scale": 2.0, "y": x}, {"N": 2})
        assert not model.training
        assert [p.requires_grad for _, p in model.named_parameters()] == [True, True, False, False]
        blocks: Any = convgen.parallelize(module, (x, 2.0), {"N": 2}, "sample", whole=False)
        (block,) = blocks(x[rank * 2 :][:2])
        assert tuple(block.shape) == (2, 4)
        with pytest.raises(InputError, match="scale=3"):
            model(x, 3.0, x)
        (found,), (truth,) = model(x, 2.0, y=x), module(x, 2.0, x)
        return [far(found, truth)]

    assert max(map(max, spawn(program, 2))) < 1e-6


class SameName(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x + 1}


def test_an_output_named_as_an_input_gets_another_name() -> None:
    """Of a module; a file that says so is refused."""
    net = convgen.from_torch(SameName(), (torch.zeros(2, 3),), {"N": 1})
    assert {*net.VALUES} == {"x", "x_out", "0"}
    graph, _ = graph_of(SameName(), (torch.zeros(2, 3),))
    with pytest.raises(InputError, match="x is an input and an output"):
        compile_network(replace(graph, outputs=(("x", graph.outputs[0][1]),)), Grid((("N", 1),)))


class Names(nn.Module):
    """Names that a generated Network might have for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mesh = nn.Sequential(nn.Linear(3, 4)), nn.Linear(4, 4)
        self.modes = nn.Parameter(torch.ones(4))
        self.register_buffer("inputs", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.mesh(self.net(x)) * self.modes + self.inputs


def test_names_of_the_source_are_free() -> None:
    module, x = Names(), torch.zeros(2, 3)
    net = convgen.from_torch(module, (x,), "N=2")

    def program(end: VirtualTransport) -> Tensor:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(module.state_dict())
        assert set(model.state_dict()) == set(module.state_dict())
        return net.gather("output", model(net.scatter("x", x, mesh)), mesh)

    for y in World(2).run(program):
        torch.testing.assert_close(y, module(x))


def test_a_plan_is_for_the_machine_that_is_named() -> None:
    torch.manual_seed(0)
    module, x = torch.nn.Conv2d(3, 8, 3, padding=1), torch.zeros(4, 3, 8, 8)
    net = convgen.from_torch(module, (x,), "N=2,H=2", "auto", "lassen")
    assert "'auto', 'lassen'" in Path(net.__file__).with_name("network.py").read_text()
