"""What the papers say of layers beside convolution, their communication counted against closed forms.

[SP] III-B: batch norm of three kinds, pooling with halos. [SP] III-C: shuffles between layers that are laid out
otherwise, forward and backward. [CF] 3.5: other layers where channels are split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from small_networks import seeded
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import convgen
from convgen.algebra.grid import Grid
from convgen.cost.machines import load_machine
from convgen.cost.network import volume
from convgen.errors import InputError
from convgen.network_compiler import CompiledNetwork, compile_network, compile_plan, plan_graph
from convgen.plan.program.written import plan_of
from convgen.plan.setting import Setting
from convgen.program.network_text import show
from convgen.spec.exported import graph_of
from convgen.spec.graph import Graph
from convgen.spec.network_plan import PlanFile, RowPlan, read_plan, write_plan
from convgen.spec.text import parse_grid
from convgen.verify.network import check_network, report_text
from convgen.verify.virtual import World

BYTES = 8  # of float64
Steps = list[tuple[str, str, str, int]]  # step, collective, axes, bytes that all ranks send


def graph_of_module(module: nn.Module, *shape: int) -> Graph:
    seeded()
    return graph_of(module.double(), (torch.randn(shape, dtype=torch.float64),), name="net")[0]


def sent(one: CompiledNetwork, part: str, *of: str) -> Steps:
    """Steps whose names begin with one of these."""
    return [
        (s["step"], s["collective"], "".join(s["axes"]), sum(s["bytes_sent_per_rank"]))
        for s in volume(one.plain, of_inputs=True)[part]
        if not of or s["step"].startswith(of)
    ]


def checked(one: CompiledNetwork) -> CompiledNetwork:
    report = check_network(one, {})
    assert report.ok, report_text(report)
    return one


def gathered(values: int, members: int, ranks: int) -> int:
    """All ranks' bytes, each sends its values to the others of its group."""
    return ranks * values * (members - 1) * BYTES


def reduced(values: int, members: int, ranks: int) -> int:
    """All ranks' bytes of an all-reduce, 2 (p - 1) / p of its values each."""
    return ranks * values * 2 * (members - 1) // members * BYTES


# ---------------------------------------------------------------- [SP] III-B: batch norm
C = 8


