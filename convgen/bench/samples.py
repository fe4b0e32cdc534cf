"""A compiled network with another number of samples, for weak scaling."""

from __future__ import annotations

from dataclasses import replace

from convgen.errors import InputError
from convgen.network_compiler import CompiledNetwork
from convgen.program.other_sizes import program_like
from convgen.spec.aten.sizes import for_any_sizes


def of_samples(compiled: CompiledNetwork, batch: int) -> CompiledNetwork:
    """The network with `batch` samples; its layout, and what travels while ranks compute, stay the same.

    Raises:
        InputError: the graph takes one number of samples only.
    """
    graph = compiled.graph
    if batch != graph.batch and not graph.is_dynamic:
        raise InputError(f"{graph.name} is of {graph.batch} samples, and no other number", hint="import it again")
    known = for_any_sizes(replace(graph, batch=batch), compiled.target.device)
    return replace(
        compiled,
        graph=known.graph,
        described=known.here,
        plain=program_like(compiled.plain, known.here),
        program=program_like(compiled.program, known.here),
        other=program_like(compiled.program, known.many),
        any_sizes=known,
    )
