"""A plan's seconds are those of its program on its ranks, and more ranks are never planned slower."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from sampling import draws
from test_plan_by_hand import branched

from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.rows import program_cost
from convgen.errors import InputError, InternalError
from convgen.network_compiler import CompiledNetwork, plan_graph
from convgen.plan.parts import Room
from convgen.plan.program.ranks import NetworkPlan
from convgen.plan.setting import Setting
from convgen.spec.network_graph import network_graph


def a_machine(draw: Random) -> Machine:
    """Of one level or two, with nodes of any size, on which it matters how layers are split."""
    machine = load_machine(draw.choice(("lassen", "dgx_h200", "cuda")))
    if len(machine.levels) > 1:
        node = draw.choice((2, 3, 4, 6, 8))
        machine = replace(
            machine, ranks_per_node=node, levels=(replace(machine.levels[0], ranks=node), *machine.levels[1:])
        )
    flops = (("float32", draw.choice((2e9, 2e10, 1e12))),)
    return replace(machine, launch_s=draw.choice((1e-8, 1e-6)), peak_flops=flops, hides_gradients=draw.random() < 0.1)


def a_plan(number: int) -> tuple[Setting, CompiledNetwork, NetworkPlan] | None:
    """Of a random network, machine, number of ranks and memory; None where that is too little."""
    draw = Random(f"price of a plan {number}")
    graph, machine = network_graph(branched(draw, draw.randint(0, 2))), a_machine(draw)
    ranks, keep = draw.choice((draw.randint(1, 12), draw.randint(1, 64))), draw.choice(("every", "needed"))
    room = Room(keep=keep, regather=draw.random() < 0.3)  # type: ignore[arg-type]
    setting = Setting(machine=machine, room=room, statistics=draw.choice(("global", "spatial", "local")))
    compiled, plan = plan_graph(graph, ranks, setting)
    if draw.random() < 0.4:
        less = int(plan.memory_bytes * draw.choice((0.7, 0.85, 0.95)))
        setting = replace(setting, room=replace(room, memory_bytes=less))
        try:
            compiled, plan = plan_graph(graph, ranks, setting)
        except InputError:
            return None
    return setting, compiled, plan


def test_a_plan_is_the_price_of_its_program() -> None:
    """Also where some of the ranks work, in nodes that they don't fill."""
    fewer = 0
    for number in range(draws(10)):
        if (found := a_plan(number)) is None:
            continue
        setting, compiled, plan = found
        for program in (plan.program, compiled.plain):
            assert program_cost(program, setting.machine, compiled.dtype).seconds == plan.seconds, number
        fewer += plan.program.grid.ranks < plan.ranks
    assert fewer


def test_another_price_is_refused() -> None:
    found = a_plan(1)
    assert found is not None
    setting, compiled, plan = found
    assert plan.checked(setting.machine, compiled.dtype) is plan
    with pytest.raises(InternalError, match="its program takes"):
        replace(plan, seconds=plan.seconds * 0.9).checked(setting.machine, compiled.dtype)


@pytest.mark.parametrize("number", range(2))
def test_more_ranks_are_never_planned_slower(number: int) -> None:
    draw = Random(f"more ranks {number}")
    machine = replace(a_machine(draw), hides_gradients=False)
    graph = network_graph(branched(draw, 1))
    some = sorted({1, 3, 7, 8, draw.randint(9, 63), 64, 4096})
    seconds = [plan_graph(graph, ranks, Setting(machine=machine, statistics="local"))[1].seconds for ranks in some]
    assert seconds == sorted(seconds, reverse=True), dict(zip(some, seconds, strict=True))
