"""Seconds of a training step: of one core group's layers, of a node, and of many.

Four core groups take a quarter of the node's samples each ([SW] Algorithm 1); core group 0 adds up their gradients;
nodes all-reduce them, packed, with round-robin numbers (Eqs. 2, 5, 6), their additions on the four meshes; every core
group updates a quarter of the weights. The next mini-batch is read meanwhile ([SW] 5.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from convgen.errors import InputError
from convgen.sw26010.allreduce.cost import Network, all_reduce_time
from convgen.sw26010.conv.cost import choose_plan, conv_terms, explicit_plan, layout_seconds
from convgen.sw26010.conv.implicit_plan import ImplicitPlan
from convgen.sw26010.conv.plan_words import plan_name
from convgen.sw26010.machine.rates import Rates, load_rates, taken_rates
from convgen.sw26010.operations.inner_product import InnerProduct
from convgen.sw26010.operations.stream import Stream
from convgen.sw26010.operations.task import operation_seconds
from convgen.sw26010.storage.reading import Disks, drawn_starts, read_together
from convgen.sw26010.storage.striping import IMAGE_BYTES, IMAGENET_IMAGES, MIB, Striping
from convgen.sw26010.target.sums import Sum, sum_seconds
from convgen.sw26010.training.caffe import caffe_parts
from convgen.sw26010.training.layers import ConvTask, Layer, Layers, Task

CORE_GROUPS = 4
SUPERNODE = 256
Plans = Literal["model", "explicit", "caffe"]


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of a layer on one core group, and the plans of its convolution, in the order of the phases."""

    layer: Layer
    forward_s: float
    backward_s: float
    plans: tuple[str, ...]


@cache
def task_seconds(task: Task, plans: Plans) -> tuple[float, str]:
    """Seconds of a task on one core group, by the closed forms, and the plan where it is a convolution.

    Args:
        plans: `model`: the faster by the cost model, with the transformations of x and y where it is implicit;
            `explicit` alone.
    """
    rates = taken_rates()
    match task:
        case ConvTask():
            return _conv_seconds(task, plans, rates)
        case InnerProduct():
            return task.seconds(rates), ""
        case _:
            return operation_seconds(task, rates), ""


def _conv_seconds(task: ConvTask, plans: Plans, rates: Rates) -> tuple[float, str]:
    fitted = load_rates().fitted()
    if plans == "explicit":
        plan = explicit_plan(task.problem, task.phase, rates)
        return task.groups * conv_terms(plan, rates).seconds(fitted), "explicit"
    choices = choose_plan(task.problem, task.phase, rates, fitted).plans
    timed = [
        (seconds + (layout_seconds(plan, rates) if isinstance(plan, ImplicitPlan) else 0.0), plan_name(plan))
        for plan, seconds in choices
    ]
    seconds, name = min(timed)
    return task.groups * seconds, name


def layer_times(layers: Iterable[Layer], samples: int, plans: Plans = "model") -> tuple[LayerTime, ...]:
    """Seconds of every layer on a core group with so many samples.

    Args:
        plans: as of `task_seconds`; or `caffe`: as the profiled public code ran them (caffe.py).
    """
    if plans == "caffe":
        return tuple(_as_profiled(layer, samples) for layer in layers)
    found: list[LayerTime] = []
    for layer in layers:
        forth = [task_seconds(task, plans) for task in layer.forward(samples)]
        back = [task_seconds(task, plans) for task in layer.backward(samples)]
        named = tuple(name for _, name in (*forth, *back) if name)
        found.append(LayerTime(layer, _sum(forth), _sum(back), named))
    return tuple(found)


def _as_profiled(layer: Layer, samples: int) -> LayerTime:
    parts = list(caffe_parts(layer, samples))
    plans = tuple(plan for part in parts for plan in part.plans)
    return LayerTime(layer, sum(p.forward_s for p in parts), sum(p.backward_s for p in parts), plans)


def _sum(parts: Iterable[tuple[float, str]]) -> float:
    return sum(seconds for seconds, _ in parts)


@dataclass(frozen=True, slots=True)
class Step:
    """A step of `nodes` nodes with `batch` samples each.

    Seconds: `compute_s` of the slowest core group's layers, `sum_s` of the sum by core group 0, `reduce_s` of the
    all-reduce, `update_s` of the update, `read_s` until the last node has its mini-batch.
    """

    batch: int
    nodes: int
    compute_s: float
    sum_s: float
    reduce_s: float
    update_s: float
    read_s: float

    @property
    def node_s(self) -> float:
        """Without other nodes."""
        return self.compute_s + self.sum_s + self.update_s

    @property
    def seconds(self) -> float:
        """The next mini-batch is read beside everything else."""
        return max(self.node_s + self.reduce_s, self.read_s)

    @property
    def images_per_s(self) -> float:
        return self.nodes * self.batch / self.seconds


def step_of(layers: Layers, batch: int, nodes: int, *, plans: Plans = "model", seed: int = 0) -> Step:
    """A step's parts.

    Args:
        nodes: a power of two; in supernodes of 256.
    Raises:
        InputError: no samples, or another number of nodes.
    """
    if batch < 1:
        raise InputError(f"a step of {batch} samples")
    rates = taken_rates()
    groups = min(CORE_GROUPS, batch)
    times = layer_times(layers.layers, -(-batch // CORE_GROUPS), plans)
    elements = layers.parameters
    summed = sum_seconds(Sum(groups, elements, "float32"), rates) if elements and groups > 1 else 0.0
    solver = Stream("momentum", max(1, -(-elements // CORE_GROUPS)), constants=(0.01, 0.9, 0.0))
    update = operation_seconds(solver, rates) if elements else 0.0
    return Step(
        batch=batch,
        nodes=nodes,
        compute_s=sum(t.forward_s + t.backward_s for t in times),
        sum_s=summed,
        reduce_s=all_reduce_time(nodes_network(nodes), "round-robin", 4 * elements).all_reduce_s,
        update_s=update,
        read_s=read_seconds(batch, nodes, seed),
    )


def nodes_network(nodes: int, latency_s: float | None = None) -> Network:
    """TaihuLight's links ([SW] 2.2, 5.1). Adding a byte reads two and writes one, on four meshes ([SW] 5.1)."""
    rates = taken_rates()
    adding = 3 / (CORE_GROUPS * rates.group.dma_bytes_per_s)
    network = Network(nodes, min(SUPERNODE, nodes), reduce_s_per_byte=adding)
    return network if latency_s is None else replace(network, latency_s=latency_s)


@cache
def read_seconds(batch: int, nodes: int, seed: int) -> float:
    """Seconds until the last of so many nodes has its mini-batch, where all read at once ([SW] 5.2)."""
    size, file_bytes = batch * IMAGE_BYTES, IMAGENET_IMAGES * IMAGE_BYTES
    starts = drawn_starts(nodes, size, file_bytes, IMAGE_BYTES, seed)
    return read_together(Striping(32, 256 * MIB), Disks(), starts, size).last_s
