"""Packed and separate all-reduces: the same sums, steps by closed form, packs and what of them is exposed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from sw26010_sums import all_reduced

from convgen.commands.main import cli
from convgen.spec.network_reader import read_network
from convgen.sw26010.allreduce.cost import NUMBERINGS, Network
from convgen.sw26010.allreduce.run import simulate_traffic
from convgen.sw26010.allreduce.steps import mesh_all_reduce_s, message_seconds, step_elements
from convgen.sw26010.machine.rates import taken_rates
from convgen.sw26010.training.of_graph import layers_of_network
from convgen.sw26010.training.packing import (
    Gradient,
    break_even_elements,
    copies_s,
    gradients,
    packing_of,
    packs_of,
    reduce_packs,
)
from convgen.sw26010.training.step import layer_times, nodes_network

ROOT = Path(__file__).parent.parent / "examples" / "networks"
powers = st.integers(0, 5).map(lambda i: 2**i)


@settings(max_examples=30)
@given(powers, powers, st.integers(1, 3000))
def test_steps_take_what_the_messages_take(nodes: int, supernode: int, elements: int) -> None:
    network = Network(nodes, min(nodes, supernode))
    for numbering in NUMBERINGS:
        traffic = simulate_traffic(network, numbering, elements, 4)
        halving = [step for step in traffic if step.phase == "reduce-scatter"]
        closed = step_elements(network, elements)
        assert [(s.distance, s.message_bytes // 4) for s in halving] == closed
        for step, (distance, size) in zip(halving, closed, strict=True):
            assert step.seconds == pytest.approx(message_seconds(network, numbering, distance, size))


@settings(max_examples=20)
@given(powers, st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 99))
def test_packed_gradients_are_the_separate_ones(nodes: int, sizes: list[int], seed: int) -> None:
    network = Network(nodes, max(1, nodes // 2))
    parts = [np.random.default_rng(seed + i).standard_normal((nodes, size)) for i, size in enumerate(sizes)]
    assert all_reduced(np.concatenate(parts, axis=1)) == pytest.approx(
        np.concatenate([all_reduced(part) for part in parts], axis=1)
    )
    apart = [simulate_traffic(network, "round-robin", size, 4) for size in sizes]
    packed = simulate_traffic(network, "round-robin", sum(sizes), 4)
    assert len(packed) * len(sizes) == sum(map(len, apart))
    assert sum(step.total_bytes for step in packed) == sum(step.total_bytes for run in apart for step in run)


def test_packs_are_neighbours_of_the_backward_pass() -> None:
    given_ = [Gradient(str(i), size, float(i)) for i, size in enumerate((10, 1, 1, 30, 5))]
    assert [[g.name for g in pack] for pack in packs_of(given_, 40)] == [["0"], ["1", "2", "3"], ["4"]]
    assert [len(pack) for pack in packs_of(given_, float("inf"))] == [5]
    assert packs_of([], 1) == []


def test_a_pack_waits_for_its_last_gradient() -> None:
    rates, network = taken_rates(), nodes_network(16)
    one, other = Gradient("a", 100_000, 0.5), Gradient("b", 50_000, 1.0)
    alone = [mesh_all_reduce_s(network, "round-robin", g.elements, rates) for g in (one, other)]
    together = mesh_all_reduce_s(network, "round-robin", 150_000, rates)
    apart = reduce_packs([[one], [other]], network, 1.0, copied=True)
    assert apart.network_s == pytest.approx(sum(alone)) and apart.exposed_s == pytest.approx(alone[1])
    packed = reduce_packs([[one, other]], network, 1.0, copied=True)
    assert packed.exposed_s == pytest.approx(together + copies_s(150_000, rates)) == packed.network_s
    assert reduce_packs([[one, other]], network, 1.0, copied=False).network_s == pytest.approx(together)


def test_small_layers_are_better_packed_and_large_ones_alone() -> None:
    network, rates, total = nodes_network(1024), taken_rates(), 10_000_000
    edge = break_even_elements(total, network)
    packed = mesh_all_reduce_s(network, "round-robin", total, rates)
    for elements, alone_wins in ((edge // 2, False), (edge * 2, True)):
        more = mesh_all_reduce_s(network, "round-robin", total + elements, rates) - packed + copies_s(elements, rates)
        assert (mesh_all_reduce_s(network, "round-robin", elements, rates) < more) == alone_wins
    assert break_even_elements(total, nodes_network(1024, 1e-4)) > edge  # messages that cost more


def test_gradients_come_in_the_order_of_the_backward_pass() -> None:
    layers = layers_of_network(read_network(ROOT / "resnet50.yaml"))
    found = gradients(layers, 32)
    assert found[0].name == "fc1000_as_conv" and found[-1].name == "conv1"
    assert sum(g.elements for g in found) == layers.parameters
    ready = [g.ready_s for g in found]
    assert ready == sorted(ready)
    assert ready[-1] == pytest.approx(sum(t.backward_s for t in layer_times(layers.layers, 8)))


def test_packing_of_the_paper_s_networks() -> None:
    for name, layers, gain in (("swcaffe/alexnet_bn", 13, False), ("vgg16", 16, False), ("resnet50", 107, True)):
        found = packing_of(layers_of_network(read_network(ROOT / f"{name}.yaml")), 64, 1024)
        assert found.layers == layers
        assert found.in_place.network_s < found.alone.network_s
        assert (found.packed.network_s < found.alone.network_s) == gain
        assert found.best.exposed_s <= found.packed.exposed_s


def test_packing_prints_and_draws(tmp_path: Path) -> None:
    path = tmp_path / "packs.svg"
    arguments = ["sw26010", "packing", str(ROOT / "vgg16.yaml"), "--nodes", "2,16", "--plot", str(path)]
    text = CliRunner().invoke(cli, arguments, catch_exceptions=False).output
    assert text.count("vgg16 ") == 2 and "one a layer" in text
    assert "after the backward pass" in path.read_text()
    found = json.loads(CliRunner().invoke(cli, [*arguments[:5], "--json"], catch_exceptions=False).output)
    assert [row["nodes"] for row in found["rows"]] == [2, 16]
    assert found["rows"][0]["bytes"] == 4 * 138_353_320
