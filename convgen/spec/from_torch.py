"""Networks from PyTorch: any module that torch.export can trace, as far as its operators are kinds of a network.

Names are those of the modules (`layer1.0.conv1` becomes `layer1_0_conv1`). Shapes are inferred as for a network
file, and compared with the ones that PyTorch traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, cast

from convgen.errors import InputError, InternalError, Note
from convgen.spec.exported_refusals import untraced, without_graphs
from convgen.spec.names import identifier
from convgen.spec.network import CONVOLUTIONS, JOINS, Network
from convgen.spec.network_blocks import INPUT
from convgen.spec.network_reader import network_from_dict
from convgen.spec.text import number_of

if TYPE_CHECKING:
    import torch

Attributes = dict[str, Any]


def network_from_module(module: torch.nn.Module, example_inputs: Sequence[Any], *, name: str | None = None) -> Network:
    """The network that a module computes.

    Args:
        module: traced by `torch.export.export` in the mode that it is in.
        example_inputs: one tensor, (N, C, spatial...); it gives the shape and the dtype.
        name: of the network; by default the module's class's.
    Raises:
        InputError: torch.export can't trace the module, or it has operators that no kind of a network is: all of
            them are listed, with the modules that they are in and why.
    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU())
        >>> [node.kind for node in network_from_module(net, (torch.zeros(1, 3, 9, 9),)).nodes]
        ['input', 'conv', 'relu']
    """
    import torch

    (example,) = example_inputs if len(example_inputs) == 1 else (None,)
    if not isinstance(example, torch.Tensor):
        fact = f"example_inputs has {len(example_inputs)} entries: a network has one input, a tensor"
        raise InputError(fact, hint="(torch.zeros(N, C, H, W),)")
    try:
        with without_graphs():
            exported = torch.export.export(module, (example,))
    except Exception as error:
        raise untraced(type(module).__name__, error, module) from error
    data: dict[str, Any] = {
        "name": identifier(name or type(module).__name__),
        "input": list(example.shape),
        "dtype": str(example.dtype).removeprefix("torch."),
    }
    reader = _Reader()
    for node in exported.graph.nodes:
        reader.read(node, exported)
    reader.refuse(type(module).__name__)
    network = network_from_dict(data | {"nodes": reader.nodes})
    for one in network.nodes:
        traced = reader.shapes.get(one.name)
        if traced is not None and one.kind != "softmax_loss" and traced != one.shape:
            raise InternalError(f"{one.name}: inferred {one.shape}, PyTorch has {traced}")
    return network


@dataclass
class _Reader:
    """Walks a traced graph; `known` maps its values to names of nodes."""

    nodes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    known: dict[str, str] = field(default_factory=dict[str, str])
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    failed: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    weights: dict[str, str] = field(default_factory=dict[str, str])  # by parameter, the node that has it

    def read(self, node: Any, exported: Any) -> None:
        if node.op == "placeholder":
            if node.name in exported.graph_signature.user_inputs:
                self.known[node.name] = INPUT
            return
        if node.op == "output":
            made = {self.known[a.name] for a in node.all_input_nodes if a.name in self.known}
            if len(made) > 1 and not self.failed:
                self.fail("output", node, f"{len(made)} of them, {', '.join(sorted(made))}; a network has one")
            return
        if node.op != "call_function" or not node.users:
            return
        operator = str(node.target).removeprefix("aten.")
        read = _OPERATORS.get(operator)
        inputs = [a for a in node.all_input_nodes if a.name in self.known]
        if not inputs:  # made of parameters and buffers alone: a counter of batches, say
            return
        if read is None:
            self.fail(operator, node, "no kind of a network does this")
            return
        try:
            found = read(node)
            if found is not None and found["kind"] in JOINS and len(inputs) < len(node.all_input_nodes):
                raise _NotUnderstoodError("with a parameter")
            if found is not None and found["kind"] in (*CONVOLUTIONS, "batch_norm"):
                self.own(node, self.name(node))
        except _NotUnderstoodError as error:
            self.fail(operator, node, str(error))
            return
        if found is None:
            self.known[node.name] = self.known[inputs[0].name]
            return
        name = self.name(node)
        self.known[node.name] = name
        self.shapes[name] = _shape(node)
        self.nodes.append({"name": name, "from": [self.known[a.name] for a in inputs]} | found)

    def own(self, node: Any, name: str) -> None:
        """Weights are parameters as they are, and one node's: what a network counts, stores and reduces."""
        w = node.args[1]
        if w is None:
            raise _NotUnderstoodError("without scale and shift")
        if w.op != "placeholder" or w.name in self.known:
            raise _NotUnderstoodError("with weights that are computed")
        if (other := self.weights.setdefault(w.name, name)) != name:
            raise _NotUnderstoodError(f"with the weights of {other}, which a network would count twice")

    def name(self, node: Any) -> str:
        """The module's name, or the value's; made different where it stands already."""
        path, kind = _module(node)
        leaf = path if path and "torch.nn.modules" in kind and "container" not in kind else str(node.name)
        base = identifier(leaf.replace("L['self'].", ""))
        name, n = base, 1
        while any(other["name"] == name for other in self.nodes) or name == INPUT:
            n += 1
            name = f"{base}_{n}"
        return name

    def fail(self, operator: str, node: Any, why: str) -> None:
        self.failed.setdefault(f"{operator}: {why}", []).append(self.name(node))
        self.known[node.name] = INPUT  # so that what follows is looked at too

    def refuse(self, module: str) -> None:
        if not self.failed:
            return
        notes = tuple(
            Note("unknown", f"{what}; at {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}")
            for what, names in self.failed.items()
        )
        count = sum(map(len, self.failed.values()))
        fact = f"{module} has {number_of(count, 'operator')} that a network can't say"
        known = "Conv1d-3d, ConvTranspose1d-3d, Linear, MaxPool, AvgPool, AdaptiveAvgPool to one pixel, BatchNorm, "
        more = "ReLU, Dropout, +, torch.cat on channels, Flatten, CrossEntropyLoss"
        raise InputError(fact, notes=notes, hint=known + more)


