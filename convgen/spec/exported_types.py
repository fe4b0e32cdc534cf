"""What a module does with types that it reads from values: torch.autocast changes these, and one trace can't tell how.

    y.to(x.dtype), zeros_like(y), torch.arange(n, dtype=y.dtype)     a type that depends on autocast's
    y.masked_fill(m, torch.finfo(y.dtype).min)                       a number that depends on autocast's type
    if y.dtype == torch.bfloat16: y = y + 1                          other calls: autocast is refused

A module that asks for types is traced under autocast, too, and the programs are compared node by node. Differences are
noted in the program without autocast, from which the graph is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from convgen.spec.exported_autocast import NOTED, NUMBERS, REGION
from convgen.spec.exported_forward import inside_forward
from convgen.spec.exported_nodes import is_float
from convgen.spec.places import place_in

if TYPE_CHECKING:
    from torch.export import ExportedProgram

OF = "types under autocast"  # the key in a node's meta for the types that its value has
CASTS = ("to.dtype", "to.dtype_layout", "to.device", "to.other", "type_as", "_to_copy", "alias")
# Operators that make values from none, in a type that they are told or that another value has; constants, too.
MADE = (
    "zeros", "ones", "full", "empty", "arange", "eye", "scalar_tensor", "zeros_like", "ones_like", "full_like",
    "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "lift_fresh_copy", "lift_fresh",
)  # fmt: skip
FILLED = ("full", "full_like", "new_full", "scalar_tensor", "lift_fresh_copy", "lift_fresh")  # with one number
# Elementwise operators whose numbers stand in their rows as they are.
NUMBERED = (
    "masked_fill.Scalar", "masked_fill_.Scalar", "clamp", "clamp_min", "clamp_max", "add.Tensor", "sub.Tensor",
    "mul.Tensor", "div.Tensor",
)  # fmt: skip
_SWITCHES = ("is_autocast_enabled", "get_autocast_dtype", "is_autocast_cpu_enabled", "get_autocast_cpu_dtype",
             "get_autocast_gpu_dtype")  # fmt: skip


NO_GRAD = "wrap_with_set_grad_enabled"


class PartedError(Exception):
    """Programs differ in more than types and numbers; the text says where."""


@dataclass
class Asks:
    """Whether the source asks values for their types, or asks what autocast's type is."""

    found: bool = False

    def of(self, program: ExportedProgram) -> bool:
        return self.found or _asks_in(program.graph_module)


