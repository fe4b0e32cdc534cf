"""Graphs made from graphs: without unread calls, with other names, in evaluation; and whether two graphs are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from convgen.errors import InputError
from convgen.operations.typed import ByAutocast
from convgen.spec.graph import FLOATS, LOW, TFLOAT32, Arg, Call, Graph, Ref, Value, refs
from convgen.spec.names import did_you_mean
from convgen.spec.text import one_line

BATCH_NORM = "batch_norm"
DROPOUT = "dropout"
BERNOULLI = "bernoulli.p"  # (values of that shape, probability, generator)
NOISE = ("rand", "rand_like", "randn", "randn_like")
ATTENTION = "scaled_dot_product_attention"  # (q, k, v, mask, dropout_p, ...)
RECURRENT = ("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")  # (six others, whether it trains, ...)


def pruned(calls: Sequence[Call], needed: Iterable[str]) -> tuple[Call | None, ...]:
    """The calls that `needed` values depend on, None in the place of others; results that nobody reads are None."""
    read = set(needed)
    kept: list[Call | None] = []
    for call in reversed(calls):
        results = tuple(value if value is not None and value.name in read else None for value in call.results)
        live = any(results)
        if live:
            read.update(name for arg in call.args for name in refs(arg))
        kept.append(replace(call, results=results) if live else None)
    return tuple(reversed(kept))


def renamed(call: Call, name: Callable[[str], str]) -> Call:
    """The call with other names for its operands and results."""
    results = tuple(value and replace(value, name=name(value.name)) for value in call.results)
    return replace(call, args=tuple(_renamed(arg, name) for arg in call.args), results=results)


def eval_graph(graph: Graph) -> Graph:
    """The graph in evaluation: batch norms use their running statistics, if they have any, and nothing is updated.
    Dropouts vanish, also those of channels, of samples (stochastic depth: products with noise over its probability),
    and between recurrent layers.

    It is the module's own graph of evaluation where `"eval" in graph.modes`.
    """
    if graph.modes == ("eval",):
        return graph
    same: dict[str, str] = {}
    shapes = {v.name: v.shape for values in (graph.inputs, *(c.results for c in graph.calls)) for v in values if v}
    noise: dict[str, Arg] = {}  # by value that is 1 with a probability, else 0: the probability
    ones: set[str] = set()  # noise divided by its probability
    divided: dict[str, tuple[str, Arg]] = {}  # by quotient: its dividend, and the number that it is divided by
    calls: list[Call] = []
    for call in graph.calls:
        call = renamed(call, lambda name: same.get(name, name))
        result = call.results[0]
        operands = [arg.name if isinstance(arg, Ref) else "" for arg in call.args]
        if call.op == BERNOULLI and result is not None:
            noise[result.name] = call.args[1]
        elif call.op.startswith("div.") and result is not None and noise.get(operands[0]) == call.args[1]:
            ones.add(result.name)
        elif call.op.startswith("div.") and result is not None and operands[0] and not operands[1]:
            divided[result.name] = operands[0], call.args[1]
        elif call.op == "mul.Tensor" and result is not None and (kept := _whole_of(operands, divided, noise)):
            if shapes.get(kept) == result.shape:
                same[result.name] = kept
                continue
        elif call.op == "mul.Tensor" and result is not None and not ones.isdisjoint(operands):
            kept = operands[0] if operands[1] in ones else operands[1]
            if shapes.get(kept) == result.shape:
                same[result.name] = kept
                continue
        elif call.op == ATTENTION:
            call = replace(call, args=(*call.args[:4], 0.0, *call.args[5:]))
        elif call.op in RECURRENT:
            call = replace(call, args=(*call.args[:6], False, *call.args[7:]))
        if call.op in (DROPOUT, "clone") and result is not None:  # a buffer's old value is its value
            same[result.name] = refs(call.args[0])[0]
            continue
        if call.op == BATCH_NORM and call.args[3] is not None:
            call = replace(call, args=(*call.args[:5], False, *call.args[6:]), results=(call.results[0], None, None))
        calls.append(call)
    outputs = tuple((key, same.get(name, name)) for key, name in graph.outputs)
    left = tuple(call for call in pruned(calls, (name for _, name in outputs)) if call is not None)
    return replace(graph, modes=("eval",), calls=left, outputs=outputs, updates=())


def _whole_of(operands: Sequence[str], divided: Mapping[str, tuple[str, Arg]], noise: Mapping[str, Arg]) -> str:
    """The name of x, if the operands are x over a probability and noise of that probability; else ""."""
    for a, b in (operands[:2], operands[1::-1]):
        if a in divided and b in noise and divided[a][1] == noise[b]:
            return divided[a][0]
    return ""


SUMMED_IN = ("float32", "bfloat16", "float16")


def check_reduce_dtype(dtype: str) -> None:
    """Raises InputError: gradients can't travel in this type to be summed; sums are in float32."""
    if dtype and dtype not in SUMMED_IN:
        hint = did_you_mean(dtype, SUMMED_IN, ", ".join(SUMMED_IN))
        raise InputError(f"reduce_dtype {dtype} is no type in which gradients are summed", hint=hint)


