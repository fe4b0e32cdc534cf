"""State dicts of the source, and going on from one: what a network's own methods and torch's take and give."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_networks_training import batches, loss_of, on_ranks, package, resnet
from torch import Tensor, nn
from torch_cases import on_processes

from convgen.algebra.grid import Grid
from convgen.network_compiler import compile_network
from convgen.package_cache import keep
from convgen.packages import files_of, load_package
from convgen.spec.exported import graph_of

(X, LABELS), *MORE = batches(4, 4)
KINDS = ["dtensors", "blocks"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["C4", "H4"])
def test_whole_tensors_are_taken(layout: str, kind: str, packages: Path) -> None:
    """By torch's load_state_dict, without a message: of parameters that are split, and of those that aren't."""
    net, module = package(0.25, layout, packages), resnet(0.25)
    with torch.no_grad():
        for t in module.state_dict().values():
            t.add_(1)
    state = module.state_dict()

    def program(old: Any, mesh: Any) -> None:
        end = net.NET.place(mesh).transport
        model = net.Network(mesh, seed=3, parameters=kind)
        sent = len(end.sent)
        for taken in (state, dict(state), copy.deepcopy(state)):
            model.reset_parameters(7)
            missing, unexpected = model.load_state_dict(taken)
            assert not missing and not unexpected
            assert len(end.sent) == sent
        assert model.state_dict()["convgen.seed"].to_local().tolist() == [7, 0]  # the source has none, so it stays
        own = dict(model.state_dict())
        other = net.Network(mesh, seed=4, parameters=kind)
        other.load_state_dict(own)  # a rank's own, as ever
        inside = nn.ModuleDict({"net": net.Network(mesh, parameters=kind), "head": nn.Linear(2, 2)})
        head = {f"head.{n}": t for n, t in inside["head"].state_dict().items()}
        inside.load_state_dict({f"net.{n}": t for n, t in state.items()} | head)
        assigned = net.Network(mesh, parameters=kind)
        own = copy.deepcopy(state)  # torch notes assign=True in the state dict, which these ranks, threads, share
        assigned.load_state_dict(own, assign=True)
        for one in (model, other, inside["net"], assigned):
            torch.testing.assert_close(dict(one.full_state_dict()), dict(state), rtol=0, atol=0)
            assert {type(p.data) for p in one.parameters()} == {type(p.data) for p in model.parameters()}
            assert all(p.requires_grad for p in one.parameters())
        assert not any(p.to_local().data_ptr() == own[n].data_ptr() for n, p in assigned.named_parameters())

    on_ranks(net, program)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_missing_or_too_much_is_torchs(kind: str, packages: Path) -> None:
    net, module = package(0.0, "C4", packages), resnet()

    def program(old: Any, mesh: Any) -> None:
        model, state = net.Network(mesh, parameters=kind), module.state_dict()
        less = {n: t for n, t in state.items() if n != "fc.bias"}
        with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"fc.bias\""):
            model.load_state_dict(less)
        assert model.load_state_dict(less, strict=False).missing_keys == ["fc.bias"]
        with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"head\""):
            model.load_state_dict(state | {"head": X})
        with pytest.raises(RuntimeError, match=r"size mismatch for fc.weight: .* torch.Size\(\[5, 7\]\)"):
            model.load_state_dict(state | {"fc.weight": torch.zeros(5, 7)})

    on_ranks(net, program)


def imported(files: dict[str, bytes], folder: Path) -> Any:
    """A package, constants too."""
    keep(folder, files)
    return load_package(folder)


class Tied(nn.Module):
    """A weight with two names, a complex one, and a module with two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.shared = nn.ModuleList([nn.BatchNorm1d(4)])
        self.again = self.shared[0]

    def forward(self, x: Tensor) -> Tensor:
        y = self.again(self.two(torch.relu(self.one(x))))
        return torch.view_as_real(self.turn * y).sum(-1)


