"""Example inputs of a module: by the names of its forward's arguments, as torch.export wants them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from convgen.errors import InputError
from convgen.spec.exported_state import dtype_name
from convgen.spec.graph import DTYPES
from convgen.spec.text import number_of, one_line

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Examples:
    """Arguments of a module's forward.

    Args:
        values: by name, in the order that export gives them to its program.
        place: of each, in what the arguments are called together: (argument, place among `*arguments` or None).
        by_name: are they given by keyword?
    """

    values: dict[str, Any]
    place: dict[str, tuple[str, int | None]]
    by_name: bool

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

    def doubled(self) -> Examples:
        """Each sample twice."""
        import torch

        return replace(self, values=self.values | {k: torch.cat([self.values[k]] * 2) for k in self.open})

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((), dict(self.values)) if self.by_name else (tuple(self.values.values()), {})

    def dynamic_shapes(self) -> dict[str, Any]:
        """torch.export's own form: by argument, tuples for `*arguments`."""
        from torch.export import Dim

        found: dict[str, Any] = {}
        for name in self.values:
            argument, place = self.place[name]
            said = {0: Dim.AUTO} if name in self.open else None
            found[argument] = said if place is None else (*found.get(argument, ()), said)
        return found


def examples_of(module: torch.nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> Examples:
    """The examples by the names of the arguments of `module.forward`.

    Raises:
        InputError: they don't fit it, none is a tensor, or one is a container.
    """
    import torch

    by_name = isinstance(inputs, Mapping)
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(**inputs) if isinstance(inputs, Mapping) else signature.bind(*inputs)
    except TypeError as error:
        fact = f"{type(module).__name__}.forward{signature} does not take the inputs: {error}"
        raise InputError(one_line(fact, 300), hint="an input an argument, in its order or by its name") from None
    values: dict[str, Any] = {}
    place: dict[str, tuple[str, int | None]] = {}
    for argument, value in bound.arguments.items():
        kind = signature.parameters[argument].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            place |= {f"{argument}_{k}": (argument, k) for k in range(len(value))}
            values |= {f"{argument}_{k}": one for k, one in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            raise InputError(f"forward takes any keyword (**{argument})", hint="a module whose arguments have names")
        else:
            place[argument], values[argument] = (argument, None), value
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            _check_tensor(name, value)
            values[name] = value.detach().clone()  # export takes one tensor given twice for one input
        elif not isinstance(value, (bool, int, float, str, type(None))):
            fact = f"input {name} is a {type(value).__name__}: inputs are tensors, or numbers that are built in"
            raise InputError(fact, hint="a module around it, whose arguments are tensors")
    found = Examples(values, place, by_name)
    if not found.tensors or not next(iter(found.tensors.values())).dim():
        fact = f"{number_of(len(found.tensors), 'tensor')} among the inputs: the first one's extent 0 counts samples"
        raise InputError(fact, hint="(torch.zeros(N, C, H, W),)")
    return found


def _check_tensor(name: str, value: torch.Tensor) -> None:
    if dtype_name(value) not in DTYPES:
        raise InputError(f"input {name} has the dtype {dtype_name(value)}", hint=f"one of {', '.join(DTYPES)}")
    if not value.numel():
        raise InputError(f"input {name} of shape {list(value.shape)} is empty", hint="extents of 1 or more")
