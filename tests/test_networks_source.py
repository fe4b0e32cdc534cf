"""Modules of the source as a network has them: read as they were, neither called nor replaced."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from free_networks import imported
from small_networks import seeded
from test_networks_training import batches, on_ranks, package, resnet
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize
from torch_cases import on_processes

import convgen
from convgen.algebra.grid import Grid
from convgen.errors import InputError
from convgen.network_compiler import compile_network
from convgen.packages import files_of
from convgen.spec.exported import graph_of
from convgen.spec.graph_file import read_graph, write_graph

(X, _), *_ = batches(1, 4)


class Source(nn.Module):
    """Containers of each kind, one in another, a module under two paths, one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 4
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.stages = nn.ModuleList([nn.Sequential(nn.Conv2d(4, 4, 3, padding=(1, 1)), nn.GELU()) for _ in range(2)])
        self.heads = nn.ModuleDict({"small": nn.Linear(4, 2), "large": nn.Linear(4, 5, bias=False)})
        self.act = nn.LeakyReLU(0.25)
        self.again = self.stages[0]
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.features(x)
        for stage in (*self.stages, self.again):
            y = self.act(stage(y))
        y = self.pool(y).flatten(1)
        return self.heads["small"](y), self.heads["large"](y)


def compiled(module: nn.Module, folder: Path, *inputs: Tensor) -> Any:
    graph, tensors = graph_of(module, inputs)
    files = files_of(compile_network(graph, Grid((("C", 2),))), tensors)
    return imported({n: t.decode() for n, t in files.items()}, folder)


def source() -> Source:
    seeded()
    return Source().double()


READS: dict[str, Callable[[Any], Any]] = {
    "names": lambda m: [n for n, _ in m.named_modules(remove_duplicate=False)],
    "once": lambda m: [n for n, _ in m.named_modules()],
    "children": lambda m: [n for n, _ in m.named_children()],
    "parameters": lambda m: [n for n, _ in m.named_parameters()],
    "kinds": lambda m: [n for n, one in m.named_modules() if isinstance(one, (nn.GELU, nn.ReLU, nn.ModuleList))],
    "lengths": lambda m: (len(m.features), len(m.stages), len(m.heads), len(m.stages[1])),
    "item": lambda m: [n for n, _ in m.features[0].named_parameters()],
    "last": lambda m: m.stages[-1][0].in_channels,
    "iteration": lambda m: [len(stage) for stage in m.stages],
    "names of heads": lambda m: [*m.heads, *m.heads.keys(), *(h.out_features for h in m.heads.values())],
    "in": lambda m: ("small" in m.heads, "none" in m.heads, m.features[1] in list(m.features)),
    "head": lambda m: (m.heads["small"].in_features, m.heads.small.out_features, m.heads["large"].bias is None),
    "conv": lambda m: (m.features[0].kernel_size, m.features[0].padding, m.stages[0][0].padding_mode),
    "norm": lambda m: (m.features[1].eps, m.features[1].momentum, m.features[1].num_features, m.features[1].affine),
    "act": lambda m: (m.act.negative_slope, m.features[2].inplace, m.pool.output_size, m.stages[0][1].approximate),
    "slice": lambda m: [n for n, _ in m.features[:2].named_parameters()],
    "slice of a list": lambda m: [n for n, _ in m.stages[1:].named_parameters()],
    "backwards": lambda m: [type(one).__name__ for one in reversed(m.stages)],
    "same": lambda m: (m.again is m.stages[0], m.get_submodule("again.0") is m.stages[0][0]),
    "mode": lambda m: (m.features[0].training, m.training),
}  # fmt: skip


def reads(model: nn.Module) -> dict[str, Any]:
    return {what: read(model) for what, read in READS.items()}


def test_children_read_as_in_the_source(tmp_path: Path) -> None:
    module = source()
    truth = reads(module)
    net = compiled(module, tmp_path, X)

    def program(model: Any, mesh: Any) -> None:
        model.load_full(module.state_dict())
        for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert reads(one) == truth
            assert [n for n, m in one.named_modules() if isinstance(m, nn.Sequential)] == [
                n for n, m in module.named_modules() if isinstance(m, nn.Sequential)
            ]
        for p in model.features[:2].parameters():
            p.requires_grad_(False)
        assert [p.requires_grad for p in model.parameters()][:5] == [False] * 4 + [True]
        with pytest.raises(AttributeError, match="nothing"):
            model.features[0].nothing  # noqa: B018
        with pytest.raises(IndexError):
            model.features[3]
        with pytest.raises(RuntimeError, match=r"features.0 is a name of parameters in a network, no call"):
            model.features[0](X)
        with pytest.raises(RuntimeError, match=r"conv2d?|in_channels can't be set"):
            model.features[0].in_channels = 4

    on_ranks(net, program)


def test_a_list_of_modules_is_one(tmp_path: Path) -> None:
    """A Sequential at the root, and a single layer."""
    module = source().features
    net, layer = compiled(module, tmp_path, X), compiled(source().features[0], tmp_path, X)

    def program(model: Any, mesh: Any) -> None:
        assert len(model) == 3
        assert [type(m).__name__ for m in model] == ["Conv2d", "BatchNorm2d", "ReLU"]
        assert model[1].eps == module[1].eps
        assert [n for n, _ in model[1:].named_parameters()] == ["1.weight", "1.bias"]

    on_ranks(net, program)
    on_ranks(layer, lambda model, mesh: [model.in_channels, model.kernel_size] == [3, (3, 3)] or pytest.fail("read"))


