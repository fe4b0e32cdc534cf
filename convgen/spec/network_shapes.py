"""Output shapes of nodes from the shapes that they read, and which shapes can't work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from convgen.algebra.conv import Conv, Spatial
from convgen.errors import InputError
from convgen.spec.build import layer_from_dict
from convgen.spec.layer import Layer
from convgen.spec.network import JOINS, KINDS, PLACED
from convgen.spec.text import as_list, shown

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """A node's output and, where it has one, its index space; `layer` and `numbers` as a node has them."""

    shape: Shape
    conv: Conv | None = None
    layer: Layer | None = None
    numbers: tuple[float, ...] = ()


def infer(kind: str, attributes: Mapping[str, Any], inputs: Mapping[str, Shape]) -> Made:
    """The output of a node.

    Args:
        kind: one of KINDS.
        attributes: its keys besides name, kind and from.
        inputs: by name of a node that it reads, its shape.
    Raises:
        InputError: the shapes don't fit; the path leads to the attribute.
    """
    _check_inputs(kind, inputs)
    (first, shape), *_ = inputs.items()
    match kind:
        case "conv" | "conv_transpose":
            layer = _layer(kind, attributes, first, shape)
            placed = layer if any(key in attributes for key in PLACED) else None
            return Made(layer.conv.shape("y"), layer.conv, placed)
        case "max_pool" | "avg_pool":
            whole = {"out_channels": shape[1], "groups": shape[1], "stride": attributes.get("kernel_size")}
            conv = _layer("conv", {**whole, **attributes}, first, shape).conv
            _check_pool(kind, conv)
            return Made(conv.shape("y"), conv)
        case "linear":
            if prod(shape[2:]) != 1:
                fact = f"linear reads {first} of shape {list(shape)}, which has spatial dimensions"
                raise InputError(fact, ("kind",), hint="flatten or global_avg_pool before it")
            return _linear(attributes, shape)
        case "global_avg_pool":
            if len(shape) < 3:
                fact = f"global_avg_pool reads {first} of shape {list(shape)}, which has no spatial dimension"
                raise InputError(fact, ("kind",), hint="remove it")
            return Made((*shape[:2], *(1 for _ in shape[2:])))
        case "flatten":
            return Made((shape[0], prod(shape[1:])))
        case "add":
            return Made(_same(kind, inputs, range(len(shape))))
        case "concat":
            _same(kind, inputs, [d for d in range(len(shape)) if d != 1])
            return Made((shape[0], sum(s[1] for s in inputs.values()), *shape[2:]))
        case "lrn":
            return Made(shape, numbers=tuple(_response(attributes)))
        case "softmax_loss":
            return Made(())
        case _:
            return Made(shape)


def _check_pool(kind: str, conv: Conv) -> None:
    """Refuse padding that torch's pools don't have."""
    for s in conv.spatial:
        most = (s.reach + 1) // 2
        if s.pad_lo != s.pad_hi:
            fact = f"{kind} pads {s.name} by {s.pad_lo} rows below and {s.pad_hi} above"
            raise InputError(fact, ("padding",), hint="as many on both sides")
        if s.pad_lo > most:
            fact = f"{kind} pads {s.name} by {s.pad_lo} rows, more than half of the {s.reach + 1} that its kernel spans"
            raise InputError(fact, ("padding",), hint=f"padding up to {most}")


def _check_inputs(kind: str, inputs: Mapping[str, Shape]) -> None:
    if kind in JOINS:
        if len(inputs) < 2:
            fact = f"{kind} reads {', '.join(inputs)}: it takes two or more different nodes"
            raise InputError(fact, ("from",), hint="from: [one, other]")
    elif len(inputs) != 1:
        fact = f"{kind} reads {len(inputs)} nodes, {', '.join(inputs)}; it takes one"
        raise InputError(fact, ("from",), hint=f"from: one node; {' and '.join(JOINS)} take several")
    for name, shape in inputs.items():
        if not shape:
            raise InputError(f"{kind} reads {name}, a loss", ("from",), hint="nothing reads a loss")


def _same(kind: str, inputs: Mapping[str, Shape], dims: Iterable[int]) -> Shape:
    (first, shape), *others = inputs.items()
    dims = list(dims)
    for name, other in others:
        if len(other) != len(shape) or any(other[d] != shape[d] for d in dims):
            fact = f"{kind} of {first} {list(shape)} and {name} {list(other)}: the shapes differ"
            but = " but for the channels" if kind == "concat" else ""
            raise InputError(fact, ("from",), hint=f"inputs of one shape{but}; see strides and paddings before it")
    return shape


