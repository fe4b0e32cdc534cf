"""What core groups did, row by row: events as they were counted, and what the closed forms say of the same tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from convgen.sw26010.machine.counts import Counts, total
from convgen.sw26010.network.tasks import Task

Parts = dict[tuple[str, str], list[Task]]  # tasks by row and part of a step, in order


@dataclass
class Account:
    """Of a core group: tasks by row and part (forward, backward, update), and their events.

    Attributes:
        counted: of each of `tasks`, in the same places.
    """

    tasks: Parts = field(default_factory=Parts)
    counted: dict[tuple[str, str], list[Counts]] = field(default_factory=dict[tuple[str, str], list[Counts]])

    def add(self, label: str, part: str, task: Task, counts: Counts) -> None:
        """A task that has been run."""
        self.tasks.setdefault((label, part), []).append(task)
        self.counted.setdefault((label, part), []).append(counts)

    def clear(self) -> None:
        """Begin anew, before a step."""
        self.tasks.clear()
        self.counted.clear()

    @property
    def total(self) -> Counts:
        return total(one for several in self.counted.values() for one in several)

    @property
    def seconds(self) -> float:
        """By the model, one task after the other."""
        return sum(seconds_of(tasks) for tasks in self.tasks.values())

    def wrong(self) -> Iterator[str]:
        """Tasks whose events are not those of their closed forms."""
        for (label, part), tasks in self.tasks.items():
            for task, counts in zip(tasks, self.counted[label, part], strict=True):
                if counts != task.counts:
                    yield f"{label} {part}: {task} counts {counts}, its closed form says {task.counts}"

    def differs(self, predicted: Parts) -> Iterator[str]:
        """Rows that ran other tasks than these."""
        for key in [*self.tasks, *(key for key in predicted if key not in self.tasks)]:
            ran, said = self.tasks.get(key, []), predicted.get(key, [])
            if ran != said:
                yield f"{' '.join(key)}: ran {ran or 'nothing'}, the closed forms are of {said or 'nothing'}"


def seconds_of(tasks: list[Task]) -> float:
    """By the model, one after the other."""
    return sum(task.seconds for task in tasks)


def counts_json(counts: Counts) -> dict[str, Any]:
    """Events as plain data."""
    names = ("putr", "putc", "vmad", "vadd", "vmax", "convert", "shuffle", "loops", "loop_bytes")
    found: dict[str, Any] = {name: getattr(counts, name) for name in names}
    for name, sizes in (("get_bytes_by_block", counts.get), ("put_bytes_by_block", counts.put)):
        found[name] = {str(block): sizes[block] for block in sorted(sizes)}
    return found
