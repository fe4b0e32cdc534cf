"""An exported program's nodes as calls: operators with all their arguments, in one form where export has several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import zip_longest
from operator import getitem
from typing import Any, cast

from convgen.errors import InputError
from convgen.operations.typed import ByAutocast
from convgen.spec.exported_autocast import AS, INTO, NUMBER, by_autocast, is_mark
from convgen.spec.exported_complex import halves, read_complex, touches_complex
from convgen.spec.exported_refusals import DATA, place_of_node
from convgen.spec.exported_state import dtype_name
from convgen.spec.extents import Extent, from_sympy
from convgen.spec.graph import DTYPES, Arg, Call, Ref, Size, Value, refs
from convgen.spec.graph_edit import ATTENTION, BATCH_NORM, BERNOULLI, DROPOUT, NOISE
from convgen.spec.places import Place
from convgen.spec.text import one_line

IDENTITIES = ("contiguous", "clone", "alias", "lift_fresh", "lift_fresh_copy", "to", "_to_copy", "type_as")
SAME_SHAPE = (
    "view",
    "_unsafe_view",
    "reshape",
    "expand",
    "slice",
    "narrow",
    "squeeze",
)  # nothing is done where shapes agree
RESHAPES = ("_unsafe_view", "reshape")  # become views, as nothing depends on contiguity
DROPOUTS = ("dropout", "native_dropout")
# By operator: places of training, momentum and eps among arguments, of new mean and variance among results.
BATCH_NORMS: dict[str, tuple[int | None, int, int, tuple[int, int] | None]] = {
    "_native_batch_norm_legit_functional": (5, 6, 7, (3, 4)),
    "_native_batch_norm_legit_no_training": (None, 5, 6, None),
    "_native_batch_norm_legit": (5, 6, 7, None),
    "_native_batch_norm_legit.no_stats": (3, 4, 5, None),
    "_batch_norm_with_update_functional": (-1, 5, 6, (4, 5)),
    "_batch_norm_no_update": (None, 5, 6, None),
    "native_batch_norm": (5, 6, 7, None),
    "batch_norm": (5, 6, 7, None),
}


class FixedError(Exception):
    """The number of samples is fixed by what was exported, or a size or an argument depends on data.

    Attributes:
        place: where in the source, if a node says it.
    """

    place: Place | None = None


@dataclass(frozen=True)
class Found:
    """A call, the visit of its module that it belongs to, and the reason why it can't be right, or ""."""

    call: Call
    visit: str
    problem: str = ""


