"""Formulas derived from the steps are the papers', as expressions; and with numbers put in, the index sets'."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import sympy as sp
from generate import algorithm_problem
from passing import passed

from convgen.algebra.conv import PHASES, Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.roles import Roles, nest, settle_groups
from convgen.algebra.space import Space
from convgen.cost.local import convolution_elements, convolution_flops
from convgen.cost.machines import load_machine
from convgen.cost.model import PICOSECONDS, Model
from convgen.cost.schedule import schedule_cost, step_cost
from convgen.cost.symbolic import axis_size, formulas, interior_window, symbol
from convgen.cost.traffic import elements_sent
from convgen.errors import InputError
from convgen.passes.share import Share
from convgen.program.build import lower
from convgen.program.nodes import Convert, Schedule, is_convolution

N, C, F, H, W, Ho, Wo, K = (symbol(name) for name in ("N", "C", "F", "H", "W", "Ho", "Wo", "K"))


def conv(kernel: int = 3, stride: int = 1, rows: int = 32, pad: int | None = None) -> Conv:
    pad = kernel // 2 if pad is None else pad
    return Conv(32, 64, 128, tuple(Spatial(n, rows, kernel, stride, pad, pad) for n in "HW"))


def schedule_of(name: str, grid: dict[str, int], layer: Conv) -> tuple[Schedule, Space]:
    problem = algorithm_problem(name, layer, Grid(tuple(grid.items())))
    space = Space(layer, problem.grid)
    naive = lower("s", space, problem.stored, problem.roles, bias=layer.bias)
    return passed(naive, space, Share()), space


def sent(name: str, grid: dict[str, int], layer: Conv, phase: str, *, kernel: bool = True) -> Any:
    """Elements that an interior rank sends in a phase, summed over its steps."""
    schedule, _ = schedule_of(name, grid, layer)
    table = formulas(schedule, layer, 4, kernel=kernel)
    return sum(table[s.result].elements for s in schedule.section(phase))  # type: ignore[arg-type]


def equal(left: Any, right: Any) -> bool:
    return sp.simplify(left - right) == 0


n, c, f = N / axis_size("N"), axis_size("C"), axis_size("F")
G = axis_size("N")
# algorithm: (grid, forward, backward-data, elements of dw that are all-reduced)
VOLUMES = {
    "sample": ({"N": 2}, 0, 0, F * C * K**2),
    "stationary-x": ({"N": 2, "C": 4}, (c - 1) / c * n * F * Ho * Wo, (c - 1) / c * n * F * Ho * Wo, F * C / c * K**2),
    "stationary-y": ({"N": 2, "F": 4}, (f - 1) / f * n * C * H * W, (f - 1) / f * n * C * H * W, F / f * C * K**2),
    "stationary-w": (
        {"N": 2, "C": 4, "F": 2},
        (f - 1) / f * n * C / c * H * W + (c - 1) / c * n * F / f * Ho * Wo,
        (c - 1) / c * n * F / f * Ho * Wo + (f - 1) / f * n * C / c * H * W,
        F / f * C / c * K**2,
    ),
}


@pytest.mark.parametrize("name", VOLUMES)
def test_volumes_of_the_channel_algorithms(name: str) -> None:
    """[CF] section 4: what stationary-x, -y and -w move, and 2(G-1)/G of dw where samples are split."""
    grid, forward, data, weights = VOLUMES[name]
    assert equal(sent(name, grid, conv(), "forward"), forward)
    assert equal(sent(name, grid, conv(), "backward_data"), data)
    assert equal(sent(name, grid, conv(), "backward_filter"), 2 * (G - 1) / G * weights)


def test_steps_of_stationary_x_one_by_one() -> None:
    """[CF] section 4: RS(n F Ho Wo, |C|), AG of dy over |C|, AR(F C/|C| K^2, G)."""
    layer = conv()
    schedule, _ = schedule_of("stationary-x", {"N": 2, "C": 4}, layer)
    table = formulas(schedule, layer, 4, kernel=True)
    found = [(s.kind, table[s.result].elements) for _, s in schedule.steps() if isinstance(s, Convert)]
    expected = [
        ("reduce_scatter", (c - 1) / c * n * F * Ho * Wo),
        ("all_gather", (c - 1) / c * n * F * Ho * Wo),
        ("all_reduce", 2 * (G - 1) / G * F * C / c * K**2),
    ]
    assert [kind for kind, _ in found] == [kind for kind, _ in expected]
    assert all(equal(a, b) for (_, a), (_, b) in zip(found, expected, strict=True))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("one", "other"), [("C", "stationary-y"), ("F", "stationary-x")])
def test_stationary_w_with_one_rank_on_an_axis(phase: str, one: str, other: str) -> None:
    left = "F" if one == "C" else "C"
    narrow = sent("stationary-w", {"N": 2, left: 4, one: 1}, conv(), phase)
    assert equal(narrow, sent(other, {"N": 2, left: 4}, conv(), phase))
    general = sent("stationary-w", {"N": 2, left: 4, one: 2}, conv(), phase)
    assert equal(general.subs(axis_size(one), 1), narrow)


@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
@pytest.mark.parametrize("samples", [1, 2])
def test_volumes_of_the_spatial_algorithm(kernel: int, samples: int) -> None:
    """[SP] III-A, where its symmetric halo is exact: stride 1, odd K, P = K//2."""
    grid = ({"N": samples} if samples > 1 else {}) | {"H": 4, "W": 4}
    own = N / axis_size("N") if samples > 1 else N
    h, w, ho, wo = H / axis_size("H"), W / axis_size("W"), Ho / axis_size("H"), Wo / axis_size("W")
    o = kernel // 2
    forward, data = (sent("spatial", grid, conv(kernel), phase) for phase in ("forward", "backward_data"))
    assert equal(forward, own * C * (2 * o * w + 2 * o * h + 4 * o**2))
    assert equal(data, own * F * (2 * o * wo + 2 * o * ho + 4 * o**2))
    ranks = sp.prod(axis_size(a) for a in grid)
    weights = sent("spatial", grid, conv(kernel), "backward_filter")
    assert equal(weights, 2 * (ranks - 1) / ranks * F * C * K**2)


