"""A network written by hand as the PyTorch module that it describes, and as the graph of that module.

So it comes in by the one way there is (spec/exported): compiled to a package, checked, explained and trained like any
other. A loss at its end is an output of its own, beside what it is of, and reads labels.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from convgen.algebra.conv import Conv
from convgen.errors import InputError
from convgen.spec.exported import graph_of
from convgen.spec.graph import Graph
from convgen.spec.layer import Layer
from convgen.spec.network import Network, Node
from convgen.spec.network_reader import read_network, with_batch

LOSS = "softmax_loss"


def read_network_graph(path: str | Path) -> Graph:
    """The graph of a network file."""
    network = read_network(path)
    return replace(network_graph(network, source=Path(path).name), source_file=network.source)


def network_graph(network: Network, *, source: str = "") -> Graph:
    """A network's graph: inputs "input" and, where it ends with a loss, "target"; outputs "output", and "loss"."""
    traced = with_batch(network, max(2, network.batch))  # torch.export takes one sample for a constant
    dtype = getattr(torch, network.dtype)
    inputs = [torch.zeros(traced.nodes[0].shape, dtype=dtype)]
    if (last := traced.nodes[-1]).kind == LOSS:
        scores = traced.node[last.inputs[0]].shape
        inputs.append(torch.zeros((scores[0], *scores[2:]), dtype=torch.int64))
    graph, _ = graph_of(module_of(network).to(dtype), inputs, name=network.name, source=source or network.name)
    return replace(graph, batch=network.batch)


def module_of(network: Network) -> nn.Module:
    """The module that a network describes; parameters are called after its nodes.

    Example:
        >>> from convgen.spec.network_reader import network_from_dict
        >>> nodes = [{"name": "a", "kind": "conv", "out_channels": 8, "kernel_size": 3}, {"kind": "relu"}]
        >>> module = module_of(network_from_dict({"name": "tiny", "input": [1, 3, 9, 9], "nodes": nodes}))
        >>> [name for name, _ in module.named_parameters()], module(torch.zeros(1, 3, 9, 9)).shape
        (['a.weight'], torch.Size([1, 8, 7, 7]))
    """
    return (_WithLoss if network.nodes[-1].kind == LOSS else _Written)(network)


class _Written(nn.Module):
    """Its nodes in order."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.steps: list[tuple[Node, str]] = []
        for node in network.nodes[1:]:
            name = node.name + "_" * hasattr(self, node.name)
            if node.kind != LOSS:
                self.add_module(name, _layer(node, network.node[node.inputs[0]].shape))
            self.steps.append((node, name))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.run(input)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """What the last node gives that is no loss."""
        values = {"input": x}
        for node, name in self.steps:
            if node.kind != LOSS:
                reads = [values[i] for i in node.inputs]
                if node.kind == "linear":  # of features without space, or on one pixel
                    reads = [x.flatten(1) for x in reads]
                x = getattr(self, name)(*reads)
                values[node.name] = x = x.reshape(-1, *node.shape[1:]) if node.kind == "linear" else x
        return x


class _WithLoss(_Written):
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        scores = self.run(input)
        return {"output": scores, "loss": F.cross_entropy(scores, target)}


class _Add(nn.Module):
    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


class _Concat(nn.Module):
    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        return torch.cat(parts, 1)


def _layer(node: Node, shape: tuple[int, ...]) -> nn.Module:
    """A node's module; `shape`: of what it reads."""
    dims = len(shape) - 2
    match node.kind:
        case "conv" | "conv_transpose" if node.conv is not None:
            return convolution_module(node.conv, dims)
        case "linear" if node.conv is not None:
            return nn.Linear(node.conv.channels, node.conv.filters, bias=node.conv.bias)
        case "max_pool" if node.conv is not None:
            kernel, stride, padding, dilation = _taps(node.conv)
            return _of("MaxPool", dims)(kernel, stride, padding, dilation)
        case "avg_pool" if node.conv is not None:
            kernel, stride, padding, _ = _taps(node.conv)
            return _of("AvgPool", dims)(kernel, stride, padding)
        case "global_avg_pool":
            return _of("AdaptiveAvgPool", dims)(1)
        case "batch_norm":
            return nn.BatchNorm1d(shape[1]) if dims <= 1 else _of("BatchNorm", dims)(shape[1])
        case "relu":
            return nn.ReLU()
        case "dropout":
            return nn.Dropout()
        case "flatten":
            return nn.Flatten()
        case "add":
            return _Add()
        case "concat":
            return _Concat()
        case _:
            raise ValueError(node.kind)


def _of(name: str, dims: int) -> Any:
    return getattr(nn, f"{name}{dims}d")


def _taps(conv: Conv) -> tuple[tuple[int, ...], ...]:
    """Kernel, stride, padding, dilation, by dimension."""
    found = [(s.kernel, s.stride, s.pad_lo, s.dilation) for s in conv.spatial]
    return tuple(zip(*found, strict=True))


def layer_graph(layer: Layer) -> Graph:
    """A layer as the graph of a network of one row: input "x", output "y".

    Raises:
        InputError: it has what networks have not: layouts and roles of its own, channels last, a type that is no
            torch type, a target other than cpu.
    """
    other = {
        "layouts of its own": layer.distribution is not None,
        "roles of its own": bool(layer.roles),
        f"target {layer.target.text}": layer.target.text != "cpu",
        "memory_format channels_last": layer.memory_format == "channels_last",
        f"dtype {layer.dtype}": layer.dtype == "tfloat32",
        "kernels of its own": bool(layer.options.kernels),
        "native sums": layer.options.sums != "ordered",
    }
    for what, is_so in other.items():
        if is_so:
            fact = f"{layer.name} has {what}, and overlaps as a network of one row, which has not"
            raise InputError(fact, hint="a named algorithm or auto, contiguous, target cpu, default options")
    conv, dtype = layer.conv, getattr(torch, layer.dtype)
    x = torch.zeros((max(2, conv.batch), conv.channels, *(d.extent for d in conv.dims("x")[2:])), dtype=dtype)
    module = _OneLayer(convolution_module(conv, len(conv.spatial)).to(dtype))
    graph, _ = graph_of(module, [x], name=layer.name, source=layer.name)
    return replace(graph, batch=conv.batch)


class _OneLayer(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.conv(x)}


def convolution_module(conv: Conv, dims: int) -> nn.Module:
    kernel, stride, padding, dilation = _taps(conv)
    options: dict[str, Any] = {"stride": stride, "dilation": dilation, "groups": conv.groups, "bias": conv.bias}
    if conv.transposed:
        options |= {"padding": padding, "output_padding": tuple(s.output_padding for s in conv.spatial)}
        return _of("ConvTranspose", dims)(conv.channels, conv.filters, kernel, **options)
    if all(s.pad_lo == s.pad_hi for s in conv.spatial):
        return _of("Conv", dims)(conv.channels, conv.filters, kernel, padding=padding, **options)
    sides = [n for s in reversed(conv.spatial) for n in (s.pad_lo, s.pad_hi)]
    return nn.Sequential(
        cast("Any", nn).ZeroPad2d(sides) if dims == 2 else _of("ConstantPad", dims)(sides, 0.0),
        _of("Conv", dims)(conv.channels, conv.filters, kernel, **options),
    )
