"""Whether a check fits this machine: its ranks, and its memory, estimated before anything is run."""

from __future__ import annotations

from math import prod
from typing import Literal

import numpy as np

from convgen.algebra.conv import Conv
from convgen.algebra.space import Space
from convgen.compiler import Compiled
from convgen.errors import InputError, Note
from convgen.free_memory import available_bytes, check_memory, gib
from convgen.network_compiler import CompiledNetwork
from convgen.program.liveness import backward_stretches, forward_stretch
from convgen.program.nodes import Convert, Schedule

# Virtual ranks are threads of one process. 1024 took 38 s on two cores and 4096 three minutes, most of it in starting
# and switching threads (and longer where hundreds of ranks exchange with each other); containers often allow a process
# no more than a few thousand.
MOST_VIRTUAL = 1024
# Each is a process with a gloo connection to every other: 64 took 80 s on two cores, and 128 did not come together.
MOST_PROCESSES = 64
WIDE = 8  # bytes of the reference's float64
BASE = 512 * 2**20  # bytes of torch itself: 230 MiB once it has convolved, and room to spare
PER_PROCESS = 64 * 2**20  # bytes of a forked rank's own, its connections included


def check_fits(compiled: Compiled, transport: Literal["virtual", "processes"]) -> None:
    """Refuse a check with more ranks, or more memory, than this machine has for it.

    Raises:
        InputError: with the numbers, and what would work.
    """
    check_ranks(compiled.layer.grid.ranks, transport)
    needed, parts = needed_bytes(compiled, transport)
    there = available_bytes()
    if there is None or needed <= there:
        return
    conv = compiled.layer.conv
    notes = [Note(name, f"{gib(size)} GiB") for name, size in parts.items()]
    fact = f"{compiled.layer.name}: a check takes about {gib(needed)} GiB, {gib(there)} GiB of memory are free"
    fixed = BASE + (compiled.layer.grid.ranks * PER_PROCESS if transport == "processes" else 0)
    batch = int(conv.batch * max(0, there - fixed) / needed)
    hint = f"input with N up to about {batch}" if batch else "smaller extents"
    raise InputError(fact, ("input",), tuple(notes), f"{hint}; or a machine with more memory")


def check_network_fits(compiled: CompiledNetwork, transport: Literal["virtual", "processes"]) -> None:
    """The same for a network, by the least that its check takes: every value and its gradient in the reference.

    Raises:
        InputError: with the numbers, and what would work.
    """
    check_ranks(compiled.program.grid.ranks, transport)
    graph = compiled.graph.at()
    made = (v for call in graph.calls for v in call.results if v is not None)
    values = (*graph.inputs, *graph.parameters, *graph.buffers, *graph.constants, *made)
    elements = sum(prod(map(int, v.shape)) for v in values)  # type: ignore[arg-type]
    what = f"{graph.name} at {graph.batch} samples: a check"
    check_memory(BASE + 2 * WIDE * elements, what, "fewer samples: batch, in the graph's file")


def check_ranks(ranks: int, transport: Literal["virtual", "processes"]) -> None:
    """Refuse more ranks than a check runs. Raises InputError."""
    most = MOST_VIRTUAL if transport == "virtual" else MOST_PROCESSES
    if ranks <= most:
        return
    what = "virtual ranks, which are threads" if transport == "virtual" else "processes, each connected to all others"
    hint = f"a grid of up to {most} ranks with the same axes"
    if transport == "processes" and ranks <= MOST_VIRTUAL:
        hint += ", or check without --processes"
    raise InputError(f"the grid has {ranks} ranks; a check runs up to {most} {what}", ("grid",), hint=hint)


def needed_bytes(compiled: Compiled, transport: Literal["virtual", "processes"]) -> tuple[int, dict[str, int]]:
    """About the most bytes that a check has at once, at the end of the run or in the reference; and its parts."""
    layer, space, conv = compiled.layer, compiled.space, compiled.layer.conv
    given = WIDE * sum(map(conv.elements, ("x", "w", "y")))
    stored = dict(compiled.schedule.stored)
    blocks = sum(int(space.elements(stored[t]).sum()) for t in ("x", "w", "y")) * layer.element_bytes
    made = most_elements(compiled.schedule, space) * layer.element_bytes
    columns = _columns(conv) * _copies(compiled) if layer.dtype == "float64" and not layer.target.is_gpu else 0
    processes = layer.grid.ranks * PER_PROCESS if transport == "processes" else 0
    run = blocks + made + columns + processes
    # Results, squares of all operands, and a second reference beside the first one's results.
    reference = blocks + 2 * given + _reference(conv)
    return BASE + given + max(run, reference), {"given": given, "run": run, "compare": reference}


def most_elements(schedule: Schedule, space: Space) -> int:
    """At most, over all ranks: elements of values that are alive together, of what is held for backward, and of what a
    conversion packs and receives beside its result. A slice may be a view, which keeps its source alive."""
    types = schedule.types()
    sizes = {name: space.elements(layout) for name, layout in types.items()}
    sliced = {step.source for _, step in schedule.steps() if isinstance(step, Convert) and step.kind == "slice"}
    none = np.zeros(space.grid.ranks, dtype=np.int64)
    most = none
    for stretches in ((forward_stretch(schedule),), backward_stretches(schedule)):
        alive = none
        for stretch in stretches:
            for step, dropped in zip(stretch.steps, stretch.dropped, strict=True):
                alive = alive + sizes[step.result]
                moves = isinstance(step, Convert)
                packed = np.maximum(sizes[step.source], sizes[step.result]) if moves else none
                if moves and step.kind == "exchange":  # what several want is packed for each
                    members, flows = space.flows(types[step.source], step.type)
                    sent = np.zeros_like(none)
                    sent[members] = flows.sum(axis=2)
                    packed = np.maximum(packed, sent)
                most = np.maximum(most, alive + packed)
                alive = alive - sum((sizes[v] for v in dropped if v not in sliced), none)
    return int(sum((sizes[v] for v in schedule.held()), most).sum())


def _reference(conv: Conv) -> int:
    """Bytes of one convolution in float64 with its gradients, beside its operands.

    Within 2 % of measurements in one to three dimensions; up to twice as much with groups, or in one dimension.
    """
    padded = conv.batch * conv.direct.channels * prod(s.extent + s.pad_lo + s.pad_hi for s in conv.spatial)
    fine, w, coarse = (conv.elements(t) for t in (conv.fine, "w", conv.coarse))
    return WIDE * (2 * padded + fine + 2 * w + 2 * coarse) + _columns(conv)


def _columns(conv: Conv) -> int:
    """Bytes that ATen's float64 unfolds for its matrix product: for all samples, or for one where taps are apart."""
    rows = prod(s.out for s in conv.spatial)
    samples = 1 if any(s.dilation > 1 for s in conv.spatial) else conv.batch
    return WIDE * samples * conv.direct.channels * conv.taps * rows if conv.taps > 1 else 0


def _copies(compiled: Compiled) -> int:
    """How often ranks unfold the same rows: once for each part of the coarse activation's channels."""
    most = 1
    for roles in compiled.choice.roles.values():
        coarse = "C" if compiled.layer.conv.transposed else "F"
        split = {axis for role, axes in roles.nests if role not in (coarse, "none") for axis in axes}
        most = max(most, compiled.layer.grid.ranks // compiled.layer.grid.over(split))
    return most
