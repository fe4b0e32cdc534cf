"""Names of parameters and buffers that torch.export can trace with, and not decompose with: put right between the two.

A module that is held under several names has placeholders for each, though one alone is read; where what they share is
changed, as running statistics are, no program can be decomposed. And a buffer may be called what a graph's module has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def drop_other_names(program: ExportedProgram) -> None:
    """Leaves out of a traced program, in place, buffers and parameters that nothing reads and that others are, too."""
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
    """Other names, in place, for parameters and buffers called as what torch's modules of graphs have: the old ones by
    the new."""
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
