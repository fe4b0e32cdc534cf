"""What bench/kernels.py does on a device: operands, ATen's variants, candidates, checks, and times by CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from convgen.kernels.families import FAMILIES
from convgen.kernels.problem import Problem
from convgen.kernels.source import Kernel, kernel_module
from convgen.spec.target import Target
from convgen.tune.ahead import Ahead
from convgen.tune.baseline import FORMATS, accuracy, aten_variants, pads_alike
from convgen.tune.bind import bind
from convgen.tune.candidates import Candidate as TuneCandidate
from convgen.tune.clock import CudaClock, Entrant, race
from convgen.tune.floor import floor_launch, grid_class
from convgen.tune.model import assumed_ceilings, modelled_us
from convgen.tune.operands import Operands

FLUSHED_BYTES = 1 << 28  # more than any cache
SLOW = 3.0  # times the fastest: what takes longer is not raced, unless it is the best of its family


class DeviceLost(RuntimeError):
    """A kernel broke the device's context; the process can't go on."""


def cause(error: BaseException) -> str:
    """One line of an exception."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


# ---- Candidates ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A family's kernel in one configuration and memory format."""

    kernel: Kernel

    @property
    def label(self) -> str:
        config = self.kernel.config
        family, _, rest = str(config).partition(" ")
        return f"{family} {self.kernel.problem.memory_format}" + (f" {rest}" if rest else "")


def candidates(p: Problem, target: Target, families: Sequence[str], more: int) -> list[Candidate]:
    """Every family's default in both formats, and the `more` of its configurations that the model says are fastest."""
    ceilings = assumed_ceilings(target)
    found: list[Candidate] = []
    for form in FORMATS:
        local = replace(p, memory_format=form)
        for family in FAMILIES:
            if family.NAME in families and family.refusal(local, target) is None:
                default = family.default(local, target)
                rest = [c for c in dict.fromkeys(family.configs(local, target)) if c != default]
                rest.sort(key=lambda c: modelled_us(local, c, target, ceilings))
                found += [Candidate(Kernel((local,), c, target)) for c in (default, *rest[:more])]
    return found


# ---- Compiling ahead -----------------------------------------------------------------------------------------------


class Compilers:
    """Processes that compile candidates before they are launched; with none, the launch compiles."""

    def __init__(self, jobs: int) -> None:
        self.ahead = Ahead(jobs, fill=True) if jobs else None
        self.trusted = False  # once something compiled, what does not is the candidate's fault
        self.waiting: dict[str, list[tuple[str, TuneCandidate]]] = {}

    def submit(self, key: str, found: Sequence[Candidate]) -> None:
        if self.ahead is not None and key not in self.waiting:
            made = [(c.label, TuneCandidate(c.kernel.problem, c.kernel.config, c.kernel.target)) for c in found]
            self.waiting[key] = made
            self.ahead.submit([c for _, c in made])

    def failures(self, key: str) -> dict[str, str]:
        """Wait for a problem's candidates: those that don't compile, spill or don't fit, and why."""
        failed: dict[str, str] = {}
        for label, candidate in self.waiting.pop(key, []):
            assert self.ahead is not None
            prepared = self.ahead.result(candidate)
            self.trusted |= not prepared.cause
            if prepared.cause:
                failed[label] = f"{prepared.cause}: {prepared.said}"
        return failed if self.trusted else {}

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.close()


# ---- One problem ---------------------------------------------------------------------------------------------------


@contextmanager
def marked(marker: Path, key: str, label: str, clock: CudaClock) -> Iterator[None]:
    """While a candidate first runs, a file says which: it stays behind if the process or its device is lost."""
    marker.write_text(f"{key}\n{label}\n", encoding="utf-8")
    try:
        yield
    except Exception as error:
        if not clock.alive():
            raise DeviceLost(f"{label}: {cause(error)}") from error
        marker.unlink()
        raise
    except BaseException:
        marker.unlink()
        raise
    marker.unlink()


def measure(
    p: Problem, key: str, found: Sequence[Candidate], left_out: dict[str, str], clock: CudaClock, marker: Path
) -> dict[str, Any]:
    """Check and time a problem's candidates and ATen; what is recorded of it.

    Args:
        left_out: label -> cause of candidates that are not tried.
    """
    left_out = dict(left_out)
    with accuracy(p.dtype):
        work = Operands(p, clock.device)
        entrants = _aten_entrants(work, key, left_out, clock, marker)
        kernels = _kernel_entrants(work, key, found, left_out, clock, marker)
        floor = Entrant("floor", floor_launch(work.device, grid_class(p)))
        floor.run()
        racing = [floor, *entrants, *_fast(kernels)]
        for e in (floor, *entrants):
            e.probe(clock)
        for e in racing:
            e.prepare(clock)
        race(racing, clock)
        flushed(racing, clock)
    return {
        "floor": floor.record | {"programs": grid_class(p)},
        "aten": {e.label: e.record for e in entrants},
        "kernels": {e.label: e.record for e in kernels},
        "left_out": left_out,
    }


def flushed(entrants: Sequence[Entrant], clock: CudaClock) -> None:
    """Record the microseconds of one launch each with none of its operands in the cache."""
    sweep = torch.empty(FLUSHED_BYTES if clock.device == "cuda" else 1, dtype=torch.uint8, device=clock.device)
    for e in entrants:
        replay, _ = clock.capture(e.run, 1)
        e.record["us_flushed"] = statistics.median(clock.lap([sweep.zero_, replay])[1] for _ in range(7)) * 1e6


def _aten_entrants(work: Operands, key: str, left_out: dict[str, str], clock: CudaClock, marker: Path) -> list[Entrant]:
    entrants: list[Entrant] = []
    for label, (last, run) in aten_variants(work).items():
        padded = label.startswith("convolution") and not pads_alike(work.problem)
        if f"ATen {label}" in left_out:
            continue
        try:
            with marked(marker, key, f"ATen {label}", clock):
                error = work.error(run())
                clock.sync()
        except DeviceLost:
            raise
        except Exception as failure:
            left_out[f"ATen {label}"] = cause(failure)
            continue
        entrants.append(Entrant(label, run, {"error": error, "padded_by_hand": padded, "channels_last": last}))
    return entrants


def _kernel_entrants(
    work: Operands, key: str, found: Sequence[Candidate], left_out: dict[str, str], clock: CudaClock, marker: Path
) -> list[Entrant]:
    """Candidates that run and are right, with an estimate of their time."""
    entrants: list[Entrant] = []
    for candidate in found:
        kernel, label = candidate.kernel, candidate.label
        if label in left_out:
            continue
        record = {
            "family": kernel.config.family, "format": kernel.problem.memory_format, "config": kernel.config.as_dict(),
        }  # fmt: skip
        try:
            with marked(marker, key, label, clock):
                bound = bind(work, kernel.problem, kernel_module([kernel]))
                error = bound.check()
                entrant = Entrant(label, bound.run, record | {"error": error})
                entrant.probe(clock)
        except DeviceLost:
            raise
        except Exception as failure:
            left_out[label] = cause(failure)
            continue
        entrants.append(entrant)
    return entrants


def _fast(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Those not much slower than the fastest, and the best of each family and format."""
    best: dict[tuple[str, str], Entrant] = {}
    for e in sorted(entrants, key=lambda e: e.estimate):
        best.setdefault((e.record["family"], e.record["format"]), e)
    limit = SLOW * min((e.estimate for e in entrants), default=0.0)
    return [e for e in entrants if e.estimate <= limit or any(e is b for b in best.values())]