@dataclass
class Walk:
    """Walks an exported program's nodes.

    Args:
        names: by placeholder, its name in the graph.
        pairs: names of complex placeholders, which the graph has as two parts.
        symbols: by symbol of an open extent, its letter.
        smooth: names of values that gradients reach.
    """

    names: Mapping[str, str]
    symbols: Mapping[Any, str]
    smooth: set[str]
    pairs: frozenset[str] = frozenset()
    found: list[Found] = field(default_factory=list[Found])
    known: dict[str, Any] = field(default_factory=dict[str, Any])  # by node, a name or a tuple of names
    numbers: dict[str, ByAutocast] = field(default_factory=dict[str, ByAutocast])  # from marks, for their readers
    lost: list[str] = field(default_factory=list[str])  # reasons why what autocast does can't be said
    inside: set[str] = field(default_factory=set[str])  # nodes in regions that set autocast themselves

    def read(self, node: Any) -> None:
        """Read one node of the program.

        Raises:
            FixedError: a size is no expression of open extents, or, with samples alone open, no multiple of them.
            InputError: the node is no operator of ATen's.
        """
        try:
            self.node(node)
        except FixedError as error:
            error.place = error.place or _place(node)
            raise

    def node(self, node: Any) -> None:
        value = node.meta.get("val")
        if node.op == "placeholder":
            if node.name in self.names:
                name = self.names[node.name]
                self.known[node.name] = halves(self, node, name) if name in self.pairs else name
        elif node.op == "get_attr":
            self.refuse(node, f"attribute {node.target}")
        elif node.op != "call_function" or _is_number(value):
            return  # numbers are evaluated where they are arguments
        elif node.target is getitem:
            source, place = cast("tuple[Any, int]", node.args)
            self.own_autocast(node)
            self.known[node.name] = self.known[source.name][place]
        elif is_mark(node):
            self.mark(node)
        elif not str(node.target).startswith("aten."):
            self.refuse(node, str(node.target))
        elif value is None:
            self.asserted(node)
        elif touches_complex(node):
            self.known[node.name] = read_complex(self, node)
        else:
            self.operator(node, value)

    def mark(self, node: Any) -> None:
        """Read a mark of what the source says about autocast (exported_autocast.py)."""
        source, (what, *said) = node.args[0], node.args[1].split()
        if what == AS:
            dtype = dtype_name(node.meta["val"])
            name, shape = f"%{node.name}", self.shape(node)
            kind = by_autocast(said[:3]) if said else dtype
            args: tuple[Arg, ...] = (Ref(self.known[source.name]), kind, None, None, None, False, None)
            self.add(node, "_to_copy", args, ((name, shape),), dtype)
            if said[3:]:
                read, name = Ref(name), f"{name}.filled"
                self.add(node, "fill.Scalar", (read, by_autocast(said[3:])), ((name, shape),), dtype)
            self.known[node.name] = name
        else:
            self.known[node.name] = self.known[source.name]
        if what == NUMBER:
            self.numbers[node.name] = by_autocast(said)
        if what == INTO or (what == AS and source.name in self.inside):
            self.inside.add(node.name)

    def own_autocast(self, node: Any) -> str:
        """Note whether a call lies in a region that sets autocast itself: "off" if so."""
        if any(n.name in self.inside for n in node.all_input_nodes):
            self.inside.add(node.name)
            return "off"
        return ""

    def add(
        self, node: Any, op: str, args: tuple[Arg, ...], made: tuple[tuple[str, tuple[Size, ...]], ...], dtype: str
    ) -> None:
        """Add a call that a node becomes, with names and shapes of its results."""
        results = tuple(Value(name=name, shape=shape, dtype=dtype) for name, shape in made)
        self.note_smooth(op, args, results)
        path, kind, visit = module_of(node)
        call = Call(op=op, args=args, results=results, module=path, kind=kind, autocast=self.own_autocast(node))
        self.found.append(Found(call, visit))

    def fixed(self, why: str) -> None:
        raise FixedError(why)

    def asserted(self, node: Any) -> None:
        """Pass over checks of metadata, which hold for what was exported; refuse those of numbers of run time."""
        if node.target.__name__.startswith("_assert_tensor_metadata"):
            return
        if self.symbols:
            raise FixedError(f"{node.target} checks a number")
        if node.target.__name__.startswith("_assert_scalar"):
            raise FixedError(f"a size or an index {DATA}")
        self.refuse(node, str(node.target))

    def operator(self, node: Any, value: Any) -> None:
        schema: Sequence[Any] = node.target._schema.arguments
        args = tuple(
            self.arg(node.args[k] if k < len(node.args) else node.kwargs.get(a.name, a.default_value))
            for k, a in enumerate(schema)
        )
        several = tuple(cast("Sequence[Any]", value)) if isinstance(value, (list, tuple)) else (value,)
        results = tuple(self.result(node, k, one) for k, one in enumerate(several))
        op, own = str(node.target).removeprefix("aten.").removesuffix(".default"), self.own_autocast(node)
        base, shape = op.split(".")[0], None if results[0] is None else results[0].shape
        for asked in (self.numbers[n.name] for n in node.all_input_nodes if n.name in self.numbers):
            args = tuple(asked if isinstance(a, float) and a == asked.plain else a for a in args)
            if asked not in args:
                self.lost.append("a number that it takes from a type is not as it stands")
        by_name = dict(zip((a.name for a in schema), args, strict=True))
        problem = _problem(node, by_name)
        if base == "squeeze":
            self.check_squeezed(node, by_name.get("dim"))
        if base == "index_put":
            self.check_places([n for n in node.args[1] if n is not None])
        if (source := self.identity(base, args, by_name, node, shape)) is not None:
            self.known[node.name] = source if not isinstance(value, (list, tuple)) else (source, *[None] * 2)
            return
        names = tuple(v and v.name for v in results)
        if base in DROPOUTS:
            args, results, op = (args[0], float(cast("float", args[1])), True), results[:1], DROPOUT
        elif op in BATCH_NORMS:
            args, picked = _batch_norm(op, args)
            lost = args[5] and args[3] is not None and picked is None
            problem = "updates running statistics that its results don't have" if lost else problem
            names = (names[0], *[None] * (max(picked or (0,)) + 1))
            for k in picked or ():
                new = results[k]
                names = (*names[:k], new and new.name, *names[k + 1 :])
            results = (results[0], *((results[k] for k in picked) if picked else (None, None)))
            op = BATCH_NORM
        elif base in RESHAPES:
            op = "view"
        self.known[node.name] = names if isinstance(value, (list, tuple)) else names[0]
        self.note_smooth(op, args, results)
        path, kind, visit = module_of(node)
        if problem and (place := _place(node)) is not None:
            problem += f", {place.text}"
        call = Call(op=op, args=args, results=results, module=path, kind=kind, autocast=own)
        self.found.append(Found(call, visit, problem))

    def identity(
        self, base: str, args: tuple[Arg, ...], by_name: Mapping[str, Arg], node: Any, shape: object
    ) -> str | None:
        """The name of the value that a node hands on unchanged; None if it does something."""
        if not args or not isinstance(args[0], Ref):
            return None
        if base in DROPOUTS:
            return args[0].name if args[2] is False or args[1] == 0 else None
        if by_name.get("train") is False and base.endswith("_dropout"):
            return args[0].name
        if base == "slice_scatter":
            same = isinstance(args[1], Ref) and _alike(node.args[1], node) and self.shape(node.args[1]) == shape
            return refs(args[1])[0] if same else None
        if not _alike(node.args[0], node):
            return None
        if base == "detach":
            return None if args[0].name in self.smooth else args[0].name
        same = base in IDENTITIES or (base in SAME_SHAPE and self.shape(node.args[0]) == shape)
        return args[0].name if same or _is_by_one(base, args) else None

    def check_squeezed(self, node: Any, dims: Arg) -> None:
        shape = self.shape(node.args[0])
        places = range(len(shape)) if dims is None else dims if isinstance(dims, tuple) else (dims,)
        if any(isinstance(shape[cast("int", place)], Extent) for place in places if shape):
            raise FixedError("squeeze drops their dimension where there is one")

    def check_places(self, places: Sequence[Any]) -> None:
        """Refuse tensors of numbers that fit each other at one number of samples alone, which torch.export lets by."""
        for sizes in zip_longest(*(reversed(self.shape(place)) for place in places), fillvalue=1):
            if len(found := dict.fromkeys(n for n in sizes if n != 1)) > 1:
                raise FixedError(f"places by number are {' and '.join(map(str, found))}")

    def note_smooth(self, op: str, args: tuple[Arg, ...], results: tuple[Value | None, ...]) -> None:
        if (
            op == "detach"
            or op.startswith("new_")
            or "_like" in op
            or not any(name in self.smooth for arg in args for name in refs(arg))
        ):
            return
        self.smooth.update(v.name for v in results if v is not None and v.dtype.startswith(("float", "bfloat")))

    def shape(self, node: Any) -> tuple[Size, ...]:
        return tuple(self.size(n) for n in node.meta["val"].shape)

    def result(self, node: Any, place: int, value: Any) -> Value | None:
        import torch

        if not isinstance(value, torch.Tensor):
            return None
        if dtype_name(value) not in DTYPES:
            self.refuse(node, f"{node.target}, which gives {dtype_name(value)},")
        name = f"%{node.name}" if place == 0 else f"%{node.name}.{place}"  # no source's name begins with %
        return Value(name=name, shape=tuple(self.size(n) for n in value.shape), dtype=dtype_name(value))

    def size(self, value: Any) -> Size:
        """A size or a number, as an integer or as an expression of open extents."""
        if isinstance(value, int):
            return value
        sympy: Any = import_module("sympy")
        ours = {s: sympy.Symbol(letter, positive=True, integer=True) for s, letter in self.symbols.items()}
        expression = sympy.expand(value.node.expr.subs(ours))
        found = from_sympy(expression, {s: s.name for s in ours.values()})
        if isinstance(found, Extent) and {*self.symbols.values()} == {"N"}:
            found = found if (found.times or (0,))[0] > 0 else None
        if found is None:
            raise FixedError(f"a size is {expression}" if self.symbols else f"a size {DATA}")
        return found

    def arg(self, value: Any) -> Arg:
        import torch

        match value:
            case None | bool() | int() | float() | str():
                return value
            case torch.fx.Node():
                return self.node_arg(value)
            case torch.SymInt():
                return self.size(value)
            case list() | tuple():
                return tuple(self.arg(one) for one in cast("Sequence[Any]", value))
            case torch.dtype() | torch.layout() | torch.memory_format():
                return str(value).removeprefix("torch.")
            case torch.device():
                return str(value)
            case complex():
                raise InputError("a complex number is an argument", hint="real numbers")
            case _:
                raise FixedError(f"an argument is {one_line(str(value))}" if self.symbols else f"an argument {DATA}")

    def node_arg(self, node: Any) -> Arg:
        value = node.meta.get("val")
        if _is_number(value):
            return self.arg(value)
        name: str | tuple[str, ...] = self.known[node.name]
        return Ref(name) if isinstance(name, str) else tuple(Ref(one) for one in name)

    def refuse(self, node: Any, what: str) -> None:
        path, kind, _ = module_of(node)
        where = f"{path or 'the module'}{f' ({kind})' if kind else ''}"
        place = _place(node)
        notes = place.notes if place is not None else ()
        raise InputError(f"{where}: {what} can't be imported", notes=notes, hint="operators of ATen's, on real tensors")


