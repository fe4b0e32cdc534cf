"""Whether a graph's calls are possible: operators, arguments and results, as ATen says without computing.

Every call is made once on tensors of torch's device `meta`, which have shapes and types but no values, and its results
are compared with the graph's. With an open number of samples, at its own number and at one that no other extent has.
Results that only values tell, such as how many elements a mask selects, are taken from the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import prod
from typing import Any, cast

from convgen.errors import InputError
from convgen.late import torch
from convgen.operations.typed import under
from convgen.spec.aten.describe import KNOWN
from convgen.spec.aten.sizes import probes_of
from convgen.spec.extents import value_at
from convgen.spec.graph import DTYPES, FOURIER, Arg, Call, Graph, Ref, Value, refs
from convgen.spec.graph_edit import BATCH_NORM, DROPOUT
from convgen.spec.graph_names import check_names
from convgen.spec.operators import pure_operator
from convgen.spec.source import KeyPath
from convgen.spec.text import one_line, shown

MOST = 2**60  # elements of a value: torch counts bytes in 63 bits
MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
_FILLED = ("kaiming_uniform", "uniform", "normal")  # fill with floating-point numbers
_COMPLEX = ("complex64", "complex128")


def check_graph(graph: Graph) -> None:
    """Check a graph's names, sizes, operators, arguments, shapes and types.

    Raises:
        InputError: names the key path of the first thing wrong.
    """
    check_names(graph)
    for k, condition in enumerate(graph.conditions):
        if not condition.holds(graph.sizes):
            said = ", ".join(f"{letter}={graph.sizes[letter]}" for letter in sorted(condition.letters))
            raise InputError(f"{condition} is not so for the example's {said}", ("conditions", k), hint="its own sizes")
    at = (graph.sizes, *(probes_of(graph) if graph.letters else ()))
    made = {v.name: v for call in graph.calls for v in call.results if v is not None}
    given = {v.name: v for v in (*graph.inputs, *graph.parameters, *graph.buffers, *graph.constants)}
    for name, value in (given | made).items():
        for sizes in at:
            _check_size(value, sizes, _path(graph, name))
    for value in (*graph.parameters, *graph.buffers):
        _check_init(value, _path(graph, value.name))
    for buffer, name in graph.updates:
        there = (given | made)[name]
        if (there.shape, there.dtype) != (given[buffer].shape, given[buffer].dtype):
            fact = f"{buffer} {_said(given[buffer])} becomes {name}, {_said(there)}"
            raise InputError(fact, ("updates", buffer), hint="a value of its shape and type")
    own = {*given}
    for alias, _ in graph.aliases:
        if alias in own:
            raise InputError(f"{alias} is a value, and another name of one", ("aliases", alias), hint="another name")
    for sizes in (*at[1:2], at[0]):
        _infer(graph.at(sizes))


def _path(graph: Graph, name: str) -> KeyPath:
    for key in ("inputs", "parameters", "buffers", "constants"):
        if any(v.name == name for v in getattr(graph, key)):
            return (key, name, "shape")
    return next(
        ("calls", k, "shape") for k, c in enumerate(graph.calls) if any(v and v.name == name for v in c.results)
    )


def _said(value: Value) -> str:
    return f"[{', '.join(map(str, value.shape))}] {value.dtype}"


def _check_size(value: Value, sizes: Mapping[str, int], path: KeyPath) -> None:
    said = ", ".join(f"{letter}={n}" for letter, n in sizes.items())
    try:
        shape: tuple[int, ...] = value_at(value.shape, sizes)
    except ZeroDivisionError:
        raise InputError(f"{value.name} {_said(value)} divides by 0 at {said}", path, hint="another size") from None
    if min(shape, default=0) < 0:
        raise InputError(f"{value.name} {_said(value)} is {list(shape)} at {said}", path, hint="sizes from 0 on")
    if prod(shape) >= MOST or max(shape, default=0) >= MOST:
        fact = f"{value.name} {_said(value)} has {prod(shape)} elements at {said}, more than fit: 2**60"
        raise InputError(fact, path, hint="smaller extents")


def _check_init(value: Value, path: KeyPath) -> None:
    kind, _, number = value.init.partition(":")
    path = (*path[:-1], "init")
    if kind in _FILLED and "float" not in value.dtype:
        raise InputError(f"{value.name} of {value.dtype} can't be {value.init}", path, hint="zeros, ones, fill:NUMBER")
    if kind in ("kaiming_uniform", "uniform") and not 0 < int(number[:20]) < MOST:
        raise InputError(f"init can't be {shown(value.init)}", path, hint=f"{kind}:FAN_IN, 1 or more")
    if kind == "fill":
        try:
            float(number)
        except ValueError:
            raise InputError(f"init can't be {shown(value.init)}", path, hint="fill:NUMBER") from None


# ---------------------------------------------------------------- calls
def _infer(graph: Graph) -> None:
    """Check every call of a graph whose sizes are numbers."""
    given = (*graph.inputs, *graph.parameters, *graph.buffers, *graph.constants)
    with torch.device("meta"), torch.no_grad():
        values = {v.name: _empty(v) for v in given}
        known: dict[object, Sequence[Any] | None] = {}  # results of equal calls, of which networks have many
        for k, call in enumerate(graph.calls):
            key = call.op, _seen(call.args, values)
            try:
                made = known[key] = known[key] if key in known else _made(call, values)
            except InputError as error:
                raise InputError(f"{call.op}: {error.fact}", ("calls", k, *error.path), hint=error.hint) from None
            if made is not None:
                _compare(call, made, k)
            values |= {v.name: _empty(v) for v in call.results if v is not None}


def _seen(arg: Arg, values: Mapping[str, Any]) -> object:
    """The part of an argument on which a call's results depend: of a value its shape and type."""
    if isinstance(arg, Ref):
        return Ref, tuple(values[arg.name].shape), values[arg.name].dtype
    return tuple([_seen(one, values) for one in arg]) if isinstance(arg, tuple) else (type(arg), arg)


