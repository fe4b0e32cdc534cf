"""A check of a network's core groups: what every rank counted in a training step, against the closed forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convgen.network_compiler import CompiledNetwork
from convgen.spec.text import aligned
from convgen.sw26010.machine.counts import Counts
from convgen.sw26010.network.account import Account, counts_json, seconds_of
from convgen.sw26010.network.predicted import predicted_parts
from convgen.verify.network_program import MOMENTUM, RATE


@dataclass(frozen=True, slots=True)
class MeshAccounts:
    """Accounts of all ranks, and the first difference from the closed forms; "" for none."""

    accounts: tuple[Account, ...]
    wrong: str

    @property
    def slowest(self) -> int:
        """The rank whose step takes longest in the model."""
        return max(range(len(self.accounts)), key=lambda rank: self.accounts[rank].seconds)


def mesh_accounts(compiled: CompiledNetwork, accounts: Sequence[Account]) -> MeshAccounts | None:
    """What ranks counted in the second step of training, compared; None for other targets."""
    if not compiled.target.is_mesh:
        return None
    graph, wrong = compiled.graph, ""
    once = "train" not in graph.modes  # a network without training runs one step, with gradients of inputs
    sgd = None if once else (RATE, MOMENTUM, 0.0)
    for rank, account in enumerate(accounts):
        predicted = predicted_parts(compiled.program, rank, graph.modes, of_inputs=once, sgd=sgd)
        found = next(iter((*account.differs(predicted), *account.wrong())), "")
        wrong = wrong or (found and f"rank {rank}: {found}")
    return MeshAccounts(tuple(accounts), wrong)


def by_kind(account: Account) -> Mapping[str, tuple[int, Counts, float]]:
    """By kind of task: how many, their events, and their seconds."""
    found: dict[str, tuple[int, Counts, float]] = {}
    for key, tasks in account.tasks.items():
        for task, counts in zip(tasks, account.counted[key], strict=True):
            number, together, seconds = found.get(task.kind, (0, Counts(), 0.0))
            together.add(counts)
            found[task.kind] = number + 1, together, seconds + task.seconds
    return found


def mesh_lines(report: MeshAccounts) -> list[str]:
    """A line for each kind of task, about the rank whose step takes longest."""
    rank = report.slowest
    account = report.accounts[rank]
    rows: list[tuple[str, ...]] = [("mesh", "tasks", "DMA B", "messages", "vmad", "loops B", "model ms")]
    kinds = by_kind(account)
    every = (sum(n for n, *_ in kinds.values()), account.total, account.seconds)
    for kind, (number, counts, seconds) in (*sorted(kinds.items(), key=lambda one: -one[1][2]), ("all", every)):
        numbers = (number, counts.dma_bytes, counts.messages, counts.vmad, counts.loop_bytes)
        rows.append((kind, *(f"{n:,}" for n in numbers), f"{seconds * 1e3:.3f}"))
    said = f"NOT AS THE CLOSED FORMS: {report.wrong}" if report.wrong else "equal the closed forms on every rank"
    return [*(f"  {line}" for line in aligned(rows, range(1, 7), "")), f"  a step of rank {rank}; events {said}"]


def mesh_json(report: MeshAccounts) -> dict[str, Any]:
    """Events and seconds as plain data, by rank, and by row and part."""
    return {
        "wrong": report.wrong,
        "ranks": [
            {
                " ".join(key): {
                    "kinds": [task.kind for task in tasks],
                    "seconds": seconds_of(tasks),
                    "events": [counts_json(c) for c in account.counted[key]],
                }
                for key, tasks in account.tasks.items()
            }
            for account in report.accounts
        ],
    }
