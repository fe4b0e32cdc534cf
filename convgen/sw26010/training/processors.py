"""Table 3's three columns: what data sheets allow a CPU, a K40m and an SW26010, beside what [SW] measured.

A layer takes its flops at peak, or its bytes at the bandwidth of memory, whichever is longer, forward and backward; the
update of the weights is one more. A tensor is read or written once for each program of the mesh that has it. That is a
bound, no prediction: the share of it that was measured says what it leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from convgen.errors import InputError
from convgen.sw26010.machine.table import table
from convgen.sw26010.operations.inner_product import InnerProduct
from convgen.sw26010.operations.stream import Stream
from convgen.sw26010.training.layers import ConvTask, Layers, Task
from convgen.sw26010.training.published import csv_rows, read_table3

FLOAT = 4


@dataclass(frozen=True, slots=True)
class Processor:
    """A column of Table 3, by its data sheet."""

    name: str
    column: str
    flops_per_s: float
    bytes_per_s: float
    source: str


@cache
def read_processors() -> tuple[Processor, ...]:
    """In the order of Table 3."""
    return tuple(
        Processor(r["name"], r["column"], float(r["flops_per_s"]), float(r["bytes_per_s"]), r["source"])
        for r in csv_rows("processors.csv")
    )


@cache
def task_work(task: Task) -> tuple[int, int]:
    """Flops and bytes of a task, every tensor once."""
    if isinstance(task, ConvTask):
        p = task.problem
        elements = p.n * p.c * p.h * p.w + p.c * p.f * p.taps + p.n * p.f * p.h_out * p.w_out
        return task.groups * p.flops, task.groups * FLOAT * elements
    if isinstance(task, InnerProduct):
        n, i, o = task.n, task.inputs, task.outputs
        return 2 * n * i * o, FLOAT * (n * i + i * o + n * o)
    counts = task.cost()
    return 0, counts.get_bytes + counts.put_bytes


def step_tasks(layers: Layers, batch: int) -> Iterator[Task]:
    """All tasks of a step on one processor, its update last."""
    for layer in layers.layers:
        yield from layer.forward(batch)
        yield from layer.backward(batch)
    if layers.parameters:
        yield Stream("momentum", layers.parameters, constants=(0.01, 0.9, 0.0))


def bound_s(tasks: Iterable[Task], processor: Processor) -> tuple[float, float]:
    """Seconds of the tasks, and how many of these are of memory."""
    whole = memory = 0.0
    for task in tasks:
        flops, moved = task_work(task)
        arithmetic, traffic = flops / processor.flops_per_s, moved / processor.bytes_per_s
        whole += max(arithmetic, traffic)
        memory += traffic if traffic > arithmetic else 0.0
    return whole, memory


def table3_rows(networks: Sequence[Layers]) -> list[dict[str, Any]]:
    """Of each network of Table 3 and each processor images a second: bound, measured, and the share.

    Raises:
        InputError: a network that Table 3 doesn't have.
    """
    published = {r["network"]: r for r in csv_rows("table3.csv")}
    rows: list[dict[str, Any]] = []
    for layers in networks:
        batch = read_table3_batch(layers.name)
        tasks = tuple(step_tasks(layers, batch))
        for processor in read_processors():
            seconds, memory = bound_s(tasks, processor)
            measured = float(published[layers.name][processor.column])
            rows.append({
                "network": layers.name, "batch": batch, "processor": processor.name,
                "bound_images_per_s": batch / seconds, "memory_share": memory / seconds,
                "paper_images_per_s": measured, "share_of_bound": measured * seconds / batch,
            })  # fmt: skip
    return rows


def read_table3_batch(network: str) -> int:
    """Raises InputError: a network that Table 3 doesn't have."""
    row = read_table3().get(network)
    if row is None:
        raise InputError(f"[SW] Table 3 has no {network}", hint=", ".join(read_table3()))
    return row.batch


def table3_text(networks: Sequence[Layers]) -> str:
    """A line a network: of every processor the bound, [SW]'s number, and its share; then ratios of both."""
    rows = table3_rows(networks)
    names = [p.name for p in read_processors()]
    lines = ["images a second in training, float32: [SW] Table 3, and what data sheets allow, modelled, not measured"]
    lines += [
        f"{p.name:8} {p.flops_per_s / 1e12:.2f} Tflop/s, {p.bytes_per_s / 1e9:.0f} GB/s: {p.source}"
        for p in read_processors()
    ]
    head = ["network", "batch"]
    for name in names:
        head += [f"{name} allows", "[SW]", "share", "of memory"]
    body: list[list[str]] = []
    ratios: list[list[str]] = []
    for layers in networks:
        mine = {r["processor"]: r for r in rows if r["network"] == layers.name}
        body.append([layers.name, str(next(iter(mine.values()))["batch"])])
        for name in names:
            r = mine[name]
            body[-1] += [f"{r['bound_images_per_s']:.1f}", f"{r['paper_images_per_s']:.2f}"]
            body[-1] += [f"{r['share_of_bound']:.0%}", f"{r['memory_share']:.0%}"]
        sw = mine["SW26010"]
        ratios.append([layers.name])
        for name in ("K40m", "CPU"):
            for key in ("bound_images_per_s", "paper_images_per_s"):
                ratios[-1].append(f"{sw[key] / mine[name][key]:.2f}")
    second = ("SW26010 is times as fast as", "K40m, allowed", "[SW]", "CPU, allowed", "[SW]")
    return "\n".join([*lines, "", table(head, body), "", table(second, ratios)])
