"""What an exported program gives: outputs by name, and new values of buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from convgen.errors import InputError
from convgen.spec.exported_state import State

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def results_of(
    program: ExportedProgram, known: Mapping[str, str], state: State, name: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Values by the names of outputs, and those that buffers become, by buffer.

    Args:
        known: values by the program's nodes.
        name: of the module, for messages.
    Raises:
        InputError: the module changes what it may not, or gives what is no tensor.
    """
    from torch.utils._pytree import tree_unflatten

    updates: dict[str, str] = {}
    given: list[Any] = []
    for spec in program.graph_signature.output_specs:
        kind, argument = spec.kind.name, cast("Any", spec.arg)
        if kind == "BUFFER_MUTATION":
            buffer = state.of_traced(spec.target or "")
            if buffer in state.hidden:
                fact = f"{name} changes {buffer}, which its state dict doesn't hold"
                raise InputError(fact, hint="register_buffer(..., persistent=True)")
            if known[argument.name] != buffer:
                updates[buffer] = _real(known[argument.name], name)
        elif kind != "USER_OUTPUT":
            what = "input" if "INPUT" in kind else "parameter" if "PARAMETER" in kind else kind
            raise InputError(f"{name} changes its {what} {spec.target or ''}".rstrip(), hint="a copy of it")
        elif type(argument).__name__ == "TensorArgument":
            given.append(_real(known[argument.name], name))
        elif getattr(argument, "value", argument) is None:
            given.append(None)
        else:
            fact = f"{name} gives {getattr(argument, 'value', 'a number')}, no tensor"
            raise InputError(fact, hint="tensors, in tuples or dicts")
    spec = program.call_spec.out_spec
    assert spec is not None
    return dict(_named_outputs(tree_unflatten(given, spec), "")), updates


def _real(known: Any, name: str) -> str:
    if isinstance(known, str):
        return known
    raise InputError(f"{name} gives complex numbers", hint="torch.view_as_real of them")


def other_names(outputs: Mapping[str, str], inputs: Collection[str]) -> dict[str, str]:
    """Outputs that are called as inputs are, as `sample` often is, with another name."""
    found: dict[str, str] = {}
    for name, value in outputs.items():
        other = name
        while other in inputs or (other != name and other in outputs):
            other += "_out"
        found[other] = value
    return found


def _named_outputs(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, str):
        yield path or "output", tree
    elif isinstance(tree, Mapping):
        for key, one in cast("Mapping[Any, Any]", tree).items():
            yield from _named_outputs(one, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, (tuple, list)):
        several = cast("Sequence[Any]", tree)
        for key, one in zip(getattr(several, "_fields", range(len(several))), several, strict=True):
            yield from _named_outputs(one, f"{path}.{key}" if path else str(key))
    elif tree is not None:
        raise InputError(f"an output is a {type(tree).__name__}", hint="tensors, in tuples or dicts")