def _empty(value: Value) -> Any:
    return torch.empty(cast("tuple[int, ...]", value.shape), dtype=getattr(torch, value.dtype))


def _compare(call: Call, made: Sequence[Any], k: int) -> None:
    pairs = list(zip_longest(call.results, made))
    if len(call.results) != len(made) and any(v is not None for v, m in pairs if m is None):
        fact = f"{call.op} makes {len(made)} results, make names {len(call.results)}"
        raise InputError(fact, ("calls", k, "make"), hint="null for a result that nobody reads")
    for value, tensor in pairs:
        if value is None or tensor is None:
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != value.shape:
            fact = f"{call.op} makes {value.name} {list(tensor.shape)}, the file says {list(value.shape)}"
            raise InputError(fact, ("calls", k, "shape"), hint="import it again")
        if dtype != value.dtype:
            fact = f"{call.op} makes {value.name} of {dtype}, the file says {value.dtype}"
            raise InputError(fact, ("calls", k, "dtype"), hint="import it again")


def _made(call: Call, values: Mapping[str, Any]) -> Sequence[Any] | None:
    """A call's results; None where only values tell them."""
    if call.op == FOURIER:
        return _fourier(call, values)
    if call.op == BATCH_NORM:
        return _batch_norm(call, values)
    op = "reshape" if call.op == "view" else call.op  # values here need not have the strides that a view asks for
    described = call.op in KNOWN or call.op.partition(".")[0] in KNOWN
    try:
        operator = pure_operator(op, described)
    except InputError as error:
        raise InputError(error.fact, ("op",), hint=error.hint) from None
    arguments = operator._schema.arguments
    _count(call, (len(arguments),), ", ".join(f"{a.type} {a.name}" for a in arguments))
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for i, (wanted, arg) in enumerate(zip(arguments, call.args, strict=True)):
        value = _argument(wanted, under(arg, None), values, i)
        if wanted.kwarg_only:
            named[wanted.name] = value
        else:
            positional.append(value)
    if call.op == DROPOUT and not (isinstance(p := call.args[1], (int, float)) and 0 <= p <= 1):
        raise InputError(f"p can't be {shown(_plain(p))}", ("args", 1), hint="a probability, 0 to 1")
    try:
        found = operator(*positional, **named)
    except NotImplementedError:
        return None
    except Exception as error:  # whatever ATen raises for these arguments
        said = str(error).partition("\n")[0]
        if "meta" in said or "data-dependent" in said:  # it asks for values
            return None
        fact = one_line(said.replace("\n", " ") or type(error).__name__, 240)
        raise InputError(fact, ("args",), hint=f"arguments as ATen has them: {operator._schema}") from None
    return tuple(cast("Sequence[Any]", found)) if isinstance(found, (tuple, list)) else (found,)


