"""Methods of a module on one set of weights; and rows of caches that are fetched apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from causal_vae import seeded
from echo import Echo
from networks_on_ranks import check, imported
from torch import Tensor, nn

import convgen
from convgen.algebra.grid import Grid
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.one_set import Asked, on_one_set, one_set, prepared, with_forward
from convgen.one_set import methods as methods_of
from convgen.packages import load_package
from convgen.parallel import how_of
from convgen.spec.exported import graph_of
from convgen.spec.graph_caches import joined_for_each
from convgen.verify.virtual import VirtualTransport, World


class Tied(nn.Module):
    """There and back by one weight, with a norm of each way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 2, 3, 3)), nn.Parameter(torch.randn(2))
        self.there, self.unused = nn.BatchNorm2d(4), nn.Linear(2, 2)

    def encode(self, x: Tensor) -> Tensor:
        return self.there(nn.functional.conv2d(x, self.weight, padding=1))

    def decode(self, y: Tensor) -> Tensor:
        return nn.functional.conv_transpose2d(torch.tanh(y), self.weight, self.bias, padding=1)


def test_tensors_of_one_set_stay_the_networks(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tensor in their place would be the set's alone, and is refused; buffers of another type are both's."""
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path))
    module, x, y = Tied(), torch.randn(2, 2, 5, 6), torch.randn(2, 4, 5, 6)
    net = convgen.from_torch(nn.ReLU(), (x,), grid="N=1")
    model = methods_of(module, {"encode": (x,), "decode": (y,)}, net.init_mesh("cpu", transport=Echo(0, 1)))
    other = Tied().state_dict()
    for name, change in (
        ("weight", lambda: setattr(model, "weight", nn.Parameter(torch.zeros_like(module.weight)))),
        ("running_mean", lambda: setattr(model.there, "running_mean", torch.ones(4))),
        ("weight", lambda: model.load_state_dict(dict(other), assign=True)),
    ):
        with pytest.raises(RuntimeError, match=f"{name} can't be set: networks of Tied have this tensor"):
            change()
    model.half()
    with pytest.raises(ValueError, match=r"torch\.float32, got torch\.float16"):
        model.encode(x)
    model.float().load_state_dict(other)
    module.load_state_dict(other)
    for given in (module, model):
        given.train()
        given.encode(x)
    for state in (model.state_dict(), model.encode.state_dict()):
        for name, t in module.state_dict().items():
            if name in state:
                found = getattr(state[name], "_local_tensor", state[name])
                assert found.dtype == t.dtype and torch.allclose(found, t, atol=1e-6), name


def test_two_methods_train_one_set_of_weights(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path))
    torch.manual_seed(0)
    module, x = Tied().double(), torch.randn(2, 2, 5, 6, dtype=torch.float64)
    how, examples = how_of({"H": 2}, None, "cpu", None, None), {"encode": x, "decode": torch.zeros(2, 4, 5, 6).double()}
    asked = {n: Asked(with_forward(module, getattr(Tied, n), n), (t,), how) for n, t in examples.items()}
    packages = prepared(asked, {"H": 2})
    net = load_package(packages["encode"][1], files=packages["encode"][2])

    def step(model: Any, x: Tensor) -> float:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            loss = (model.decode(model.encode(x)) - x).square().mean()
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    def program(transport: VirtualTransport) -> tuple[float, dict[str, Tensor], list[str]]:
        mesh = net.init_mesh("cpu", transport=transport)
        model = one_set(module, on_one_set(asked, packages, mesh, whole=True))
        assert model.encode.weight is model.decode.weight is model.weight
        assert (model.training, model.eval().decode.training) == (True, False)
        model.train()
        return step(model, x), model.full_state_dict(), [n for n, _ in model.named_parameters()]

    found = World(2).run(program)
    loss = step(module, x)
    for own, state, names in found:
        assert own == pytest.approx(loss, abs=1e-12)
        assert state.keys() == module.state_dict().keys()
        assert all(torch.allclose(t, state[n], rtol=0, atol=1e-11) for n, t in module.state_dict().items())
        assert names == [n for n, _ in module.named_parameters()]


class Twice(nn.Linear):
    def twice(self, x: Tensor) -> Tensor:
        return self(self.forward(x)) - self.bias


def test_a_method_may_call_its_module() -> None:
    torch.manual_seed(0)
    module, x = Twice(3, 3), torch.randn(2, 3)
    assert torch.equal(with_forward(module, Twice.twice, "twice")(x), module.twice(x))


def test_what_is_no_method_is_refused() -> None:
    module, x = Tied(), torch.zeros(2, 2, 5, 6)
    with pytest.raises(InputError, match=r"Tied has no method encod of its class\n.*encode"):
        methods_of(module, {"encod": (x,)}, {"H": 1})
    module.encode = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(InputError, match="no method encode of its class"):
        methods_of(module, {"encode": (x,)}, {"H": 1})


def test_weights_of_other_layouts_are_not_shared(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a network whose channels are split otherwise."""
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path))
    module = nn.Linear(4, 4)
    nets = []
    for grid in ({"H": 2}, {"F": 2}):
        asked = {"a": Asked(module, (torch.zeros(2, 4),), how_of(grid, None, "cpu", None, None))}
        packages = prepared(asked, grid)
        nets.append(load_package(packages["a"][1], files=packages["a"][2]))

    def program(transport: VirtualTransport) -> str:
        first, second = (net.Network(net.init_mesh("cpu", transport=transport)) for net in nets)
        with pytest.raises(ValueError, match="is on another mesh") as caught:
            second.take_from(first)
        return str(caught.value)

    assert len({*World(2).run(program)}) == 1


