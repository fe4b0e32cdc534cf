"""Messages on levels: rounds add up to [TRG]'s formulas, placement against brute force, and [SW] 5.1's equations."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from test_cost_symbolic import conv, schedule_of

from convgen.algebra.grid import Grid
from convgen.algebra.space import Space
from convgen.cost.collectives import ALGORITHMS, BEST, seconds, usable, whole
from convgen.cost.links import Links, collective_seconds
from convgen.cost.machine import Level, Operands
from convgen.cost.machines import load_machine
from convgen.cost.model import Model
from convgen.cost.rounds import rounds
from convgen.cost.schedule import step_cost
from convgen.program.nodes import Convert
from convgen.sw26010.allreduce.cost import Network, Numbering, all_reduce_time, ring_time

ALPHA, BETA, GAMMA, WORDS = 1e-6, 1e-9, 1e-10, 2**20
ONE = (Level(name="machine", latency_s=ALPHA, bytes_per_s=1 / BETA),)
THREE = (
    Level(name="socket", ranks=2, latency_s=1e-6, bytes_per_s=50.0),
    Level(name="node", ranks=4, latency_s=2e-6, bytes_per_s=20.0, shared_bytes_per_s=25.0),
    Level(name="machine", latency_s=5e-6, bytes_per_s=10.0, shared_bytes_per_s=15.0),
)

# [TRG]'s forms by hand, 8 ranks (and 6 where the algorithm takes any number): n = 2^20, 1 us, 1 ns, 0.1 ns.
GOLDEN = {
    ("all_reduce", "recursive-doubling"): 0.0034633008,
    ("all_reduce", "rabenseifner"): 0.0019327584,
    ("all_reduce", "ring"): 0.0019407584,
    ("reduce_scatter", "recursive-halving"): 0.0010122544,
    ("reduce_scatter", "ring"): 0.0010162544,
    ("reduce_scatter", "recursive-doubling"): 0.0024540464,
    ("all_gather", "ring"): 0.000924504,
    ("all_gather", "recursive-doubling"): 0.000920504,
    ("all_gather", "bruck"): 0.000920504,
}
GOLDEN_OF_SIX = {
    ("all_reduce", "ring"): 0.001845008,
    ("reduce_scatter", "ring"): 0.000966194667,
    ("all_gather", "ring"): 0.000878813333,
    ("all_gather", "bruck"): 0.000876813333,
}


def timed(kind: Any, algorithm: str, p: int, levels: tuple[Level, ...] = ONE) -> float:
    n = (2 if kind == "all_reduce" else 1) * (p - 1) / p * WORDS
    found, used = collective_seconds(Grid((("a", p),)), levels, kind, ("a",), n, GAMMA, algorithm)
    assert used == algorithm
    return found


@pytest.mark.parametrize(("p", "golden"), [(8, GOLDEN), (6, GOLDEN_OF_SIX)])
def test_forms_and_messages_are_thakurs(p: int, golden: dict[tuple[Any, str], float]) -> None:
    for (kind, algorithm), expected in golden.items():
        assert timed(kind, algorithm, p) == pytest.approx(expected, rel=1e-6), (kind, algorithm)
        closed = ALGORITHMS[kind][algorithm](p, WORDS, ALPHA, BETA, GAMMA)
        assert closed == pytest.approx(expected, rel=1e-6), (kind, algorithm)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("p", [2, 3, 4, 7, 8, 16])
def test_messages_add_up_to_the_formula(kind: Any, p: int) -> None:
    """On one level; `seconds` takes what the slowest rank sends."""
    if p != 7 or kind != "all_to_all":
        assert len(usable(kind, p)) >= (2 if kind != "all_reduce" or p != 7 else 1)
    n = (2 if kind == "all_reduce" else 1) * (p - 1) / p * WORDS
    assert whole(kind, p, n) == pytest.approx(WORDS)
    for algorithm in usable(kind, p):
        if (kind, algorithm) == ("all_to_all", "bruck") and p & (p - 1):
            continue  # the formula is for powers of two
        expected = seconds(kind, p - 1, n, ALPHA, BETA, GAMMA, algorithm)
        assert timed(kind, algorithm, p) == pytest.approx(expected, rel=1e-9), algorithm


@pytest.mark.parametrize(
    ("p", "factors"), [(2, (2,)), (8, (8,)), (8, (2, 4)), (16, (4, 2, 2)), (6, (6,)), (12, (2, 6))]
)
def test_every_algorithm_does_what_it_says(p: int, factors: tuple[int, ...]) -> None:
    """Sets of pieces, sent as the rounds say: after an all-gather everybody has all, and each message was long
    enough."""
    for algorithm in usable("all_reduce", p):
        parts = rounds("all_reduce", algorithm, p, factors)
        known = [{i} for i in range(p)]  # whose addends a place has seen, in any piece: all must meet
        for r in parts:
            for _ in range(r.times):
                arrived = [set[int]() for _ in range(p)]
                for place, to in enumerate(r.to):
                    arrived[to] |= known[place]
                known = [had | new for had, new in zip(known, arrived, strict=True)]
            assert sorted(r.to) == list(range(p)), "each place receives one message"
            assert all(r.to != np.arange(p)), "nobody sends to itself"
        assert all(len(had) == p for had in known), algorithm
        sent = sum(r.times * r.share for r in parts)
        assert sent >= 2 * (p - 1) / p - 1e-12, "[TRG]: the least that an all-reduce of long vectors can send"


def test_lines_are_those_of_brute_force() -> None:
    """Random permutations of messages: who leaves which unit, counted one by one."""
    rng = Random(3)
    for _ in range(30):
        grid = Grid((("a", rng.choice([2, 3, 4])), ("b", rng.choice([2, 4, 5]))))
        ranks = list(range(grid.ranks))
        to = rng.sample(ranks, len(ranks))
        links = Links(grid, THREE)
        messages = [(a, b) for a, b in zip(ranks, to, strict=True) if a != b]
        if not messages:
            continue
        worst: dict[str, float] = {}
        for a, b in messages:
            crossed = 0 if a // 2 == b // 2 else 1 if a // 4 == b // 4 else 2
            beta = 1 / THREE[crossed].bytes_per_s
            for j in range(1, crossed + 1):
                size, shared = (2, 25.0) if j == 1 else (4, 15.0)
                leaving = [m for m in messages if m[0] // size == a // size != m[1] // size]
                arriving = [m for m in messages if m[1] // size == b // size != m[0] // size]
                beta = max(beta, max(len(leaving), len(arriving)) / shared)
            worst[THREE[crossed].name] = max(worst.get(THREE[crossed].name, 0.0), beta)
        src, dst = (np.array(end) for end in zip(*messages, strict=True))
        assert {line.level: line.beta for line in links.lines(src, dst)} == pytest.approx(worst)


@pytest.mark.parametrize(
    ("axes", "over", "factors"),
    [
        ((("data", 4), ("chan", 2)), ("data",), (2, 2)),  # one rank of a socket, two of a node, two nodes
        ((("data", 4), ("chan", 2)), ("chan",), (2,)),
        ((("data", 2), ("chan", 4)), ("chan",), (2, 2)),
        ((("data", 2), ("chan", 4)), ("data",), (2,)),  # one rank a node
        ((("data", 2), ("chan", 4)), ("data", "chan"), (2, 2, 2)),
        ((("data", 2), ("chan", 3)), ("chan",), (3,)),  # ranks 0 1 2 | 3 4 5: sockets and nodes hold uneven parts
    ],
)
def test_how_groups_lie_on_nodes(axes: Any, over: tuple[str, ...], factors: tuple[int, ...]) -> None:
    assert Links(Grid(axes), THREE).factors(over) == factors


def test_segmented_rings_share_the_links_of_a_node() -> None:
    """Four rings through each node's two adapters get half of one each; the rings of one group have both."""
    links = (THREE[0], THREE[1], Level(name="machine", latency_s=0, bytes_per_s=10.0, shared_bytes_per_s=20.0))
    four, _ = collective_seconds(Grid((("data", 8), ("chan", 4))), links, "all_reduce", ("data",), 1e6, 0, "ring")
    one, _ = collective_seconds(Grid((("data", 32),)), links, "all_reduce", ("data",), 1e6, 0, "ring")
    assert four == pytest.approx(1e6 / (20.0 / 4))
    assert one == pytest.approx(1e6 / 20.0)
    two, _ = collective_seconds(Grid((("data", 16), ("chan", 2))), links, "all_reduce", ("data",), 1e6, 0, "ring")
    assert two == pytest.approx(1e6 / 10.0)


