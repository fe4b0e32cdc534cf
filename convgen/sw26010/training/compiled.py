"""A compiled network's step on its core groups: what every row counts, by closed form, along Algorithm 1 of [SW] 5.1.

The same tasks are what a run of the package does (network/account.py); `convgen check` compares them. Seconds are the
model's, of the core group whose step takes longest, one task after the other; what is moved otherwise than by sums
(halos, gathered channels) is no task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from convgen.program.network import Program
from convgen.spec.text import aligned
from convgen.sw26010.machine.counts import Counts, total
from convgen.sw26010.network.account import Parts, counts_json, seconds_of
from convgen.sw26010.network.nodes import nodes_of
from convgen.sw26010.network.predicted import Settings, predicted_parts
from convgen.sw26010.network.sums import HandshakeTask, SumTask
from convgen.sw26010.network.tasks import Task
from convgen.sw26010.training.step import read_seconds

SGD: Settings = (0.01, 0.9, 0.0)
LINES = {
    "4": "reading, beside the rest", "5": "forward and backward", "7": "core groups wait for each other",
    "8": "core group 0 adds up gradients", "9": "all-reduce over nodes", "10": "SGD",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """A step of the slowest core group.

    Attributes:
        parts: its tasks by row and part.
        read_s: seconds of reading a mini-batch on every node.
    """

    name: str
    grid: str
    rank: int
    parts: Parts
    read_s: float

    @property
    def tasks(self) -> Iterator[Task]:
        for several in self.parts.values():
            yield from several

    @property
    def counts(self) -> Counts:
        return total(task.counts for task in self.tasks)

    @property
    def seconds(self) -> float:
        """The next mini-batch is read beside everything else."""
        return max(sum(task.seconds for task in self.tasks), self.read_s)

    def line(self, number: str) -> list[Task]:
        """Tasks of a line of Algorithm 1."""
        return [t for (_, part), tasks in self.parts.items() for t in tasks if _line(part, t) == number]


def _line(part: str, task: Task) -> str:
    if isinstance(task, HandshakeTask):
        return "7"
    if isinstance(task, SumTask):
        return "8"
    return {"all-reduce": "9", "update": "10"}.get(part, "5")


def compiled_step(program: Program, modes: Sequence[str], batch: int) -> CompiledStep:
    """The step of the rank whose tasks take longest.

    Args:
        batch: samples of all nodes.
    """
    found = [predicted_parts(program, rank, modes, sgd=SGD) for rank in range(program.grid.ranks)]
    seconds = [sum(map(seconds_of, parts.values())) for parts in found]
    rank = max(range(len(found)), key=seconds.__getitem__)
    nodes = nodes_of(program.grid.sizes)
    count = nodes.ranks // nodes.each
    read = read_seconds(-(-batch // count), count, 0)
    return CompiledStep(program.name, str(program.grid), rank, found[rank], read)


def step_text(step: CompiledStep) -> str:
    """A line a row and part, then a line a line of Algorithm 1."""
    head = ("row", "part", "what", "DMA B", "messages", "vmad", "loops B", "ms")
    rows = [
        (label, part, ", ".join(dict.fromkeys(t.kind for t in tasks)), *_numbers(tasks))
        for (label, part), tasks in step.parts.items()
    ]
    rows.append(("all", "", "", *_numbers(list(step.tasks))))
    lines = [
        (number, said, f"{(step.read_s if number == '4' else seconds_of(step.line(number))) * 1e3:.3f}")
        for number, said in LINES.items()
    ]
    title = f"{step.name} on {step.grid}: a step of rank {step.rank}, by closed form"
    titled = ("line", "Algorithm 1 of [SW] 5.1", "ms")
    tables = (aligned((head, *rows), range(3, len(head))), aligned((titled, *lines), (2,)))
    return "\n\n".join([title, *("\n".join(one) for one in tables)])


def _numbers(tasks: Sequence[Task]) -> tuple[str, ...]:
    c = total(task.counts for task in tasks)
    counts = (c.dma_bytes, c.messages, c.vmad, c.loop_bytes)
    return (*(f"{n:,}" for n in counts), f"{seconds_of(list(tasks)) * 1e3:.3f}")


def step_json(step: CompiledStep) -> dict[str, Any]:
    """The same as plain data, with all events."""
    rows = [
        {"row": label, "part": part, "tasks": [str(t) for t in tasks], "seconds": seconds_of(tasks),
         **counts_json(total(t.counts for t in tasks))}
        for (label, part), tasks in step.parts.items()
    ]  # fmt: skip
    lines = {number: step.read_s if number == "4" else seconds_of(step.line(number)) for number in LINES}
    return {
        "network": step.name, "grid": step.grid, "rank": step.rank, "rows": rows, "all": counts_json(step.counts),
        "algorithm_1_seconds": lines, "seconds": step.seconds,
    }  # fmt: skip
