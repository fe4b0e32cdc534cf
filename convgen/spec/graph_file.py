"""Graph files: `convgen import` writes them, and they are read back as equal graphs.

    network: resnet18
    format: 1
    source: "torchvision.models:resnet18"
    modes: [train, eval]
    batch: 8
    dtype: float32                     # of values that say none; tfloat32: products take TF32 on a GPU
    inputs:
      x: {shape: [N, 3, 64, 64]}
    parameters:
      conv1.weight: {shape: [64, 3, 7, 7], init: kaiming_uniform:147}
    calls:
      - {make: conv1, op: conv2d, args: ["%x", "%conv1.weight", null, [2, 2], ...], shape: [N, 64, 32, 32],
         module: conv1, kind: Conv2d}                       # in one line
    modules:
      conv1: {kind: Conv2d, has: {in_channels: 3, kernel_size: [7, 7], ...}}

In arguments `%NAME` is a value and `N` or `3*N` a multiple of the number of samples; a text that would read as one of
them has `%%` before it. A graph with other open extents has their letters with the example's sizes, its sizes as
expressions of letters, and conditions on these: `open: {H: 64, W: 64}`, `shape: [N, 64, "(H - 1)//2 + 1", W//2]`,
`conditions: ["H%8 == 0"]`. What the source takes from a value's type is written without and under torch.autocast:
`{plain: float32, bfloat16: bfloat16, float16: float16}`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from convgen.errors import InputError
from convgen.operations.typed import ByAutocast
from convgen.spec.extents import Extent
from convgen.spec.formats import FORMAT, KEY
from convgen.spec.graph import TFLOAT32, Arg, Call, Graph, Module, Ref, Value
from convgen.spec.graph_reader import BY_AUTOCAST, DTYPE, is_graph_file, read_graph
from convgen.spec.text import shown

if TYPE_CHECKING:
    import torch

__all__ = ["constants_path", "given_names", "is_graph_file", "read_constants", "read_graph", "write_graph"]

_PLAIN = re.compile(r"[A-Za-z0-9_]+([.:/-][A-Za-z0-9_]+)*")
_SIZE = re.compile(r"([1-9][0-9]*\*)?[A-Z]|[A-Z](//|%)[0-9]+")  # which YAML takes for text, however it stands
_WORDS = frozenset(("null", "true", "false", "yes", "no", "on", "off"))  # of YAML 1.1 too


def constants_path(path: str | Path) -> Path:
    """Where a graph file's tensors are: beside it, in NAME.constants.safetensors."""
    return Path(path).with_suffix(".constants.safetensors")


def given_names(graph: Graph) -> tuple[str, ...]:
    """Names of constants, parameters and buffers whose values are in the file of tensors."""
    held = (*graph.parameters, *graph.buffers)
    return (*(v.name for v in graph.constants), *(v.name for v in held if v.init == "given"))


def read_constants(path: str | Path, graph: Graph) -> dict[str, torch.Tensor]:
    """The tensors in the file beside a graph's, by name: those of `given_names`; none if the graph needs none.

    Raises:
        InputError: the file of tensors can't be read, or is another graph's.
    """
    from convgen.spec.safetensors import read_tensors

    names = given_names(graph)
    if not names:
        return {}
    values = {v.name: v for v in (*graph.constants, *graph.parameters, *graph.buffers)}
    beside, hint = constants_path(path), "the file that convgen import wrote with this one"
    tensors = read_tensors(beside)
    for name in names:
        found, wanted = tensors.get(name), values[name]
        dtype = "" if found is None else str(found.dtype).removeprefix("torch.")
        if found is None or (tuple(found.shape), dtype) != (wanted.shape, wanted.dtype):
            said = "no tensor" if found is None else f"a tensor {list(found.shape)} {dtype}"
            fact = f"{beside} has {said} for {name} {list(wanted.shape)} {wanted.dtype}"
            raise InputError(fact, where=str(beside), hint=hint)
    if more := [name for name in tensors if name not in names]:
        fact = f"{beside} has {shown(more[0])}, for which {path} wants no values"
        raise InputError(fact, where=str(beside), hint=hint)
    return {name: tensors[name] for name in names}


