# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (objects of any kind are taken apart)
"""A fingerprint of everything on which an export may depend, made without exporting: classes and the code that they
reach, objects, tensors, settings. It is the same in another process where all of these are the same; there is none
where something can't be judged.

It follows what forward's code reads: globals with the attributes behind them, attributes of any object by their names
alone, closures, defaults, hooks. Torch and Python count by their versions (trust.py). Tensors count by shape, type and
the like, and by their values, except parameters and the state dict's buffers: no export reads the values of these.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import logging
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from enum import Enum
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, cast

from convgen.exports.code import Chain, Unknown, digest_of, names_of, reads_of
from convgen.exports.trust import BY_NAME, PURE, is_pythons, is_torchs, replaced, settings, trusted

if TYPE_CHECKING:
    import torch

MOST = 200_000  # the most objects that are looked at
C_FUNCTIONS = (types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType)
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
# Entries of classes that say nothing of what the class does, or that repeat its bases and other entries.
SILENT = frozenset(
    ("__module__", "__dict__", "__weakref__", "__doc__", "__annotations__", "__annotate__", "__annotate_func__",
     "__qualname__", "__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__", "__slots__",
     "__abstractmethods__", "_abc_impl", "__dataclass_fields__", "__dataclass_params__", "__match_args__",
     "__annotations_cache__", "__type_params__", "__jit_unused_properties__", "__constants__",
     "_backward_cls")
)  # fmt: skip
COMPARES = ("__eq__", "__repr__", "__lt__", "__le__", "__gt__", "__ge__")
SHAPED = frozenset(("__dict__", "__slots__", "__weakref__"))  # entries that every class in Python has
MADE = ("__init__", "__new__", "__post_init__")
ASKED = frozenset(("keys", "values", "items", "get", "index", "count", "copy", "update", "__class__"))  # by torch
CONTAINERS = (list, dict, set, frozenset, tuple, str, bytes, int, float, deque, OrderedDict, defaultdict)
# Attributes by which code finds files, its callers, and what else is loaded.
FORBIDDEN = frozenset(
    ("data_ptr", "_cdata", "__globals__", "__code__", "__closure__", "__subclasses__", "__builtins__", "f_globals",
     "f_locals", "f_back", "_getframe", "_version", "__defaults__", "gi_frame", "tb_frame",
     "__annotations__", "get_type_hints")
)  # fmt: skip
HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
IDS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


def fingerprint(said: object, module: torch.nn.Module, inputs: object) -> tuple[str, str]:
    """The hash by which a module's export is kept, or why there is none.

    Args:
        said: the text of it says what else the answer depends on.
        inputs: the example inputs, whose tensors' values don't count.
    Returns:
        A hash, and ""; or "", and what can't be judged.
    """
    walk = _Walk()
    try:
        walk.say("begin", repr(said), repr(settings()))
        for where, value in replaced():
            walk.say("replaced", where, value if isinstance(value, str) else walk.ref(value))
        walk.say("global hooks", *map(walk.ref, _global_hooks()))
        walk.values = False
        walk.say("inputs", walk.inputs(inputs))
        walk.values = True
        walk.say("module", walk.ref(module))
        walk.run()
    except Unknown as error:
        return "", str(error)
    except Exception as error:  # somebody's objects may raise anything when they are asked for what they hold
        return "", f"{type(error).__name__}: {error}"
    return walk.digest.hexdigest(), ""


def _global_hooks() -> list[Any]:
    import torch

    home: Any = torch.nn.modules.module
    return [list(v.values()) for k, v in sorted(vars(home).items()) if k.startswith("_global") and "hooks" in k and v]


class _Walk:
    """Describes objects, each once, under numbers in the order in which they are met."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.numbers: dict[int, int] = {}
        self.held: list[Any] = []  # keeps objects alive, so that no id becomes another object's
        self.left: deque[tuple[int, Any]] = deque()
        self.names: set[str] = {*ASKED}  # the attributes for which some code asks
        self.any_name = False  # whether some code makes up the names that it asks for
        self.any_made = False  # whether some code may make objects of classes that it has from objects
        self.classes: dict[type, set[str]] = {}  # classes, with the entries for which somebody is known to ask
        self.made: set[type] = set()  # the classes of which code may make objects
        self.storages: dict[int, int] = {}
        self.valued: set[int] = set()
        self.values = True

    def say(self, *what: object) -> None:
        self.digest.update(repr(what).encode(errors="surrogatepass"))

    def run(self) -> None:
        """Describe all objects that are left, and those that newly asked names bring, until there are none."""
        while True:
            while self.left:
                number, value = self.left.popleft()
                self.say(number, *self.told(value))
            found = False
            for kind, known in list(self.classes.items()):
                for name in sorted(self.wanted(kind) - known):
                    found = True
                    known.add(name)
                    self.say("of class", self.seen(kind), name, self.ref(vars(kind)[name]))
            if not found and not self.left:
                return

    def ref(self, value: Any) -> object:
        """The text of plain data; the number of any other object, which is described later."""
        kind: Any = type(value)
        if kind in PLAIN:
            return f"{kind.__name__} {value!r}"
        if kind is tuple:
            return ("tuple", *map(self.ref, value))
        if kind in (set, frozenset):
            if all(type(one) in PLAIN for one in value):
                return (kind.__name__, *sorted(map(str, map(self.ref, value))))
            named = {f"{getattr(one, '__module__', '')}.{getattr(one, '__qualname__', '')}": one for one in value}
            if len(named) < len(value) or not all(isinstance(one, (type, FunctionType)) for one in value):
                raise Unknown("a set of objects has no order")
            return (kind.__name__, *((name, self.ref(one)) for name, one in sorted(named.items())))
        if isinstance(value, type):
            self.made.add(value)
        return self.seen(value)

    def seen(self, value: Any) -> int:
        """An object's number. If it is a class, this alone doesn't say that code makes objects of it."""
        number = self.numbers.get(id(value))
        if number is None:
            number = self.numbers[id(value)] = len(self.numbers)
            if number > MOST:
                raise Unknown(f"more than {MOST} objects are reached")
            self.held.append(value)
            self.left.append((number, value))
        if self.values and id(value) not in self.valued and self.is_tensor(value):
            self.valued.add(id(value))
            self.say("values", number, hashlib.sha256(_raw(value)).hexdigest())
        return number

    def refs(self, values: Iterable[Any]) -> tuple[object, ...]:
        return tuple(map(self.ref, values))

    def inputs(self, value: Any) -> object:
        """A description of example inputs: torch's containers of plain data and of tensors."""
        from convgen.spec.containers import level

        if self.is_tensor(value):
            return self.tensor(value, shared=False)
        found = level(value) if type(value) not in PLAIN else None
        if found is None:
            return self.ref(value)
        node, parts = found
        return str(node.kind), self.ref(node.kind), self.ref(node.context), *map(self.inputs, parts)

    # ---- What objects are ----

    def told(self, value: Any) -> tuple[object, ...]:
        kind: Any = type(value)
        if self.is_tensor(value):
            return self.tensor(value)
        if kind is FunctionType:
            return self.function(value)
        if isinstance(value, type):
            return self.kind(value)
        if isinstance(value, C_FUNCTIONS):
            owner = getattr(value, "__self__", None)
            if owner is not None and not isinstance(owner, (type, ModuleType)) and type(owner) in CONTAINERS:
                return "method", value.__name__, self.ref(owner)
            said = trusted(value)
            self.note_call(said)
            return "C", said
        if kind in (list, deque):
            return kind.__name__, *self.refs(value)
        if kind in (dict, OrderedDict, defaultdict, types.MappingProxyType):
            made = self.ref(value.default_factory) if kind is defaultdict else ""
            return kind.__name__, made, *((self.ref(k), self.ref(v)) for k, v in value.items())
        if kind is types.MethodType:
            return "method", self.ref(value.__self__), self.ref(value.__func__)
        if kind in (staticmethod, classmethod):
            return kind.__name__, self.ref(value.__func__)
        if kind is property:
            return "property", self.ref(value.fget), self.ref(value.fset), self.ref(value.fdel)
        if kind is functools.cached_property:
            return "cached property", self.ref(value.func), value.attrname
        if kind in (functools.partial, functools.partialmethod):
            return kind.__name__, self.ref(value.func), *self.refs(value.args), self.ref({**value.keywords})
        if kind is functools._lru_cache_wrapper:  # pyright: ignore[reportPrivateUsage]
            if value.cache_info().currsize:
                raise Unknown(f"{value.__name__} keeps results of earlier calls")
            return "cache", self.ref(value.__wrapped__)
        if kind is weakref.ReferenceType:
            return "weak", self.ref(value())
        if isinstance(value, ModuleType):
            return self.module(value)
        if kind is types.CodeType:
            return "code", digest_of(value)
        if kind in (types.MemberDescriptorType, types.GetSetDescriptorType):
            return "held by", value.__name__
        return self.other(value)

    def other(self, value: Any) -> tuple[object, ...]:
        import torch

        kind: Any = type(value)
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)):
            return kind.__name__, str(value)
        if kind.__module__ == "typing" or kind in (types.GenericAlias, types.UnionType):
            return kind.__name__, repr(value)
        if kind is types.SimpleNamespace:
            return "namespace", self.ref(vars(value))
        if kind is logging.Logger:
            return "logger", value.name, value.getEffectiveLevel()
        if kind.__module__ == "torch._ops":
            name = str(value)
            if not name.startswith(("aten.", "prims.")):
                raise Unknown(f"{name} is no operator of torch's own")
            return "operator", name
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic, numpy.dtype, numpy.ufunc)):
            if kind is numpy.ufunc:
                return "ufunc", value.__name__
            if isinstance(value, numpy.dtype):
                return "dtype", str(value)
            if kind is not numpy.ndarray and not isinstance(value, numpy.generic):
                raise Unknown(f"a {kind.__name__} is reached")
            if value.dtype.hasobject:
                raise Unknown("an array of objects is reached")
            raw = hashlib.sha256(numpy.ascontiguousarray(value).tobytes()).hexdigest()
            return kind.__name__, str(value.dtype), value.shape, value.strides, raw
        if kind.__name__ == "_tuplegetter":
            return "field", str(value.__reduce__()[1][0])
        return self.instance(value)

    def instance(self, value: Any) -> tuple[object, ...]:
        """A description of an object of a class written in Python: its class, and all that it holds."""
        import torch

        kind: Any = type(value)
        said: list[object] = ["object", self.seen(kind)]
        for base in kind.__mro__:
            if base in (list, tuple, deque, set, frozenset):
                said += self.refs(sorted(value, key=repr) if base in (set, frozenset) else base.__iter__(value))
            elif base in (dict, OrderedDict, defaultdict):
                said += [(self.ref(k), self.ref(v)) for k, v in dict.items(value)]
            elif base in (int, float, str, bytes, complex):
                said.append(base.__repr__(value))
            elif base is not object:
                if not any(SHAPED & vars(one).keys() for one in base.__mro__[:-1]):
                    raise Unknown(f"a {base.__module__}.{base.__qualname__} is reached, which is written in C")
                said += self.slots(base, value)
        new = kind.__new__
        if not isinstance(new, FunctionType) and getattr(new, "__self__", None) not in kind.__mro__[-1:] + BASES:
            raise Unknown(f"a {kind.__module__}.{kind.__qualname__} is reached, which is written in C")
        held: dict[str, Any] = getattr(value, "__dict__", {})
        if isinstance(value, torch.nn.Module):
            return *said, *self.network(value, held)
        return *said, *((self.ref(k), self.ref(v)) for k, v in [*held.items()])

    def slots(self, base: Any, value: Any) -> list[object]:
        found: list[object] = []
        for name, entry in vars(base).items():
            if isinstance(entry, types.MemberDescriptorType):
                with_value = hasattr(value, name)
                found.append((name, self.ref(entry.__get__(value)) if with_value else "nothing"))
            elif isinstance(entry, types.GetSetDescriptorType) and name not in ("__dict__", "__weakref__"):
                raise Unknown(f"a {base.__qualname__} is reached, which is written in C")
        return found

    def network(self, module: Any, held: Mapping[str, Any]) -> list[object]:
        """A description of an nn.Module. Hooks count without their numbers, which other modules' hooks shift."""
        import torch

        said: list[object] = []
        flat: list[str] = []
        if isinstance(module, torch.nn.RNNBase):
            weights: list[Any] = held.get("_flat_weights", [])
            names: list[str] = held.get("_flat_weights_names", [])
            own = [held["_parameters"].get(name) for name in names]
            if len(own) == len(weights) and all(a is b and a is not None for a, b in zip(own, weights, strict=True)):
                flat = ["_flat_weights", "_flat_weight_refs"]
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise Unknown("SyncBatchNorm asks for the ranks")
        for name, value in held.items():
            if name in flat:
                said.append(name)
            elif name == "_parameters":
                said.append((name, *self.own(value, ())))
            elif name == "_buffers":
                said.append((name, *self.own(value, held["_non_persistent_buffers_set"])))
            elif name == "_non_persistent_buffers_set":
                said.append((name, *sorted(map(str, value))))
            elif name.endswith(HOOKS):
                if value:
                    all_of = held[name.partition("_with_")[0].partition("_always")[0]]
                    places = {key: place for place, key in enumerate(all_of)}
                    these = [places.get(key, -1) for key in value] if name in IDS else self.refs(value.values())
                    said.append((name, *these))
            else:
                said.append((name, self.ref(value)))
        return said

    def own(self, tensors: Mapping[str, Any], by_value: Iterable[str]) -> list[object]:
        """A description of parameters or buffers, with the values of those that no state dict has."""
        found: list[object] = []
        for name, tensor in tensors.items():
            self.values = name in by_value
            found.append((name, self.ref(tensor)))
        self.values = True
        return found

    def is_tensor(self, value: Any) -> bool:
        import torch

        return isinstance(value, torch.Tensor)

    def tensor(self, value: Any, *, shared: bool = True) -> tuple[object, ...]:
        import torch
        from torch.nn.parameter import Buffer, Parameter

        if type(value) not in (torch.Tensor, Parameter, Buffer) or value.layout != torch.strided or value.is_quantized:
            raise Unknown(f"a {type(value).__name__} is reached, which is no ordinary tensor")
        hooks = value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None)
        if hooks:
            raise Unknown("a tensor has hooks")
        said = (type(value).__name__, str(value.dtype), tuple(value.shape), tuple(value.stride()), str(value.device))
        said = (*said, value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg())
        if not shared:
            return said
        storage = self.storages.setdefault(value.untyped_storage()._cdata, len(self.storages))
        held: list[object] = [(name, self.ref(one)) for name, one in cast("dict[str, Any]", vars(value)).items()]
        grad = value.grad if value.is_leaf else None
        return *said, storage, value.storage_offset(), grad is not None and "grad" in self.names, *held

    def module(self, value: ModuleType) -> tuple[object, ...]:
        """A description of a Python module that is handed on as a value, so that code may ask for anything in it."""
        if value.__name__ not in PURE or sys.modules.get(value.__name__) is not value:
            raise Unknown(f"the module {value.__name__} is handed on as a value")
        return "module", value.__name__

    # ---- Code ----

    def function(self, value: Any) -> tuple[object, ...]:
        said = trusted(value)
        self.note_call(said)
        if said:
            self.names |= names_of(value.__code__)
            return "function", said
        code = value.__code__
        cells: list[object] = []
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            try:
                cells.append(self.seen(cell.cell_contents) if name == "__class__" else self.ref(cell.cell_contents))
            except ValueError:
                cells.append("empty")
        told = ("function", self.refs(value.__defaults__ or ()), self.ref(value.__kwdefaults__), tuple(cells))
        told = (*told, *((k, self.ref(v)) for k, v in cast("dict[str, Any]", vars(value)).items()))
        home = sys.modules.get(str(value.__module__))
        if is_torchs(code.co_filename) or is_pythons(code.co_filename):  # made by a function of torch's or Python's
            self.names |= names_of(code)
            return *told, digest_of(code)
        reads = reads_of(code)
        wrong = reads.names & FORBIDDEN
        if wrong and (wrong != {"_version"} or code.co_name != "_load_from_state_dict"):  # its own, no tensor's
            raise Unknown(f"{value.__qualname__} reads {min(wrong)}")
        self.names |= reads.names
        self.any_name |= not reads.names.isdisjoint(("__dict__", "__getattribute__", "__getattr__"))
        compares = code.co_filename == "<string>" and code.co_name in COMPARES  # a dataclass's own
        self.any_made |= "__class__" in reads.names and not compares
        package = value.__globals__.get("__package__") or (home and home.__package__) or ""
        chains = [self.chain(chain, value.__globals__, package) for chain in reads.chains]
        return *told, reads.digest, tuple(chains)

    def note_call(self, said: str) -> None:
        last = said.rpartition(".")[2]
        self.any_name |= last in BY_NAME
        self.any_made |= said in ("dataclasses.replace", "copy.replace")

    def chain(self, chain: Chain, names: Mapping[str, Any], package: str) -> tuple[object, ...]:
        """A description of what a global with attributes behind it, or an import, stands for."""
        if chain.level is None:
            builtins: Any = names.get("__builtins__", {})
            builtins = vars(builtins) if isinstance(builtins, ModuleType) else builtins
            if chain.name not in names and chain.name not in builtins:
                return "missing", chain.name
            value: Any = names[chain.name] if chain.name in names else builtins[chain.name]
        else:
            path = importlib.util.resolve_name("." * chain.level + chain.name, package)
            if path not in sys.modules:
                raise Unknown(f"{path} is imported by code and not loaded yet")
            if chain.part == "\0":
                return "import", path
            value = sys.modules[path if chain.part else path.partition(".")[0]]
            if chain.part:
                value = _attribute(value, chain.part)
        behind = list(chain.attributes)
        while behind and isinstance(value, ModuleType):
            value = _attribute(value, behind.pop(0))
        if value is _Missing:
            return "missing", chain
        return "reads", chain, self.ref(value)

    # ---- Classes ----

    def kind(self, value: type) -> tuple[object, ...]:
        said = trusted(value)
        self.note_call(said)
        if said:  # its methods may ask for entries of a subclass
            self.names |= {name for base in value.__mro__ for name in names_in(base)}
            return "class", said
        if issubclass(value, _script_classes()):
            raise Unknown(f"{value.__qualname__} is TorchScript's")
        self.classes[value] = set()
        found: list[object] = [
            "class",
            value.__module__,
            value.__qualname__,
            self.seen(type(value)),
            *map(self.seen, value.__bases__),
        ]
        fields: dict[str, Any] = vars(value).get("__dataclass_fields__", {})
        for name, field in fields.items():
            found += [name, self.ref(field.default), self.ref(field.default_factory), self.ref({**field.metadata})]
        found.append(self.ref(vars(value).get("_fields")))
        if dataclasses.is_dataclass(value):
            found.append(repr(value.__dataclass_params__))  # type: ignore[attr-defined]
        if issubclass(value, Enum):
            found += [(name, self.ref(one)) for name, one in value.__members__.items()]
        return *found, *self.registered(value)

    def registered(self, value: type) -> tuple[object, ...]:
        """A description of how torch takes somebody's container apart."""
        from torch.utils import _pytree as pytree

        node = pytree.SUPPORTED_NODES.get(value)
        code = getattr(node and node.flatten_fn, "__code__", None)
        if node is None or code is None or not is_torchs(code.co_filename):
            return () if node is None else (self.ref(node.flatten_fn), self.ref(node.unflatten_fn))
        # A dataclass, of which convgen too tells torch when it is met: with all of its fields.
        cells = [cell.cell_contents for cell in cast("Any", node.flatten_fn).__closure__ or ()]
        fields: list[Any] = dict(zip(code.co_freevars, cells, strict=True)).get("field_names", [])
        usual = [one.name for one in dataclasses.fields(value) if one.init] if dataclasses.is_dataclass(value) else []
        return () if [*fields] == usual else tuple(fields)

    def wanted(self, kind: type) -> set[str]:
        """The entries of a class for which somebody may ask."""
        import torch

        module = issubclass(kind, torch.nn.Module)
        bases = [base for base in kind.__mro__[1:] if base is not object and base not in self.classes]
        making = kind in self.made or type in self.made or self.any_made or not module

        def asked(name: str) -> bool:
            if name in SILENT and name not in self.names:
                return False
            if name in MADE:
                return making
            if name.startswith("__") and name.endswith("__"):
                return True
            return name in self.names or self.any_name or any(hasattr(base, name) for base in bases)

        return {name for name in vars(kind) if asked(name)}


BASES: tuple[Any, ...] = (object, *CONTAINERS, complex)


@functools.cache
def names_in(kind: type) -> frozenset[str]:
    """The names for which the methods of a class of torch's or Python's ask."""
    found: set[str] = set()
    for value in vars(kind).values():
        value = value.fget if type(value) is property else getattr(value, "__func__", value)
        if type(value) is FunctionType:
            found |= names_of(value.__code__)
    return frozenset(found)


class _Missing:
    pass


def _attribute(module: ModuleType, name: str) -> Any:
    """Raises Unknown: the module makes it when it is asked for."""
    held = vars(module)
    if name in held:
        return held[name]
    if module.__name__.partition(".")[0] in ("torch", "numpy"):
        return getattr(module, name, _Missing)
    if "__getattr__" in held:
        raise Unknown(f"{module.__name__} makes {name} when it is asked for it")
    return _Missing


def _script_classes() -> tuple[type, ...]:
    import torch

    return (torch.jit.ScriptModule,)


def _raw(tensor: Any) -> bytes:
    import torch

    if tensor.device.type == "meta":
        return b""
    whole = tensor.detach().cpu().contiguous()
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes()
