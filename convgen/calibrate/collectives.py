# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# (parts of torch.distributed have no types)
"""Collectives of all ranks as torch.distributed runs them, beside what the model makes of the measured links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from convgen.algebra.grid import Grid
from convgen.algebra.redistribute import Kind
from convgen.calibrate.race import Case, climb, race
from convgen.calibrate.team import Call, Team
from convgen.cost.links import collective_seconds
from convgen.cost.machine import Machine

KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce")
VECTORS = (1 << 12, 1 << 18, 1 << 23)  # bytes, about: 4 KiB, 256 KiB, 8 MiB


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of all ranks.

    Attributes:
        vector_bytes: the whole vector: what all ranks have after an all-gather, or before a reduction.
        modelled_s: by the measured machine.
    """

    kind: Kind
    vector_bytes: int
    measured_s: float
    modelled_s: float

    @property
    def ratio(self) -> float:
        return self.modelled_s / self.measured_s


def measure_collectives(team: Team, seconds: float) -> list[tuple[Kind, int, float]]:
    """(kind, bytes of the whole vector, seconds) of float32 collectives."""
    rungs = [[Case(kind, size, _call(team, kind, size)) for kind in KINDS] for size in _vectors(team.size)]
    timings = race(team, climb(team, rungs, 0.5 * seconds, at_least=2), 0.5 * seconds)
    return [(kind, t.size, t.seconds) for kind in KINDS for t in timings if t.label == kind]


def _vectors(ranks: int) -> list[int]:
    """Bytes of vectors that ranks have equal parts of."""
    return [max(1, size // (4 * ranks)) * 4 * ranks for size in VECTORS]


def _call(team: Team, kind: Kind, size: int) -> Call:
    whole = torch.zeros(size // 4, device=team.device)
    part = torch.zeros(size // 4 // team.size, device=team.device)
    parts = list(whole.split(part.numel()))
    # torch 2.13 has a new name for it and deprecates the old one.
    gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009

    def all_gather() -> None:
        gather(whole, part)

    def reduce_scatter() -> None:
        dist.reduce_scatter(part, parts)

    def all_reduce() -> None:
        dist.all_reduce(whole)

    calls = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}
    return team.communicate(calls[kind])


def modelled(machine: Machine, ranks: int, kind: Kind, vector_bytes: int) -> float:
    """Seconds of a collective of so many ranks, numbered node by node, by the machine's algorithm for it."""
    axis = "rank"
    sent = vector_bytes * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
    found, _ = collective_seconds(
        Grid(((axis, ranks),)), machine.levels, kind, (axis,), sent, machine.add_s_per_byte,
        machine.collectives.of(kind),
    )  # fmt: skip
    return found


def beside_model(machine: Machine, ranks: int, measured: list[tuple[Kind, int, float]]) -> list[Collective]:
    """What was measured, and what the machine's numbers give for it."""
    return [Collective(kind, size, s, modelled(machine, ranks, kind, size)) for kind, size, s in measured]
