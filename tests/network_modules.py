"""A network written by hand as the PyTorch module that it describes: what its graph has to be the graph of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from convgen.algebra.conv import Conv
from convgen.spec.exported import graph_of
from convgen.spec.graph import Graph
from convgen.spec.network import Network, Node
from convgen.spec.network_graph import LOSS, taps
from convgen.spec.network_reader import with_batch


def exported_graph(network: Network) -> Graph:
    """The graph of its module, by torch.export."""
    traced = with_batch(network, max(2, network.batch))  # torch.export takes one sample for a constant
    dtype = getattr(torch, network.dtype)
    inputs = [torch.zeros(traced.nodes[0].shape, dtype=dtype)]
    if (last := traced.nodes[-1]).kind == LOSS:
        scores = traced.node[last.inputs[0]].shape
        inputs.append(torch.zeros((scores[0], *scores[2:]), dtype=torch.int64))
    graph, _ = graph_of(module_of(network).to(dtype), inputs, name=network.name, source=network.name)
    return replace(graph, batch=network.batch)


def module_of(network: Network) -> nn.Module:
    """The module that a network describes; parameters are called after its nodes."""
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


class Add(nn.Module):
    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


class Concat(nn.Module):
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
            kernel, stride, padding, dilation = taps(node.conv)
            return _of("MaxPool", dims)(kernel, stride, padding, dilation)
        case "avg_pool" if node.conv is not None:
            kernel, stride, padding, _ = taps(node.conv)
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
            return Add()
        case "concat":
            return Concat()
        case _:
            raise ValueError(node.kind)


def _of(name: str, dims: int) -> Any:
    return getattr(nn, f"{name}{dims}d")


def convolution_module(conv: Conv, dims: int) -> nn.Module:
    kernel, stride, padding, dilation = taps(conv)
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