def test_integrated_is_equation_5() -> None:
    """[INT] Eq. 5: of each activation an all-gather forward and an all-reduce backward (3 in all), 2 of dw."""
    layer, grid = conv(), {"N": 2, "F": 4}
    model, batch = f, axis_size("N")
    schedule, _ = schedule_of("integrated", grid, layer)
    kinds = [(phase, s.kind, s.over) for phase, s in schedule.steps() if isinstance(s, Convert) and s.kind != "slice"]
    assert kinds == [
        ("forward", "all_gather", ("F",)),
        ("backward_data", "all_reduce", ("F",)),
        ("backward_filter", "all_reduce", ("N",)),
    ]
    d_out, d_in, weights = F * Ho * Wo, C * H * W, F * C * K**2
    assert equal(sent("integrated", grid, layer, "forward"), N / batch * (model - 1) / model * d_out)
    assert equal(sent("integrated", grid, layer, "backward_data"), N / batch * 2 * (model - 1) / model * d_in)
    assert equal(sent("integrated", grid, layer, "backward_filter"), 2 * (batch - 1) / batch * weights / model)
    alpha, beta, gamma = symbol("alpha"), symbol("beta"), symbol("gamma")
    time = formulas(schedule, layer, 4, kernel=True)["dx"].seconds
    words = N / batch * d_in
    bandwidth = 2 * (model - 1) / model * 4 * words * beta
    assert equal(time, 2 * (model - 1) * alpha + bandwidth + (model - 1) / model * 4 * words * gamma)


