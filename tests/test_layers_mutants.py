"""The verifier of layers misses no planted mistake: of a step, a type, an operand, a role, a form, or the bias.

Schedules are those of the examples and of every named algorithm, as lowering makes them and as they are compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from random import Random

import pytest
from generate import algorithm_problem, random_problem
from layer_mutants import SCHEDULES
from oracle import Oracle, random_tensors
from sampling import ALL, cases_of

from convgen.algebra.algorithms import ALGORITHMS
from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.space import Space
from convgen.compiler import PIPELINE, compile_layer
from convgen.errors import InternalError
from convgen.passes.contract import Context, run_passes, with_options
from convgen.passes.hold_x import HoldX
from convgen.program.build import lower
from convgen.program.nodes import Schedule
from convgen.program.text import show
from convgen.program.verify import verify
from convgen.spec.reader import read_layer
from convgen.spec.target import read_target

EXAMPLES = sorted(Path(__file__).parents[1].glob("examples/*.yaml"))
ROWS = (Spatial("H", 8, 3, 2, 1, 1), Spatial("W", 8, 3, 1, 1, 1))
LAYERS = {
    "plain": Conv(4, 8, 8, ROWS),
    "grouped": Conv(4, 8, 16, ROWS, groups=4, bias=True),
    "transposed": Conv(4, 8, 8, tuple(s.transposed(s.extent, 0) for s in ROWS), bias=True, transposed=True),
}
FEW = 6 if not ALL else 10**6  # mutants of a kind and a schedule


def is_refused(schedule: Schedule, space: Space) -> bool:
    try:
        verify(schedule, space)
    except InternalError as error:
        assert ": check_" in str(error) or "index space" in str(error)
        return True
    return False


def missed(schedule: Schedule, space: Space, draw: Random) -> Iterator[str]:
    """Of each kind mistakes that the verifier takes."""
    verify(schedule, space)
    for kind, plant in SCHEDULES.items():
        mutants = [*plant(schedule, space)]
        for mutant in draw.sample(mutants, min(FEW, len(mutants))):
            if not is_refused(mutant, space):
                was = {*show(schedule).splitlines()}
                yield f"{kind}: {[' '.join(line.split()) for line in show(mutant).splitlines() if line not in was]}"


@lru_cache(maxsize=1)
def of_example(path: Path, target: str) -> list[tuple[Schedule, Space]]:
    """As lowered and as compiled, x held either way."""
    found: dict[Schedule, Space] = {}
    layer = read_layer(path)
    for hold in ("gathered", "stored"):
        stages: list[Schedule | None] = []
        one = replace(layer, options=replace(layer.options, hold_x=hold))
        compiled = compile_layer(one, target=target or None, after=[lambda _, made, to=stages: to.append(made)])
        found |= {made: compiled.space for made in stages if made in (stages[1], compiled.schedule) and made}
    return [*found.items()]


@pytest.mark.parametrize("target", ["", "cuda"])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_no_mistake_in_an_example_is_missed(path: Path, target: str) -> None:
    if target and "sw26010" in path.stem:
        pytest.skip("its options are a mesh's")
    for schedule, space in of_example(path, target):
        assert [*missed(schedule, space, Random(f"{path.stem} {target}"))] == []


def compiled(
    conv: Conv, axes: dict[str, int], algorithm: str, target: str, hold: str
) -> Iterator[tuple[Schedule, Space]]:
    """A named algorithm as lowered and as compiled."""
    problem = algorithm_problem(algorithm, conv, Grid(tuple(axes.items())))
    made_for = read_target(target)
    space = Space(conv, problem.grid, virtual_padding=made_for.pads_virtually)
    naive = lower("s", space, problem.stored, problem.roles, bias=conv.bias)
    passes = with_options(PIPELINE, f"hold-x{{choice={hold}}}")
    yield naive, space
    yield run_passes(passes, naive, lambda one, given: one.run(given, Context(space, made_for))), space


@pytest.mark.parametrize("hold", ["gathered", "stored"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_mistake_in_an_algorithm_is_missed(algorithm: str, name: str, hold: str) -> None:
    letters = [a for a in ALGORITHMS[algorithm].letters if a != "D"]
    axes = dict.fromkeys(letters[-3:], 2) | {"N": 2} | ({"G": 2} if name == "grouped" else {})
    for target in ("cpu", "cuda"):
        for schedule, space in compiled(LAYERS[name], axes, algorithm, target, hold):
            assert [*missed(schedule, space, Random(f"{algorithm} {name} {hold} {target}"))] == []


def test_every_kind_is_planted() -> None:
    left = set(SCHEDULES)
    for schedule, space in compiled(LAYERS["grouped"], {"N": 2, "C": 2, "G": 2}, "stationary-x", "cpu", "gathered"):
        left -= {kind for kind in left if next(SCHEDULES[kind](schedule, space), None) is not None}
    assert left == {"backward_reads_others"}  # nothing is gathered of x
    for schedule, space in compiled(LAYERS["plain"], {"N": 2, "H": 2}, "spatial", "cpu", "gathered"):
        left -= {kind for kind in left if next(SCHEDULES[kind](schedule, space), None) is not None}
    assert not left


@pytest.mark.parametrize("seed", cases_of(40, "test_what_is_taken_of_any_schedule_is_right"))
def test_what_is_taken_of_any_schedule_is_right(seed: int) -> None:
    """Any storage and any roles, ranks without an element, axes of one rank: what verifies has one device's results."""
    draw = Random(f"layers {seed}")
    conv, grid, stored, roles = random_problem(draw)
    space, oracle = Space(conv, grid), Oracle(conv, grid)
    naive = lower("s", space, stored, roles, bias=conv.bias)
    passes = [HoldX(draw.choice(("gathered", "stored"))) if isinstance(p, HoldX) else p for p in PIPELINE]
    done = run_passes(passes, naive, lambda one, given: one.run(given, Context(space)))
    for schedule in (naive, done):
        verify(schedule, space)
        for plant in SCHEDULES.values():
            mutants = [*plant(schedule, space)]
            for mutant in draw.sample(mutants, min(FEW, len(mutants))):
                if not is_refused(mutant, space):
                    oracle.run(mutant, *random_tensors(oracle, seed))
