"""Counts of convolutions, seconds, and [SW] Table 2: fitted on two layers, held out on the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from convgen.commands.main import cli
from convgen.sw26010.conv.cost import conv_terms, explicit_plan
from convgen.sw26010.conv.explicit_plan import col2im_operations
from convgen.sw26010.conv.implicit_plan import implicit_counts, implicit_plan, implicit_trips
from convgen.sw26010.conv.problem import Axis, ConvProblem
from convgen.sw26010.conv.support import implicit_refusal, implicit_supported
from convgen.sw26010.gemm.cost import clock_seconds, gemm_seconds, library_seconds, search_blocks
from convgen.sw26010.gemm.plan import GemmPlan
from convgen.sw26010.gemm.run import run_gemm
from convgen.sw26010.machine.core_group import SW26010
from convgen.sw26010.machine.rates import FITTED, load_rates, taken_rates
from convgen.sw26010.table2.causes import CAUSES, worths
from convgen.sw26010.table2.cells import (
    FIT_LAYERS,
    cells,
    held_out,
    read_table2,
    score,
    support_right,
    winners,
)
from convgen.sw26010.table2.fit import determines, fit, leave_one_layer_out, non_negative_least_squares
from convgen.sw26010.table2.report import FIT_PAIRS, choices, fit_range

TAKEN = taken_rates()


def test_the_ridge_of_the_machine() -> None:
    assert SW26010.peak_flops_per_s == 742.4e9
    assert round(SW26010.ridge_flops_per_byte, 1) == 26.5


@pytest.mark.parametrize(
    ("c", "f", "size", "columns", "trips", "sizes", "messages"),
    [
        (64, 64, 224, 58, (448900, 156110, 50176), (7354777600, 5115412480, 1644167168), 3677388800),
        (128, 128, 112, 28, (111556, 40414, 12544), (7310934016, 2648571904, 822083584), 3655467008),
        (512, 512, 28, 2, (6724, 5494, 784), (7050625024, 1440219136, 205520896), 3525312512),
        (512, 512, 14, 2, (1600, 1280, 196), (1677721600, 335544320, 51380224), 838860800),
    ],
    ids=["conv1_2", "conv2_2", "conv4_2", "conv5_1"],
)
def test_events_of_the_full_layers(
    c: int, f: int, size: int, columns: int, trips: tuple[int, ...], sizes: tuple[int, ...], messages: int
) -> None:
    plan = implicit_plan(ConvProblem.square(128, c, size, size, f), "forward")
    found = implicit_trips(plan)
    assert plan.columns == columns
    assert (found.gemms, found.data_tiles, found.out_tiles) == trips
    assert found.gemms == (3 * size - 2) ** 2
    counts = implicit_counts(plan)
    weights, data, out = sizes
    assert (counts.get_bytes, counts.put_bytes) == (weights + data, out)
    by_block: dict[int, int] = {}
    for block, size_bytes in ((4 * c // 8, weights), (4 * 128 // 8, data)):
        by_block[block] = by_block.get(block, 0) + size_bytes
    assert counts.get == by_block
    assert counts.messages == messages


@pytest.mark.parametrize(
    ("row_major", "seconds", "blocks", "gflops"),
    [
        ((64, 50176, 576), 8.007e-3, (64, 1024, 96), 462),
        ((256, 3136, 2304), 5.605e-3, (256, 640, 48), 660),
        ((512, 784, 4608), 6.108e-3, (256, 896, 24), 606),
        ((512, 196, 4608), 1.782e-3, (512, 256, 96), 519),
    ],
)
def test_block_search(
    row_major: tuple[int, int, int], seconds: float, blocks: tuple[int, int, int], gflops: float
) -> None:
    # Row-major M x N x K is column-major N x M x K.
    rows, columns, k = row_major
    problem = GemmPlan(m=columns, n=rows, k=k, bm=32, bn=8, bk=8, dtype="float32", accumulate=False)
    plan = search_blocks(problem, TAKEN)
    assert (plan.bn, plan.bm, plan.bk) == blocks
    assert plan.ldm_bytes <= 60 * 1024
    found = gemm_seconds(plan, TAKEN)
    assert found == pytest.approx(seconds, rel=2e-3)
    assert plan.useful_flops / found / 1e9 == pytest.approx(gflops, rel=2e-3)


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_the_closed_form_is_what_the_run_takes(accumulate: bool, turned: bool) -> None:
    plan = GemmPlan(
        m=256, n=128, k=192, bm=128, bn=64, bk=24, dtype="float32", accumulate=accumulate, a_transposed=turned
    )
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(shape) for shape in ((256, 192), (192, 128), (256, 128)))
    run = run_gemm(plan, a, b, c if accumulate else None, log=True)
    assert clock_seconds(run.events, TAKEN) == pytest.approx(gemm_seconds(plan, TAKEN), rel=1e-12)


def test_double_buffering_saves_time() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((256, 256)), rng.standard_normal((256, 256))
    plan = GemmPlan(m=256, n=256, k=256, bm=256, bn=256, bk=32, accumulate=False)
    seconds = [
        clock_seconds(run_gemm(replace(plan, double_buffer=twice), a, b, log=True).events, TAKEN)
        for twice in (True, False)
    ]
    assert seconds[0] < 0.8 * seconds[1]


def test_support_reproduces_every_dash() -> None:
    assert support_right() == (38, 38)
    conv1_2, conv2_2 = (ConvProblem.square(128, c, 8, 8, c) for c in (64, 128))
    assert implicit_supported(conv1_2, "forward") and not implicit_supported(conv1_2, "backward_filter")
    assert all(implicit_supported(conv2_2, phase) for phase in ("forward", "backward_data", "backward_filter"))
    assert implicit_refusal(ConvProblem.square(128, 32, 8, 8, 64), "forward") == "C=32 is below 64"
    assert implicit_refusal(ConvProblem.square(100, 64, 8, 8, 64), "forward") == "N=100 is no multiple of 128"


def test_table2_held_out() -> None:
    everything = cells(TAKEN)
    assert len(everything) == 46 and len(read_table2()) == 13
    assert sum(len(row.published_s) for row in read_table2()) == 70
    constants = fit(cell for cell in everything if set(cell.layers) & set(FIT_LAYERS))
    rest = held_out(everything, FIT_LAYERS)
    assert len(rest) == 36
    overall = score(rest, constants)
    assert overall.mean <= 0.065 and overall.largest <= 0.21
    assert score((c for c in rest if c.kind == "implicit"), constants).mean <= 0.04
    assert score((c for c in rest if c.kind == "explicit"), constants).mean <= 0.09
    assert score((c for c in rest if c.kind == "explicit" and c.problem.h >= 112), constants).mean <= 0.08
    won = winners(TAKEN, constants)
    assert (won.pairs, won.clear_pairs, won.always_implicit) == (32, 30, 22)
    assert won.right >= 31 and won.clear_right == 30
    errors = [abs(c.terms.seconds(k) / c.published_s - 1) for c, k in leave_one_layer_out(everything)]
    assert sum(errors) / len(errors) <= 0.065


def test_constants_of_the_file_are_those_that_fit() -> None:
    constants = fit(cell for cell in cells(TAKEN) if set(cell.layers) & set(FIT_LAYERS))
    stored = load_rates().fitted()
    assert set(stored) == set(FITTED)
    for name, value in constants.items():
        assert stored[name] == pytest.approx(value, rel=1e-4), name
    assert len(FITTED) == 3
    assert 1 / stored["implicit_kernel_slowdown"] == pytest.approx(0.607, rel=0.02)  # as an independent study has it


def test_a_fit_finds_the_constants_that_made_the_numbers() -> None:
    truth = dict(zip(FITTED, (1.5, 2e-6, 1e-9), strict=True))
    made = [replace(cell, published_s=cell.terms.seconds(truth)) for cell in cells(TAKEN)]
    for name, value in fit(made).items():
        assert value == pytest.approx(truth[name], rel=1e-6), name


def test_no_constant_is_negative() -> None:
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative_least_squares(matrix, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert non_negative_least_squares(matrix, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])


def test_every_choice_of_two_layers_that_determines_the_constants() -> None:
    made = choices(TAKEN)
    assert len(made) == len({layers for layers, _, _ in made}) >= len(FIT_PAIRS)
    assert {*FIT_PAIRS} <= {layers for layers, _, _ in made}
    assert all(found["held out"].cells == 46 - found["fitted"].cells for _, _, found in made)
    forward = [cell for cell in cells(TAKEN) if cell.phase == "forward"]
    assert not determines(forward)  # no col2im
    assert median(found["held out"].mean for _, _, found in made) <= 0.07
    low, middle, high = fit_range(TAKEN)["held out"]
    assert low <= middle <= 0.07 and high <= 0.08


def test_what_each_cause_is_worth() -> None:
    found = {worth.name: worth for worth in worths(TAKEN)}
    as_it_is = found["as it is"]
    assert as_it_is.constants == len(FITTED) and as_it_is.pairs == len(choices(TAKEN))
    assert as_it_is.median_of_all == pytest.approx(median(f["held out"].mean for _, _, f in choices(TAKEN)))
    assert as_it_is.median_of_ten == pytest.approx(fit_range(TAKEN)["held out"][1])
    for name in ("no library", "no copies of large planes' operands"):
        assert found[name].median_of_ten > 1.5 * as_it_is.median_of_ten and found[name].large > 0.2
    # Table 2 alone finds about what was taken from elsewhere.
    assert all(0.9 < times < 1.15 for _, times in found["library and copies fitted"].fits)


def test_choices_and_causes_as_json() -> None:
    printed = CliRunner().invoke(cli, ["sw26010", "table2", "--choices", "--causes", "--json"]).stdout
    found = json.loads(printed)
    assert len(found["choices"]) == len(choices(TAKEN)) and len(found["causes"]) == len(CAUSES)
    refused = CliRunner().invoke(cli, ["sw26010", "table2", "--causes", "--write", "rates.json"])
    assert "print a table alone" in str(refused.exception)


def test_a_term_s_parts_add_up() -> None:
    problem = ConvProblem.square(2, 64, 112, 112, 128)
    plan = explicit_plan(problem, "forward", TAKEN)
    terms, parts = conv_terms(plan, TAKEN), dict(conv_terms(plan, TAKEN).fixed)
    assert set(parts) == {"product", "repacked weights", "im2col", "library", "copies"}
    assert terms.fixed_s == pytest.approx(sum(parts.values()))
    assert parts["library"] == pytest.approx(2 * (TAKEN.library_call_s + TAKEN.library_row_s * 112 * 112))
    padded = 112 * 112 * 128 + 128 * 576 + 112 * 112 * 576  # 12,544 pixels are a multiple of 128
    outside = 1 - 65536 / (8 * 112 * 112)
    assert parts["copies"] == pytest.approx(2 * outside * 8 * padded / 9.9e9)
    small = explicit_plan(ConvProblem.square(2, 64, 56, 56, 128), "forward", TAKEN)
    assert {"library", "copies"}.isdisjoint(dict(conv_terms(small, TAKEN).fixed))
    more = conv_terms(small, TAKEN, library=True).fixed_s - conv_terms(small, TAKEN).fixed_s
    assert more == pytest.approx(2 * library_seconds(small.gemm, TAKEN))


@pytest.mark.parametrize(
    ("problem", "operations"),
    [
        # 8 channels a CPE: rows 0 and 13 with 6 gets, 1 and 12 with 9, rows 2 to 11 together with 9, a put each.
        (ConvProblem.square(1, 512, 14, 14, 8), 8 * (6 + 9 + 9 + 9 + 6 + 5)),
        (ConvProblem.square(1, 64, 5, 9, 8, kernel=1, padding=0), 2),  # a channel at once: a get, a put
        (ConvProblem.square(1, 64, 4, 4, 8, kernel=2, stride=2, padding=0), 4 * (2 + 1)),  # a row at a time
    ],
)
def test_col2im_operations_of_the_published_nest(problem: ConvProblem, operations: int) -> None:
    assert col2im_operations(problem) == operations


@settings(max_examples=60)
@given(
    st.integers(1, 90), st.integers(1, 20), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(1, 40)
)
def test_col2im_operations_are_those_of_rows_in_groups(
    c: int, h: int, kernel: int, stride: int, padding: int, w: int
) -> None:
    if h + 2 * padding < kernel or w + 2 * padding < kernel:
        return
    problem = ConvProblem.square(1, c, h, w, 4, kernel, stride, padding)
    rows = [(channel, row - padding) for channel in range(c) for row in range(h + 2 * padding)]
    parts = [part.tolist() for part in np.array_split(np.array(rows), 64)]  # larger ones first, as the nest deals them
    room = max(len(part) for part in parts)
    while room > 1 and 4 * room * (problem.w_out + w) >= 65536:
        room //= 2
    most = 0
    for part in parts:
        operations, length = 0, 0
        for i, (channel, row) in enumerate(part):
            if not 0 <= row < h:
                continue
            inner = stride == 1 and kernel - 1 <= row <= h - kernel
            previous = part[i - 1] if i else None
            joined = inner and length and previous == [channel, row - 1] and length < room
            joined = joined and kernel - 1 <= row - 1
            length = length + 1 if joined else int(inner)
            if not joined:
                taps = [k for k in range(kernel) if (row - k + padding) % stride == 0]
                met = [k for k in taps if 0 <= (row - k + padding) // stride < problem.h_out]
                operations += kernel * len(met) + 1
        most = max(most, operations)
    assert col2im_operations(problem) == most


def test_a_dilated_row_is_taken_alone() -> None:
    rows = Axis(9, 5, 3, dilation=2)
    assert col2im_operations(ConvProblem(1, 64, 4, rows, Axis(9, 7, 3))) == 9 + 3 * 15  # 15 pairs of a row and a tap