class Norms(nn.Module):
    """Two batch norms, the second behind a stride."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, C, 3, padding=1, bias=False), nn.BatchNorm2d(C)
        self.conv2, self.bn2 = nn.Conv2d(C, C, 3, 2, 1), nn.BatchNorm2d(C, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))


@cache
def two_norms(batch: int) -> Graph:
    return graph_of_module(Norms(), batch, 3, 8, 6)


def norms(grid: str, statistics: str, batch: int = 4) -> CompiledNetwork:
    return compile_network(two_norms(batch), Grid(tuple(parse_grid(grid, "N=2").items())), statistics=statistics)


def test_global_statistics_merge_over_all_ranks() -> None:
    one = norms("N=2,H=2", "global")
    assert sent(one, "forward", "bn1") == [("bn1_moments", "all_gather", "NH", gathered(2 * C, 4, 4))]
    assert sent(one, "backward", "bn1") == [("bn1.dp", "all_reduce", "NH", reduced(3 * C, 4, 4))]


def test_spatial_statistics_merge_over_the_ranks_of_a_sample() -> None:
    """Behind them a rank's weight and bias gradients, and running statistics, are summed over the samples' ranks."""
    one = norms("N=2,H=2", "spatial")
    assert sent(one, "forward", "bn1") == [
        ("bn1_moments", "all_gather", "H", gathered(2 * C, 2, 4)),
        ("bn1_statistics", "all_reduce", "N", reduced(2 * C, 2, 4)),
    ]
    assert sent(one, "backward", "bn1") == [
        ("bn1.dp", "all_reduce", "H", reduced(3 * C, 2, 4)),
        ("bn1_coefficients.db", "all_reduce", "N", reduced(C, 2, 4)),
        ("bn1_coefficients.dw", "all_reduce", "N", reduced(C, 2, 4)),
    ]
    assert [step[0] for step in sent(one, "backward", "bn2")] == ["bn2.dp"]  # it has no weight


@pytest.mark.parametrize("statistics", ["global", "local"])
def test_a_norm_takes_few_passes_over_memory(statistics: str) -> None:
    """Forward the statistics and y; backward the sums, and dx: at most in two."""
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).double()
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    net = convgen.from_torch(module, (x,), {"N": 2}, statistics=statistics)

    class Wide(TorchDispatchMode):
        """Calls that make, or read, as many elements as the norm has."""

        def __init__(self) -> None:
            super().__init__()
            self.found = list[str]()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            shapes = [t.shape for t in args if isinstance(t, torch.Tensor)]
            if any(s[1:] == (4, 4, 4) for s in shapes) and not func.is_view:
                self.found.append(func.__name__.partition(".")[0])
            return func(*args, **kwargs or {})

    def program(end: Any) -> list[str]:
        mesh = net.init_mesh("cpu", transport=end)
        model, block = net.Network(mesh), net.scatter("input", x, mesh)
        y = model(block)
        with Wide() as seen:
            y = model(block)
            y.backward(torch.ones_like(y))
        return [name for name in seen.found if "batch_norm" in name or "addcmul" in name]

    forward = ["batch_norm_update_stats", "native_batch_norm"]
    back = ["native_batch_norm_backward", *(["native_batch_norm", "addcmul_"] if statistics == "global" else [])]
    assert all(names == forward + back for names in World(2).run(program)), World(2).run(program)[0]


def test_local_statistics_send_nothing_for_what_is_made() -> None:
    one = norms("N=2,H=2", "local")
    assert sent(one, "forward", "bn1") == [("bn1_statistics", "all_reduce", "NH", reduced(2 * C, 4, 4))]
    assert sent(one, "backward", "bn1") == [
        ("bn1_coefficients.db", "all_reduce", "NH", reduced(C, 4, 4)),
        ("bn1_coefficients.dw", "all_reduce", "NH", reduced(C, 4, 4)),
    ]
    assert not sent(one, "backward", "bn2")


@pytest.mark.parametrize("statistics", ["spatial", "local"])
@pytest.mark.parametrize(("grid", "batch"), [("N=2,H=2", 4), ("N=3,W=2", 2)], ids=["even", "ragged and empty"])
def test_each_part_is_normalised_alone(statistics: str, grid: str, batch: int) -> None:
    checked(norms(grid, statistics, batch))


def test_statistics_over_rows_alone_are_global_ones() -> None:
    """Where no axis splits samples a sample's ranks are all ranks: the same program."""
    one, other = norms("H=2,W=2", "spatial"), norms("H=2,W=2", "global")
    assert volume(one.program) == volume(other.program)


def test_parts_follow_the_number_of_samples_at_run_time() -> None:
    module, x = Norms().double(), torch.randn(7, 3, 8, 6, dtype=torch.float64)
    net = convgen.from_torch(module, (x[:4],), {"N": 3}, statistics="spatial")

    def program(end: Any) -> tuple[Tensor, dict[str, Tensor]]:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        model.load_full(module.state_dict())
        y = model(net.scatter("x", x, mesh), batch=7)
        return net.gather("output", y, mesh, batch=7).detach(), model.full_state_dict()

    y, state = World(3).run(program)[0]
    parts = [x[:3], x[3:5], x[5:]]
    fresh = [Norms().double() for _ in parts]
    for one in fresh:
        one.load_state_dict(module.state_dict())
    assert torch.allclose(y, torch.cat([one(part) for one, part in zip(fresh, parts, strict=True)]), atol=1e-12)
    own = [one.state_dict()["bn1.running_var"] * len(part) / 7 for one, part in zip(fresh, parts, strict=True)]
    assert torch.allclose(state["bn1.running_var"], sum(own), atol=1e-12)


