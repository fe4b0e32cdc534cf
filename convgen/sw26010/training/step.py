"""Seconds of a training step: of one core group's layers, of a node, and of many.

Four core groups take a quarter of the node's samples each ([SW] Algorithm 1); core group 0 adds up their gradients;
nodes all-reduce them, packed, with round-robin numbers (Eqs. 2, 5, 6), their additions on the four meshes; every core
group updates a quarter of the weights. The next mini-batch is read meanwhile ([SW] 5.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, assert_never

from convgen.errors import InputError
from convgen.sw26010.allreduce.cost import Network, all_reduce_time
from convgen.sw26010.conv.cost import choose_plan, conv_terms, explicit_plan
from convgen.sw26010.conv.implicit_plan import ImplicitPlan
from convgen.sw26010.conv.layouts import Transform, transform_counts
from convgen.sw26010.conv.plan_words import plan_name
from convgen.sw26010.gemm.cost import gemm_seconds, search_blocks
from convgen.sw26010.gemm.plan import GemmPlan
from convgen.sw26010.machine.rates import Rates, load_rates, taken_rates
from convgen.sw26010.pointwise.normalise import norm_seconds
from convgen.sw26010.pointwise.stream import Stream, stream_seconds
from convgen.sw26010.pooling.windows import windows_seconds
from convgen.sw26010.storage.reading import Disks, drawn_starts, read_together
from convgen.sw26010.storage.striping import IMAGE_BYTES, IMAGENET_IMAGES, MIB, Striping
from convgen.sw26010.target.sums import Sum, sum_seconds
from convgen.sw26010.training.layers import ConvLayer, ConvTask, Layer, Layers, NormTask, PoolTask, Task

CORE_GROUPS = 4
SUPERNODE = 256
FEWEST_PIXELS, MANAGEMENT_FLOPS_PER_S = 64, 5.29e9  # see small_on_management_s
Plans = Literal["model", "explicit"]


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
            `explicit`: as the public code trains on four core groups.
    """
    rates = taken_rates()
    match task:
        case ConvTask():
            return _conv_seconds(task, plans, rates)
        case GemmPlan():
            return gemm_seconds(search_blocks(task, rates), rates), ""
        case Stream():
            return stream_seconds(task, rates), ""
        case NormTask():
            return norm_seconds(task.norm, rates, backward=task.backward), ""
        case PoolTask():
            return windows_seconds(task.windows, rates, backward=task.backward), ""
        case _:
            assert_never(task)


def _conv_seconds(task: ConvTask, plans: Plans, rates: Rates) -> tuple[float, str]:
    fitted = load_rates().fitted()
    if plans == "explicit":
        plan = explicit_plan(task.problem, task.phase, rates)
        return task.groups * conv_terms(plan, rates).seconds(fitted), "explicit"
    choices = choose_plan(task.problem, task.phase, rates, fitted).plans
    timed = [
        (seconds + (_layout_seconds(plan, rates) if isinstance(plan, ImplicitPlan) else 0.0), plan_name(plan))
        for plan, seconds in choices
    ]
    seconds, name = min(timed)
    return task.groups * seconds, name


def _layout_seconds(plan: ImplicitPlan, rates: Rates) -> float:
    """Of bringing images to (R, C, N, B) and the result back ([SW] 4.3); neighbours that keep it save that."""
    p = plan.problem
    x, y = (p.n, p.c, p.h, p.w), (p.n, p.f, p.h_out, p.w_out)
    to, back = {"forward": ([x], [y]), "backward_data": ([y], [x]), "backward_filter": ([x, y], [])}[plan.phase]
    moved = [transform_counts(Transform(*shape, plan.dtype, "to_implicit")) for shape in to]
    moved += [transform_counts(Transform(*shape, plan.dtype, "to_explicit")) for shape in back]
    return sum(rates.transfer_s(counts.get) + rates.transfer_s(counts.put) for counts in moved)