def write_graph(graph: Graph) -> str:
    """The text of a graph's file; `read_graph` reads an equal graph from it."""
    dtype = graph.inputs[0].dtype if graph.inputs and not graph.tf32 else DTYPE
    lines = [
        f"network: {_scalar(graph.name)}",
        f"{KEY}: {FORMAT}",
        f"source: {_scalar(graph.source)}",
        f"modes: {_flow(graph.modes)}",
        f"batch: {graph.batch}",
        *([f"open: {_mapping({letter: str(size) for letter, size in graph.open})}"] if graph.open else []),
        *([f"conditions: {json.dumps([str(one) for one in graph.conditions])}"] if graph.conditions else []),
        f"dtype: {TFLOAT32 if graph.tf32 else dtype}",
    ]
    for key in ("inputs", "parameters", "buffers", "constants"):
        values: tuple[Value, ...] = getattr(graph, key)
        lines += _block(key, (f"{_scalar(v.name)}: {_value(v, dtype)}" for v in values), "{}")
    lines += _block("calls", (f"- {_call(call, dtype)}" for call in graph.calls), "[]")
    for key in ("updates", "outputs", "aliases"):
        pairs: tuple[tuple[str, str], ...] = getattr(graph, key)
        lines += _block(key, (f"{_scalar(a)}: {_scalar(b)}" for a, b in pairs), "{}")
    if graph.asks:
        lines += _block("asks", (f"{low}: {_scalar(why)}" for low, why in graph.asks), "{}")
    if graph.modules:
        lines += _block("modules", (f"{_scalar(m.path)}: {_module(m)}" for m in graph.modules), "{}")
    return "\n".join(lines) + "\n"


def _module(module: Module) -> str:
    said = {"same": _scalar(module.same)} if module.same else {}
    said |= {"kind": _scalar(module.kind)} if module.kind else {}
    said |= {"has": _mapping({n: _flow(_escaped(v)) for n, v in module.has})} if module.has else {}
    return _mapping(said)


def _block(key: str, entries: Iterable[str], empty: str) -> list[str]:
    lines = [f"  {entry}" for entry in entries]
    return [f"{key}:", *lines] if lines else [f"{key}: {empty}"]


def _value(value: Value, dtype: str) -> str:
    said: dict[str, str] = {"shape": _flow(value.shape)}
    if value.dtype != dtype:
        said["dtype"] = value.dtype
    if value.init:
        said["init"] = _scalar(value.init)
    if value.frozen:
        said["frozen"] = "true"
    if value.owner:
        said["owner"] = _scalar(value.owner)
    if value.pairs:
        said["pairs"] = "true"
    return _mapping(said)


def _call(call: Call, dtype: str) -> str:
    results = call.results
    made = [None if v is None else v.name for v in results]
    shapes = [None if v is None else v.shape for v in results]
    dtypes = [None if v is None else v.dtype for v in results]
    one = len(results) == 1
    said = {"make": _flow(made[0] if one else tuple(made)), "op": _scalar(call.op), "args": _args(call.args)}
    said["shape"] = _flow(shapes[0] if one else tuple(shapes))
    if any(d not in (None, dtype) for d in dtypes):
        said["dtype"] = _flow(dtypes[0] if one else tuple(dtypes))
    said["module"] = _scalar(call.module)
    if call.kind:
        said["kind"] = _scalar(call.kind)
    if call.autocast:
        said["autocast"] = _scalar(call.autocast)
    return _mapping(said)


def _mapping(said: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {text}" for key, text in said.items()) + "}"


def _args(args: tuple[Arg, ...]) -> str:
    return _flow(tuple(_escaped(arg) for arg in args))


def _escaped(arg: Arg) -> Arg:
    match arg:
        case str() if arg.startswith("%") or Extent.read(arg) is not None:
            return f"%%{arg}"
        case Ref():
            return f"%{arg.name}"
        case tuple():
            return tuple(_escaped(one) for one in arg)
        case ByAutocast():
            return ByAutocast(*(_escaped(one) for one in (arg.plain, arg.bfloat16, arg.float16)))
        case _:
            return arg


def _flow(value: Arg) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float():
            return _float(value)
        case int():
            return str(value)
        case Extent():
            return _scalar(str(value), is_size=True)
        case tuple():
            return "[" + ", ".join(map(_flow, value)) + "]"
        case ByAutocast():
            return _mapping({name: _flow(getattr(value, name)) for name in BY_AUTOCAST})
        case Ref():
            return _scalar(f"%{value.name}")
        case str():
            return _scalar(value)


def _float(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"


def _scalar(text: str, *, is_size: bool = False) -> str:
    """A text that YAML reads back as a text: plain where that works, else as JSON writes it."""
    if is_size and _SIZE.fullmatch(text):
        return text
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS and Extent.read(text) is None
    return text if plain and not _is_number(text) else json.dumps(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text[:1].isdigit() and not re.fullmatch(r"[0-9]+\.[A-Za-z_].*", text)
    return True
