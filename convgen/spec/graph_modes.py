"""Modules of the source that compute something else in training than in evaluation."""

from __future__ import annotations

from convgen.spec.graph import Graph, Ref
from convgen.spec.graph_edit import ATTENTION, BATCH_NORM, BERNOULLI, DROPOUT, NOISE, RECURRENT

NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")


def own_modes(graph: Graph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Paths of torch's batch norms, each of which computes as its own mode says; and paths of other such modules.

    A batch norm whose running statistics something else changes is one of the others.
    """
    owners = {v.name: v.owner for v in graph.buffers}
    names = {name: name for name in owners}
    if graph.modules:  # these say which paths are one module
        names |= dict(graph.aliases)
    norms: dict[str, None] = {}
    others: dict[str, None] = {}
    renewed: dict[str, str] = {}  # by buffer, the norm that renews it
    for call in graph.calls:
        mean = call.args[3] if call.op == BATCH_NORM else None
        if isinstance(mean, Ref):
            own = names.get(f"{call.module}.running_mean") == mean.name and owners.get(mean.name) in NORMS
            (norms if own else others)[call.module] = None
            if own:
                home = mean.name.removesuffix("running_mean")
                renewed |= {f"{home}{n}": call.module for n in ("running_mean", "running_var", "num_batches_tracked")}
        drops = call.op == ATTENTION and call.args[4] != 0.0
        if drops or call.op in (DROPOUT, BERNOULLI, *NOISE, *RECURRENT):
            others[call.module] = None
    for buffer, _ in graph.updates:
        if buffer not in renewed:
            others[buffer.rpartition(".")[0]] = None
    if "train" not in graph.modes:
        return (), tuple(others)
    return tuple(path for path in norms if path and path not in others), tuple(others)