def layer_times(layers: Layers, samples: int, plans: Plans = "model") -> tuple[LayerTime, ...]:
    """Of every layer on a core group with so many samples."""
    found: list[LayerTime] = []
    for layer in layers.layers:
        forth = [task_seconds(task, plans) for task in layer.forward(samples)]
        back = [task_seconds(task, plans) for task in layer.backward(samples)]
        named = tuple(name for _, name in (*forth, *back) if name)
        found.append(LayerTime(layer, _sum(forth), _sum(back), named))
    return tuple(found)


def _sum(parts: Iterable[tuple[float, str]]) -> float:
    return sum(seconds for seconds, _ in parts)


@dataclass(frozen=True, slots=True)
class Step:
    """A step of `nodes` nodes with `batch` samples each.

    `compute_s` of the slowest core group; `sum_s` of core group 0; `reduce_s` of the all-reduce; `update_s`; `read_s`
    of the last node's mini-batch.
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
    times = layer_times(layers, -(-batch // CORE_GROUPS), plans)
    elements = layers.parameters
    summed = sum_seconds(Sum(groups, elements, "float32"), rates) if elements and groups > 1 else 0.0
    update = stream_seconds(Stream("momentum", -(-elements // CORE_GROUPS)), rates) if elements else 0.0
    return Step(
        batch=batch,
        nodes=nodes,
        compute_s=sum(t.forward_s + t.backward_s for t in times),
        sum_s=summed,
        reduce_s=all_reduce_time(nodes_network(nodes), "round-robin", 4 * elements).all_reduce_s,
        update_s=update,
        read_s=_read_seconds(batch, nodes, seed),
    )


def nodes_network(nodes: int, latency_s: float | None = None) -> Network:
    """TaihuLight's links ([SW] 2.2, 5.1). Adding a byte reads two and writes one, on four meshes ([SW] 5.1)."""
    rates = taken_rates()
    adding = 3 / (CORE_GROUPS * rates.group.dma_bytes_per_s)
    network = Network(nodes, min(SUPERNODE, nodes), reduce_s_per_byte=adding)
    return network if latency_s is None else replace(network, latency_s=latency_s)


def small_on_management_s(layers: Layers, batch: int, plans: Plans = "model") -> float:
    """Seconds that a step takes longer if products of fewer than 64 pixels run on the management core.

    A hypothesis: [SW] has no word of it. The rate is that of the one product of Table 2 that the mesh's model is 18
    times too fast for, conv1_1 forward, 5.29 Gflop/s of the management core's 11.6. Table 2 has no plane below 14 x 14;
    ResNet-50 and GoogLeNet have 7 x 7.
    """
    rates, more = taken_rates(), 0.0
    for layer in layers.layers:
        if not isinstance(layer, ConvLayer) or layer.rows.out * layer.columns.out >= FEWEST_PIXELS:
            continue
        samples = -(-batch // CORE_GROUPS)
        for task in (*layer.forward(samples), *layer.backward(samples)):
            if isinstance(task, ConvTask) and task.phase != "backward_filter":
                plan = explicit_plan(task.problem, task.phase, rates)
                slow = task.problem.n * (plan.gemm.useful_flops / MANAGEMENT_FLOPS_PER_S)
                before = task_seconds(task, plans)[0] / task.groups
                after = conv_terms(plan, rates).seconds(load_rates().fitted())
                after += slow - task.problem.n * gemm_seconds(plan.gemm, rates)
                more += task.groups * max(0.0, after - before)
    return more


@cache
def _read_seconds(batch: int, nodes: int, seed: int) -> float:
    size, file_bytes = batch * IMAGE_BYTES, IMAGENET_IMAGES * IMAGE_BYTES
    starts = drawn_starts(nodes, size, file_bytes, IMAGE_BYTES, seed)
    return read_together(Striping(32, 256 * MIB), Disks(), starts, size).last_s
