"""Graphs of PyTorch modules: equal to the module on one device, and what can't be right refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from graph_runs import run_graph, values_of
from torch import Tensor, nn
from torch.nn import functional

from convgen.errors import InputError
from convgen.spec.exported import graph_of
from convgen.spec.extents import samples
from convgen.spec.graph import Graph, Ref
from convgen.spec.graph_edit import eval_graph

N = samples()


class Block(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.bn1(self.conv1(x)))


class Net(nn.Module):
    """Residual, with constants, an in-place dropout, sizes that are multiples of N, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer1 = nn.Conv2d(3, 4, 3), nn.Sequential(Block(4), Block(4))
        self.drop, self.fc, self.again = nn.Dropout(0.25, inplace=True), nn.Linear(4, 4), nn.Linear(4, 4)
        self.again.weight = self.fc.weight
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("mask", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.stem(x))
        n, c, h, w = x.shape
        x = x.permute(0, 2, 3, 1).reshape(n * h * w, c) * self.scale
        x = self.again(self.fc(self.drop(x))).view(n, h * w, c).mean(1)
        return x + self.mask + torch.tensor([0.5, 1, 2, 3])


def agree(module: nn.Module, graph: Graph, tensors: dict[str, Tensor], inputs: dict[str, Tensor]) -> None:
    before = values_of(module, graph, tensors, inputs)
    with torch.no_grad():
        outputs, updates = run_graph(graph, before)
        wanted = module(**inputs)
    wanted = {"output": wanted} if isinstance(wanted, Tensor) else wanted
    assert outputs.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(outputs[key], value, rtol=0, atol=0)
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(updates.get(name, before[name] if name in before else tensors[name]), buffer)


def test_both_modes_for_another_number_of_samples() -> None:
    module = Net()
    graph, tensors = graph_of(module, (torch.zeros(2, 3, 6, 6),), source="here")
    assert (graph.name, graph.source, graph.modes, graph.batch) == ("Net", "here", ("train", "eval"), 2)
    assert graph.is_dynamic and graph.inputs[0].shape == (N, 3, 6, 6)
    made = {v.name: (call, v) for call in graph.calls for v in call.results if v is not None}
    conv, value = made["layer1_0_conv1"]
    assert (conv.module, conv.kind, value.shape) == ("layer1.0.conv1", "Conv2d", (N, 4, 4, 4))
    assert conv.args == (Ref("stem"), Ref("layer1.0.conv1.weight"), None, (1, 1), (1, 1), (1, 1), 1)
    assert made["layer1_0_add"][0].op == "add.Tensor"
    assert made["view"][0].args[1] == (samples(16), 4)
    assert made["drop"][0].args[1:] == (0.25, True)
    assert graph.updates[0] == ("layer1.0.bn1.running_mean", "layer1_0_bn1_running_mean")
    assert graph.aliases == (("again.weight", "fc.weight"),)
    assert {v.init for v in graph.buffers} == {"zeros", "ones"}
    inits = {v.name: v.init for v in graph.parameters}
    assert (inits["stem.weight"], inits["stem.bias"], inits["scale"]) == ("kaiming_uniform:27", "uniform:27", "given")
    assert set(tensors) == {"scale", "mask", *(v.name for v in graph.constants)} and len(graph.constants) == 2
    module.drop.p = 0.0  # draws no one can repeat
    again, _ = graph_of(module, (torch.zeros(2, 3, 6, 6),))
    x = torch.randn(5, 3, 6, 6)
    agree(module, again, tensors, {"x": x})
    agree(module.eval(), eval_graph(graph), tensors, {"x": x})
    assert eval_graph(graph).updates == () and graph.at(5).calls[0].results[0].shape == (5, 4, 4, 4)  # type: ignore[union-attr]


def test_one_sample_is_as_open_as_several() -> None:
    graph, _ = graph_of(nn.Conv1d(2, 3, 3), (torch.zeros(1, 2, 9),), training=False)
    assert (graph.modes, graph.batch, graph.calls[0].results[0].shape) == (("eval",), 1, (N, 3, 7))  # type: ignore[union-attr]


class Two(nn.Module):
    def forward(self, x: Tensor, t: Tensor, *, gain: float = 2.0) -> dict[str, Tensor]:
        return {"a": x * gain, "b": (t + 1).detach() * x.size(0) - x.sum(1).detach()}


def test_two_inputs_and_a_dict_of_outputs() -> None:
    inputs = {"x": torch.randn(3, 4), "t": torch.arange(3)}
    graph, tensors = graph_of(Two(), {"x": torch.zeros(8, 4), "t": torch.zeros(8, dtype=torch.int64)})
    assert [(v.name, v.shape, v.dtype) for v in graph.inputs] == [("x", (N, 4), "float32"), ("t", (N,), "int64")]
    assert [key for key, _ in graph.outputs] == ["a", "b"]
    assert [c.op for c in graph.calls].count("detach") == 1  # the one that stops a gradient
    agree(Two(), graph, tensors, inputs)