def _layer(kind: str, attributes: Mapping[str, Any], name: str, shape: Shape) -> Layer:
    """The index space of a convolution or pooling: what a layer file with these keys describes, on a grid of the axes
    that they name."""
    if not 3 <= len(shape) <= 5:
        fact = f"it reads {name} of shape {list(shape)}: a convolution or pooling takes 1 to 3 spatial dimensions"
        raise InputError(fact, ("from",), hint="linear for features without space")
    grid = dict(_axes(attributes)) or {"N": 1}
    data = {"name": "node", "layer": f"{kind}{len(shape) - 2}d", "input": list(shape), "grid": grid}
    return layer_from_dict(data | dict(attributes))


def _axes(attributes: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Axes that a node's distribution and roles name, as far as these are well formed: each of one rank, or of as many
    ranks as it has sizes of blocks."""
    said = (attributes.get(key) for key in PLACED)
    distribution, roles = (cast("dict[str, object]", one) if isinstance(one, dict) else {} for one in said)
    names = [entry for entries in distribution.values() for entry in as_list(entries) or ()]
    names = [name for entry in names for name in (as_list(entry) or [entry])]
    names += [axis for phase in roles.values() if isinstance(phase, dict) for axis in cast("dict[str, object]", phase)]
    yield from ((name, 1) for name in names if isinstance(name, str) and name not in ("*", "none"))
    sizes = [pair for name in names if isinstance(name, dict) for pair in cast("dict[str, object]", name).items()]
    yield from ((axis, len(as_list(some) or (1,))) for axis, some in sizes)


def _response(attributes: Mapping[str, Any]) -> Iterator[float]:
    """size, alpha, beta and k; the defaults are AlexNet's in Caffe."""
    for key, usual in (("size", 5), ("alpha", 1e-4), ("beta", 0.75), ("k", 1.0)):
        given = attributes.get(key, usual)
        whole = isinstance(given, int) and not isinstance(given, bool)
        if not (whole or (isinstance(given, float) and key != "size")) or not 0 < given < 2**31:
            kind = "whole number" if key == "size" else "number"
            raise InputError(f"{key} can't be {shown(given)}", (key,), hint=f"a {kind} above 0, e.g. {usual}")
        yield given


def _linear(attributes: Mapping[str, Any], shape: Shape) -> Made:
    features, bias = attributes["out_features"], attributes.get("bias", False)
    if not isinstance(features, int) or isinstance(features, bool) or not 1 <= features < 2**31:
        raise InputError(f"out_features can't be {shown(features)}", ("out_features",), hint="a whole number above 0")
    if not isinstance(bias, bool):
        raise InputError(f"bias can't be {shown(bias)}", ("bias",), hint="true or false")
    conv = Conv(shape[0], shape[1], features, (Spatial("W", 1, kernel=1),), bias=bias)
    layer = None
    if placed := {key: attributes[key] for key in PLACED if key in attributes}:
        if isinstance(placed.get("distribution"), dict):
            placed["distribution"] = _of_one_row(placed["distribution"], shape)
        layer = _layer("conv", {"out_channels": features, "kernel_size": 1, "bias": bias, **placed}, "it", (*shape, 1))
    return Made((shape[0], features, *shape[2:]), conv, layer)


def _of_one_row(distribution: Mapping[str, object], shape: Shape) -> dict[str, object]:
    """A linear layer's distribution as that of a convolution of one row."""
    found = dict(distribution)
    for tensor in ("x", "y"):
        entries = as_list(found.get(tensor))
        if entries is None:
            continue
        if len(entries) != len(shape):
            fact = f"distribution.{tensor} has {len(entries)} entries, {tensor} has {len(shape)} dimensions to split"
            names = "N, C" if tensor == "x" else "N, F"
            example = ", ".join(['"*"'] * len(shape))
            hint = f"an entry each for {names}, e.g. {tensor}: [{example}]"
            raise InputError(fact, ("distribution", tensor), hint=hint)
        found[tensor] = [*entries, "*"]
    return found


def keys_of(kind: str) -> tuple[str, ...]:
    """The attributes that a kind takes."""
    return tuple(key.rstrip("!") for key in KINDS[kind])


def needed_keys(kind: str) -> tuple[str, ...]:
    """The attributes that a kind needs."""
    return tuple(key[:-1] for key in KINDS[kind] if key.endswith("!"))