class Deep(nn.Module):
    """A norm of one value a channel and sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mean((2, 3), keepdim=True))


def test_a_part_of_one_value_is_refused_on_every_rank_as_on_one_device() -> None:
    x = torch.randn(3, 3, 4, 4, dtype=torch.float64)
    net = convgen.from_torch(Deep().double(), (x,), {"N": 2}, statistics="local")

    def program(end: Any) -> str:
        mesh = net.init_mesh("cpu", transport=end)
        model = net.Network(mesh)
        with pytest.raises(ValueError, match="more than 1 are expected") as found:
            model(net.scatter("x", x, mesh))
        return str(found.value)

    assert len(set(World(2).run(program))) == 1


def test_statistics_stand_in_plans_and_what_there_is_not_is_refused(tmp_path: Path) -> None:
    graph, one = two_norms(4), norms("N=2,H=2", "local")
    (tmp_path / "plan.yaml").write_text(write_plan(plan_of(one.program, "net.yaml")))
    plan = read_plan(tmp_path / "plan.yaml")
    assert plan.statistics == "local"
    again = compile_plan(graph, plan)
    assert show(again.program) == show(one.program)
    assert again.graph == one.graph != graph
    searched, _ = plan_graph(
        graph_of_module(Deep(), 4, 3, 4, 4), 2, Setting(machine=load_machine("lassen"), statistics="spatial")
    )
    assert searched.algorithm == "auto"
    with pytest.raises(InputError, match="no statistics globe"):
        compile_network(graph, Grid((("N", 2),)), statistics="globe")
    (tmp_path / "plan.yaml").write_text(write_plan(plan).replace("statistics: local", "statistics: lokal"))
    with pytest.raises(InputError, match="no statistics lokal"):
        read_plan(tmp_path / "plan.yaml")


# ---------------------------------------------------------------- [SP] III-B: pooling
class Pooled(nn.Module):
    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x)


# (pooling, rows that travel up and down at the one border of two ranks, forward; backward)
POOLINGS: Mapping[str, tuple[nn.Module, int, int]] = {
    "max 3/2/1": (nn.MaxPool2d(3, 2, 1), 1, 1),
    "average 3/1/1": (nn.AvgPool2d(3, 1, 1), 2, 2),
    "max 5/1/2": (nn.MaxPool2d(5, 1, 2), 4, 4),
    "average 2/2": (nn.AvgPool2d(2, 2), 0, 0),
}


@pytest.mark.parametrize("kind", POOLINGS)
def test_pooling_sends_halos_of_x_and_of_dy(kind: str) -> None:
    pool, forward, backward = POOLINGS[kind]
    one = compile_network(graph_of_module(Pooled(pool), 3, 5, 8, 7), Grid((("H", 2),)))
    row = 3 * 5 * 7 * BYTES
    width = one.program.values["output" if "output" in one.program.values else one.program.outputs[0][1]].shape[-1]
    assert sum(step[-1] for step in sent(one, "forward")) == forward * row
    gradients = {backward * row, backward * 3 * 5 * width * BYTES}  # rows of dx that are added, or of dy
    assert sum(step[-1] for step in sent(one, "backward")) in gradients


# ---------------------------------------------------------------- [SP] III-C: shuffles
class Chain(nn.Module):
    """Layers that take whatever layout they are given."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(torch.tanh(torch.sigmoid(x)))


def kept_by(shape: Sequence[int], stored: str, at: Mapping[str, int], grid: Mapping[str, int]) -> set[tuple[int, ...]]:
    """Elements that the rank at these coordinates has, counted one by one."""
    sides = []
    for n, entry in zip(shape, stored.split(), strict=True):
        rows = [*range(n)]
        for axis in entry.strip("()").split(","):
            if axis != "*":
                parts, k = grid[axis], at[axis]
                rows = rows[sum(len(rows[j::parts]) for j in range(k)) :][: len(rows[k::parts])]
        sides.append(rows)
    return set(product(*sides))


