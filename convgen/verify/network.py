"""`convgen check` of a network: run every rank on this machine, and compare with its graph on one device in float64.

Each rank runs the package through its public interface: a step of training whose gradients are compared, two more
steps, and evaluation. What it holds then is compared with its part of the reference; copies must be equal to the last
bit.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from convgen.cost.network import volume
from convgen.network_compiler import CompiledNetwork
from convgen.packages import files_of, forget_package, load_package, runtime_of
from convgen.program.network import Program
from convgen.spec.graph import TFLOAT32
from convgen.verify.network_mesh import MeshAccounts, mesh_accounts, mesh_json, mesh_lines
from convgen.verify.network_program import (
    BUFFERS,
    CHANGE,
    CHANGED,
    EVALUATED,
    KINDS,
    LATER,
    OF_INPUTS,
    OF_PARAMETERS,
    OUTPUTS,
    STEPS,
    SUMMED,
    Given,
    RankRun,
    given_of,
    run_rank,
    truth_of,
)  # fmt: skip
from convgen.verify.parted import Parted, first_parted, verdict
from convgen.verify.processes import Tell, count_calls, silent, spawn
from convgen.verify.tf32 import RoundedFactors, without_tf32
from convgen.verify.virtual import VirtualTransport, World

Transport = Literal["virtual", "processes"]
DTYPE_ROUNDOFF = {
    "float64": 2.0**-53, "float32": 2.0**-24, "tfloat32": 2.0**-11, "bfloat16": 2.0**-8, "float16": 2.0**-11,
}  # fmt: skip
EXACT = 1e-10  # the tolerance in float64
ILL_CONDITIONED = 1e-6  # the most in float64, for a network whose steps of training enlarge every rounding
LARGEST = 0.5  # the most in other types: a tensor that was never computed is off by 1
LEAST = 1e-3  # a gradient that is smaller than so many times the largest is compared as if it were that large
LEAST_ROUNDOFFS = 16  # the least tolerance, in unit roundoffs of the type


@dataclass(frozen=True, slots=True)
class Compared:
    """The tensors of a kind against the reference.

    Attributes:
        worst: the name of the tensor that is farthest off.
        error: its max |error| / max |reference|.
        unequal: names of tensors whose copies differ; wrong: names of tensors that are too far off.
    """

    kind: str
    count: int
    worst: str
    error: float
    tolerance: float
    unequal: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance and not self.unequal


@dataclass(frozen=True, slots=True)
class NetworkReport:
    """A check's outcome.

    Attributes:
        bytes_sent: over all ranks, in the forward and the backward pass of a step of training.
        uncounted: where what was sent differs from VOLUME; "" if it does not.
        parted: the first wrong element of the first wrong tensor that a step computes, of the first wrong kind.
    """

    name: str
    grid: str
    ranks: int
    dtype: str
    transport: Transport
    compared: tuple[Compared, ...]
    bytes_sent: Mapping[str, int]
    uncounted: str
    tolerance_from: str
    parted: Parted | None = None
    mesh: MeshAccounts | None = None  # of target sw26010

    @property
    def ok(self) -> bool:
        return not self.uncounted and not (self.mesh and self.mesh.wrong) and all(one.ok for one in self.compared)


def check_network(
    compiled: CompiledNetwork,
    tensors: Mapping[str, Tensor],
    *,
    transport: Transport = "virtual",
    timeout_s: float = 120.0,
    interpret: bool = False,
    told: Tell = silent,
) -> NetworkReport:
    """Compile to a temporary package, run all its ranks, compare. Float32 that follows torch's switches is multiplied
    as float32.

    Args:
        tensors: values of constants, and of parameters and buffers that are `given`.
        transport: threads of this process with a rendezvous of their own, or one gloo process a rank.
        timeout_s: seconds after which processes are given up; virtual ranks detect a deadlock at once.
        interpret: run a GPU target's kernels in Triton's interpreter, and all else on the CPU.
        told: is called with what is going on.
    """
    program, graph = compiled.program, compiled.graph
    given = given_of(graph, tensors, autocast=program.autocast)
    with tempfile.TemporaryDirectory(prefix="convgen-check-") as folder:
        path = Path(folder) / graph.name
        path.mkdir()
        for name, data in files_of(compiled, tensors).items():
            (path / name).write_bytes(data)
        # Processes first: a fork must come before this process has run parallel kernels.
        run = _run_virtual if transport == "virtual" else _run_processes
        runs = run(path, program.grid.ranks, given, timeout_s, interpret, told)
    told(f"{graph.name}: the same on one device in float64")
    every = (kind for kind in program.types.values() if kind in DTYPE_ROUNDOFF)
    dtype = max(every, key=DTYPE_ROUNDOFF.__getitem__)
    rounds = compiled.dtype == TFLOAT32 and compiled.target.is_gpu  # a CPU has no TF32
    dtype = TFLOAT32 if rounds and dtype == "float32" else dtype
    truth = truth_of(graph, given)
    slack: Mapping[str, float] = {}
    summed = DTYPE_ROUNDOFF[program.reduce_dtype or dtype]
    least = max(LEAST, LEAST_ROUNDOFFS * max(DTYPE_ROUNDOFF[dtype], summed))
    if dtype != "float64":
        with RoundedFactors() if dtype == TFLOAT32 else nullcontext():
            one, other = (truth_of(graph, given, doubles=dtype == TFLOAT32, shaken=s) for s in (False, True))
        slack = {k: max(_farthest(truth[k], found[k], least) for found in (one, other)) for k in KINDS}
    floor = EXACT if dtype == "float64" else 16 * DTYPE_ROUNDOFF[dtype]
    kinds = [kind for kind in KINDS if truth.get(kind)]
    floors = {k: max(floor, 16 * summed) if program.reduce_dtype and k in SUMMED else floor for k in kinds}
    compared = [_compare(k, runs, truth[k], _tolerance(floors[k], slack.get(k, 0.0)), least) for k in kinds]
    if dtype == "float64" and any(one.error > one.tolerance for one in compared):
        other = truth_of(graph, given, shaken=True)
        limits = {k: min(10 * _farthest(truth[k], other[k], least), ILL_CONDITIONED) for k in kinds}
        compared = [replace(one, tolerance=max(one.tolerance, limits[one.kind])) for one in compared]
    parts = {one.kind: _parts(one, runs, truth[one.kind], least) for one in compared if one.error > one.tolerance}
    compared = [replace(one, wrong=tuple(p.name for p in parts.get(one.kind, []))) for one in compared]
    sent = volume(program)
    return NetworkReport(
        name=graph.name,
        grid=str(program.grid),
        ranks=program.grid.ranks,
        dtype=dtype,
        transport=transport,
        compared=tuple(compared),
        bytes_sent={part: sum(sum(s["bytes_sent_per_rank"]) for s in steps) for part, steps in sent.items()},
        uncounted=_uncounted(compiled, runs, sent),
        tolerance_from=(EXACTLY if dtype == "float64" else ROUNDED)
        + f"; what sums in {program.reduce_dtype} make has 16 unit roundoffs of it" * bool(program.reduce_dtype),
        mesh=mesh_accounts(compiled, [run.account for run in runs]),
        parted=next((_first(kind, found, program) for kind, found in parts.items() if found), None),
    )


EXACTLY = (
    "1e-10 in float64; where that is exceeded 10 times how far one device is from itself with all that is given a unit "
    "in the last place off, at most 1e-6"
)
ROUNDED = (
    "10 times how far one device in the same type is from float64, and one with all that is given a unit off; "
    "at least 16 unit roundoffs; above 0.5 (rounding may turn a rectifier over) 2 times. --dtype float64 has 1e-10"
)


def _loaded(path: Path, interpret: bool) -> Any:
    package = load_package(path)
    if interpret:
        from convgen.verify.interpreter import in_interpreter

        in_interpreter(package)
    return package


def _run_virtual(path: Path, ranks: int, given: Given, timeout_s: float, interpret: bool, told: Tell) -> list[RankRun]:
    told(f"{ranks} virtual ranks run it")
    package = _loaded(path, interpret)

    def begins(step: int) -> None:
        told(f"{ranks} virtual ranks run it: step {step + 1} of {len(given.inputs)}")

    def program(end: VirtualTransport) -> RankRun:
        mesh = package.init_mesh(package.NET.device, transport=end)
        return run_rank(package, given, mesh, end.sent, begins if end.rank == 0 else lambda _: None)

    try:
        with without_tf32():
            return World(ranks).run(program)
    finally:
        forget_package(package)


@dataclass(frozen=True, slots=True)
class RunPackage:
    """The program that each process runs: a package's ranks."""

    path: Path
    given: Given
    timeout_s: float
    interpret: bool

    def __call__(self, _: int) -> RankRun:
        package = _loaded(self.path, self.interpret)
        sent: list[Any] = []
        count_calls(runtime_of(package), sent)
        mesh = package.init_mesh(package.NET.device, timeout=self.timeout_s)
        with without_tf32():
            return run_rank(package, self.given, mesh, sent)