@contextmanager
def asking(module: Any, asks: Asks) -> Generator[None]:
    """Notes questions for types while a module is traced, but not those of torch's own insides.

    A cast is made of an alias: a cast that does nothing gives back its operand, whose other readers would look like the
    cast's.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    tensor: Any = torch.Tensor
    questions: tuple[Any, ...] = (tensor.dtype.__get__, tensor.type, tensor.element_size, tensor.itemsize.__get__,
                                  tensor.nbytes.__get__, torch.result_type)  # fmt: skip

    casts = (tensor.to, tensor.type, tensor.type_as, tensor.float, tensor.double, tensor.half, tensor.bfloat16)

    class Listening(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in questions and _is_source(_caller()):
                asks.found = True
            if func in casts and args[0].is_floating_point():
                args = (torch.ops.aten.alias.default(args[0]), *args[1:])
            return func(*args, **(kwargs or {}))

    def switch(plain: Callable[..., Any], *args: Any) -> Any:
        if _is_source(_caller()):
            asks.found = True
        return plain(*args)

    with ExitStack() as stack:
        for name in _SWITCHES:
            stack.enter_context(patch.object(torch, name, partial(switch, getattr(torch, name))))
        stack.enter_context(inside_forward(module, Listening()))
        yield


def _caller() -> str:
    """The file of the line that has called the function that asks."""
    return sys._getframe(2).f_code.co_filename  # pyright: ignore[reportPrivateUsage]


def _is_source(file: str) -> bool:
    """Whether a line of this file is the module's own, or of torch's layers and functions."""
    import torch

    home = f"{Path(torch.__file__).parent}/"
    if file.startswith(home):
        inside = file.removeprefix(home).split("/")[0]
        return inside in ("nn", "functional.py")
    return not file.startswith((f"{Path(__file__).parent.parent}/", "<"))


def _asks_in(module: Any) -> bool:
    """Whether a graph has calls that take types from values, or regions of autocast without a stated type."""
    for node in module.graph.nodes:
        name, target = _op(node), str(node.target)
        made = name.partition(".")[0].endswith("_like") or name.startswith("new_")
        noop = name != "alias" and _does_nothing(node)
        if name in ("to.other", "type_as") or noop or _keeps_type(node) or (made and node.kwargs.get("dtype") is None):
            return True
        is_region = target.endswith(REGION)
        inner = node.args[4 if is_region else 1] if is_region or target.startswith(NO_GRAD) else None
        if inner is not None and ((is_region and node.args[2]) or _asks_in(getattr(module, inner.target))):
            return True
    return False


def _op(node: Any) -> str:
    return str(node.target).removeprefix("aten.").removesuffix(".default") if node.op == "call_function" else ""


@dataclass
class Compared:
    """Two programs of a module, one without autocast and one under it.

    Args:
        low: autocast's type.
        mapped: by node of the program under autocast, the node of the other that has the same value.
        same: by cast in the program without autocast that the other lacks, the value that it casts.
    """

    plain: ExportedProgram
    other: ExportedProgram
    low: str
    mapped: dict[Any, Any] = field(default_factory=dict[Any, Any])
    same: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def note(self) -> None:
        """Note what differs.

        Raises:
            PartedError: more than types and numbers differs.
        """
        self._graphs(self.plain.graph_module, self.other.graph_module)

    def _graphs(self, module: Any, other: Any) -> None:
        mine = [n for n in module.graph.nodes if not _op(n).startswith("_assert")]
        theirs = [n for n in other.graph.nodes if not _op(n).startswith("_assert")]
        given, others = ([n for n in of if n.op == "placeholder"] for of in (mine, theirs))
        if module is self.plain.graph_module:
            given, others = (
                [n for n in of if self._constant(p, n) is None] for of, p in ((given, self.plain), (others, self.other))
            )
        self.mapped.update(zip(others, given, strict=False))
        mine, theirs = ([n for n in of if n.op != "placeholder"] for of in (mine, theirs))
        left = iter(mine)
        node = next(left, None)
        for there in theirs:
            while node is not None and not self._pairs(node, there) and _op(node) in CASTS and _op(there) not in CASTS:
                self._absent(node)
                node = next(left, None)
            if node is not None and self._pairs(node, there):
                self._pair(module, node, other, there)
                node = next(left, None)
            elif node is not None and _op(there) in CASTS and is_float(there.args[0]):
                self._inserted(module, node, there)
            else:
                raise PartedError(_place(there, node))
        if node is not None:
            raise PartedError(_place(node))

    def _constant(self, program: ExportedProgram, node: Any) -> Any:
        """The tensor that the source makes and a placeholder stands for; None for other nodes."""
        specs = {s.arg.name: s for s in program.graph_signature.input_specs}
        spec = specs.get(node.name) if node.op == "placeholder" else None
        return (
            program.constants[spec.target or ""] if spec is not None and spec.kind.name == "CONSTANT_TENSOR" else None
        )

    def _pairs(self, node: Any, there: Any) -> bool:
        if (node.op, _target(node)) != (there.op, _target(there)):
            return False
        free = _op(node) in CASTS or _op(node).partition(".")[0] in MADE
        return self._alike(node.args, there.args, free, node) and self._alike(node.kwargs, there.kwargs, free, node)

    def _alike(self, a: Any, b: Any, free: bool, node: Any) -> bool:
        """Whether arguments of two nodes agree; types of casts may differ, and numbers that rows hold."""
        import torch

        if isinstance(b, torch.fx.Node):
            return isinstance(a, torch.fx.Node) and self._is(a, b)
        if isinstance(b, (tuple, list)):
            return isinstance(a, (tuple, list)) and len(a) == len(b) and all(  # pyright: ignore[reportUnknownArgumentType]
                self._alike(x, y, free, node) for x, y in zip(a, b, strict=True)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
            )  # fmt: skip
        if isinstance(b, Mapping):
            return isinstance(a, Mapping) and {*a} == {*b} and all(self._alike(a[k], b[k], free, node) for k in b)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if isinstance(b, torch.dtype):
            off = str(node.target).endswith(REGION) and not node.args[2]  # a region that switches autocast off
            return (
                a == b or off or (free and isinstance(a, torch.dtype) and a.is_floating_point and b.is_floating_point)
            )
        if isinstance(a, float) and isinstance(b, float):
            filled = _op(node).partition(".")[0] in FILLED
            return a == b or (a != a and b != b) or filled or _op(node) in NUMBERED
        return type(a) is type(b) and (a == b or isinstance(a, (torch.SymInt, torch.SymFloat)))

    def _is(self, a: Any, b: Any) -> bool:
        known = self.mapped.get(b)
        if known is None:
            if b.op == "get_attr":
                return a.op == "get_attr" and a.target == b.target
            return None not in (self._constant(self.plain, a), self._constant(self.other, b))
        return self._root(a) is self._root(known)

    def _root(self, node: Any) -> Any:
        """The value behind casts that only one of the programs has, or that do nothing."""
        while node in self.same or _does_nothing(node):
            node = self.same.get(node) or node.args[0]
        return node

    def _pair(self, module: Any, node: Any, other: Any, there: Any) -> None:
        from torch.fx import map_arg

        mine, theirs = list[Any](), list[Any]()
        map_arg((node.args, node.kwargs), mine.append)
        map_arg((there.args, there.kwargs), theirs.append)
        read = [self._read(node, there, a, b) for a, b in zip(mine, theirs, strict=True)]
        if any(a is not b for a, b in zip(mine, read, strict=True)):
            if node.meta.setdefault("read as", self.low) != self.low:  # read otherwise under autocast of another type
                raise PartedError(_place(there, node))
            each = iter(read)
            node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda _: next(each))
        self.mapped[there] = node
        if is_float(there):
            node.meta.setdefault(OF, {})[self.low] = _dtype(there)
        base = _op(node).partition(".")[0]
        if str(node.target).endswith(REGION) or str(node.target).startswith(NO_GRAD):
            place = 4 if str(node.target).endswith(REGION) else 1
            self._graphs(getattr(module, node.args[place].target), getattr(other, there.args[place].target))
        elif base in MADE or _op(node) in CASTS:
            self._note_type(node, there)
            if base in FILLED:
                self._note_filling(node, there)
        else:
            self._note_numbers(node, there)
            if _keeps_type(node):
                self._note_type(node, there)

    def _read(self, node: Any, there: Any, a: Any, b: Any) -> Any:
        """What a node should read in place of `a`, if under autocast it reads `b`."""
        now = self.mapped.get(b, a)
        if now is a or self.same.get(a) is now:
            return a
        if _of_itself(now) is _of_itself(a):
            return now
        raise PartedError(_place(there, node))

    def _note_type(self, node: Any, there: Any) -> None:
        if is_float(node) and is_float(there):
            node.meta.setdefault(NOTED, {})[self.low] = _dtype(there)
        elif _dtype(node) != _dtype(there):
            raise PartedError(_place(there, node))

    def _note_filling(self, node: Any, there: Any) -> None:
        import torch

        if _op(node).startswith("lift_fresh"):
            a, b = self._constant(self.plain, node.args[0]), self._constant(self.other, there.args[0])
            if a is None or (a.dtype == b.dtype and torch.equal(a, b)) or torch.equal(a.to(b.dtype), b):
                return
            if not a.numel() or a.shape != b.shape or (a != a.flatten()[0]).any() or (b != b.flatten()[0]).any():
                raise PartedError(_place(there, node))
            pair = float(a.flatten()[0]), float(b.flatten()[0])
        else:
            k = next(i for i, a in enumerate(node.target._schema.arguments) if a.name in ("fill_value", "s"))
            pair = node.args[k], there.args[k]
            if not all(isinstance(one, float) for one in pair) or pair[0] == pair[1]:
                return
        _number(node, self.low, *pair)

    def _note_numbers(self, node: Any, there: Any) -> None:
        pairs = [
            (a, b)
            for a, b in zip((*node.args, *node.kwargs.values()), (*there.args, *there.kwargs.values()), strict=True)
            if isinstance(a, float) and isinstance(b, float)
        ]
        for a, b in pairs:
            if a != b and a == a:
                if len(pairs) > 1:
                    raise PartedError(_place(there, node))
                _number(node, self.low, a, b)

    def _absent(self, node: Any) -> None:
        """Note a cast that the program under autocast lacks: the value keeps its type there."""
        source = next((b for b, a in self.mapped.items() if self._root(a) is self._root(node.args[0])), None)
        if source is None or not is_float(source):
            raise PartedError(_place(node))
        node.meta.setdefault(NOTED, {})[self.low] = _dtype(source)
        self.same[node] = self.mapped[source]

    def _inserted(self, module: Any, before: Any, there: Any) -> None:
        """Add a cast that only the program under autocast has: without autocast the value keeps its type."""
        import torch

        source = self.mapped.get(there.args[0])
        if source is None or not is_float(source):
            raise PartedError(_place(there))
        with module.graph.inserting_before(before):
            told = () if _op(there) == "alias" else (source.meta["val"].dtype,)
            one = module.graph.call_function(torch.ops.aten.to.dtype if told else there.target, (source, *told))
        one.meta = {k: v for k, v in source.meta.items() if k not in (NOTED, NUMBERS)}
        one.meta |= {"inserted": True, NOTED: one.meta.get(OF, {}) | {self.low: _dtype(there)}}
        one.meta[OF] = dict(one.meta[NOTED])
        self.mapped[there] = one


def _number(node: Any, low: str, plain: float, there: float) -> None:
    said = node.meta.setdefault(NUMBERS, {})
    if said.setdefault("plain", plain) != plain:
        raise PartedError(_place(node))
    said[low] = there


def _keeps_type(node: Any) -> bool:
    """Whether it writes into a value what is made of several: what is functional would be of the widest type."""
    return _op(node).partition(".")[0].endswith("_") and is_float(node) and sum(map(is_float, node.all_input_nodes)) > 1


def _does_nothing(node: Any) -> bool:
    """Whether a cast, without autocast, is to the type that its operand has already."""
    return _op(node) in CASTS and is_float(node) and is_float(node.args[0]) and _dtype(node) == _dtype(node.args[0])


def _of_itself(node: Any) -> Any:
    """The value behind casts that do nothing."""
    while _does_nothing(node):
        node = node.args[0]
    return node


def _dtype(node: Any) -> str:
    return str(node.meta["val"].dtype).removeprefix("torch.")


def _target(node: Any) -> Any:
    return node.target if node.op == "call_function" else node.op


def _place(*nodes: Any) -> str:
    """The first line of source that belongs to one of the nodes."""
    places = (place_in(str(n.meta.get("stack_trace") or "")) for n in nodes if n is not None)
    found = next((p for p in places if p is not None), None)
    return f" at {found.text}: {found.code}" if found is not None else ""