def sunway(p: int, q: int, gamma: float) -> tuple[Network, tuple[Level, ...]]:
    """[SW]: 12 GB/s a node, a quarter of a supernode's bandwidth between supernodes."""
    network = Network(p, q, reduce_s_per_byte=gamma)
    inside = Level(name="supernode", ranks=q, latency_s=1e-6, bytes_per_s=12e9)
    return network, (inside, Level(name="machine", latency_s=1e-6, bytes_per_s=12e9, shared_bytes_per_s=q * 12e9 / 4))


@pytest.mark.parametrize(("p", "q"), [(8, 4), (64, 16), (1024, 256)])
@pytest.mark.parametrize("gamma", [0.0, 3 / 28e9])
def test_two_levels_are_swcaffes_equations(p: int, q: int, gamma: float) -> None:
    """[SW] Eqs. 2-6: the quarter of the bandwidth follows from all nodes of a supernode sending out at once."""
    network, levels = sunway(p, q, gamma)
    n = 100e6
    sent = 2 * (p - 1) / p * n
    numberings: tuple[tuple[str, Numbering], ...] = (
        ("rabenseifner", "adjacent"),
        ("hierarchical-halving", "round-robin"),
    )
    for algorithm, numbering in numberings:
        found, _ = collective_seconds(Grid((("N", p),)), levels, "all_reduce", ("N",), sent, gamma, algorithm)
        assert found == pytest.approx(all_reduce_time(network, numbering, n).all_reduce_s, rel=1e-9)
    ring, _ = collective_seconds(Grid((("N", p),)), levels, "all_reduce", ("N",), sent, gamma, "ring")
    assert ring == pytest.approx(ring_time(network, n), rel=1e-9), "one message at a time leaves a supernode"


