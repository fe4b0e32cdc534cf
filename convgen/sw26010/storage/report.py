"""What `convgen sw26010 io` prints: text for people, dictionaries for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from convgen.spec.text import number_of
from convgen.sw26010.machine.table import table
from convgen.sw26010.storage.reading import Disks, at_least_s, drawn_starts, read_together, single_split_s
from convgen.sw26010.storage.striping import IMAGE_BYTES, IMAGENET_IMAGES, MIB, Striping


@dataclass(frozen=True, slots=True)
class Question:
    """Processes that read a mini-batch each, of `batch` images, from a file on striped arrays."""

    striping: Striping
    disks: Disks
    batch: int
    seed: int = 0

    @property
    def size(self) -> int:
        return self.batch * IMAGE_BYTES

    @property
    def file_bytes(self) -> int:
        """Of ImageNet's training images, decoded to 256 x 256."""
        return IMAGENET_IMAGES * IMAGE_BYTES


def io_rows(question: Question, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Of each number of processes: seconds and bytes a second on one array and striped, and who shares an array."""
    found: list[dict[str, Any]] = []
    for processes in counts:
        starts = drawn_starts(processes, question.size, question.file_bytes, IMAGE_BYTES, question.seed)
        run = read_together(question.striping, question.disks, starts, question.size)
        single = single_split_s(question.disks, processes, question.size)
        found.append(
            {
                "processes": processes,
                "single_split_s": single,
                "single_split_bytes_per_s": processes * question.size / single,
                "striped_s": run.last_s,
                "striped_at_least_s": at_least_s(question.striping, question.disks, starts, question.size),
                "striped_bytes_per_s": run.bytes_per_s,
                "arrays_a_process": float(run.readers.sum()) / processes,
                "processes_an_array": float(run.readers.mean()),
                "processes_on_the_busiest": int(run.readers.max()),
                "paper_processes_an_array": processes / question.striping.arrays * 2,
            }
        )
    return found


def io_json(question: Question, counts: Sequence[int]) -> dict[str, Any]:
    """The question and its rows."""
    striping, disks = question.striping, question.disks
    return {
        "arrays": striping.arrays, "stripe_bytes": striping.stripe_bytes, "read_bytes": question.size,
        "array_bytes_per_s": disks.array_bytes_per_s, "link_bytes_per_s": disks.link_bytes_per_s,
        "most_arrays_a_process": striping.most_touched(question.size),
        "mean_stripes_a_process": striping.mean_stripes(question.size),
        "rows": io_rows(question, counts),
    }  # fmt: skip


def io_text(question: Question, counts: Sequence[int]) -> str:
    """The same for people."""
    striping, size = question.striping, question.size
    head = (
        "processes", "one array, GB/s", "s", f"{number_of(striping.arrays, 'array')}, GB/s", "s", "s at least",
        "arrays a process", "processes an array", "busiest", "[SW] 2N/arrays",
    )  # fmt: skip
    rows = [
        [
            str(row["processes"]),
            f"{row['single_split_bytes_per_s'] / 1e9:.2f}", f"{row['single_split_s']:.2f}",
            f"{row['striped_bytes_per_s'] / 1e9:.2f}", f"{row['striped_s']:.2f}", f"{row['striped_at_least_s']:.2f}",
            f"{row['arrays_a_process']:.2f}", f"{row['processes_an_array']:.1f}",
            str(row["processes_on_the_busiest"]), f"{row['paper_processes_an_array']:.1f}",
        ]
        for row in io_rows(question, counts)
    ]  # fmt: skip
    disks = question.disks
    arrays, touched = (number_of(n, "array") for n in (striping.arrays, striping.most_touched(size)))
    mean = min(float(striping.arrays), striping.mean_stripes(size))
    lines = [
        f"reads of {size / MIB:g} MiB, {question.batch} images, from anywhere in a file on {arrays} by "
        f"stripes of {striping.stripe_bytes / MIB:g} MiB",
        f"an array gives {disks.array_bytes_per_s / 1e9:g} GB/s, a link takes {disks.link_bytes_per_s / 1e9:g} GB/s",
        f"a process touches at most {touched}, {mean:.2f} on average over all starts",
        "",
        table(head, rows),
    ]
    return "\n".join(lines)
