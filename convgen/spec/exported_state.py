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
        canonical: by every name, the canonical one.
        hidden: names of buffers that no state dict holds.
        traced: by name in a traced program that renames it, the module's own name.
    """

    parameters: tuple[Value, ...]
    buffers: tuple[Value, ...]
    tensors: dict[str, torch.Tensor]
    canonical: dict[str, str]
    hidden: frozenset[str]
    traced: dict[str, str] = field(default_factory=dict[str, str])

    def of_traced(self, name: str) -> str:
        """The canonical name of a parameter or buffer, by its name in a traced program."""
        return self.canonical[self.traced.get(name, name)]

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Other names in the state dict, with the canonical ones."""
        return tuple((a, b) for a, b in self.canonical.items() if a != b and a not in self.hidden)


def state_of(module: torch.nn.Module) -> State:
    """The parameters and buffers of a module.

    Raises:
        InputError: one has a type that graphs lack, or no values yet (a lazy module).
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


MOST = 64  # elements that an attribute may have to be kept


def class_of_torch(owner: Any, lists: tuple[str, ...] = ()) -> str:
    """The name of the class of torch.nn that a module has; for containers only if it is in `lists`."""
    import torch

    for kind in type(owner).__mro__:
        home = kind.__module__
        if home.startswith("torch.nn.modules.") and getattr(torch.nn, kind.__name__, None) is kind:
            holds = home.endswith((".container", ".module")) and kind.__name__ not in lists
            return "" if holds else kind.__name__
    return ""


def modules_of(module: torch.nn.Module) -> tuple[Module, ...]:
    """A module and all modules in it, each before its children; those of torch.nn's classes with plain attributes."""
    first: dict[int, str] = {}
    found: list[Module] = []
    same: set[str] = set()
    whole: Any = module
    for path, one in whole.named_modules(remove_duplicate=False):
        inside = any(path.startswith(f"{other}.") for other in same)
        if inside:  # the same as what has been listed under another path
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
    """A complex tensor with a last dimension for real and imaginary part; any other tensor as it is."""
    import torch

    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def initialisation(owner: Any, leaf: str) -> str:
    """How torch initialises an entry of one of its own modules; `given` where no word says it.

    Source:
        `reset_parameters` of each module of torch.nn; fan_in is `nn.init._calculate_fan_in_and_fan_out`'s.
    """
    if not type(owner).__module__.startswith("torch.nn.modules."):
        return GIVEN
    kind = type(owner).__name__
    if kind.startswith(_NORMS):
        return ({"weight": "ones", "bias": "zeros"} | _STATISTICS).get(leaf, GIVEN)
    if kind == "NonDynamicallyQuantizableLinear" and leaf == "bias":
        return "zeros"  # nn.MultiheadAttention sets it after the linear layer has
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