def _run_processes(
    path: Path, ranks: int, given: Given, timeout_s: float, interpret: bool, told: Tell
) -> list[RankRun]:
    return spawn(RunPackage(path, given, timeout_s, interpret), ranks, timeout_s, told)


# ---- What was sent ----


def _uncounted(compiled: CompiledNetwork, runs: Sequence[RankRun], sent: Mapping[str, list[Any]]) -> str:
    """The first collective that differs from VOLUME, in autograd's order, with and without gradients of inputs; "" if
    none does. Each lane has an order of its own."""
    parts = {**sent, "backward of inputs, too": volume(compiled.program, of_inputs=True)["backward"]}
    for part, steps in parts.items():
        for rank, run in enumerate(runs):
            known = [(s["collective"], s["bytes_sent_per_rank"][rank], s.get("lane", "")) for s in steps]
            found = [tuple(one) for one in run.sent.get(part, known)]
            for lane in sorted({one[2] for one in (*known, *found)}):
                said, went = ([one for one in all_of_it if one[2] == lane] for all_of_it in (known, found))
                names = [s["step"] for s in steps if s.get("lane", "") == lane]
                for name, one, other in zip(names, said, went, strict=False):
                    if one != other:
                        return f"{part}, rank {rank}: {name} is {one[:2]} in VOLUME, {other[:2]} was sent"
                if len(said) != len(went):
                    return f"{part}, rank {rank}: {len(went)} collectives, {len(said)} in VOLUME"
    return ""