class _NotUnderstoodError(Exception):
    pass


def _module(node: Any) -> tuple[str, str]:
    """Path and class of the innermost module that makes a value."""
    found: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    stack = list(found.values())
    return (stack[-1][0], str(stack[-1][1])) if stack else ("", "")


def _shape(node: Any) -> tuple[int, ...]:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        value = cast("Sequence[Any]", value)[0]
    return tuple(int(n) for n in value.shape)


def _argument(node: Any, place: int, name: str, default: Any = None) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[place] if len(node.args) > place else default


def _each(value: Any) -> list[int]:
    if isinstance(value, (list, tuple)):
        return [int(v) for v in cast("Sequence[int]", value)]
    return [int(value)]


def _conv(node: Any) -> Attributes:
    padding = _argument(node, 4, "padding", 0)
    return _taps(node) | {
        "kind": "conv",
        "out_channels": int(node.args[1].meta["val"].shape[0]),
        "padding": padding if isinstance(padding, str) else _per_dimension(node, 4, "padding", 0),
        "dilation": _per_dimension(node, 5, "dilation", 1),
        "groups": int(_argument(node, 6, "groups", 1)),
    }


def _conv_transpose(node: Any) -> Attributes:
    groups = int(_argument(node, 6, "groups", 1))
    return _taps(node) | {
        "kind": "conv_transpose",
        "out_channels": int(node.args[1].meta["val"].shape[1]) * groups,
        "padding": _per_dimension(node, 4, "padding", 0),
        "output_padding": _per_dimension(node, 5, "output_padding", 0),
        "groups": groups,
        "dilation": _per_dimension(node, 7, "dilation", 1),
    }


def _taps(node: Any) -> Attributes:
    return {
        "kernel_size": [int(k) for k in node.args[1].meta["val"].shape[2:]],
        "stride": _per_dimension(node, 3, "stride", 1),
        "bias": _argument(node, 2, "bias") is not None,
    }


def _per_dimension(node: Any, place: int, name: str, default: int) -> list[int]:
    dims = len(node.args[1].meta["val"].shape) - 2
    values = _each(_argument(node, place, name, default))
    return values if len(values) == dims else values * dims


def _linear(node: Any) -> Attributes:
    if len(_shape(node)) != 2:
        raise _NotUnderstoodError(f"of {list(_shape(node.args[0]))}, not of samples and features; Flatten before it")
    return {
        "kind": "linear",
        "out_features": int(node.args[1].meta["val"].shape[0]),
        "bias": _argument(node, 2, "bias") is not None,
    }