def check_autocast(dtype: str) -> None:
    """Raises InputError: torch.autocast has no such type."""
    if dtype not in ("", *LOW):
        raise InputError(f"there is no autocast of {dtype}", hint=did_you_mean(dtype, LOW, " or ".join(LOW)))


def check_floats(dtype: str) -> None:
    """Raises InputError: a network can't have this floating-point type."""
    if dtype not in (known := (*FLOATS, TFLOAT32)):
        hint = did_you_mean(dtype, known, ", ".join(known))
        raise InputError(f"dtype {one_line(dtype, 100)} is no type of floats", ("dtype",), hint=hint)


def with_dtype(graph: Graph, dtype: str) -> Graph:
    """The graph with one floating-point type in place of all that it has.

    Args:
        dtype: the type; tfloat32 is float32 whose products take TF32 on a GPU.

    Raises:
        InputError: it is no type of floats.
    """
    check_floats(dtype)
    dtype, tf32 = ("float32", True) if dtype == TFLOAT32 else (dtype, False)

    def value(one: Value) -> Value:
        return replace(one, dtype=dtype) if one.dtype in FLOATS else one

    def argument(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(map(argument, arg))
        if isinstance(arg, ByAutocast) and dtype != "float32":
            return argument(arg.plain)
        return dtype if isinstance(arg, str) and arg in FLOATS else arg

    calls = tuple(
        replace(call, args=tuple(map(argument, call.args)), results=tuple(v and value(v) for v in call.results))
        for call in graph.calls
    )
    groups = {k: tuple(map(value, getattr(graph, k))) for k in ("inputs", "parameters", "buffers", "constants")}
    why = f"its types were asked for as float32, and it is compiled for {dtype}"
    asks = tuple((low, said if dtype == "float32" else why) for low, said in graph.asks)
    return replace(graph, calls=calls, tf32=tf32, asks=asks, **groups)


def same_calls(a: Graph, b: Graph, same_constant: Callable[[str, str], bool]) -> bool:
    """Whether two graphs of one module compute the same. Names of results and of constants may differ.

    Args:
        same_constant: whether a constant of `a` holds the same as one of `b`.
    """
    mine, theirs = _Numbered(a), _Numbered(b)
    pairs = list(zip(mine.constants, theirs.constants, strict=False))
    alike = len(mine.constants) == len(theirs.constants) and mine.calls == theirs.calls
    return alike and mine.said == theirs.said and all(same_constant(x, y) for x, y in pairs)


class _Numbered:
    """A graph with numbers for the names of results and constants, in the order of their use."""

    def __init__(self, graph: Graph) -> None:
        constant = {value.name for value in graph.constants}
        numbers: dict[str, str] = {}
        self.constants: list[str] = []

        def number(name: str) -> str:
            if name in constant and name not in numbers:
                self.constants.append(name)
                numbers[name] = f"constant {len(self.constants)}"
            return numbers.get(name, name)

        self.calls: list[Call] = []
        for call in graph.calls:
            for place, value in enumerate(call.results):
                if value is not None:
                    numbers[value.name] = f"result {len(self.calls)} {place}"
            self.calls.append(renamed(call, number))
        outputs = tuple((key, number(name)) for key, name in graph.outputs)
        self.said: tuple[object, ...] = (graph.inputs, graph.parameters, graph.buffers, outputs)


def _renamed(arg: Arg, name: Callable[[str], str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(name(arg.name))
    return tuple(_renamed(one, name) for one in arg) if isinstance(arg, tuple) else arg
