"""Example inputs of a module, by the names of its forward's arguments, as torch.export takes them; and later calls."""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

from convgen.errors import InputError
from convgen.spec.containers import Slot, alike, check_leaf, filled, said, taken, tree_of
from convgen.spec.exported_open import Follows, Opened, check_opened
from convgen.spec.exported_state import dtype_name
from convgen.spec.graph import DTYPES
from convgen.spec.text import number_of, one_line

if TYPE_CHECKING:
    import torch
    from torch.export import ShapesCollection

Inputs = Sequence[Any] | Mapping[str, Any]
EMPTY: dict[Any, Any] = {inspect.Parameter.VAR_POSITIONAL: (), inspect.Parameter.VAR_KEYWORD: {}}


@dataclass(frozen=True)
class Arguments:
    """What calls of a module's forward take: tensors like the example inputs'; all else as it was traced.

    Args:
        name: the module's, for messages.
        signature: the forward's, without annotations.
        trees: by argument that the examples have, its tree; in the signature's order.
    """

    name: str
    signature: inspect.Signature
    trees: dict[str, Any]

    def tensors(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a call, by the names of the graph's inputs.

        Raises:
            InputError: forward takes no such arguments; or one differs from what was traced.
        """
        try:
            bound = self.signature.bind(*args, **keywords)
        except TypeError as error:
            fact = f"{self.name}.forward{self.signature} does not take these arguments: {error}"
            raise InputError(one_line(fact, 300), hint="the arguments of the example inputs") from None
        given = {*bound.arguments}
        bound.apply_defaults()
        found: dict[str, torch.Tensor] = {}
        for argument, value in bound.arguments.items():
            if argument in self.trees:
                left = "" if argument in given else "left out, "

                def differs(text: str, left: str = left) -> NoReturn:
                    fact = f"{self.name}: {left}{text}"
                    raise InputError(fact, hint="parallelize with example inputs that are like this call")

                found |= taken(self.trees[argument], value, argument, differs)
                continue
            parameter = self.signature.parameters[argument]
            default = EMPTY.get(parameter.kind, parameter.default)
            if not alike(value, default):
                fact = f"{self.name}: {argument}={said(value)}, but the example inputs left it at its default when the "
                fact += f"module was traced, {said(default)}"
                hint = f"parallelize with {argument} among the example inputs: a tuple that reaches it, or (args, "
                raise InputError(fact, hint=f"{hint}{{{argument!r}: ...}})")
        return found


@dataclass(frozen=True)
class Examples:
    """Arguments of a module's forward.

    Args:
        values: tensors and plain values by name, in the order in which export gives them to its program.
        call: how they stand in a call.
        opened: inputs' extents, beside the number of samples, that are known at run time only.
    """

    values: dict[str, Any]
    call: Arguments
    opened: Opened = field(default_factory=dict[str, Mapping[str, int]])

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        import torch

        return {k: v for k, v in self.values.items() if isinstance(v, torch.Tensor)}

    @property
    def batch(self) -> int:
        """The number of samples."""
        return int(next(iter(self.tensors.values())).shape[0])

    @property
    def open(self) -> tuple[str, ...]:
        """The tensors whose extent 0 is the number of samples."""
        return tuple(k for k, v in self.tensors.items() if v.dim() and v.shape[0] == self.batch)

    @property
    def letters(self) -> dict[str, dict[str, int]]:
        """By input, its open extents, with the number of samples; none where that alone is open."""
        if not self.opened:
            return {}
        found = {name: {"N": 0} for name in self.open}
        for name, dims in self.opened.items():
            found[name] = {**found.get(name, {}), **dims}
        return found

    def doubled(self) -> Examples:
        """The examples with each sample twice."""
        import torch

        def twice(x: torch.Tensor) -> torch.Tensor:
            return _everywhere(x, 2 * len(x)) if _is_one_number(x) else torch.cat([x] * 2)

        return replace(self, values=self.values | {k: twice(self.values[k]) for k in self.open})

    def with_values(self, given: Mapping[str, torch.Tensor]) -> Examples:
        """The examples with other tensors in place of some."""
        return replace(self, values=self.values | dict(given))

    def of_sizes(self, sizes: Mapping[str, int], follows: Follows) -> Examples:
        """Zeros of other sizes, by letter; memory for them is taken when it is touched."""
        given: dict[str, torch.Tensor] = {}
        for name, dims in self.letters.items():
            shape = list(self.values[name].shape)
            for letter, d in dims.items():
                shape[d] = sizes[letter] if letter in sizes else int(follows[name][d](sizes))
            given[name] = self.values[name].new_zeros(shape)
        return self.with_values(given)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        whole = OrderedDict((name, filled(tree, self.values)) for name, tree in self.call.trees.items())
        bound = inspect.BoundArguments(self.call.signature, whole)
        return bound.args, bound.kwargs

    def dynamic_shapes(self) -> ShapesCollection:
        """The open extents in torch.export's own form."""
        from torch.export import Dim, ShapesCollection

        found = ShapesCollection()
        for name, dims in (self.letters or {name: {"N": 0} for name in self.open}).items():
            found[self.values[name]] = dict.fromkeys(dims.values(), Dim.AUTO)
        return found


def examples_of(module: torch.nn.Module, inputs: Inputs, opened: Opened | None = None) -> Examples:
    """The examples, by the names of the arguments of `module.forward`.

    Args:
        inputs: the arguments in their order, by name, or both: a tuple or list, and a dict.
        opened: extents that are known at run time only.
    Raises:
        InputError: the inputs don't fit the forward, none of them is a tensor, or one can't be traced.
    """
    import torch

    signature = _plain(inspect.signature(module.forward))
    bound = _bound(signature, inputs, type(module).__name__)
    values: dict[str, Any] = {}

    def leaf(name: str, value: Any) -> Any:
        check_leaf(name, value)
        if not isinstance(value, torch.Tensor):
            name = _free(name, values)
            values[name] = value
            return value
        _check_tensor(name, value)
        name = _free(name, values)
        # torch.export takes one tensor given twice for a single input.
        values[name] = _everywhere(value, *value.shape[:1]) if _is_one_number(value) else value.detach().clone()
        return Slot(name)

    trees: dict[str, Any] = {}
    for argument, value in bound.arguments.items():
        if signature.parameters[argument].kind is inspect.Parameter.VAR_KEYWORD:
            raise InputError(f"forward takes any keyword (**{argument})", hint="a module whose arguments have names")
        trees[argument] = tree_of(value, leaf, argument)
    found = Examples(values, Arguments(type(module).__name__, signature, trees), opened or {})
    check_opened(found.opened, found.tensors, type(module).__name__)
    if not found.tensors or not next(iter(found.tensors.values())).dim():
        fact = f"{number_of(len(found.tensors), 'tensor')} among the inputs: the first one's extent 0 counts samples"
        raise InputError(fact, hint="(torch.zeros(N, C, H, W),)")
    return found


def _is_one_number(x: torch.Tensor) -> bool:
    """Whether a tensor is one number expanded everywhere, which takes no memory: an example too large for a process."""
    return x.numel() > 1 and not any(x.stride())


def _everywhere(x: torch.Tensor, *samples: int) -> torch.Tensor:
    return x.detach()[(0,) * x.dim()].clone().expand(*samples, *x.shape[1:])


def _plain(signature: inspect.Signature) -> inspect.Signature:
    """The signature without annotations, which may not pickle."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def _bound(signature: inspect.Signature, inputs: Any, name: str) -> inspect.BoundArguments:
    hint = "an input an argument, in its order or by its name, or (args, kwargs)"
    if not isinstance(inputs, (tuple, list, Mapping)):
        raise InputError(f"the example inputs are {said(inputs)}, no tuple of them", hint=hint)
    given = cast("Sequence[Any] | Mapping[str, Any]", inputs)
    if not isinstance(given, Mapping) and len(given) == 2:
        args, keywords = given
        if isinstance(args, (tuple, list)) and isinstance(keywords, dict):
            try:
                return signature.bind(*cast("Sequence[Any]", args), **cast("dict[str, Any]", keywords))
            except TypeError:
                pass  # it is two arguments, which are containers
    try:
        return signature.bind(**given) if isinstance(given, Mapping) else signature.bind(*given)
    except TypeError as error:
        fact = f"{name}.forward{signature} does not take the inputs: {error}"
        raise InputError(one_line(fact, 300), hint=hint) from None


def _free(name: str, known: Mapping[str, Any]) -> str:
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    while name in known:
        name += "_"
    return name


def _check_tensor(name: str, value: torch.Tensor) -> None:
    if dtype_name(value) not in DTYPES:
        raise InputError(f"input {name} has the dtype {dtype_name(value)}", hint=f"one of {', '.join(DTYPES)}")
    if not value.numel():
        raise InputError(f"input {name} of shape {list(value.shape)} is empty", hint="extents of 1 or more")
