"""Greedy hiding as [SP] V-B says, against a clock that ticks, and on real schedules."""

from __future__ import annotations

from random import Random

import pytest
from test_cost_symbolic import conv, schedule_of

from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.overlap import Behind, LayerTasks, Overlap, Task, TaskKind, beside, layer_tasks, network_time
from convgen.cost.schedule import schedule_cost


def ticked(layers: list[LayerTasks], overlap: Overlap) -> int:
    """The same, one picosecond at a time: the foreground's task ticks, and the background's where it may."""
    now = 0
    for tasks in (
        [t for layer in layers for t in layer.forward],
        [t for layer in reversed(layers) for t in layer.backward],
    ):
        background, halo = 0, 0
        for task in (*tasks, Task("end", "compute", 0)):
            left = task.time_ps
            if task.kind == "reduce":
                background += left
                continue
            if task.kind == "halo" and overlap.halos:
                halo += left
                continue
            computes = task.kind == "compute"
            while left or (computes and halo):
                behind = overlap.reductions == "everything" or (computes and left and overlap.reductions == "compute")
                background -= bool(behind and background)
                halo -= bool(computes and halo)
                left -= bool(left)
                now += 1
        now += background
    return now


@pytest.mark.parametrize("reductions", ["compute", "everything", "nothing"])
@pytest.mark.parametrize("halos", [True, False])
def test_greedy_hiding_is_the_ticking_clocks(reductions: Behind, halos: bool) -> None:
    rng = Random(7)
    kinds: list[TaskKind] = ["compute", "transfer", "halo", "reduce"]
    for _ in range(60):
        layers = [
            LayerTasks(
                tuple(Task("f", rng.choice(kinds[:3]), rng.randint(1, 9)) for _ in range(3)),
                tuple(Task("b", rng.choice(kinds), rng.randint(1, 9)) for _ in range(4)),
            )
            for _ in range(rng.randint(1, 4))
        ]
        overlap = Overlap(reductions, halos)
        found = network_time(layers, overlap)
        assert found.forward_ps + found.backward_ps == ticked(layers, overlap)
        assert found.forward_ps + found.backward_ps == found.compute_ps + found.transfers_ps + found.exposed_ps


def test_a_reduction_hides_behind_what_comes_after_it() -> None:
    """By hand: of 12, 5 behind dx and 5 behind the next layer's dw; its dx hides the last 2 and 3 of the next 12."""
    layer = LayerTasks((), (Task("dw", "compute", 5), Task("sum", "reduce", 12), Task("dx", "compute", 5)))
    one = network_time([layer])
    assert (one.exposed_ps, one.backward_ps) == (7, 17)
    two = network_time([layer, layer])
    assert two.exposed_ps == 24 - 15  # all that is computed after the first reduction may start
    assert network_time([layer, layer], Overlap(reductions="nothing")).exposed_ps == 24


def tasks_of(name: str, grid: dict[str, int], needs_dx: bool = True) -> LayerTasks:
    schedule, space = schedule_of(name, grid, conv())
    cost = schedule_cost(schedule, Model(space, load_machine("lassen"), "float32"))
    return layer_tasks(schedule, cost, needs_dx=needs_dx)


@pytest.mark.parametrize(
    ("name", "grid", "needs_dx", "forward", "backward"),
    [
        ("sample", {"N": 4}, True, "y", "dw_partial dw dx"),
        ("spatial", {"N": 2, "H": 2}, True, "x_halo y", "dy_halo dw_partial dw dx"),
        ("stationary-x", {"N": 2, "C": 2}, True, "y_partial y", "dy_gathered dw_partial dw dx"),
        ("stationary-y", {"N": 2, "F": 2}, True, "x_gathered y", "dw_partial dw dx_partial dx"),
        ("stationary-y", {"N": 2, "F": 2}, False, "x_gathered y", "dw_partial dw"),
        ("spatial", {"N": 2, "H": 2}, False, "x_halo y", "dw_partial dw"),
    ],
)
def test_tasks_of_a_layer(name: str, grid: dict[str, int], needs_dx: bool, forward: str, backward: str) -> None:
    tasks = tasks_of(name, grid, needs_dx)
    assert " ".join(t.name for t in tasks.forward) == forward
    assert " ".join(t.name for t in tasks.backward) == backward
    assert {t.kind for t in tasks.backward if t.name == "dw"} == {"reduce"}
    assert {t.kind for t in (*tasks.forward, *tasks.backward) if "halo" in t.name} <= {"halo"}


def test_nothing_hidden_is_the_schedules_cost() -> None:
    schedule, space = schedule_of("spatial", {"N": 2, "H": 2, "W": 2}, conv())
    cost = schedule_cost(schedule, Model(space, load_machine("lassen"), "float32"))
    bare = network_time([layer_tasks(schedule, cost)], Overlap("nothing", halos=False))
    assert bare.forward_ps + bare.backward_ps == cost.time_ps()


def test_other_work_of_a_layer_goes_between() -> None:
    tasks = beside(tasks_of("sample", {"N": 4}), (Task("bn", "compute", 3),), (Task("dbn", "compute", 4),))
    assert [t.name for t in tasks.forward] == ["y", "bn"]
    assert tasks.backward[0].name == "dbn"