def test_other_names_and_complex_numbers(tmp_path: Path) -> None:
    module, x = Tied().double(), torch.randn(6, 4, dtype=torch.float64)
    graph, tensors = graph_of(module, (x,))
    net = imported(files_of(compile_network(graph, Grid((("C", 2),))), tensors), tmp_path / "tied")
    start = copy.deepcopy(module.state_dict())
    module.again.eval()
    y = module(x).detach()

    def program(model: Any, mesh: Any) -> None:
        model.load_state_dict(start)
        assert model.again is model.shared[0]
        model.again.eval()
        torch.testing.assert_close(net.gather("output", model(net.scatter("x", x, mesh)), mesh), y)
        torch.testing.assert_close(dict(model.full_state_dict()), dict(start))

    on_ranks(net, program)


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_it_would_have(kind: str, packages: Path, tmp_path: Path) -> None:
    """Of a full state dict, and through a file, dropout draws the masks that would have come next; the source takes it
    strictly. A source's state dict, or a copy without metadata, leaves seed and step as they are."""
    net = package(0.25, "H2 W2", packages)
    given = [(X, LABELS), *MORE]

    def program(rank: int) -> None:
        mesh = net.init_mesh("cpu")

        def train(model: Any, optimizer: Any, steps: Any) -> list[float]:
            losses = list[float]()
            for x, labels in steps:
                optimizer.zero_grad()
                loss = loss_of(net.gather("output", model(net.scatter("x", x, mesh)), mesh), labels)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            return losses

        def made(seed: int) -> tuple[Any, Any]:
            model = net.Network(mesh, seed=seed, parameters=kind)
            return model, torch.optim.AdamW(model.parameters(), lr=0.01)

        first, optimizer = made(5)
        train(first, optimizer, given[:2])
        state = first.full_state_dict()
        own = optimizer.state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        copies = [state, copy.deepcopy(state), copy.copy(state), torch.load(file, weights_only=True)]
        by_key = dict(state) | {"convgen.seed": first.state_dict()["convgen.seed"].to_local().clone()}
        own = copy.deepcopy(own)
        expected = train(first, optimizer, given[2:])
        for one in (*copies, by_key):
            again, other = made(6)
            again.load_full(one)
            other.load_state_dict(copy.deepcopy(own))
            assert train(again, other, given[2:]) == expected, (type(one), expected)
        resnet(0.25).load_state_dict(state)
        json.dumps(state._metadata)
        for one in (dict(state), resnet(0.25).state_dict()):
            again, _ = made(6)
            again.load_full(one)
            assert again.state_dict()["convgen.seed"].to_local().tolist() == [6, 0]
        again.load_full(first.full_state_dict())
        assert again.state_dict()["convgen.seed"].to_local().tolist() == [5, 4]

    on_processes(program, 4)


def test_a_whole_state_dict_is_in_the_sources_order_and_has_one_seed(packages: Path) -> None:
    """What is no seed, or another one on another rank, is refused on all ranks; negative ones are seeds, too."""
    net, names = package(0.25, "H4", packages), [*resnet(0.25).state_dict()]

    def program(old: Any, mesh: Any) -> None:
        model, rank = net.Network(mesh, seed=-3), net.NET.place(mesh).me
        state = model.full_state_dict()
        assert [*state] == names
        for wrong in ({"seed": 3}, {"seed": 3, "step": 0.5}, {"seed": None, "step": 0}, {"seed": 2**70, "step": 0}):
            state._metadata["convgen"] = wrong
            with pytest.raises(ValueError, match="in the place of a seed and a step, whole numbers"):
                model.load_full(state)
        state._metadata["convgen"] = {"seed": 3 + rank % 2, "step": 1}
        with pytest.raises(RuntimeError, match=r"convgen\.seed and step: \[3, 1\] on ranks \[0, 2\]"):
            model.load_full(state)
        assert model.state_dict()["convgen.seed"].to_local().tolist() == [-3, 0]
        state._metadata["convgen"] = {"seed": -5, "step": 1}
        model.load_full(state)
        assert model.state_dict()["convgen.seed"].to_local().tolist() == [-5, 1]

    on_ranks(net, program)
