"""Names of results: a module's path, where the module makes one value; else the operator's name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from convgen.spec.graph import Call
from convgen.spec.graph_edit import BATCH_NORM, pruned
from convgen.spec.names import identifier
from convgen.spec.taken import STANDARD


def result_names(
    calls: Sequence[tuple[Call, str]],
    leaves: Iterable[str],
    outputs: Sequence[str],
    updates: Sequence[tuple[str, str]],
    taken: Iterable[str],
) -> dict[str, str]:
    """A new name for every result, by its present name.

    Args:
        calls: each with the visit of the module that it belongs to.
        leaves: paths of modules without children, which alone may give values their name.
        outputs: values that are the graph's results.
        updates: (buffer, value that it becomes).
        taken: names that are used already.
    """
    live = pruned([call for call, _ in calls], outputs)
    visits = Counter(visit for kept, (_, visit) in zip(live, calls, strict=True) if kept is not None)
    own, becomes = set(leaves), {value: buffer for buffer, value in updates}
    used, counts, found = set(taken), Counter[str](), dict[str, str]()

    def unique(base: str) -> str:
        base = base if base in STANDARD else identifier(base)  # `select` is a fine name for a value
        name = base
        while name in used:
            counts[base] += 1
            name = f"{base}_{counts[base] + 1}"
        used.add(name)
        return name

    for kept, (call, visit) in zip(live, calls, strict=True):
        alone = kept is not None and visits[visit] == 1 and call.module in own and call.module
        prefix = f"{call.module}_" if call.module else ""
        base = call.module if alone else f"{prefix}{call.op.split('.')[0].strip('_')}"
        for place, value in enumerate(call.results):
            if value is not None:
                first = place == 0 and (len(call.results) == 1 or call.op == BATCH_NORM)
                state = becomes.get(value.name) if kept is None or kept.results[place] is None else None
                found[value.name] = unique(state or (base if first else f"{base}_{place}"))
    return found