def module_of(node: Any) -> tuple[str, str, str]:
    """The path and class of the innermost module that makes a value, and the visit of it."""
    stack = cast("dict[str, tuple[str, Any]]", node.meta.get("nn_module_stack") or {})
    for key, (path, kind) in reversed(stack.items()):
        if not key.startswith("_empty_nn_module_stack"):
            name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
            return path.split("@")[0], name, f"{path}@{key.partition('@')[2]}"
    return "", "", ""


def _place(node: Any) -> Place | None:
    return place_of_node(node, *module_of(node)[:2])


def _is_number(value: Any) -> bool:
    import torch

    return isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_by_one(base: str, args: tuple[Arg, ...]) -> bool:
    """Whether a call multiplies or divides by 1."""
    return base in ("mul", "div") and len(args) == 2 and type(args[1]) in (int, float) and args[1] == 1


def _alike(source: Any, made: Any) -> bool:
    value = made.meta["val"]
    value = cast("Sequence[Any]", value)[0] if isinstance(value, (list, tuple)) else value
    return source.meta["val"].dtype == value.dtype


def _problem(node: Any, args: Mapping[str, Arg]) -> str:
    """Why a call can't be right: it draws random numbers, or changes an operand."""
    import torch

    if node.target._schema.is_mutable:
        return "changes what it reads"
    if torch.Tag.nondeterministic_seeded not in node.target.tags or str(node.target) in _DRAWN:
        return ""
    off = args.get("train", args.get("training", True)) is False
    return "" if off or args.get("dropout_p", args.get("dropout")) == 0 else "draws random numbers"


# Drawn by an element's number in the whole tensor (spec/aten/seeds.py).
_DRAWN = frozenset(f"aten.{name}" for name in (*(f"{n}.default" for n in (*DROPOUTS, *NOISE, ATTENTION)), BERNOULLI))


def _batch_norm(op: str, args: tuple[Arg, ...]) -> tuple[tuple[Arg, ...], tuple[int, int] | None]:
    """The arguments of `batch_norm`, and the places of the new statistics among an operator's results."""
    training, momentum, eps, new = BATCH_NORMS[op]
    flag = False if training is None else True if training < 0 else bool(args[training])
    statistics: tuple[Arg, Arg] = (None, None) if op.endswith(".no_stats") else (args[3], args[4])
    if statistics[0] is None or not flag:
        new = None
    flag = flag or statistics[0] is None
    return (*args[:3], *statistics, flag, args[momentum], args[eps]), new