# ---- What was found ----


def _compare(
    kind: str, runs: Sequence[RankRun], truth: Mapping[str, Tensor], tolerance: float, least: float
) -> Compared:
    """Compare each rank's blocks with their parts of the reference. Every copy counts: none stands for another."""
    worst, error, unequal = "", -1.0, list[str]()
    for name, whole in truth.items():
        first: dict[tuple[Any, ...], Tensor] = {}
        scale, farthest = _scale(kind, truth, name, least), 0.0
        for run in runs:
            box, block = run.results[kind].get(name, ((), None))
            part = whole[tuple(slice(lo, hi) for lo, hi in box)] if block is not None else None
            if block is None or part is None or part.shape != block.shape:
                farthest = math.inf
                continue
            other = first.setdefault(tuple(box), block)
            if not _are_alike(other, block) and name not in unequal:
                unequal.append(name)
            farthest = max(farthest, _difference(block, part))
        if (relative := farthest / scale if scale else farthest) > error:
            worst, error = name, relative
    return Compared(kind, len(truth), worst, max(error, 0.0), tolerance, tuple(unequal))


def _parts(one: Compared, runs: Sequence[RankRun], truth: Mapping[str, Tensor], least: float) -> list[Parted]:
    """For each tensor of a kind that is too far off, where it first is."""
    found: list[Parted] = []
    for name, whole in truth.items():
        held = ((rank, run.results[one.kind].get(name, ((), None))) for rank, run in enumerate(runs))
        blocks = [(rank, [lo for lo, _ in box], block) for rank, (box, block) in held if block is not None]
        limit = one.tolerance * (_scale(one.kind, truth, name, least) or 1.0)
        if (part := first_parted(name, blocks, whole, limit)) is not None:
            found.append(part)
    return found


def _first(kind: str, found: Sequence[Parted], program: Program) -> Parted:
    """The wrong element of the row that comes first: for gradients, first in backward."""
    rows = {name: i for i, row in enumerate(program.rows) for name in (*row.bound.reads, *row.bound.makes) if name}
    sign = -1 if "gradient" in kind or "change" in kind else 1
    return min(found, key=lambda one: sign * rows.get(one.name, 0))


