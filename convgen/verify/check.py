"""`convgen check`: run every rank on this machine and compare with a single-device float64 reference."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from convgen.algebra.conv import Conv
from convgen.algebra.layout import Layout
from convgen.algebra.space import Space
from convgen.compiler import Compiled
from convgen.emit.volume import volume
from convgen.program.nodes import PHASES, Convert
from convgen.verify.mesh import MeshReport, mesh_report
from convgen.verify.parted import Parted, first_parted
from convgen.verify.processes import Tell, run_processes, silent
from convgen.verify.program import (
    OF,
    RESULTS,
    TORCH_DTYPES,
    RankResult,
    forget_module,
    global_tensors,
    load_module,
    reference,
    run_rank,
)
from convgen.verify.virtual import VirtualTransport, World

Transport = Literal["virtual", "processes"]


@dataclass(frozen=True, slots=True)
class TensorReport:
    """How far one result is from the reference, as max |error| / max |reference|; and the first element too far off."""

    name: str
    error: float
    tolerance: float
    copies_equal: bool
    shape: tuple[int, ...] = ()
    parted: Parted | None = None

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance and self.copies_equal


@dataclass(frozen=True, slots=True)
class Report:
    """A check's outcome: results; and bytes sent by tensor over all ranks, as counted and as VOLUME has them."""

    tensors: tuple[TensorReport, ...]
    tolerance_from: str
    bytes_sent: dict[str, int]
    counted_equals_volume: bool
    transport: Transport
    interpreted: bool = False
    mesh: MeshReport | None = None  # of target sw26010

    @property
    def ok(self) -> bool:
        counted = self.counted_equals_volume and (self.mesh is None or not self.mesh.wrong)
        return counted and all(t.ok for t in self.tensors)


def check(
    compiled: Compiled,
    *,
    transport: Transport = "virtual",
    timeout_s: float = 120.0,
    interpret: bool = False,
    told: Tell = silent,
) -> Report:
    """Compile to a temporary module, run all its ranks forward and backward, and compare the results.

    Args:
        transport: threads of this process with a rendezvous of their own, or one gloo process a rank.
        timeout_s: seconds after which processes are given up; virtual ranks detect a deadlock at once.
        interpret: run a GPU target's kernels on the CPU, in Triton's interpreter.
        told: is called with what is going on.
    """
    layer, space = compiled.layer, compiled.space
    given = global_tensors(layer)
    with tempfile.TemporaryDirectory(prefix="convgen-check-") as folder:
        path = Path(folder) / f"{layer.name}.py"
        path.write_text(compiled.module(), encoding="utf-8")
        # Processes first: a fork must come before this process has run parallel kernels.
        run = _run_virtual if transport == "virtual" else run_processes
        results = run(path, layer.grid.ranks, given, timeout_s, interpret, told)
    told(f"{layer.name}: the same on one device in float64")
    truth = reference(layer.conv, given)
    stored = dict(compiled.schedule.stored)
    rounds = layer.target.is_gpu and layer.dtype == "tfloat32"
    added = _added_by_the_backend(compiled)
    tolerances = {
        name: tolerance(
            layer.dtype, layer.conv, layer.grid.ranks, name, given, truth, tf32=rounds, added=added.get(name, 1)
        )
        for name in truth
    }
    tensors = tuple(
        _compare(name, results, truth[name], stored[OF[name]], space, tolerances[name])
        for name in RESULTS
        if name in truth
    )
    steps = [s for phase in PHASES for s in volume(compiled.schedule, space, layer.element_bytes)[phase]]
    expected = [[(s["collective"], s["bytes_sent_per_rank"][r]) for s in steps] for r in range(layer.grid.ranks)]
    sent = dict[str, int]()
    for s in steps:
        name = str(s["step"]).split("_")[0]
        sent[name] = sent.get(name, 0) + sum(s["bytes_sent_per_rank"])
    return Report(
        tensors=tensors,
        tolerance_from=TOLERANCE_FROM + TF32_FROM * rounds + NATIVE_FROM * bool(added),
        bytes_sent=sent,
        counted_equals_volume=[list(r.sent) for r in results] == expected,
        transport=transport,
        interpreted=interpret,
        mesh=mesh_report(compiled, results),
    )


def _added_by_the_backend(compiled: Compiled) -> dict[str, int]:
    """By result, how many ranks' addends the backend adds; none where sums are ordered."""
    sums = (step for _, step in compiled.schedule.steps() if isinstance(step, Convert))
    sums = (step for step in sums if step.kind in ("reduce_scatter", "all_reduce"))
    found = dict[str, int]()
    for step in sums if compiled.layer.options.sums == "native" else ():
        (name,) = (result for result in RESULTS if OF[result] == step.type.tensor)
        found[name] = found.get(name, 1) * compiled.layer.grid.over(step.over)
    return found


