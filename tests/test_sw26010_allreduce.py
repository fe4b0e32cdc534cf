"""The all-reduce of [SW] 5.1: Equations 2-6, and what the messages say."""

from __future__ import annotations

import numpy as np
import pytest
from sw26010_sums import all_reduced

from convgen.errors import InputError
from convgen.sw26010.allreduce.cost import NUMBERINGS, Network, Numbering, all_reduce_time, coefficients, ring_time
from convgen.sw26010.allreduce.run import doubling_steps, halving_steps, simulate_traffic

BETA1 = 1 / 12e9
MB100 = 100e6
PHASES = ("reduce-scatter", "all-gather")


@pytest.mark.parametrize(
    ("beta2", "gamma", "adjacent", "round_robin", "speedup"),
    [
        (4 * BETA1, 0.0, (27.0852, 27.0852, 54.1704), (8.4084, 8.4084, 16.8169), 3.221),
        (4 * BETA1, 3 / 28e9, (37.7890, 27.0852, 64.8742), (19.1123, 8.4084, 27.5207), 2.357),
        (BETA1 / 4, 0.0, (3.6477, 3.6477, 7.2954), (8.3169, 8.3169, 16.6338), 0.439),  # the text's beta2
    ],
    ids=["beta2=4beta1", "with the sums", "beta2=beta1/4"],
)
def test_equations(
    beta2: float,
    gamma: float,
    adjacent: tuple[float, float, float],
    round_robin: tuple[float, float, float],
    speedup: float,
) -> None:
    network = Network(1024, 256, 1e-6, BETA1, beta2, gamma)
    found = {numbering: all_reduce_time(network, numbering, MB100) for numbering in NUMBERINGS}
    for numbering, want in (("adjacent", adjacent), ("round-robin", round_robin)):
        time = found[numbering]  # type: ignore[index]
        milliseconds = (time.reduce_scatter_s * 1e3, time.all_gather_s * 1e3, time.all_reduce_s * 1e3)
        assert milliseconds == pytest.approx(want, abs=6e-5)
    assert found["adjacent"].all_reduce_s / found["round-robin"].all_reduce_s == pytest.approx(speedup, abs=6e-4)


def test_equations_for_the_papers_models_and_the_ring() -> None:
    network = Network(1024, 256)
    for total_bytes, want in ((232.6e6, (126.0, 39.1)), (97.7e6, (52.9, 16.4))):
        times = [all_reduce_time(network, numbering, total_bytes).all_reduce_s * 1e3 for numbering in NUMBERINGS]
        assert times == pytest.approx(want, abs=0.06)
    assert ring_time(network, MB100) * 1e3 == pytest.approx(18.696, abs=6e-4)


@pytest.mark.parametrize("numbering", NUMBERINGS)
@pytest.mark.parametrize(("nodes", "supernode"), [(8, 4), (16, 4), (64, 16), (512, 256), (1024, 256), (4096, 256)])
def test_messages_give_the_coefficients(nodes: int, supernode: int, numbering: Numbering) -> None:
    network = Network(nodes, supernode, reduce_s_per_byte=3 / 28e9)
    steps = simulate_traffic(network, numbering, nodes, 4)  # an element a node: n/p = 4 bytes
    for phase in ("reduce-scatter", "all-gather"):
        mine = [step for step in steps if step.phase == phase]
        assert len(mine) == network.steps
        assert all(step.crossing_bytes in (0, step.total_bytes) for step in mine)  # all nodes or none
        inside = sum(step.message_bytes for step in mine if not step.crossing_bytes) // 4
        across = sum(step.message_bytes for step in mine if step.crossing_bytes) // 4
        assert (inside, across) == coefficients(network, numbering)
    time = all_reduce_time(network, numbering, 4 * nodes)
    assert sum(s.seconds for s in steps if s.phase == "reduce-scatter") == pytest.approx(time.reduce_scatter_s)
    assert sum(s.seconds for s in steps if s.phase == "all-gather") == pytest.approx(time.all_gather_s)