SHUFFLES = ["a b * *|* * a b", "(a,b) * * *|* * a b", "a * b *|* a * b", "* * (a,b) *|* (a,b) * *", "a b * *|b a * *"]


@pytest.mark.parametrize("pair", SHUFFLES)
def test_a_shuffle_sends_what_a_rank_no_longer_owns_and_back(pair: str) -> None:
    """Forward a rank sends its elements of D_i that it has not in D_j, backward the other way round."""
    grid, shape = {"a": 2, "b": 3}, (4, 5, 7, 6)
    first, second = pair.split("|")

    def stored(text: str) -> tuple[tuple[str, ...], ...]:
        return tuple(() if e == "*" else tuple(e.strip("()").split(",")) for e in text.split())

    graph = graph_of_module(Chain(), *shape)
    names = [r.name for call in graph.calls for r in call.results if r is not None]
    layouts = {"x": stored(first), names[0]: stored(first), names[1]: stored(second), names[2]: stored(second)}
    rows = tuple(RowPlan(n, 0, tuple((f"d{d}", axes) for d, axes in enumerate(layouts[n]) if axes)) for n in names)
    plan = PlanFile("net", "net.yaml", Grid(tuple(grid.items())), layouts, rows)
    one = compile_plan(graph, plan)
    if pair in SHUFFLES[-2:]:
        checked(one)
    places = [dict(zip(grid, at, strict=True)) for at in product(*map(range, grid.values()))]
    held = [[kept_by(shape, text, at, grid) for text in (first, second)] for at in places]
    for part, (here, there) in (("forward", (0, 1)), ("backward", (1, 0))):
        moved = volume(one.plain, of_inputs=True)[part]
        found = [sum(s["bytes_sent_per_rank"][r] for s in moved) for r in range(6)]
        assert found == [len(own[here] - own[there]) * BYTES for own in held], (part, moved)


# ---------------------------------------------------------------- [CF] 3.5: other layers
LAYERS: Mapping[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "dropout": lambda: nn.Dropout(0.4), "max pooling": lambda: nn.MaxPool2d(3, 2, 1),
    "average pooling": lambda: nn.AvgPool2d(2), "global pooling": lambda: nn.AdaptiveAvgPool2d(1),
    "batch norm": lambda: nn.BatchNorm2d(6),
}  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_are_applied_channel_by_channel(layer: str) -> None:
    """Where channels are split nothing moves; beside samples batch norm's sums are segmented: of its own channels."""
    graph = graph_of_module(Pooled(LAYERS[layer]()), 4, 6, 8, 7)
    one = compile_network(graph, Grid((("C", 3),)))
    assert not sent(one, "forward")
    assert not sent(one, "backward")
    both = compile_network(graph, Grid((("N", 2), ("C", 3))))
    steps = sent(both, "forward") + sent(both, "backward")
    if layer != "batch norm":
        assert not steps
        return
    segment = 6 // 3
    assert [s[1:] for s in steps] == [
        ("all_gather", "N", gathered(2 * segment, 2, 6)),
        ("all_reduce", "N", reduced(3 * segment, 2, 6)),
    ]


def test_a_linear_layer_takes_its_input_in_any_distribution() -> None:
    """Its rows summed over the axes of its inputs, as stationary-x has it: [CF] 3.2 with K = 1."""
    graph = graph_of_module(nn.Linear(8, 6), 4, 8)
    one = compile_network(graph, Grid((("N", 2), ("C", 2))))
    ((_, kind, axes, bytes_),) = sent(one, "forward")
    assert (kind, axes, bytes_) == ("reduce_scatter", "C", 4 * prod((2, 6)) // 2 * BYTES)