def _argument(wanted: Any, arg: Arg, values: Mapping[str, Any], i: int) -> Any:
    """An argument as the schema's type."""
    kind = str(wanted.type)
    if wanted.name == "device":
        if not isinstance(arg, str | None):
            raise InputError(f"device can't be {shown(arg)}", ("args", i), hint="null")
        return torch.device("meta")
    if kind in ("Generator", "Optional[Generator]") and arg is not None:
        raise InputError(f"{wanted.name} can't be {shown(arg)}", ("args", i), hint="null")
    if wanted.name == "pin_memory" and arg not in (None, False):
        raise InputError(f"pin_memory can't be {shown(arg)}", ("args", i), hint="null or false")
    names = {"dtype": (*DTYPES, *_COMPLEX), "layout": ("strided",), "memory_format": MEMORY_FORMATS}.get(wanted.name)
    if names is not None and "str" not in kind and arg is not None:
        if arg not in names:
            raise InputError(f"{wanted.name} can't be {shown(arg)}", ("args", i), hint=f"one of {', '.join(names)}")
        return getattr(torch, cast("str", arg))
    if "Tensor" not in kind and refs(arg):
        raise InputError(f"{wanted.name} is {kind}, and the file has a value there", ("args", i), hint="no %NAME")
    if kind in ("int", "List[int]", "Optional[int]", "Optional[List[int]]") and _has(arg, bool):
        raise InputError(f"{wanted.name} can't be {shown(arg)}", ("args", i), hint=f"{kind}")
    if kind == "float" and isinstance(arg, bool):
        raise InputError(f"{wanted.name} can't be {shown(arg)}", ("args", i), hint=f"{kind}")
    return _value(arg, values)


def _has(arg: Arg, kind: type) -> bool:
    return any(_has(one, kind) for one in arg) if isinstance(arg, tuple) else isinstance(arg, kind)


def _value(arg: Arg, values: Mapping[str, Any]) -> Any:
    if isinstance(arg, Ref):
        return values[arg.name]
    return [_value(one, values) for one in arg] if isinstance(arg, tuple) else arg


def _count(call: Call, counts: Sequence[int], wanted: str) -> None:
    if len(call.args) not in counts:
        fact = f"{len(call.args)} arguments, the operator has {' or '.join(map(str, counts))}"
        raise InputError(fact, ("args",), hint=f"({wanted}), defaults written out")


