"""Training memory, part by part, and [SP]'s claim that one 2K sample does not fit 16 GB."""

from __future__ import annotations

import pytest
from generate import algorithm_problem
from passing import passed
from test_cost_symbolic import conv, schedule_of

from convgen.algebra.conv import Conv
from convgen.algebra.grid import Grid
from convgen.algebra.space import Space
from convgen.cost.memory import memory
from convgen.cost.training_memory import STATES, NetworkMemory, Optimizer, layer_memory, network_memory
from convgen.passes.drop_single_rank import DropSingleRank
from convgen.passes.hold_x import HoldX
from convgen.passes.share import Share
from convgen.program.build import lower
from convgen.resources import data_file
from convgen.spec.table import read_csv

W, X, Y = 128 * 64 * 9, 32 * 64 * 32 * 32, 32 * 128 * 32 * 32  # of conv()
GIB = 2**30


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize(("dtype", "size", "state"), [("float32", 4, 4), ("bfloat16", 2, 4), ("float64", 8, 8)])
def test_parameters(optimizer: Optimizer, dtype: str, size: int, state: int) -> None:
    schedule, space = schedule_of("stationary-w", {"N": 2, "C": 2, "F": 4}, conv())
    found = layer_memory(schedule, space, dtype, optimizer=optimizer)
    assert found.weights == W // 8 * (size + (state if size < state else 0))
    assert found.gradients == W // 8 * size
    assert found.optimizer == STATES[optimizer] * W // 8 * state
    assert (found.input, found.output) == (X // 16 * size, Y // 16 * size)


def test_a_gathered_x_is_held_or_temporary() -> None:
    """[CF] 4: stationary-y holds the gathered x; where x is gathered anew, it is a temporary."""
    problem = algorithm_problem("stationary-y", conv(), Grid((("F", 4),)))
    space = Space(conv(), problem.grid)
    naive = lower("s", space, problem.stored, problem.roles, bias=False)
    gathered, stored = (
        layer_memory(passed(naive, space, DropSingleRank(), hold, Share()), space, "float32")
        for hold in (HoldX(choice="gathered"), HoldX(choice="stored"))
    )
    assert gathered.held == X * 4
    assert stored.held == 0
    assert stored.temporaries >= X * 4


@pytest.mark.parametrize("name", ["sample", "spatial", "stationary-x", "stationary-y", "integrated"])
def test_parts_add_up_to_what_a_module_takes(name: str) -> None:
    """Each phase's peak is within results, what is held, and temporaries; and one phase's is just that."""
    letter = {"sample": {"N": 4}, "spatial": {"H": 4}, "stationary-x": {"C": 4}}.get(name, {"F": 4})
    schedule, space = schedule_of(name, letter, conv())
    found, used = layer_memory(schedule, space, "float32"), memory(schedule, space)
    forward = int(used.peak["forward"].max()) * 4 - found.output - found.held
    backward = max(int(used.peak[p].max()) * 4 for p in ("backward_data", "backward_filter"))
    assert found.temporaries == max(0, forward, backward - found.input - found.gradients)


def mesh(ranks: int) -> NetworkMemory:
    """[SP]'s 2K model with 128 filters, one sample, its rows over some ranks."""
    path = data_file("tuning", "layers", "mesh2k_assumed.csv")
    layers = read_csv(path, grid={"H": ranks}, algorithm="spatial")
    found = []
    for i, layer in enumerate(layers):
        problem = algorithm_problem("spatial", layer.conv, layer.grid)
        space = Space(layer.conv, layer.grid)
        schedule = lower(layer.name, space, problem.stored, problem.roles, bias=False)
        shared = passed(schedule, space, DropSingleRank(), HoldX(choice="stored"), Share())
        found.append(layer_memory(shared, space, "float32", needs_dx=i > 0))
    return network_memory(found, signals="kept", outputs_kept=3)


def test_one_large_sample_needs_two_gpus() -> None:
    """[SP] VI: more than 16 GB on one GPU, less on each of two: activations of conv, BN and ReLU, and error signals."""
    one, two = mesh(1), mesh(2)
    assert one.activations / GIB == pytest.approx(10.28, abs=0.02)
    assert (one.activations + one.signals) / GIB == pytest.approx(20.56 - 288 / 1024, abs=0.02)  # x has no dx
    assert one.total > 16e9
    assert two.total < 16e9
    assert (two.activations + two.signals) / (one.activations + one.signals) == pytest.approx(0.5, abs=0.01)


def test_a_layer_of_nothing_but_bias() -> None:
    layer = Conv(4, 8, 8, conv().spatial, bias=True)
    schedule, space = schedule_of("sample", {"N": 2}, layer)
    assert layer_memory(schedule, space, "float32").gradients == (8 * 8 * 9 + 8) * 4
