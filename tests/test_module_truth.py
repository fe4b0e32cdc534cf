"""Generated modules against a single device: hundreds of random layers, grids, layouts and roles a run.

For each: y, dx, dw and db of every rank against plain float64 convolution, copies equal, results in the layer's memory
format, what the transport counts equal to VOLUME, and the adjoint identities. Virtual ranks, ATen's kernels.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from generate import Problem
from modules import GRADIENT_OF, Case, assert_adjoint, assert_counted, assert_true, draw, make, run, with_dtype
from sampling import cases_of, draws

from convgen.algebra.algorithms import ALGORITHMS
from convgen.algebra.conv import PHASES, Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Layout
from convgen.algebra.redistribute import COLLECTIVES
from convgen.algebra.roles import Roles
from convgen.program.nodes import Convert
from convgen.verify.check import tolerance
from convgen.verify.program import global_tensors, reference

BATCH = 10  # cases a test, so that pytest-xdist spreads them evenly


def seeds(cases: int, name: str) -> list[range]:
    """The cases of a test, in batches: of as many, those that this run takes."""
    return [range(k * BATCH, min((k + 1) * BATCH, cases)) for k in cases_of(-(-cases // BATCH), name)]


def check(case: Case) -> None:
    """Everything that holds of one layer in float64."""
    given = global_tensors(case.layer)
    ran = run(case, given)
    assert_true(case, ran, reference(case.layer.conv, given))
    assert_counted(case, ran)
    assert_adjoint(case, given, ran)


LAYERS = 240


@pytest.mark.parametrize("batch", seeds(LAYERS, "any layer"), ids=str)
def test_any_layer(batch: range) -> None:
    for seed in batch:
        check(draw(seed))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_named_algorithms_and_their_hybrids(algorithm: str) -> None:
    for seed in range(draws(12)):
        check(draw(seed, algorithm=algorithm, most=12))


@pytest.mark.parametrize("batch", seeds(16, "large grids"), ids=str)
def test_large_grids(batch: range) -> None:
    """16 to 64 ranks, most with little or nothing to do."""
    for seed in batch:
        algorithm = random.Random(seed).choice((None, *ALGORITHMS))
        check(draw(seed, algorithm=algorithm, least=16, most=64))


@pytest.mark.parametrize("batch", seeds(30, "other batch"), ids=str)
def test_other_batch(batch: range) -> None:
    """A module serves any number of samples, whatever it was compiled for."""
    for seed in batch:
        case = draw(1000 + seed)
        check(case.with_batch(random.Random(seed).randint(1, 9)))


@pytest.mark.parametrize("batch", seeds(20, "gradients that nobody wants"), ids=str)
def test_gradients_that_nobody_wants(batch: range) -> None:
    """Their steps are skipped, communication included; y.sum().backward() hands in a dy without memory of its own."""
    for seed in batch:
        case = draw(2000 + seed)
        given = global_tensors(case.layer)
        given["dy"] = torch.ones_like(given["dy"])
        truth = reference(case.layer.conv, given)
        for need in (("x",), ("w",), ("bias",), ("x", "w"), ()):
            ran = run(case, given, need=need, dy_of_sum=True)
            wanted = {"y", *(GRADIENT_OF[name] for name in need if name in given)}
            assert all(set(one.blocks) == wanted for one in ran)
            assert_true(case, ran, {name: truth[name] for name in wanted})
            assert_counted(case, ran, needed={GRADIENT_OF[name] for name in need})


@pytest.mark.parametrize("dtype", ["float32", "tfloat32", "bfloat16", "float16"])
@pytest.mark.parametrize("batch", seeds(20, "dtypes"), ids=str)
def test_dtypes(batch: range, dtype: str) -> None:
    """Within what rounding explains; what is sent is counted in the type's bytes."""
    for seed in batch:
        case = with_dtype(draw(3000 + seed), dtype)
        given = global_tensors(case.layer)
        truth = reference(case.layer.conv, given)
        ranks = case.layer.grid.ranks
        tolerances = {name: tolerance(dtype, case.layer.conv, ranks, name, given, truth) for name in truth}
        ran = run(case, given)
        assert_true(case, ran, truth, tolerances)
        assert_counted(case, ran)


def test_other_batch_moves_what_the_compiled_batch_does_not() -> None:
    """One sample on four ranks has one owner; which steps there are may not follow from that."""
    conv = Conv(1, 2, 3, (Spatial("W", 5, kernel=3, pad_lo=1, pad_hi=1),))
    grid = Grid((("a", 2), ("b", 2)))
    stored = {
        "x": Layout("x", (("a", "b"), (), ())),
        "w": Layout("w", ((), ())),
        "y": Layout("y", (("b",), ("a",), ())),
    }
    roles = {
        "forward": Roles((("N", ("b", "a")),)),
        "backward_data": Roles((("N", ("b",)), ("W", ("a",)))),
        "backward_filter": Roles((("N", ("a",)), ("F", ("b",)))),
    }
    case = make(Problem(conv, grid, stored, roles), "batch_of_one", random.Random(0))
    for batch in (1, 2, 3, 4, 7):
        check(case.with_batch(batch))


def test_the_random_layers_have_everything() -> None:
    """What test_any_layer is trusted to cover comes up in it, most of it many times."""
    seen: Counter[str] = Counter()
    for seed in range(LAYERS):
        case = draw(seed)
        conv, layer, space, types = case.layer.conv, case.layer, case.space, case.schedule.types()
        roles = dict(case.schedule.roles)
        splits = {axis for axes in case.stored["x"].axes[:1] for axis in axes}
        for phase, step in case.schedule.steps():
            if not isinstance(step, Convert):
                continue
            seen[f"{step.kind} in {phase}"] += 1
            if step.kind == "exchange" and step.type.has_window:
                senders = (space.moves(types[step.source], step.type) > 0).sum(axis=0)
                seen["halo"] += 1
                seen["halo from several ranks on one side"] += int(len(step.over) == 1 and senders.max() > 2)
                seen["halo with corners"] += sum(w is not None for w in step.type.windows) > 1
                seen["halo of negative width"] += any(w and min(w.lo, w.hi) < 0 for w in step.type.windows)
        seen[f"conv{len(conv.spatial)}d"] += 1
        seen["groups"] += conv.groups > 1
        seen["depthwise"] += conv.groups == conv.channels > 1
        seen["bias"] += conv.bias
        seen["stride"] += any(s.stride > 1 for s in conv.spatial)
        seen["dilation"] += any(s.dilation > 1 and s.kernel > 1 for s in conv.spatial)
        seen["even kernel"] += any(s.kernel % 2 == 0 for s in conv.spatial)
        seen["asymmetric padding"] += any(s.pad_lo != s.pad_hi for s in conv.spatial)
        seen["channels last"] += layer.memory_format == "channels_last"
        seen["re-gathered x"] += layer.options.hold_x == "stored"
        seen["native sums"] += layer.options.sums == "native"
        seen["dw by input rows"] += roles["backward_filter"].rows == "input"
        seen["a role for each phase"] += len({str(r) for r in roles.values()}) == 3
        seen["weights split over the samples' axis"] += bool(splits & case.stored["w"].used)
        seen["ranks without a sample, row or channel"] += any(
            space.empty_ranks(case.stored[t]) for t in ("x", "w", "y")
        )
        seen["gathered x held for backward"] += bool(case.schedule.held())
    rare = [f"{kind} in {phase}" for kind in ("slice", *COLLECTIVES) for phase in PHASES]
    missing = [name for name in (*seen, *rare) if seen[name] < 3]
    assert not missing, seen