def test_which_steps_cross() -> None:
    network = Network(64, 16)
    crossing = {
        numbering: [s.distance for s in simulate_traffic(network, numbering, 64, 4) if s.crossing_bytes]
        for numbering in NUMBERINGS
    }
    assert crossing["adjacent"] == [32, 16, 16, 32]  # p/2 .. q
    assert crossing["round-robin"] == [2, 1, 1, 2]  # p/2q .. 1


def test_bytes_that_cross() -> None:
    # n (p - q) against n (p/q - 1) a phase, over all nodes: q times fewer.
    elements = 1024 * 4
    runs = {numbering: simulate_traffic(Network(1024, 256), numbering, elements, 4) for numbering in NUMBERINGS}
    scattered = {k: sum(s.crossing_bytes for s in v if s.phase == "reduce-scatter") for k, v in runs.items()}
    assert scattered == {"adjacent": 4 * elements * (1024 - 256), "round-robin": 4 * elements * 3}
    assert 100e6 * (1024 - 256) == 7.68e10 and 100e6 * 3 == 3.0e8


@pytest.mark.parametrize("numbering", NUMBERINGS)
def test_the_messages_are_the_equations(numbering: Numbering) -> None:
    network = Network(16, 4)
    steps = simulate_traffic(network, numbering, 64, 4)
    crossing = {phase: sum(s.crossing_bytes for s in steps if s.phase == phase) // 4 for phase in PHASES}
    assert list(crossing.values()) == [{"adjacent": 768, "round-robin": 192}[numbering]] * 2
    assert sum(s.seconds for s in steps) == pytest.approx(all_reduce_time(network, numbering, 256).all_reduce_s)


@pytest.mark.parametrize(("nodes", "elements"), [(16, 64), (8, 1), (8, 5), (8, 13)])
def test_every_node_gets_the_sum(nodes: int, elements: int) -> None:
    """Also where parts differ by one."""
    vectors = np.random.default_rng(0).integers(-50, 50, (nodes, elements)).astype(float)
    assert np.array_equal(all_reduced(vectors), np.broadcast_to(vectors.sum(axis=0), (nodes, elements)))


def test_distance_doubling_on_rank_order_is_round_robin() -> None:
    # The authors' code keeps contiguous supernodes and pairs rank ^ 1 first with n/2: the same traffic.
    p, q = 64, 16
    sizes = [(p >> (s + 1)) for s in range(6)]  # elements of a message, n = p
    crossing = sum(size * p for s, size in enumerate(sizes) if (1 << s) >= q)
    steps = simulate_traffic(Network(p, q), "round-robin", p, 1)
    assert crossing == sum(s.crossing_bytes for s in steps if s.phase == "reduce-scatter")


def test_halving_and_doubling_are_each_others_reverse() -> None:
    halving, doubling = list(halving_steps(8, 16)), list(doubling_steps(8, 16))
    assert [distance for distance, _ in halving] == [4, 2, 1] == [distance for distance, _ in doubling][::-1]
    assert [m.hi - m.lo for m in halving[0][1]] == [8] * 8 == [m.hi - m.lo for m in doubling[-1][1]]
    for (_, sent), (_, returned) in zip(halving, reversed(doubling), strict=True):
        assert {(m.sender, m.receiver, m.lo, m.hi) for m in sent} == {
            (m.receiver, m.sender, m.lo, m.hi) for m in returned
        }


def test_what_the_equations_do_not_cover_is_refused() -> None:
    with pytest.raises(InputError, match="1000 nodes: recursive halving"):
        Network(1000, 250)
    with pytest.raises(InputError, match="supernodes of 512"):
        Network(256, 512)
    assert all_reduce_time(Network(1, 1), "adjacent", 8.0).all_reduce_s == 0.0