# ---------------------------------------------------------------- calls of the graph's own form
def _batch_norm(call: Call, values: Mapping[str, Any]) -> Sequence[Any]:
    """(x, weight, bias, running_mean, running_var, training, momentum, eps[, parts])."""
    _count(call, (8, 9), "x, weight, bias, running_mean, running_var, training, momentum, eps")
    x, *vectors = call.args[:5]
    if not isinstance(x, Ref) or values[x.name].dim() < 2:
        raise InputError(f"x can't be {shown(_plain(x))}", ("args", 0), hint="a value of 2 dimensions or more")
    given = values[x.name]
    for i, one in enumerate(vectors, 1):
        if one is None:
            continue
        if not isinstance(one, Ref) or tuple(values[one.name].shape) != (given.shape[1],):
            raise InputError(
                f"argument {i} can't be {shown(_plain(one))}", ("args", i), hint="a number a channel, or null"
            )
        if not values[one.name].is_floating_point():
            raise InputError(f"argument {i} is of {values[one.name].dtype}", ("args", i), hint="a type of floats")
    if (vectors[2] is None) != (vectors[3] is None):
        raise InputError("a running mean without a variance, or one without a mean", ("args", 3), hint="both or null")
    training, momentum, eps = call.args[5:8]
    if not isinstance(training, bool):
        raise InputError(f"training can't be {shown(training)}", ("args", 5), hint="true or false")
    for i, number in ((6, momentum), (7, eps)):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise InputError(f"argument {i} can't be {shown(_plain(number))}", ("args", i), hint="a number")
    if not training and vectors[2] is None:
        raise InputError("statistics of evaluation without a running mean", ("args", 3), hint="training: true")
    if len(call.args) == 9:
        raise InputError("statistics by parts are a layout's", ("args", 8), hint="convgen compile --statistics")
    if not given.is_floating_point():
        raise InputError(f"x is of {given.dtype}", ("args", 0), hint="a type of floats")
    return (given, *(None if one is None else values[cast("Ref", one).name] for one in vectors[2:]))


def _plain(arg: Arg) -> object:
    return f"%{arg.name}" if isinstance(arg, Ref) else arg


def _fourier(call: Call, values: Mapping[str, Any]) -> Sequence[Any]:
    """(real, complex or back; real and imaginary part; dimension, forward, scale, length)."""
    _count(call, (7,), "kind, re, im, dimension, forward, scale, length")
    kind, re, im, d, forward, scale, length = call.args
    if kind not in ("real", "complex", "back"):
        raise InputError(f"the kind can't be {shown(kind)}", ("args", 0), hint="real, complex or back")
    if not isinstance(re, Ref) or (not isinstance(im, Ref) if kind != "real" else im is not None):
        raise InputError(f"a {kind} transform is of {'two values' if kind != 'real' else 'one value'}", ("args", 1))
    x = values[re.name]
    if isinstance(im, Ref) and (values[im.name].shape, values[im.name].dtype) != (x.shape, x.dtype):
        raise InputError("real and imaginary part differ in shape or type", ("args", 2), hint="two alike")
    if not x.is_floating_point():
        raise InputError(f"{re.name} is of {x.dtype}", ("args", 1), hint="a type of floats")
    if type(d) is not int or not 0 <= d < x.dim():
        raise InputError(f"the dimension can't be {shown(d)}", ("args", 3), hint=f"0 to {x.dim() - 1}")
    if not isinstance(forward, bool) or scale not in (0, 1, 2) or type(scale) is not int:
        raise InputError(f"forward and scale can't be {shown(forward)}, {shown(scale)}", ("args", 4), hint="true, 0")
    if type(length) is not int or length < 1:
        raise InputError(f"the length can't be {shown(length)}", ("args", 6), hint="1 or more")
    there = {"real": length, "complex": length, "back": length // 2 + 1}[cast("str", kind)]
    if x.shape[d] != there:
        fact = f"a {kind} transform of length {length} is of {there} rows, {re.name} has {x.shape[d]}"
        raise InputError(fact, ("args", 6), hint="as convgen import writes it")
    rows = length // 2 + 1 if kind == "real" else length
    y = torch.empty((*x.shape[:d], rows, *x.shape[d + 1 :]), dtype=x.dtype)
    return (y,) if kind == "back" else (y, y)
