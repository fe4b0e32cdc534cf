"""From a graph to its values and its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pkgutil import iter_modules

from convgen.errors import InputError
from convgen.late import torch
from convgen.operations.bound import Bound
from convgen.operations.calls import Whole, operator_of
from convgen.spec import aten
from convgen.spec.aten.convolutions import own_padding
from convgen.spec.aten.reader import KNOWN, Reader, Tensor, slots
from convgen.spec.autocast import kind_of
from convgen.spec.graph import FLOATS, Call, Graph
from convgen.spec.operators import impurity

# Each file registers its describers; sizes.py describes graphs by these.
for _file in iter_modules(aten.__path__):
    if _file.name not in ("describe", "sizes", "responses"):
        import_module(f"{aten.__name__}.{_file.name}")


@dataclass(frozen=True)
class Described:
    """A graph as rows.

    Attributes:
        calls: by row, the number of the graph's call that the row belongs to.
        whole: numbers of calls that run whole.
    """

    tensors: dict[str, Tensor]
    rows: tuple[Bound, ...]
    calls: tuple[int, ...]
    whole: tuple[int, ...]


def describe(graph: Graph, device: str = "") -> Described:
    """The rows of a graph whose sizes are numbers (`Graph.at`).

    Args:
        device: where torch.autocast would run, so that rows say how it takes their operands; "": rows say nothing of
            it.
    Raises:
        InputError: an operator draws random numbers, or changes an operand, and no row describes it.
    """
    reader = Reader(taken=frozenset(v.name for call in graph.calls for v in call.results if v is not None))
    learnt, frozen = ([v for v in graph.parameters if v.frozen == f] for f in (False, True))
    given = (("input", graph.inputs), ("parameter", learnt), ("buffer", (*frozen, *graph.buffers)))
    for kind, values in (*given, ("constant", graph.constants)):
        for v in values:
            reader.tensors[v.name] = Tensor(v.name, tuple(map(int, v.shape)), v.dtype, kind)  # type: ignore[arg-type]
    for number, call in _calls(graph):
        for v in call.results:
            if v is not None:
                reader.tensors[v.name] = Tensor(v.name, tuple(map(int, v.shape)), v.dtype, "made")  # type: ignore[arg-type]
        reader.number, reader.module, first = number, call.module, len(reader.rows)
        known = KNOWN.get(call.op) or KNOWN.get(call.op.partition(".")[0])
        try:
            if known is None or not known(reader, call):
                _as_it_stands(reader, call)
        except InputError as error:
            error.path = error.path or ("calls", number)
            raise
        if device and not call.autocast and (kind := _autocast(reader, call, device)):
            for n, row in enumerate(reader.rows[first:], first):
                reader.rows[n] = replace(row, autocast=(kind,) * len(row.reads))
    return Described(reader.tensors, tuple(reader.rows), tuple(reader.calls), tuple(reader.whole))


def _calls(graph: Graph) -> Iterator[tuple[int, Call]]:
    """Calls with their numbers; convolutions do the padding that nothing else reads."""
    padded = own_padding(graph)
    for number, call in enumerate(graph.calls):
        if (there := padded.get(number, call)) is not None:
            yield number, there


def _autocast(reader: Reader, call: Call, device: str) -> str:
    found: list[Tensor] = []
    args = tuple(slots(a, reader, found) for a in call.args)
    return kind_of(call, args, [t.shape for t in found], [t.dtype for t in found], device)


def asks_on(graph: Graph, found: Described, device: str) -> tuple[tuple[str, str], ...]:
    """By autocast's type, why the types that the source asks for can't be said on a device: they are a CPU's."""
    reader = Reader(tensors=found.tensors)
    if device == "cpu" or not graph.asks:
        return graph.asks
    for _, call in _calls(graph.at()):
        if not call.autocast and _autocast(reader, call, "cpu") != _autocast(reader, call, device):
            why = f"the source asks for types, which are those of a CPU's autocast; a GPU's takes {call.op} otherwise"
            return tuple((low, said or why) for low, said in graph.asks)
    return graph.asks


def _as_it_stands(reader: Reader, call: Call) -> None:
    """Add a call as one row: elementwise on blocks, where torch says that it is elementwise; else whole."""
    found: list[Tensor] = []
    args = tuple(slots(a, reader, found) for a in call.args)
    differentiable = tuple(t.floats for t in found)
    if overload_tags_allow(call, reader) and found and len(call.results) == 1 and call.results[0] is not None:
        y = reader.tensors[call.results[0].name]
        if reader.elementwise(call.op, call.args, y):
            return
    results = [None if v is None else reader.tensors[v.name] for v in call.results]
    shapes = tuple(() if t is None else t.shape for t in results)
    integers = tuple(k for k, t in enumerate(results) if t is None or t.dtype not in FLOATS)
    operation = Whole(call.op, args, tuple(t.shape for t in found), shapes, differentiable, integers)
    reader.add(operation, found, [t.name if t else "" for t in results])
    reader.whole.append(reader.number)


# Elementwise operators that torch doesn't tag so: a change of type, and before torch 2.13 a rectifier.
UNTAGGED = frozenset({"_to_copy", "leaky_relu"})


def overload_tags_allow(call: Call, reader: Reader) -> bool:
    """Whether torch says that an operator is elementwise.

    Raises:
        InputError: it draws random numbers, or changes an operand.
    """
    op = operator_of(call.op)
    if why := impurity(op):
        fact = f"{call.module or 'the module'}: {call.op} {why}, and no operation describes it"
        raise InputError(fact, hint="a module without it")
    args = dict(zip((a.name for a in op._schema.arguments), call.args, strict=True))
    off = args.get("train", True) is False or args.get("dropout_p", args.get("dropout")) == 0  # recurrent layers
    if torch.Tag.nondeterministic_seeded in op.tags and not off:
        fact = f"{call.module or 'the module'}: {call.op} draws random numbers, and no operation describes it"
        raise InputError(fact, hint="eval mode, or a module without it")
    return torch.Tag.pointwise in op.tags or call.op in UNTAGGED