def _pool(kind: str) -> Callable[[Any], Attributes]:
    def read(node: Any) -> Attributes:
        dims = len(_shape(node)) - 2
        kernel = _each(node.args[1])
        stride = _each(_argument(node, 2, "stride") or kernel)
        padding = _each(_argument(node, 3, "padding", 0))
        ceil_mode = _argument(node, 5 if kind == "max_pool" else 4, "ceil_mode", False)
        if ceil_mode:
            raise _NotUnderstoodError("ceil_mode=True")
        wide = {"kernel_size": kernel, "stride": stride, "padding": padding}
        if kind == "max_pool":
            wide["dilation"] = _each(_argument(node, 4, "dilation", 1))
        return {"kind": kind} | {k: v if len(v) == dims else v * dims for k, v in wide.items()}

    return read


def _to_one_pixel(node: Any) -> Attributes:
    if any(size != 1 for size in _each(node.args[1])):
        raise _NotUnderstoodError(f"to {_each(node.args[1])}, not to one pixel")
    return {"kind": "global_avg_pool"}


def _mean(node: Any) -> Attributes:
    shape = _shape(node.args[0])
    given = list(range(len(shape))) if node.args[1] is None else _each(node.args[1])
    dims = sorted(d % len(shape) for d in given)
    if dims != list(range(2, len(shape))) or not dims:
        raise _NotUnderstoodError(f"over dimensions {given}, not over space")
    if not _argument(node, 2, "keepdim", False):
        raise _NotUnderstoodError("keepdim=False: the result has no pixel; keepdim=True and flatten say the same")
    return {"kind": "global_avg_pool"}


def _add(node: Any) -> Attributes:
    if node.args[0] is node.args[1]:
        raise _NotUnderstoodError("of a tensor and itself")
    if len(node.all_input_nodes) != 2 or _argument(node, 2, "alpha", 1) != 1:
        raise _NotUnderstoodError("of one tensor and a number, or scaled")
    if any(_shape(a) != _shape(node) for a in node.all_input_nodes):
        raise _NotUnderstoodError("of different shapes, broadcast")
    return {"kind": "add"}


def _concat(node: Any) -> Attributes:
    if _argument(node, 1, "dim", 0) % len(_shape(node)) != 1:
        raise _NotUnderstoodError("not along the channels")
    return {"kind": "concat"}


def _flatten(node: Any) -> Attributes | None:
    before, after = _shape(node.args[0]), _shape(node)
    if before == after:
        return None
    if after != (before[0], prod(before[1:])):
        raise _NotUnderstoodError(f"from {list(before)} to {list(after)}: not all but the samples as one")
    return {"kind": "flatten"}


def _cross_entropy(node: Any) -> Attributes:
    return {"kind": "softmax_loss"}


def _of(kind: str) -> Callable[[Any], Attributes | None]:
    return lambda node: {"kind": kind}


def _same(node: Any) -> Attributes | None:
    return None


_OPERATORS: dict[str, Callable[[Any], Attributes | None]] = {
    **{f"conv{d}d.{overload}": _conv for d in (1, 2, 3) for overload in ("default", "padding")},
    "conv_transpose1d.default": _conv_transpose,
    **{f"conv_transpose{d}d.input": _conv_transpose for d in (2, 3)},
    **{f"max_pool{d}d.default": _pool("max_pool") for d in (1, 2, 3)},
    **{f"avg_pool{d}d.default": _pool("avg_pool") for d in (1, 2, 3)},
    **{f"adaptive_avg_pool{d}d.default": _to_one_pixel for d in (1, 2, 3)},
    "linear.default": _linear,
    "mean.dim": _mean,
    "batch_norm.default": _of("batch_norm"),
    "relu.default": _of("relu"),
    "relu_.default": _of("relu"),
    "dropout.default": _of("dropout"),
    "dropout_.default": _of("dropout"),
    "add.Tensor": _add,
    "add_.Tensor": _add,
    "cat.default": _concat,
    "flatten.using_ints": _flatten,
    "view.default": _flatten,
    "reshape.default": _flatten,
    "cross_entropy_loss.default": _cross_entropy,
    "contiguous.default": _same,
    "clone.default": _same,
}
