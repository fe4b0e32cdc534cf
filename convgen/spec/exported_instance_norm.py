"""Running statistics of instance norms, which torch.export forgets among a module's changes: they are written out here.

    running_mean <- (1 - momentum) running_mean + momentum mean_n(mean of sample n)

and likewise with unbiased variances, as ATen computes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def write_running_statistics(program: ExportedProgram) -> None:
    """Add, in place, the changes that instance norms make to a traced program that is not decomposed yet."""
    whole: Any = program.graph_module
    for module in whole.modules():  # with the graphs of regions
        if hasattr(module, "graph"):
            _write(module)


def _write(module: Any) -> None:
    import torch

    aten = torch.ops.aten
    graph: Any = module.graph
    for norm in [n for n in graph.nodes if n.target is aten.instance_norm.default]:
        x, weight, bias, mean, variance, of_inputs, momentum, *rest = norm.args
        if mean is None or not of_inputs:
            continue
        rows = [*range(2, x.meta["val"].dim())]
        with graph.inserting_before(norm):

            def call(op: Any, *args: Any, meta: Any = norm.meta, **named: Any) -> Any:
                node = graph.call_function(op, args, named)
                node.meta = dict(meta)
                return node

            given = call(aten.detach.default, x)
            for held, of in (
                (mean, call(aten.mean.dim, given, rows)),
                (variance, call(aten.var.correction, given, rows, correction=1)),
            ):
                old = call(aten.mul_.Tensor, held, 1 - momentum)
                call(aten.add_.Tensor, old, call(aten.mean.dim, of, [0]), alpha=momentum)
        norm.args = (x, weight, bias, None, None, of_inputs, momentum, *rest)
    module.recompile()
