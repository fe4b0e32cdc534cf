"""A network written by hand, as the graph that torch.export would make of its module, written without torch.

So it is compiled to a package, checked, planned and trained like any other (spec/exported). A loss at its end is an
extra output, beside the scores that it reads, and it reads labels.

| kind | calls |
|---|---|
| conv, conv_transpose | `conv2d` ...; behind a `pad` where padding is not the same on both sides |
| linear | `linear`, between views where features have space of one pixel |
| max_pool, avg_pool, global_avg_pool | `max_pool2d`, `avg_pool2d`, `adaptive_avg_pool2d` |
| batch_norm | `batch_norm` and the running statistics |
| add, concat | `add.Tensor` one after the other, `cat` |
| lrn | `mul`, `pad`, `avg_pool3d`, `pow` and `div`, as LocalResponseNorm is exported |
| relu, dropout, flatten, softmax_loss | `relu`, `dropout`, `view`, `cross_entropy_loss` |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from convgen.algebra.blocks import Uneven
from convgen.algebra.conv import Conv
from convgen.errors import InputError
from convgen.spec.exported_names import result_names
from convgen.spec.extents import samples
from convgen.spec.graph import TFLOAT32, Arg, Call, GivenRow, Graph, Ref, Size, Value
from convgen.spec.graph_edit import BATCH_NORM, renamed
from convgen.spec.layer import Layer
from convgen.spec.network import Network, Node
from convgen.spec.network_reader import read_network
from convgen.spec.source import KeyPath
from convgen.spec.taken import NETWORK

LOSS = "softmax_loss"
INPUT, TARGET = "input", "target"
ROW = "conv"  # the name of the module of a layer's row


def read_network_graph(path: str | Path) -> Graph:
    """The graph of a network file."""
    network = read_network(path)
    return replace(network_graph(network, source=Path(path).name), source_file=network.source)


def network_graph(network: Network, *, source: str = "") -> Graph:
    """A network's graph: inputs "input" and, where it ends with a loss, "target"; outputs "output", and "loss".

    Example:
        >>> from convgen.spec.network_reader import network_from_dict
        >>> nodes = [{"name": "a", "kind": "conv", "out_channels": 8, "kernel_size": 3}, {"kind": "relu"}]
        >>> network = network_from_dict({"name": "n", "input": [1, 3, 9, 9], "nodes": nodes})
        >>> [call.op for call in network_graph(network).calls]
        ['conv2d', 'relu']
    """
    writer = _Writer(network.name, source or network.name, network.dtype, network.batch)
    first, *nodes = network.nodes
    writer.inputs.append(Value(name=INPUT, shape=_sized(first.shape), dtype=writer.dtype))
    values, last = {first.name: INPUT}, INPUT
    for node in nodes:
        shapes = [network.node[name].shape for name in node.inputs]
        if node.kind == LOSS:
            scores = shapes[0]
            writer.inputs.append(Value(name=TARGET, shape=_sized((scores[0], *scores[2:])), dtype="int64"))
            args = (Ref(values[node.inputs[0]]), Ref(TARGET), None, 1, -100, 0.0)
            writer.outputs["loss"] = writer.call("cross_entropy_loss", args, (), "")
            continue
        values[node.name] = last = writer.node(node, [values[name] for name in node.inputs], shapes)
    given = tuple(given_row(module_of(n), n.layer, n.path) for n in nodes if n.layer is not None)
    return replace(writer.graph({"output": last} | writer.outputs), given=given)


def module_of(node: Node) -> str:
    """The name of a node's module; names that the package's modules use themselves get a _."""
    return node.name + "_" * (node.name in NETWORK)


def given_row(module: str, layer: Layer, path: KeyPath = ()) -> GivenRow:
    """How a layer with a distribution is laid out, as a row of a network."""
    d = layer.distribution
    stored = () if d is None else (("x", d.x), ("w", d.w), ("y", d.y))
    sizes = tuple([(axis, size) for axis, size in layer.grid.axes if isinstance(size, Uneven)])
    return GivenRow(
        module=module, stored=stored, roles=layer.roles, hold_x=layer.options.hold_x, sizes=sizes, path=path
    )


def node_of(network: Network, module: str) -> Node | None:
    """The node that a call belongs to, by the call's module; None if it belongs to none."""
    name = module.split(".")[0]
    known = network.node.get(name) or network.node.get(name.removesuffix("_"))
    return known if known is not None and name in (known.name, module_of(known)) else None