def test_files_keep_modules(tmp_path: Path) -> None:
    """Files without them, as older ones, give torch's kinds alone; what is no module or attribute is refused."""
    module = source()
    graph, tensors = graph_of(module, (X,))
    path = tmp_path / "source.yaml"
    path.write_text(write_graph(graph))
    assert read_graph(path).modules == graph.modules
    old = replace(graph, modules=())
    path.write_text(write_graph(old))
    assert read_graph(path).modules == ()
    files = files_of(compile_network(read_graph(path), Grid((("C", 2),))), tensors)
    net = imported({n: t.decode() for n, t in files.items()}, tmp_path)

    def program(model: Any, mesh: Any) -> None:
        assert [n for n, m in model.named_modules() if isinstance(m, nn.Linear)] == ["heads.small", "heads.large"]

    on_ranks(net, program)
    text = write_graph(graph)
    for was, now, match in (
        ("has: {in_features: 4, out_features: 2}", "has: {in_features: .inf}", "attribute can't be in_features"),
        ("has: {in_features: 4, out_features: 2}", "has: {a-b: 2}", "attribute can't be a-b"),
        ("{same: stages.0}", "{same: nowhere}", "'nowhere' is no module that stands before"),
        ("{kind: GELU", '{kind: "a b"', "kind can't be"),
        ("  heads.small:", "  heads..small:", "a module can't be called"),
    ):
        assert was in text, was
        path.write_text(text.replace(was, now, 1))
        with pytest.raises(InputError, match=match):
            read_graph(path)


REPLACED: dict[str, Callable[[Any], Any]] = {
    "head": lambda m: setattr(m, "fc", nn.Linear(6, 3)),
    "Identity": lambda m: setattr(m, "fc", nn.Identity()),
    "None": lambda m: setattr(m, "fc", None),
    "nested": lambda m: setattr(m.layer1, "conv1", nn.Conv2d(4, 4, 3)),
    "nested None": lambda m: setattr(m.layer1, "conv1", None),
    "another": lambda m: setattr(m, "extra", nn.Linear(6, 3)),
    "another, nested": lambda m: setattr(m.layer1, "extra", nn.Linear(6, 3)),
    "add_module": lambda m: m.add_module("fc", nn.Linear(6, 3)),
    "register_module": lambda m: m.layer1.register_module("conv1", nn.Linear(6, 3)),
    "set_submodule": lambda m: m.set_submodule("layer1.conv1", nn.Identity()),
    "del": lambda m: delattr(m, "fc"),
    "del, nested": lambda m: delattr(m.layer1, "conv1"),
    "del of a weight": lambda m: delattr(m.fc, "weight"),
    "item": lambda m: m.layer2.down.__setitem__(0, nn.Identity()),
    "append": lambda m: m.layer2.down.append(nn.ReLU()),
    "insert": lambda m: m.layer2.down.insert(0, nn.ReLU()),
    "del of an item": lambda m: m.layer2.down.__delitem__(0),
    "pop": lambda m: m.layer2.down.pop(0),
    "parametrize": lambda m: parametrize.register_parametrization(m.fc, "weight", nn.Identity()),
}


@pytest.mark.parametrize("kind", ["dtensors", "blocks"])
def test_modules_are_not_replaced(kind: str, packages: Path) -> None:
    """It would be ignored; nothing is changed by what is refused."""
    net = package(0.0, "H2 W2", packages)

    def program(old: Any, mesh: Any) -> None:
        model = net.Network(mesh, parameters=kind)
        before = [(n, type(m).__name__) for n, m in model.named_modules()], [n for n, _ in model.named_parameters()]
        for what, change in REPLACED.items():
            with pytest.raises(RuntimeError, match=r"what (a network|it) computes is compiled") as raised:
                change(model)
            assert str(raised.value).startswith("trained"), what
            after = [(n, type(m).__name__) for n, m in model.named_modules()], [n for n, _ in model.named_parameters()]
            assert after == before, what
        model.note, model.loss = "kept", nn.functional.mse_loss  # attributes that are no modules
        assert model.note == "kept"
        del model.note
        model.fc.weight = nn.Parameter(model.fc.weight.detach() * 2)
        model(net.scatter("x", X, mesh))

    on_ranks(net, program)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:FSDP2-wrapped module:UserWarning")
def test_what_goes_on_working(packages: Path) -> None:
    """Copies, averages, wrappers, compile and hooks of the whole."""
    net, module = package(0.0, "N2", packages), resnet()
    with torch.no_grad():
        y = module(X)

    def program(rank: int) -> None:
        mesh = net.init_mesh("cpu")

        def made() -> Any:
            model = net.Network(mesh, parameters="blocks")
            model.load_state_dict(resnet().state_dict())
            return model

        def call(model: Any) -> None:
            with torch.no_grad():
                found = net.gather("output", model(net.scatter("x", X, mesh)), mesh)
            torch.testing.assert_close(found, y, rtol=1e-10, atol=1e-10)

        call(copy.deepcopy(made()))
        averaged = torch.optim.swa_utils.AveragedModel(made())
        averaged.update_parameters(made())
        call(averaged)
        model, seen = made(), list[str]()
        model.register_forward_hook(lambda *_: seen.append("forward"))
        call(model)
        assert seen == ["forward"]
        model = made()
        model.compile(backend="aot_eager")
        call(model)
        call(fully_shard(made(), mesh=mesh["N"]))

    on_processes(program, 2)


@pytest.mark.slow
def test_of_parallelize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGEN_CACHE", str(tmp_path / "cache"))
    module = source()
    truth = reads(module)

    def program(rank: int) -> None:
        model: Any = convgen.parallelize(module, (X,), {"C": 2}, None)
        assert reads(model) == truth
        with pytest.raises(RuntimeError, match=r"heads can't be set: what a network computes is compiled"):
            model.heads = nn.Identity()
        model.load_state_dict(module.state_dict())

    on_processes(program, 2)
