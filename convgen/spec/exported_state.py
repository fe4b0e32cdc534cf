"""Parameters and buffers of a module: their names, and how torch initialises them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from convgen.errors import InputError
from convgen.spec.graph import DTYPES, LISTS, Arg, Module, Value

if TYPE_CHECKING:
    import torch

GIVEN = "given"
REAL = {"complex64": "float32", "complex128": "float64"}
_NORMS = ("BatchNorm", "LazyBatchNorm", "SyncBatchNorm", "GroupNorm", "LayerNorm", "RMSNorm", "InstanceNorm")
_STATISTICS = {"running_mean": "zeros", "running_var": "ones", "num_batches_tracked": "zeros"}


@dataclass(frozen=True)
class State:
    """What a module holds.

    Args:
        tensors: by canonical name, the first of a tensor's names.
        canonical: of every name.
        hidden: names of buffers that no state dict holds.
        traced: names that a traced program has another one for, by that.
    """

    parameters: tuple[Value, ...]
    buffers: tuple[Value, ...]
    tensors: dict[str, torch.Tensor]
    canonical: dict[str, str]
    hidden: frozenset[str]
    traced: dict[str, str] = field(default_factory=dict[str, str])

    def of_traced(self, name: str) -> str:
        """The canonical name of what a traced program calls so."""
        return self.canonical[self.traced.get(name, name)]

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Other names in the state dict, with the canonical ones."""
        return tuple((a, b) for a, b in self.canonical.items() if a != b and a not in self.hidden)


def state_of(module: torch.nn.Module) -> State:
    """The parameters and buffers of a module.

    Raises:
        InputError: one has values of a type that graphs don't, or none yet (a lazy module).
    """
    by_id: dict[int, str] = {}
    canonical: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}

    def values(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[Value, ...]:
        found: list[Value] = []
        for name, tensor in named:
            first = by_id.setdefault(id(tensor), name)
            canonical[name] = first
            if first == name:
                tensors[name] = as_pairs(tensor)
                found.append(_value(module, name, tensor))
        return tuple(found)

    parameters = values(module.named_parameters(remove_duplicate=False))
    buffers = values(module.named_buffers(remove_duplicate=False))
    whole: Any = module
    hidden = frozenset(
        f"{path}.{name}" if path else name
        for path, owner in whole.named_modules(remove_duplicate=False)
        for name in cast("set[str]", owner._non_persistent_buffers_set)
    )
    return State(parameters, buffers, tensors, canonical, hidden)


def _value(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> Value:
    from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter

    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise InputError(f"{name} has no shape yet: its module is lazy", hint="call the module once before the import")
    pairs = dtype_name(tensor) in REAL
    learnt = isinstance(tensor, Parameter) and (tensor.is_floating_point() or pairs)
    frozen = learnt and not tensor.requires_grad
    tensor = as_pairs(tensor)
    dtype = dtype_name(tensor)
    if dtype not in DTYPES:
        raise InputError(f"{name} has the dtype {dtype}", hint=f"one of {', '.join(DTYPES)}")
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    init = initialisation(owner, leaf)
    shape, kind = tuple(tensor.shape), class_of_torch(owner)
    return Value(name=name, shape=shape, dtype=dtype, init=init, frozen=frozen, pairs=pairs, owner=kind)


MOST = 64  # elements of an attribute that is kept


def class_of_torch(owner: Any, lists: tuple[str, ...] = ()) -> str:
    """The class of torch.nn that a module is of; of containers these."""
    import torch

    for kind in type(owner).__mro__:
        home = kind.__module__
        if home.startswith("torch.nn.modules.") and getattr(torch.nn, kind.__name__, None) is kind:
            holds = home.endswith((".container", ".module")) and kind.__name__ not in lists
            return "" if holds else kind.__name__
    return ""


def modules_of(module: torch.nn.Module) -> tuple[Module, ...]:
    """A module and all inside of it, each before its children, with plain attributes of those of torch.nn's classes."""
    first: dict[int, str] = {}
    found: list[Module] = []
    same: set[str] = set()
    whole: Any = module
    for path, one in whole.named_modules(remove_duplicate=False):
        inside = any(path.startswith(f"{other}.") for other in same)
        if inside:  # of what is the same as another
            continue
        if id(one) in first:
            same.add(path)
            found.append(Module(path, same=first[id(one)]))
            continue
        first[id(one)] = path
        kind = class_of_torch(one, LISTS)
        own: dict[str, Any] = {**vars(one), **one._parameters, **one._buffers} if kind else {}  # a bias of None, too
        names = (n for n in own if not n.startswith("_") and n != "training" and n.isidentifier())
        has = ((n, own[n]) for n in names if _is_plain(own[n]))
        found.append(Module(path, kind, tuple(has)))
    return tuple(found)


def _is_plain(value: object) -> TypeGuard[Arg]:
    if isinstance(value, tuple):
        return len(cast("tuple[object, ...]", value)) <= MOST and all(map(_is_plain, cast("tuple[object, ...]", value)))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and isfinite(value))


def as_pairs(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor with a last dimension of real and imaginary part; any other as it is."""
    import torch

    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def initialisation(owner: Any, leaf: str) -> str:
    """How torch initialises an entry of one of its own modules; `given` where it can't be said in a word.

    Source:
        `reset_parameters` of each module of torch.nn; fan_in is `nn.init._calculate_fan_in_and_fan_out`'s.
    """
    if not type(owner).__module__.startswith("torch.nn.modules."):
        return GIVEN
    kind = type(owner).__name__
    if kind.startswith(_NORMS):
        return ({"weight": "ones", "bias": "zeros"} | _STATISTICS).get(leaf, GIVEN)
    if kind == "NonDynamicallyQuantizableLinear" and leaf == "bias":
        return "zeros"  # of nn.MultiheadAttention, which sets it after the linear layer's own
    if kind.startswith(("Conv", "Linear", "NonDynamicallyQuantizableLinear")):
        fan_in = int(owner.weight[0].numel())
        return {"weight": f"kaiming_uniform:{fan_in}", "bias": f"uniform:{fan_in}"}.get(leaf, GIVEN)
    if kind == "Bilinear":
        return f"uniform:{owner.in1_features}"
    if kind in ("RNN", "LSTM", "GRU"):
        return f"uniform:{owner.hidden_size}"
    if kind in ("Embedding", "EmbeddingBag") and owner.padding_idx is None:
        return "normal"
    if kind == "PReLU":
        return f"fill:{float(owner.init)!r}"
    return "zeros" if kind == "MultiheadAttention" and leaf == "in_proj_bias" else GIVEN