def layer_graph(layer: Layer) -> Graph:
    """A layer as the graph of a network of one row: input "x", output "y". The graph has no layout, and no memory
    format, as a package takes tensors of any.

    Raises:
        InputError: the layer has what networks lack: a mesh's target, kernels by name, native sums.
    """
    conv, target = layer.conv, layer.target
    lacks = {
        f"target {target.text}": (target.is_mesh, "target: cpu, cuda or hip"),
        "kernels by name": (bool(layer.options.kernels), "options without kernels"),
        "native sums": (layer.options.sums != "ordered", "options: {sums: ordered}"),
    }
    for what, (is_so, hint) in lacks.items():
        if is_so:
            fact = f"{layer.name} has {what}, which a network of one row has not"
            raise InputError(fact, hint=f"{hint}; or the layer's module, without --overlap")
    writer = _Writer(layer.name, layer.name, layer.dtype, conv.batch)
    writer.inputs.append(Value(name="x", shape=_sized(conv.shape("x")), dtype=writer.dtype))
    return writer.graph({"y": writer.convolution(conv, ROW, "x", conv.shape("x"), conv.shape("y"))})


class _Writer:
    """Writes calls one after the other, and the values that they read."""

    def __init__(self, name: str, source: str, dtype: str, batch: int) -> None:
        self.name, self.source, self.batch = name, source, batch
        self.tf32 = dtype == TFLOAT32
        self.dtype = "float32" if self.tf32 else dtype  # the type of tensors
        self.inputs: list[Value] = []
        self.parameters: list[Value] = []
        self.buffers: list[Value] = []
        self.calls: list[Call] = []
        self.updates: list[tuple[str, str]] = []
        self.outputs: dict[str, str] = {}
        self.modules: list[str] = []

    def graph(self, outputs: dict[str, str]) -> Graph:
        """The graph; results get their nodes' names."""
        calls, known = [(call, call.module) for call in self.calls], [*self.parameters, *self.buffers, *self.inputs]
        found = result_names(calls, self.modules, [*outputs.values()], self.updates, [v.name for v in known])

        def named(name: str) -> str:
            return found.get(name, name)

        return Graph(
            name=self.name,
            source=self.source,
            modes=("train", "eval"),
            batch=self.batch,
            inputs=tuple(self.inputs),
            parameters=tuple(self.parameters),
            buffers=tuple(self.buffers),
            constants=(),
            calls=tuple(renamed(call, named) for call in self.calls),
            updates=tuple((buffer, named(value)) for buffer, value in self.updates),
            outputs=tuple((name, named(value)) for name, value in outputs.items()),
            aliases=(),
            tf32=self.tf32,
        )

    def call(self, op: str, args: Sequence[Arg], shape: Sequence[int], module: str, kind: str = "") -> str:
        """Add a call with one result; gives the result's name for now."""
        value = Value(name=f"%{len(self.calls)}.0", shape=_sized(shape) if shape else (), dtype=self.dtype)
        self._call(op, args, (value,), module, kind)
        return value.name

    def _call(self, op: str, args: Sequence[Arg], results: Sequence[Value], module: str, kind: str) -> None:
        self.calls.append(Call(op=op, args=tuple(args), results=tuple(results), module=module, kind=kind))
        if module and module not in self.modules:
            self.modules.append(module)

    # ---------------------------------------------------------------- nodes
    def node(self, node: Node, reads: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str:
        """Add the calls of a node that is no loss."""
        x, shape, dims = reads[0], shapes[0], len(shapes[0]) - 2
        node = replace(node, name=module_of(node))
        match node.kind:
            case "conv" | "conv_transpose" if node.conv is not None:
                return self.convolution(node.conv, node.name, x, shape, node.shape)
            case "linear" if node.conv is not None:
                return self._linear(node, node.conv, x, shape)
            case "max_pool" if node.conv is not None:
                kernel, stride, padding, dilation = taps(node.conv)
                args: tuple[Arg, ...] = (Ref(x), kernel, stride, padding, dilation, False)
                return self.call(f"max_pool{dims}d", args, node.shape, node.name, f"MaxPool{dims}d")
            case "avg_pool" if node.conv is not None:
                kernel, stride, padding, _ = taps(node.conv)
                args = (Ref(x), kernel, stride, padding, False, True, *((None,) if dims > 1 else ()))
                return self.call(f"avg_pool{dims}d", args, node.shape, node.name, f"AvgPool{dims}d")
            case "global_avg_pool":
                args = (Ref(x), (1,) * dims)
                return self.call(f"adaptive_avg_pool{dims}d", args, node.shape, node.name, f"AdaptiveAvgPool{dims}d")
            case "batch_norm":
                return self._batch_norm(node, x, shape)
            case "relu":
                return self.call("relu", (Ref(x),), node.shape, node.name, "ReLU")
            case "dropout":
                return self.call("dropout", (Ref(x), 0.5, True), node.shape, node.name, "Dropout")
            case "lrn":
                return self._response(node, x, shape)
            case "flatten":
                flat = (samples(), prod(shape[1:]))
                return self.call("view", (Ref(x), flat), node.shape[:2], node.name, "Flatten")
            case "add":
                for other in reads[1:]:
                    x = self.call("add.Tensor", (Ref(x), Ref(other), 1), node.shape, node.name, "Add")
                return x
            case "concat":
                parts = tuple(Ref(name) for name in reads)
                return self.call("cat", (parts, 1), node.shape, node.name, "Concat")
            case _:
                raise ValueError(node.kind)

    def convolution(self, conv: Conv, name: str, x: str, shape: Sequence[int], made: Sequence[int]) -> str:
        """Add a convolution with any padding, or a transposed one.

        Raises:
            InputError: a transposed convolution crops differently on both sides, which ATen can't.
        """
        if conv.transposed and any(s.pad_lo != s.pad_hi for s in conv.spatial):
            fact = f"{name}: {conv.name} with padding {[[s.pad_lo, s.pad_hi] for s in conv.spatial]}"
            raise InputError(f"{fact} cuts off other rows below than above", ("padding",), hint="as many on both sides")
        dims = len(conv.spatial)
        kernel, stride, padding, dilation = taps(conv)
        channels, filters = conv.channels, conv.filters
        rows = (channels, filters // conv.groups) if conv.transposed else (filters, channels // conv.groups)
        if any(s.pad_lo != s.pad_hi for s in conv.spatial) and not conv.transposed:
            sides = tuple(n for s in reversed(conv.spatial) for n in (s.pad_lo, s.pad_hi))
            wide = (*shape[:2], *(n + s.pad_lo + s.pad_hi for n, s in zip(shape[2:], conv.spatial, strict=True)))
            pad = "ZeroPad2d" if dims == 2 else f"ConstantPad{dims}d"
            x = self.call("pad", (Ref(x), sides, "constant", 0.0), wide, f"{name}.0", pad)
            name, padding = f"{name}.1", (0,) * dims
        owner = f"Conv{'Transpose' * conv.transposed}{dims}d"
        fan_in = rows[1] * prod(kernel)
        w, bias = self._parameters(name, owner, (*rows, *kernel), fan_in, filters if conv.bias else 0)
        if conv.transposed:
            more = tuple(s.output_padding for s in conv.spatial)
            args = (Ref(x), w, bias, stride, padding, more, conv.groups, dilation)
            return self.call(
                f"conv_transpose{dims}d{'.input' if dims > 1 else ''}", args, made, name, f"ConvTranspose{dims}d"
            )
        args = (Ref(x), w, bias, stride, padding, dilation, conv.groups)
        return self.call(f"conv{dims}d", args, made, name, f"Conv{dims}d")

    def _linear(self, node: Node, conv: Conv, x: str, shape: Sequence[int]) -> str:
        """Add a linear layer over features without space, or on one pixel."""
        if len(shape) > 2:
            x = self.call("view", (Ref(x), (samples(), prod(shape[1:]))), (conv.batch, prod(shape[1:])), "")
        w, bias = self._parameters(
            node.name, "Linear", (conv.filters, conv.channels), conv.channels, conv.filters if conv.bias else 0
        )
        y = self.call("linear", (Ref(x), w, bias), (conv.batch, conv.filters), node.name, "Linear")
        return self.call("view", (Ref(y), (-1, *node.shape[1:])), node.shape, "") if len(node.shape) > 2 else y

    def _response(self, node: Node, x: str, shape: tuple[int, ...]) -> str:
        """Add a local response normalisation: channels become rows of a volume, over which windows take their mean."""
        size, alpha, beta, k = int(node.numbers[0]), *node.numbers[1:]
        n, c, rest = shape[0], shape[1], shape[2:] if len(shape) == 4 else (prod(shape[2:]), 1)

        def call(op: str, args: Sequence[Arg], made: Sequence[int]) -> str:
            return self.call(op, args, made, node.name, "LocalResponseNorm")

        y = call("mul.Tensor", (Ref(x), Ref(x)), shape)
        y = call("view", (Ref(y), (samples(), 1, c, *rest)), (n, 1, c, *rest))
        sides = (0, 0, 0, 0, size // 2, (size - 1) // 2)
        y = call("pad", (Ref(y), sides, "constant", None), (n, 1, c + size - 1, *rest))
        pooled = (size, 1, 1), (1, 1, 1), (0, 0, 0), False, True, None
        y = call("avg_pool3d", (Ref(y), *pooled), (n, 1, c, *rest))
        y = call("view", (Ref(y), (samples(), *shape[1:])), shape)
        for op, args in (("mul.Tensor", (alpha,)), ("add.Tensor", (k, 1)), ("pow.Tensor_Scalar", (beta,))):
            y = call(op, (Ref(y), *args), shape)
        return call("div.Tensor", (Ref(x), Ref(y)), shape)

    def _batch_norm(self, node: Node, x: str, shape: tuple[int, ...]) -> str:
        name, channels, kind = node.name, (shape[1],), f"BatchNorm{max(len(shape) - 2, 1)}d"
        for part, init in (("weight", "ones"), ("bias", "zeros")):
            self.parameters.append(self._state(f"{name}.{part}", kind, channels, init))
        for part, init in (("running_mean", "zeros"), ("running_var", "ones")):
            self.buffers.append(self._state(f"{name}.{part}", kind, channels, init))
        count = self._state(f"{name}.num_batches_tracked", kind, (), "zeros")
        self.buffers.append(replace(count, dtype="int64"))
        number = len(self.calls)
        count = Value(name=f"%{number}.0", shape=(), dtype="int64")
        self._call("add.Tensor", (Ref(f"{name}.num_batches_tracked"), 1, 1), (count,), name, kind)
        y = Value(name=f"%{number + 1}.0", shape=_sized(shape), dtype=self.dtype)
        moments = [Value(name=f"%{number + 1}.{k}", shape=channels, dtype=self.dtype) for k in (1, 2)]
        states = [Ref(f"{name}.{part}") for part in ("weight", "bias", "running_mean", "running_var")]
        self._call(BATCH_NORM, (Ref(x), *states, True, 0.1, 1e-05), (y, *moments), name, kind)
        becomes = zip(("running_mean", "running_var", "num_batches_tracked"), (*moments, count), strict=True)
        self.updates += [(f"{name}.{part}", value.name) for part, value in becomes]
        return y.name

    def _state(self, name: str, owner: str, shape: tuple[int, ...], init: str) -> Value:
        return Value(name=name, shape=shape, dtype=self.dtype, init=init, owner=owner)

    def _parameters(
        self, name: str, owner: str, shape: tuple[int, ...], fan_in: int, bias: int
    ) -> tuple[Ref, Ref | None]:
        """Add w and, if it has elements, a bias of so many."""
        init = f"kaiming_uniform:{fan_in}"
        self.parameters.append(self._state(f"{name}.weight", owner, shape, init))
        if bias:
            init = f"uniform:{fan_in}"
            self.parameters.append(self._state(f"{name}.bias", owner, (bias,), init))
        return Ref(f"{name}.weight"), Ref(f"{name}.bias") if bias else None


def taps(conv: Conv) -> tuple[tuple[int, ...], ...]:
    """Kernel, stride, padding and dilation, each with a number for every dimension."""
    found = [(s.kernel, s.stride, s.pad_lo, s.dilation) for s in conv.spatial]
    return tuple(zip(*found, strict=True))


def _sized(shape: Sequence[int]) -> tuple[Size, ...]:
    """A shape whose first extent counts samples."""
    return (samples(), *shape[1:])