@pytest.mark.parametrize(
    ("kernel", "stride", "forward", "backward"),
    [
        (7, 2, (3, 2), (1, 2)),
        (3, 2, (1, 0), (0, 1)),
        (1, 1, (0, 0), (0, 0)),
        (3, 1, (1, 1), (1, 1)),
        (1, 2, (0, -1), (0, 0)),
    ],
)
def test_exact_rows_of_an_interior_halo(
    kernel: int, stride: int, forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    """Forward lo = P, hi = K-P-S; backward lo = floor((K-1-P)/S), hi = floor((S-1+P)/S)."""
    s = Spatial("H", 224, kernel, stride, kernel // 2, kernel // 2)
    assert interior_window(s, "x") == forward
    assert interior_window(s, "y") == backward


GOLDEN = [  # words sent a rank over four, N=32: algorithm, grid, forward, backward-data, backward-filter
    ("res3b_branch2a", "sample", {"N": 4}, 0, 0, 98304),
    ("res3b_branch2a", "spatial", {"H": 2, "W": 2}, 0, 0, 98304),
    ("res3b_branch2a", "stationary-x", {"C": 4}, 2408448, 2408448, 0),
    ("res3b_branch2a", "stationary-y", {"F": 4}, 9633792, 9633792, 0),
    ("res3b_branch2a", "stationary-w", {"C": 2, "F": 2}, 3211264 + 802816, 802816 + 3211264, 0),
    ("res5b_branch2b", "sample", {"N": 4}, 0, 0, 3538944),
    ("res5b_branch2b", "stationary-x", {"C": 4}, 602112, 602112, 0),
    ("res5b_branch2b", "stationary-y", {"F": 4}, 602112, 602112, 0),
    ("res5b_branch2b", "stationary-w", {"C": 2, "F": 2}, 200704 + 200704, 200704 + 200704, 0),
    ("conv1", "sample", {"N": 4}, 0, 0, 14112),
]
RESNET = {
    "conv1": Conv(32, 3, 64, tuple(Spatial(n, 224, 7, 2, 3, 3) for n in "HW")),
    "res3b_branch2a": Conv(32, 512, 128, tuple(Spatial(n, 28, 1) for n in "HW")),
    "res5b_branch2b": Conv(32, 512, 512, tuple(Spatial(n, 7, 3, 1, 1, 1) for n in "HW")),
}


@pytest.mark.parametrize(("layer", "name", "grid", "forward", "data", "weights"), GOLDEN)
def test_golden_volumes_of_resnet_50(
    layer: str, name: str, grid: dict[str, int], forward: int, data: int, weights: int
) -> None:
    schedule, space = schedule_of(name, grid, RESNET[layer])
    cost = schedule_cost(schedule, Model(space, load_machine("cpu"), "float32"))
    words = [cost.total(phase).sent_bytes // 4 for phase in PHASES]
    assert words == [forward, data, weights]


def test_golden_volume_of_conv1_with_uneven_channels() -> None:
    """3 channels over 4 ranks: three of them send, and the mean is what the formula says."""
    schedule, space = schedule_of("stationary-y", {"F": 4}, RESNET["conv1"])
    types = schedule.types()
    for phase in ("forward", "backward_data"):
        steps = [s for s in schedule.section(phase) if isinstance(s, Convert)]
        counts = sum(elements_sent(space, s.kind, s.over, types[s.source], s.type) for s in steps)
        assert np.mean(counts) == 3612672


def divisible_conv(rng: Random, grid: Grid, *, transposed: bool = False) -> Conv:
    """A layer whose every extent every set of axes divides, with H = S Ho and blocks wider than halos."""
    ranks = grid.ranks
    spatial: list[Spatial] = []
    for name in "HW"[: rng.choice((1, 2))]:
        kernel, stride, dilation = rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 2)
        reach = dilation * (kernel - 1)
        lo = rng.randint(0, reach)
        hi = rng.randint(max(0, reach + 1 - stride - lo), max(reach - lo, 0))
        spatial.append(Spatial(name, stride * ranks * 12, kernel, stride, lo, hi, dilation))
        assert spatial[-1].out == ranks * 12
    if transposed:  # what the last window leaves of the rows is output padding
        left = ((s.extent + s.pad_lo + s.pad_hi - s.reach - 1) % s.stride for s in spatial)
        spatial = [replace(s, output_padding=more) for s, more in zip(spatial, left, strict=True)]
    channels, filters = (ranks * rng.randint(1, 2) for _ in range(2))
    return Conv(ranks, channels, filters, tuple(spatial), bias=rng.random() < 0.3, transposed=transposed)


def placed(rng: Random, grid: Grid, dims: int) -> tuple[Axes, ...]:
    places: list[list[str]] = [[] for _ in range(dims)]
    for axis in rng.sample(grid.names, len(grid.names)):
        if (d := rng.randint(-1, dims - 1)) >= 0:
            places[d].append(axis)
    return tuple(map(tuple, places))


def random_roles(rng: Random, layer: Conv, grid: Grid, phase: str) -> Roles:
    while True:
        pairs = [(a, rng.choice(("none", "N", "C", "F", *layer.letters))) for a in grid.names]
        rows = rng.choice(("output", "input")) if phase == "backward_filter" else "output"
        try:
            return settle_groups(layer, grid, phase, nest(pairs, rows))
        except InputError:
            continue


def interior(space: Space, layouts: tuple[Layout, ...]) -> np.ndarray:
    """Ranks at least two blocks away from both edges of every split spatial dimension."""
    inside = np.ones(space.grid.ranks, dtype=bool)
    for layout in layouts:
        for d, axes in enumerate(layout.axes):
            if layout.tensor in "xy" and d >= 2 and axes:
                lo, _ = space.block(layout.tensor, d, axes)
                place = np.searchsorted(np.unique(lo), lo)
                inside &= (place >= 2) & (place <= place.max() - 2)
    return inside


@pytest.mark.parametrize("seed", range(5))
def test_formulas_are_the_index_sets(seed: int) -> None:
    """Where extents divide, the numbers of every interior rank: elements sent, flops, bytes moved; of a transposed
    convolution with the last seed."""
    rng, compared = Random(seed), dict[str, int]()
    for _ in range(12):
        sizes = rng.choice(((5,), (5, 2), (2, 5), (6, 2), (5, 5), (2, 2, 5)))
        grid = Grid(tuple(zip("abc", sizes, strict=False)))
        layer = divisible_conv(rng, grid, transposed=seed == 4)
        space = Space(layer, grid)
        stored = {t: Layout(t, placed(rng, grid, len(layer.dims(t)))) for t in ("x", "w", "y")}
        roles = {phase: random_roles(rng, layer, grid, phase) for phase in PHASES}
        schedule = passed(lower("s", space, stored, roles, bias=layer.bias), space, Share())
        types, table = schedule.types(), formulas(schedule, layer, 4)
        values = {axis_size(a): size for a, size in grid.axes} | {N: layer.batch, C: layer.channels, F: layer.filters}
        for x, y in zip(layer.dims("x")[2:], layer.dims("y")[2:], strict=True):
            values |= {symbol(x.name): x.extent, symbol(y.name + "o"): y.extent}
        for _, step in schedule.steps():
            formula = table[step.result]
            if isinstance(step, Convert) and formula.elements is not None:
                src = types[step.source]
                cut = step.kind == "exchange" or src.has_window
                ranks = interior(space, (src, step.type)) if cut else slice(None)
                exact = elements_sent(space, step.kind, step.over, src, step.type)[ranks]
                assert set(exact.tolist()) <= {int(formula.elements.subs(values))}, (step, src, layer)
            elif is_convolution(step):
                operands = (types[step.inputs[0]], types[step.inputs[1]], step.type)
                ranks = interior(space, operands)
                assert set(convolution_flops(space, operands)[ranks].tolist()) <= {int(formula.flops.subs(values))}
                moved = 4 * convolution_elements(space, operands)[ranks]
                assert set(moved.tolist()) <= {int(formula.moved_bytes.subs(values))}, (step, operands, layer)
            else:
                continue
            key = step.kind if isinstance(step, Convert) else "convolve"
            compared[key] = compared.get(key, 0) + 1
    assert {"all_gather", "all_reduce", "convolve"} <= set(compared)


@pytest.mark.parametrize(
    ("name", "grid"),
    [("sample", {"N": 4}), ("spatial", {"H": 8}), ("stationary-w", {"N": 2, "C": 4, "F": 2}), ("integrated", {"F": 4})],
)
def test_seconds_are_the_models(name: str, grid: dict[str, int]) -> None:
    """With a machine's numbers put in, a formula's seconds are the model's."""
    layer = conv()
    schedule, space = schedule_of(name, grid, layer)
    machine, types = load_machine("cpu"), schedule.types()
    (level,) = machine.levels
    model, table = Model(space, machine, "float32"), formulas(schedule, layer, 4)
    values = {
        symbol("alpha"): level.latency_s, symbol("beta"): 1 / level.bytes_per_s,
        symbol("gamma"): machine.add_s_per_byte, symbol("peak"): machine.flops_per_s("float32"),
        symbol("memory"): machine.memory_bytes_per_s, symbol("launch"): machine.launch_s,
        N: 32, C: 64, F: 128, H: 32, W: 32, Ho: 32, Wo: 32,
    } | {axis_size(a): size for a, size in grid.items()}  # fmt: skip
    for _, step in schedule.steps():
        expected = step_cost(step, types, model).time_ps
        found = float(table[step.result].seconds.subs(values)) * PICOSECONDS
        assert found == pytest.approx(expected, rel=1e-9, abs=1), step


def test_what_has_no_formula_says_so() -> None:
    """Axes swapped on one dimension: every rank keeps a different part."""
    grid = Grid((("a", 2), ("b", 2)))
    layer = Conv(4, 4, 4, (Spatial("W", 8, 1),))
    space = Space(layer, grid)
    stored = {
        "x": Layout("x", (("a", "b"), (), ())),
        "w": Layout("w", ((), ())),
        "y": Layout("y", (("b", "a"), (), ())),
    }
    roles = dict.fromkeys(PHASES, Roles((("N", ("b", "a")),)))
    schedule = passed(lower("s", space, stored, roles), space, Share())
    table = formulas(schedule, layer, 4)
    kinds = {s.result: s.kind for _, s in schedule.steps() if isinstance(s, Convert)}
    exchanged = [table[result] for result, kind in kinds.items() if kind == "exchange"]
    assert exchanged
    assert {str(e) for e in exchanged} == {"by index sets"}