class Chunked(nn.Module):
    """Convolutions behind caches: of one as it is, of a part of one, behind edges that are repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv3d(2, 3, 3, padding=(0, 1, 1)), nn.Conv3d(3, 2, (3, 5, 3), (1, 2, 1))
        self.c = nn.Conv3d(2, 2, 3, padding=(0, 1, 1))

    def forward(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        one = torch.cat([a, x], 2)
        two = torch.cat([b[:, :, -2:], torch.relu(self.a(one))], 2)
        y = self.b(nn.functional.pad(two, (1, 1, 2, 2, 0, 0), mode="replicate"))
        three = torch.cat([c.to(torch.float64), torch.tanh(y)], 2)
        return self.c(three), one[:, :, -2:], two[:, :, -2:], three[:, :, -2:]


def chunked() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(1)
    shapes = ((2, 2, 2, 9, 6), (2, 2, 2, 9, 6), (2, 3, 4, 9, 6), (2, 2, 2, 5, 6))
    return Chunked().double(), tuple(torch.randn(s, dtype=torch.float64) for s in shapes)


@pytest.mark.parametrize("grid", [{"N": 2, "H": 2}, {"W": 3}], ids=str)
def test_caches_are_fetched_apart(grid: dict[str, int]) -> None:
    """Outputs, gradients and bytes are right; and each convolution reads its cache by a window of its own."""
    module, inputs = chunked()
    given = imported(module, *inputs)
    given = replace(given, graph=replace(given.graph, caches=("a", "b", "c")))
    errors = check(given, grid)
    assert errors.right, errors
    program = compile_network(given.graph, Grid(tuple(grid.items()))).plain
    fused = [row for row in program.rows if "concatenate_" in row.bound.operation.name]
    assert [row.bound.operation.name.count("conv_forward") for row in fused] == [1, 1, 1]
    assert [sorted({*row.bound.reads} & {"a", "b", "c"}) for row in fused] == [["a"], ["b"], ["c"]]
    for row in fused:
        assert sum(any(c.dst.has_window for c in chain) for chain in row.fetch) == 2
    plain = compile_network(replace(given.graph, caches=()), Grid(tuple(grid.items()))).plain
    assert not any("concatenate_" in row.bound.operation.name for row in plain.rows)


def test_each_reader_of_rows_has_a_concatenation_of_its_own() -> None:
    module, inputs = chunked()
    graph = replace(graph_of(module, inputs)[0], caches=("a", "b", "c"))
    found = joined_for_each(graph)
    count = {op: [sum(call.op == op for call in one.calls) for one in (graph, found)] for op in ("cat", "_to_copy")}
    assert count == {"cat": [3, 6], "_to_copy": [1, 2]}
    assert joined_for_each(replace(graph, caches=())).calls == graph.calls
    assert joined_for_each(found).calls == found.calls  # nothing is left to do


def test_a_vae_has_the_example_s_methods() -> None:
    """Encode is causal, too: its chunks are those of one shot."""
    vae, y = seeded(), torch.randn(1, 2, 5, 8, 6, dtype=torch.float64)
    z, kept = vae.encode(y[:, :, :2])
    assert torch.equal(torch.cat([z, vae.encode(y[:, :, 2:], kept)[0]], 2), vae.encode(y)[0])
