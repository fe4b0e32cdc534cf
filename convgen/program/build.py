"""Lowering: from stored layouts and roles to a naive schedule that is correct and easy to read.

Each phase is lowered on its own: convert the inputs to what their roles want, convolve locally, convert the result to
how it is stored. Sharing is left to the passes. Axes of one rank are in no type, role or step: a type without
them says the same of every rank, and has the simpler conversions. The grid keeps them, as the mesh does.
"""

from __future__ import annotations

from collections.abc import Mapping

from convgen.algebra.layout import Layout
from convgen.algebra.redistribute import Kind, redistribute
from convgen.algebra.roles import Roles
from convgen.algebra.space import Space
from convgen.operations.layer import convolution, wanted, way_of
from convgen.program.nodes import PHASES, Compute, Convert, Phase, Schedule, Step

SUFFIX: dict[Kind, str] = {
    "slice": "slice",
    "all_gather": "gathered",
    "all_to_all": "moved",
    "reduce_scatter": "scattered",
    "all_reduce": "summed",
    "exchange": "exchanged",
}


def bias_layout(stored: Mapping[str, Layout]) -> Layout:
    """bias has y's axes on F and is copied elsewhere."""
    return Layout("bias", (stored["y"].axes[1],))


class _Names:
    """Names for values: each once in a schedule."""

    def __init__(self) -> None:
        self.taken = {"x", "w", "bias", "dy", "y", "dx", "dw", "db"}

    def fresh(self, name: str) -> str:
        candidate, n = name, 1
        while candidate in self.taken:
            n += 1
            candidate = f"{name}_{n}"
        self.taken.add(candidate)
        return candidate


def lower(
    name: str, space: Space, stored: Mapping[str, Layout], roles: Mapping[str, Roles], *, bias: bool = False
) -> Schedule:
    """The naive schedule of a layer.

    Args:
        stored: layouts of x, w and y; dx, dw, dy and bias follow.
        roles: each phase's.
    """
    names, single = _Names(), space.grid.single
    types = {tensor: stored[tensor].without(single) for tensor in ("x", "w", "y")}
    roles = {phase: roles[phase].without(single) for phase in PHASES}
    if bias:
        types["bias"] = bias_layout(types)
    forward, data, filter_ = (_lower_phase(space, phase, roles[phase], types, names) for phase in PHASES)
    return Schedule(
        name=name,
        grid=space.grid,
        stored=tuple(types.items()),
        roles=tuple((phase, roles[phase]) for phase in PHASES),
        forward=forward,
        backward_data=data,
        backward_filter=filter_,
    )


def convert(space: Space, value: str, src: Layout, dst: Layout, names: _Names, final: str = "") -> tuple[Step, ...]:
    """Steps from a value of type `src` to one of type `dst`, whose last result is called `final` if given."""
    steps: list[Step] = []
    base = value.split("_")[0]
    conversions = redistribute(space, src, dst)
    for i, c in enumerate(conversions):
        halo = c.kind == "exchange" and c.dst.has_window
        last = final and i == len(conversions) - 1
        result = final if last else names.fresh(f"{base}_{'halo' if halo else SUFFIX[c.kind]}")
        steps.append(Convert(result=result, type=c.dst, kind=c.kind, source=value, over=c.over))
        value = result
    return tuple(steps)


def _lower_phase(
    space: Space, phase: Phase, roles: Roles, stored: Mapping[str, Layout], names: _Names
) -> tuple[Step, ...]:
    row = convolution(space.conv, phase)
    first, second, out = row.tensors
    given, result = row.reads, row.makes
    *wants, makes = wanted(space, phase, roles)
    steps: list[Step] = []
    inputs: list[str] = []
    for value, tensor, want in zip(given, (first, second), wants, strict=True):
        chain = convert(space, value, stored[tensor], want, names)
        steps += chain
        inputs.append(chain[-1].result if chain else value)
    bias = phase == "forward" and "bias" in stored
    final = names.fresh("y_summed") if bias else result
    name = final if makes == stored[out] else names.fresh(result + ("_partial" if makes.partial else "_local"))
    way = way_of(roles)
    steps.append(Compute(result=name, type=makes, operation=row.operation.name, inputs=tuple(inputs), way=way))
    steps += convert(space, name, makes, stored[out], names, final=final)
    if bias:
        steps.append(Compute(result=result, type=stored[out], operation="add_bias", inputs=(final, "bias")))
    if phase == "backward_filter" and "bias" in stored:
        steps += _bias_gradient(space, stored, names)
    return tuple(steps)


def _bias_gradient(space: Space, stored: Mapping[str, Layout], names: _Names) -> tuple[Step, ...]:
    """db sums the stored dy over y's axes but F's; copies of dy are equal, so nothing is summed over them."""
    y, bias = stored["y"], stored["bias"]
    summed = space.grid.ordered(a for d, axes in enumerate(y.axes) if d != 1 for a in axes)
    own = Layout("bias", bias.axes, partial=summed)
    if not summed:
        return (Compute(result="db", type=bias, operation="sum_bias", inputs=("dy",)),)
    local = Compute(result=names.fresh("db_partial"), type=own, operation="sum_bias", inputs=("dy",))
    return (local, *convert(space, local.result, own, bias, names, final="db"))