def _are_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the last bit; NaN in both, as where training diverges, counts as equal."""
    return torch.equal(a, b) or (a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def _tolerance(floor: float, slack: float) -> float:
    """The tolerance that ROUNDED describes."""
    return max(floor, min(10 * slack, max(LARGEST, 2 * slack)))


def _scale(kind: str, truth: Mapping[str, Tensor], name: str, least: float) -> float:
    """What an error is divided by. Gradients that vanish but for rounding (of a bias in front of a batch norm) are
    compared with a part of the largest gradient."""
    largest = max(map(_largest, truth.values()))
    return max(_largest(truth[name]), least * largest if "gradient" in kind or kind in LATER else 0.0)


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().double().abs().max()) if tensor.numel() else 0.0


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest difference; inf where only one is NaN, or infinities differ."""
    if not a.numel():
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, torch.nan_to_num((a - b).abs(), nan=math.inf)).max())


def _farthest(truth: Mapping[str, Tensor], found: Mapping[str, Tensor], least: float) -> float:
    """The largest relative difference among a kind's tensors."""
    errors = [_difference(found[n], truth[n]) / (_scale("gradient", truth, n, least) or 1.0) for n in truth]
    return max(errors, default=0.0)


# ---- Saying it ----

_FIRST, _LAST = "of the first step", f"after {STEPS} steps"
WHEN = {
    OUTPUTS: _FIRST, OF_INPUTS: _FIRST, OF_PARAMETERS: _FIRST, BUFFERS: "after the first step",
    CHANGE: f"by {STEPS} steps of SGD", CHANGED: _LAST, EVALUATED: _LAST,
}  # fmt: skip
LOOSE = 0.01  # a tolerance above this says little


def report_text(report: NetworkReport, *, derived: bool = False) -> str:
    """A line for each kind of tensor: count, error, tolerance, and the tensor farthest off; then the verdict.

    Args:
        derived: whether to add what the tolerances are derived from.
    """
    how = "virtual ranks" if report.transport == "virtual" else "processes (gloo)"
    lines = [
        f"{report.name}: {report.ranks} {how} on {report.grid}, {report.dtype}, against one device in float64",
        f"  {'':<26}  {'':<19}  {'tensors':>7}  {'max|error|/max|ref|':>20}  {'tolerance':>10}      (the farthest off)",
    ]
    for one in report.compared:
        said = "ok" if one.ok else "WRONG" if one.error > one.tolerance else "COPIES DIFFER"
        worst = one.worst if one.error > one.tolerance or not one.unequal else one.unequal[0]
        numbers = f"{one.count:>7}  {one.error:>20.2e}  {one.tolerance:>10.1e}"
        lines.append(f"  {one.kind:<26}  {WHEN[one.kind]:<19}  {numbers}  {said}  ({worst})")
    sent = "  ".join(f"{part} {n:,}" for part, n in report.bytes_sent.items())
    counted = "VOLUME as counted behind the seam" if not report.uncounted else f"NOT AS VOLUME: {report.uncounted}"
    lines.append(f"  bytes sent, all ranks: {sent}; {counted}")
    lines += mesh_lines(report.mesh) if report.mesh else []
    if derived:
        lines.append(f"  tolerance: {report.tolerance_from}")
    wrong = [f"{n} in {one.kind}" for one in report.compared for n in dict.fromkeys((*one.wrong, *one.unequal))]
    others = ("what was sent is not what VOLUME says",) if report.uncounted else ()
    others += ("events are not the closed forms'",) if report.mesh and report.mesh.wrong else ()
    said = verdict(sum(one.count for one in report.compared), wrong, report.parted, others)
    if not (wrong or others) and max((one.tolerance for one in report.compared), default=0.0) > LOOSE:
        said += f", as far as {report.dtype} tells; --dtype float64 compares to {EXACT:g}"
    return "\n".join([*lines, said])


def report_json(report: NetworkReport) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "network": report.name,
        "ranks": report.ranks,
        "dtype": report.dtype,
        "transport": report.transport,
        "ok": report.ok,
        "compared": [
            {
                "kind": one.kind,
                "tensors": one.count,
                "worst": one.worst,
                "error": one.error,
                "tolerance": one.tolerance,
                "copies_differ": list(one.unequal),
                "ok": one.ok,
            }
            for one in report.compared
        ],
        "bytes_sent": dict(report.bytes_sent),
        "counted_equals_volume": not report.uncounted,
        "uncounted": report.uncounted,
        "tolerance_from": report.tolerance_from,
        **({"mesh": mesh_json(report.mesh)} if report.mesh else {}),
    }
