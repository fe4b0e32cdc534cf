"""Whether a module's two modes are one graph, as torch.export traces them, before anything is decomposed.

Decomposing takes several times as long as tracing. If the programs agree node by node, but for flags of batch norms,
dropouts and recurrent layers and for counts of batches, evaluation need not be decomposed. If they don't, nothing is
known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from convgen.spec import graph_edit

if TYPE_CHECKING:
    from torch.export import ExportedProgram

DROPOUTS = ("aten.dropout.default", "aten.dropout_.default")  # (x, p, train)
RECURRENT = tuple(f"aten.{op}" for op in graph_edit.RECURRENT)
BATCH_NORM = "aten.batch_norm.default"  # (x, weight, bias, mean, variance, training, ...)
COUNT = "aten.add_.Tensor"  # adds to the number of batches so far, which nothing reads


def same_but_for_flags(training: ExportedProgram, evaluation: ExportedProgram) -> bool:
    """Whether the program of training, with its flags off, is that of evaluation; False if that is unsure."""
    import torch

    inputs = [[(s.kind, s.target) for s in p.graph_signature.input_specs] for p in (training, evaluation)]
    if inputs[0] != inputs[1] or str(training.call_spec.out_spec) != str(evaluation.call_spec.out_spec):
        return False
    mine, theirs = training.constants, evaluation.constants
    if mine.keys() != theirs.keys():
        return False
    for name, value in mine.items():
        other = theirs[name]
        if not (isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and value.dtype == other.dtype):
            return False
        if not torch.equal(value, other):
            return False
    one = [node for node in training.graph.nodes if not _counts(node)]
    two = [*evaluation.graph.nodes]
    twin: dict[Any, Any] = {}
    for a, b in zip(one, two, strict=False):
        if not _same(a, b, twin):
            return False
        twin[a] = b
    return len(one) == len(two)


def _counts(node: Any) -> bool:
    return (
        str(node.target) == COUNT
        and not node.users
        and node.args[0].op == "placeholder"
        and len(node.args[0].users) == 1
    )


def _same(a: Any, b: Any, twin: Mapping[Any, Any]) -> bool:
    """Whether a node of training and the node of evaluation in its place are the same."""
    if a.op != b.op or a.op not in ("placeholder", "call_function", "output") or str(a.target) != str(b.target):
        return False
    if _map(a.kwargs, twin) != b.kwargs:
        return False
    mine, theirs, target = list(_map(a.args, twin)), list(b.args), str(a.target)
    if target in DROPOUTS:
        return mine[:2] == theirs[:2] and 0 <= a.args[1] < 1 and (mine[2], theirs[2]) == (True, False)
    if target in RECURRENT:
        return mine[:6] + mine[7:] == theirs[:6] + theirs[7:] and (mine[6], theirs[6]) == (True, False)
    if target == BATCH_NORM and a.args[3] is not None:
        return mine[:5] + mine[6:] == theirs[:5] + theirs[6:] and theirs[5] is False
    return mine == theirs


def _map(value: Any, twin: Mapping[Any, Any]) -> Any:
    from torch.fx import map_arg

    return map_arg(value, lambda node: twin.get(node, node))
