"""Runs an imported graph with ATen's operators, on one device: what others lower it to must equal it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from convgen.spec.graph import Arg, Graph, Ref

TORCHS = ("layout", "memory_format", "dtype")  # arguments that are torch's, and text in a graph


def run_graph(graph: Graph, values: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs and new buffers, by name. `values`: inputs, parameters, buffers, constants."""
    graph, env = graph.at(values[graph.inputs[0].name].shape[0]), dict(values)
    for call in graph.calls:
        args = [plain(arg, env) for arg in call.args]
        several = batch_norm(*args) if call.op == "batch_norm" else aten(call.op, args)
        several = several if isinstance(several, (tuple, list)) else (several,)
        for value, made in zip(call.results, several, strict=True):
            if value is not None:
                assert (tuple(made.shape), str(made.dtype)) == (value.shape, f"torch.{value.dtype}"), call
                env[value.name] = made
    return {k: env[v] for k, v in graph.outputs}, {k: env[v] for k, v in graph.updates}


def plain(arg: Arg, env: dict[str, Tensor]) -> Any:
    if isinstance(arg, Ref):
        return env[arg.name]
    return [plain(one, env) for one in arg] if isinstance(arg, tuple) else arg


def aten(op: str, args: list[Any]) -> Any:
    name, _, overload = ("reshape" if op == "view" else op).partition(".")
    function = getattr(getattr(torch.ops.aten, name), overload or "default")
    schema = function._schema.arguments
    said = [(s, getattr(torch, a) if s.name in TORCHS and isinstance(a, str) else a)
            for s, a in zip(schema, args, strict=True)]  # fmt: skip
    places = [a for s, a in said if not s.kwarg_only]
    return function(*places, **{s.name: a for s, a in said if s.kwarg_only})


def batch_norm(x: Tensor, w: Any, b: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float) -> Any:
    mean, var = (None if t is None else t.clone() for t in (mean, var))
    return nn.functional.batch_norm(x, mean, var, w, b, training, momentum, eps), mean, var


def values_of(module: nn.Module, graph: Graph, tensors: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Any]:
    """A module's own values, by the names of its graph."""
    state = {k: v.detach().clone() for k, v in (*module.named_parameters(), *module.named_buffers())}
    return tensors | {v.name: state[v.name] for v in (*graph.parameters, *graph.buffers)} | inputs