def _run_virtual(
    path: Path,
    ranks: int,
    given: Mapping[str, Tensor],
    timeout_s: float,
    interpret: bool,
    told: Tell,
) -> list[RankResult]:
    told(f"{ranks} virtual ranks run it")
    module = load_module(path, interpret=interpret)

    def program(end: VirtualTransport) -> RankResult:
        mesh = module.init_mesh(module.DEVICE, transport=end)
        return run_rank(module, given, mesh, end.sent)

    try:
        return World(ranks).run(program)
    finally:
        forget_module(module)


def _compare(
    name: str, results: list[RankResult], truth: Tensor, layout: Layout, space: Space, tolerance: float
) -> TensorReport:
    """Compare each rank's block with its part of the reference. Every copy counts: none stands for another."""
    boxes = space.held(layout)
    worst, equal = 0.0, True
    copies: dict[tuple[int, ...], Tensor] = {}
    for rank, result in enumerate(results):
        part = truth[tuple(slice(int(lo), int(hi)) for lo, hi in boxes[rank])]
        block = result.blocks[name]
        if tuple(block.shape) != tuple(part.shape):
            return TensorReport(name, math.inf, tolerance, False, tuple(truth.shape))
        other = copies.setdefault(tuple(boxes[rank].flatten().tolist()), block)
        equal = equal and torch.equal(other, block)
        if part.numel():
            difference = (block.double() - part).abs().max()
            worst = max(worst, float(torch.nan_to_num(difference, nan=math.inf)))
    scale = float(truth.abs().max()) if truth.numel() else 0.0
    error = worst / scale if scale else worst
    first = None
    if error > tolerance:
        taps = (0,) * (truth.dim() - boxes.shape[1])  # which every rank has whole
        lows = [(*(int(lo) for lo, _ in box), *taps) for box in boxes]
        blocks = ((rank, low, one.blocks[name]) for rank, (low, one) in enumerate(zip(lows, results, strict=True)))
        first = first_parted(name, blocks, truth, tolerance * (scale or 1.0))
    return TensorReport(name, error, tolerance, equal, tuple(truth.shape), first)


TOLERANCE_FROM = (
    "r u max(1, q) + 4 sqrt(n) v q, q = |terms|2 / |result|: r roundings to the layer's type (unit roundoff u), of a "
    "rank's sum, of the total and of the bias; n products added in the wide type (unit roundoff v), errors adding up "
    "like a random walk [Higham & Mary 2019]; |terms|2 the largest root of a sum of squared products; at most 1e-12 in "
    "float64"
)
TF32_FROM = "; 6 t q more for operands rounded to TF32 (t = 2**-11)"
NATIVE_FROM = "; 4 sqrt(p) u q more for native sums, which may round after each of p ranks' addends"
ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def tolerance(
    dtype: str,
    conv: Conv,
    ranks: int,
    name: str,
    given: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    *,
    tf32: bool = False,
    added: int = 1,
) -> float:
    """Largest max |error| / max |reference| that rounding explains; see TOLERANCE_FROM.

    Args:
        tf32: whether operands of products are rounded to TF32.
        added: how many ranks' addends the backend adds in the layer's type.
    """
    narrow = TORCH_DTYPES[dtype]
    u, v = ROUNDOFF[narrow], ROUNDOFF[torch.float64 if narrow == torch.float64 else torch.float32]
    terms = {
        "y": conv.channels // conv.groups * conv.taps,
        "dx": conv.filters // conv.groups * conv.taps,
        "dw": conv.batch * math.prod(s.out for s in conv.spatial),
        "dbias": conv.elements("y") // conv.filters,
    }[name]
    squares = reference(conv, {k: t.square() for k, t in given.items()})[name]
    scale = float(truth[name].abs().max()) if truth[name].numel() else 0.0
    if not scale:
        return 0.0
    ratio = math.sqrt(float(squares.max())) / scale
    rounded = 6 * 2.0**-11 if tf32 and name != "dbias" else 0.0
    rounded += 4 * math.sqrt(added) * u if added > 1 else 0.0
    roundings = 3 if ranks > 1 else 2
    bound = roundings * u * max(1.0, ratio) + (4 * math.sqrt(terms) * v + rounded) * ratio
    return min(bound, 1e-12) if narrow == torch.float64 else bound