def test_best_is_the_least_of_all() -> None:
    _, levels = sunway(64, 16, 0.0)
    grid = Grid((("N", 64),))
    for n in (1e2, 1e5, 1e9):
        every = {
            a: collective_seconds(grid, levels, "all_reduce", ("N",), n, 0, a)[0] for a in usable("all_reduce", 64)
        }
        found, name = collective_seconds(grid, levels, "all_reduce", ("N",), n, 0, "best")
        assert found == min(every.values()) == every[name]


def test_an_exchange_is_as_slow_as_its_fullest_link() -> None:
    """Two ranks of a node send 10 and 20 bytes to another node, over links that carry 15 a second together."""
    links = Links(Grid((("a", 8),)), THREE)
    found = links.exchange(np.array([0, 1, 2]), np.array([4, 5, 3]), np.array([10, 20, 5]))
    assert found == pytest.approx(5e-6 + 1e-6 + max(20 / 10, 30 / 15, 30 / 25, 5 / 50))


def test_levels_that_are_alike_are_one_level() -> None:
    """Costs of a layer's steps don't depend on how a uniform machine is cut into nodes."""
    machine = load_machine("cpu")
    (level,) = machine.levels
    nodes = replace(machine, levels=(replace(level, name="node", ranks=4), level))
    for name, grid in (("stationary-w", {"N": 2, "C": 4, "F": 2}), ("spatial", {"N": 2, "H": 4, "W": 2})):
        schedule, space = schedule_of(name, grid, conv())
        types = schedule.types()
        one, two = (Model(space, m, "float32") for m in (machine, nodes))
        for _, step in schedule.steps():
            if not (isinstance(step, Convert) and step.kind == "exchange"):
                assert step_cost(step, types, one) == step_cost(step, types, two), step


class Timed:
    """Of forward alone."""

    pads_virtually = False

    def __call__(self, space: Space, operands: Operands) -> float | None:
        return 7.0 if operands[2].tensor == "y" else None


def test_a_model_takes_measured_seconds_and_other_algorithms() -> None:
    schedule, space = schedule_of("sample", {"N": 8}, conv())
    machine, types = load_machine("cpu"), schedule.types()
    plain = Model(space, machine, "float32")
    known = Model(space, replace(machine, timed=Timed()), "float32")
    best = Model(space, machine, "float32", collectives=BEST)
    for _, step in schedule.steps():
        base = step_cost(step, types, plain)
        if step.result == "y":
            assert step_cost(step, types, known).seconds == 7.0
            assert step_cost(step, types, known).flops == base.flops
        else:
            assert step_cost(step, types, known) == base
        assert (step_cost(step, types, best).time_ps < base.time_ps) == (step.result == "dw")