def of(forward: Any, **parts: nn.Module) -> nn.Module:
    module = type("Odd", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def test_products_with_one_are_none() -> None:
    """But for those that change the type, and quotients that are rounded."""

    def forward(self: nn.Module, x: Tensor) -> dict[str, Tensor]:
        whole = torch.div(x, 1, rounding_mode="floor")
        return {"same": x / 1.0 * 1, "one": 1 / x, "two": x * 2, "float": x.long() / 1, "whole": whole}

    x = torch.randn(3, 4)
    graph, tensors = graph_of(of(forward), (x,))
    ops = sorted(c.op for c in graph.calls)
    assert ops == ["_to_copy", "div.Tensor", "div.Tensor_mode", "mul.Tensor", "reciprocal"]
    agree(of(forward), graph, tensors, {"x": x})


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: x * 2 if x.shape[0] > 4 else x,
        lambda self, x: x * 2 if x.shape[0] % 4 == 0 else x,
        lambda self, x: x.view(x.shape[0] // 2, 2, 4),
        lambda self, x: x + torch.ones(8, 1),
        lambda self, x: x[:5],
        lambda self, x: x.index_put((torch.arange(8)[:, None], x.long().clamp(0, 3)), x[:, :1]),
        lambda self, x: x.sum(1, keepdim=True).squeeze() + x.sum(0, keepdim=True).squeeze(0)[0],
    ],
)
def test_a_number_of_samples_that_matters_is_fixed(forward: Any) -> None:
    said: list[str] = []
    module = of(forward)
    graph, tensors = graph_of(module, (torch.zeros(8, 4),), remark=said.append)
    assert not graph.is_dynamic and len(said) == 1 and said[0].startswith("the number of samples is fixed, 8: ")
    agree(module, graph, tensors, {"x": torch.randn(8, 4)})


def changed_without_gradient(self: Any, x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y.view(-1).mul_(2)
    return x + y


class WithoutGradient(nn.Module):
    """Reads what it made and a buffer that it changed where no gradients are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        with torch.no_grad():
            self.mean.mul_(0.5).add_(y.mean(0))
            z = y * self.scale
            z.add_(1)
        return y * self.mean + z * self.scale


def test_no_gradients_through_a_region_without() -> None:
    module, x = WithoutGradient(), torch.randn(4, 3)
    graph, tensors = graph_of(module, (torch.zeros(2, 3),))
    state = {k: v.detach().clone() for k, v in (module.state_dict() | tensors).items()}
    state["scale"].requires_grad_()
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs, updates = run_graph(graph, state | {"x": mine})
    outputs["output"].square().sum().backward()
    module(theirs).square().sum().backward()
    for got, wanted in (
        (mine.grad, theirs.grad),
        (state["scale"].grad, module.scale.grad),
        (updates["mean"], module.mean),
    ):
        torch.testing.assert_close(got, wanted)


class Beside(nn.Module):
    """What a teacher says, without gradients."""

    def __init__(self, region: Any) -> None:
        super().__init__()
        self.region, self.teacher, self.norm = region, nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        with self.region():
            said = self.teacher(x).tanh()
        return self.norm(x) * said.clone()


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
def test_no_gradients_through_other_words_nor_in_evaluation(region: Any, training: bool) -> None:
    module, x = Beside(region).train(training), torch.randn(4, 3)
    graph, tensors = graph_of(module, (torch.zeros(2, 3),))
    state = {k: v.detach().clone() for k, v in (module.state_dict() | tensors).items()}
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    run_graph(graph, state | {"x": mine})[0]["output"].square().sum().backward()
    module(theirs).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    ("module", "fact"),
    [
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.RReLU()), "draws random numbers"),
        (of(lambda self, x: x + torch.poisson(x.exp())), "poisson draws random numbers"),
        (of(lambda self, x: x.add_(1)), "changes its input x"),
        (of(lambda self, x: torch.tanh(torch.fft.fft(x)).real), "tanh.default of complex numbers"),
        (of(lambda self, x: x * 2 if x.sum() > 0 else x), "torch.export can't trace Odd"),
        (of(changed_without_gradient), "torch.no_grad"),
        (of(lambda self, x: (x, x.dtype)), "dtype'> in output, which is not a known type"),
        (of(lambda self, x: x[x > 0]), "can't be imported"),
    ],
)
def test_refused(module: nn.Module, fact: str) -> None:
    with pytest.raises(InputError) as caught:
        graph_of(module, (torch.zeros(2, 3, 4, 4),))
    assert fact in str(caught.value) and caught.value.hint


def test_refused_inputs() -> None:
    with pytest.raises(InputError, match="x_0 is a complex"):
        graph_of(of(lambda self, x: x[1]), ([1j, torch.zeros(2)],))
    with pytest.raises(InputError, match="does not take the inputs"):
        graph_of(nn.ReLU(), {"z": torch.zeros(2)})


def test_evaluation_stays_where_training_differs() -> None:
    module = of(lambda self, x: functional.dropout(x, 0.5) if self.training else x * 2)
    was = copy.deepcopy([m.training for m in module.modules()])
    assert graph_of(module, (torch.zeros(2, 3),))[0].modes == ("train",)
    assert [m.training for m in module.modules()] == was


class Layer(nn.Module):
    def __init__(self, heads: list[torch.Tensor]) -> None:
        super().__init__()
        self.heads, self.conv = heads, nn.Conv2d(3, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.heads[0] = self.conv(x)
        return self.heads[0]


class Supervised(nn.Module):
    """Results that a layer leaves in a list that the network holds as well, as MONAI's DynUNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = [torch.zeros(1)]
        self.layer = Layer(self.heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer(x)
        return self.heads[0].relu()


def test_a_module_that_keeps_results_in_lists_stays_what_it_was() -> None:
    module, x = Supervised(), torch.randn(2, 3, 5, 5)
    truth = module(x)
    graph, _ = graph_of(module, (x,))
    assert [call.op for call in graph.calls] == ["conv2d", "relu"]
    assert module.heads is module.layer.heads
    assert torch.equal(module(x), truth)
