"""Names of parameters and buffers with which torch.export can trace but not decompose: they are mended between the two.

A module that is held under several names has placeholders for each name, though only one is read. Where such a buffer
is changed, as running statistics are, no program can be decomposed. And a buffer may have a name that torch's graph
modules use themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def drop_other_names(program: ExportedProgram) -> None:
    """Drop from a traced program, in place, unread parameters and buffers that are read under another name."""
    signature: Any = program.graph_signature
    graph: Any = program.graph_module.graph
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    held: Any = program.state_dict | program.constants
    specs = [s for s in signature.input_specs if s.kind.name in ("PARAMETER", "BUFFER") and s.target in held]
    used = {id(held[s.target]) for s in specs if nodes[s.arg.name].users}
    others = [s for s in specs if not nodes[s.arg.name].users and id(held[s.target]) in used]
    for spec in others:
        graph.erase_node(nodes[spec.arg.name])
        signature.input_specs.remove(spec)
    if others:
        program.graph_module.recompile()


def rename_those_of_graphs(program: ExportedProgram) -> dict[str, str]:
    """Rename, in place, parameters and buffers whose names torch's graph modules use; gives old names by new ones."""
    import torch

    signature: Any = program.graph_signature
    there = torch.fx.GraphModule({}, torch.fx.Graph())
    found: dict[str, str] = {}
    for held in (program.state_dict, program.constants):
        for name in [n for n in held if hasattr(there, n)]:
            other = f"{name}_"
            while other in held or hasattr(there, other):
                other += "_"
            held[other] = held.pop(name)
            found[other] = name
    new = {name: other for other, name in found.items()}
    for spec in (*signature.input_specs, *signature.output_specs):
        if spec.kind.name in ("PARAMETER", "BUFFER", "BUFFER_MUTATION", "CONSTANT_TENSOR"):
            spec.target = new.get(spec.target, spec.target)
    return found
