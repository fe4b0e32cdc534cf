"""Results of an exported program: outputs by name, the containers that they stand in, and new values of buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

from convgen.errors import InputError
from convgen.spec.containers import Slot, slots, tree_of_spec
from convgen.spec.exported_state import State
from convgen.spec.exported_walk import FixedError

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def results_of(
    program: ExportedProgram, known: Mapping[str, str], state: State, name: str
) -> tuple[dict[str, str], Any, dict[str, str]]:
    """By an output's name, its value; the tree of outputs, whose slots have their numbers; and by buffer, the value
    that it becomes.

    Args:
        known: by the program's node, the value.
        name: the module's, for messages.
    Raises:
        InputError: the module changes what it may not, or gives complex numbers.
        FixedError: it gives a number that depends on the number of samples.
    """
    updates: dict[str, str] = {}
    given: list[str] = []
    leaves: list[Any] = []
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
            leaves.append(Slot(str(len(given))))
            given.append(_real(known[argument.name], name))
        elif type(argument).__name__ != "ConstantArgument":
            raise FixedError(f"it gives the number {argument.name}, which depends on it")
        else:  # a number, a text or None
            leaves.append(argument.value)
    spec = program.call_spec.out_spec
    assert spec is not None
    tree = tree_of_spec(spec, iter(leaves))
    outputs: dict[str, str] = {}
    for path, slot in slots(tree):
        path = path or "output"
        while path in outputs:  # {"a": {"b": x}, "a.b": y}
            path += "_"
        outputs[path] = given[int(slot.name)]
    return outputs, tree, updates


def _real(known: Any, name: str) -> str:
    if isinstance(known, str):
        return known
    raise InputError(f"{name} gives complex numbers", hint="torch.view_as_real of them")


def other_names(outputs: Mapping[str, str], others: Collection[str]) -> dict[str, str]:
    """Outputs, with new names for those that have an input's name, as `sample` often is, or a parameter's."""
    found: dict[str, str] = {}
    for name, value in outputs.items():
        other = name
        while other in others or (other != name and other in outputs):
            other += "_out"
        found[other] = value
    return found
