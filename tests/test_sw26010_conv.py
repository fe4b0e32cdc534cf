"""Convolutions on the mesh equal torch, in both plans and all phases; their counts equal the closed forms."""

from __future__ import annotations

import ast
from typing import Any

import jinja2
import jinja2.meta
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convgen.errors import InputError
from convgen.program.nodes import PHASES, Phase
from convgen.resources import data_file
from convgen.sw26010.conv.batch_report import blocked, blocked_run, blocked_text
from convgen.sw26010.conv.check import reference
from convgen.sw26010.conv.cost import choose_plan, explicit_plan
from convgen.sw26010.conv.counts import conv_counts
from convgen.sw26010.conv.explicit_plan import ExplicitPlan, col2im_counts, gemm_of, im2col_counts
from convgen.sw26010.conv.implicit_plan import ImplicitPlan, implicit_counts, implicit_plan
from convgen.sw26010.conv.layouts import Transform, run_transform, transform_counts, transform_program
from convgen.sw26010.conv.problem import Axis, ConvProblem
from convgen.sw26010.conv.programs import columns_context, columns_program, implicit_context, implicit_program
from convgen.sw26010.conv.run import operand_shapes, run_conv
from convgen.sw26010.conv.trial import choose_by_running, trial_seconds
from convgen.sw26010.gemm.cost import clock_seconds, search_blocks
from convgen.sw26010.gemm.triton import triton_gemm
from convgen.sw26010.machine.emulator import MessageMesh
from convgen.sw26010.machine.memory import Dram
from convgen.sw26010.machine.mesh import VectorMesh
from convgen.sw26010.machine.printing import load_program
from convgen.sw26010.machine.rates import load_rates, taken_rates
from convgen.sw26010.pooling.run import (
    Pooling,
    pooling_backward_program,
    pooling_program,
    run_pooling,
    run_pooling_backward,
)
from convgen.sw26010.table2.cells import read_table2

TAKEN = taken_rates()
REDUCED = {224: 7, 112: 6, 56: 5, 28: 4, 14: 3}
ODD = (
    ConvProblem.square(3, 5, 6, 7, 4),
    ConvProblem.square(2, 5, 9, 8, 4, 3, 2, 1),
    ConvProblem.square(2, 5, 9, 8, 4, 5, 3, 2),
    ConvProblem.square(1, 4, 6, 6, 9, 2, 2, 0),
    ConvProblem.square(2, 4, 6, 7, 4, 1, 2, 0),
    ConvProblem.square(33, 9, 4, 3, 10, 3, 1, 2),
    ConvProblem.square(1, 1, 6, 1, 11, 1, 3, 1),  # every output column lies in the padding
    # Axes that differ, dilation, more padding below than above; and parts of images that are cut off on both sides.
    ConvProblem(2, 5, 4, Axis(9, 4, 3, 2, 1), Axis(10, 9, 2, 1, 3, 4)),
    ConvProblem(2, 3, 4, Axis(8, 3, 3, 2, -2), Axis(7, 9, 3, 1, -1, 2)),
    ConvProblem(1, 2, 3, Axis(1, 6, 1), Axis(9, 2, 3, 4, 5)),
)


def plans(problem: ConvProblem, phase: Phase, dtype: Any) -> tuple[ImplicitPlan, ExplicitPlan]:
    gemm = search_blocks(gemm_of(problem, phase, dtype), TAKEN)
    return implicit_plan(problem, phase, dtype), ExplicitPlan(problem=problem, phase=phase, gemm=gemm)


def operands(problem: ConvProblem) -> dict[Phase, tuple[Any, Any]]:
    rng = np.random.default_rng(problem.c + problem.f)
    (x_shape, w_shape), (dy_shape, _) = operand_shapes(problem, "forward"), operand_shapes(problem, "backward_data")
    x, w, dy = (rng.standard_normal(shape) for shape in (x_shape, w_shape, dy_shape))
    return {"forward": (x, w), "backward_data": (dy, w), "backward_filter": (x, dy)}


def truth(problem: ConvProblem, given: dict[Phase, tuple[Any, Any]]) -> dict[Phase, Any]:
    x, w = (torch.tensor(t, requires_grad=True) for t in given["forward"])
    axes = (problem.rows, problem.columns)
    sides = [side for a in reversed(axes) for side in (a.padding, a.span - a.extent - a.padding)]  # may be negative
    y = torch.nn.functional.conv2d(
        torch.nn.functional.pad(x, sides), w, stride=[a.stride for a in axes], dilation=[a.dilation for a in axes]
    )
    y.backward(torch.tensor(given["backward_data"][0]))
    assert x.grad is not None and w.grad is not None
    return {"forward": y.detach().numpy(), "backward_data": x.grad.numpy(), "backward_filter": w.grad.numpy()}


def check_truth(problem: ConvProblem, dtype: str, tolerance: float) -> None:
    given = operands(problem)
    if dtype == "float32":
        given = {phase: (a.astype(np.float32), b.astype(np.float32)) for phase, (a, b) in given.items()}
    want = truth(problem, {phase: (a.astype(float), b.astype(float)) for phase, (a, b) in given.items()})
    for phase in PHASES:
        for plan in plans(problem, phase, dtype):
            run = run_conv(plan, *given[phase])
            assert run.result.dtype == dtype and run.result.shape == want[phase].shape
            assert abs(run.result - want[phase]).max() <= tolerance * abs(want[phase]).max(), (phase, plan)
            assert run.counts == conv_counts(plan), (phase, plan)
            assert run.ldm_bytes <= 60 * 1024


@pytest.mark.parametrize("row", read_table2(), ids=lambda row: row.name)
def test_vgg16_equals_torch(row: Any) -> None:
    full = row.problem
    check_truth(ConvProblem.square(2, full.c, REDUCED[full.h], REDUCED[full.h], full.f), "float64", 1e-12)


@pytest.mark.parametrize("problem", ODD, ids=str)
def test_odd_sizes_strides_and_paddings_equal_torch(problem: ConvProblem) -> None:
    check_truth(problem, "float64", 1e-13)
    check_truth(problem, "float32", 3e-7)  # computed in double; dw of the explicit plan is rounded for every image


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_levels_agree_bit_by_bit_and_event_by_event(dtype: str) -> None:
    problem = ConvProblem.square(2, 5, 4, 3, 4)
    given = operands(problem)
    for phase in PHASES:
        for plan in plans(problem, phase, dtype):
            runs = [run_conv(plan, *given[phase], level=level) for level in ("messages", "exact")]
            assert np.array_equal(runs[0].result, runs[1].result)
            assert runs[0].counts == runs[1].counts
            assert runs[0].ldm_bytes == runs[1].ldm_bytes


@pytest.mark.parametrize("problem", ODD, ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_moving_is_the_same_cpe_by_cpe_and_at_once(problem: ConvProblem, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((problem.c * problem.h, problem.w)).astype(dtype)
    columns = rng.standard_normal((problem.c * problem.taps * problem.h_out, problem.w_out)).astype(dtype)
    for kind, source, shape, closed in (
        ("im2col", x, columns.shape, im2col_counts),
        ("col2im", columns, x.shape, col2im_counts),
    ):
        found = []
        for mesh in (MessageMesh(), VectorMesh()):
            text = columns_program(kind, problem, dtype, messages=isinstance(mesh, MessageMesh))
            target = np.full(shape, np.nan, dtype)
            counts = mesh.run(load_program(text), Dram("SOURCE", source), Dram("TARGET", target))
            assert counts == closed(problem, dtype)
            found.append((target, mesh.ldm_bytes))
        assert np.array_equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_channels_that_do_not_fit_are_cut() -> None:
    problem = ConvProblem.square(64, 1200, 1, 1, 900, 1, 1, 0)
    plan = implicit_plan(problem, "forward", "float64")
    assert plan.blocks[1] * plan.blocks[2] > 1 and plan.ldm_bytes <= 60 * 1024
    check_truth(problem, "float64", 1e-12)


def test_without_the_superfluous_column() -> None:
    problem = ConvProblem.square(64, 512, 1, 8, 512)  # columns in blocks of 4
    given = operands(problem)
    runs = []
    for one_more in (True, False):
        plan = implicit_plan(problem, "forward", "float64", one_more=one_more)
        assert plan.columns < 8
        runs.append(run_conv(plan, *given["forward"]))
        assert runs[-1].counts == implicit_counts(plan)
    assert np.array_equal(runs[0].result, runs[1].result)
    assert runs[0].counts.get_bytes > runs[1].counts.get_bytes


def test_shapes_that_are_not_the_plans_are_refused() -> None:
    problem = ODD[0]
    plan = implicit_plan(problem, "forward")
    given = operands(problem)
    with pytest.raises(InputError, match=r"an operand of forward is \[3, 4, 6, 7\], the plan has \[3, 5, 6, 7\]"):
        run_conv(plan, given["backward_data"][0], given["forward"][1])
    with pytest.raises(InputError, match="a row of 4200 columns and its line in LDM"):
        plans(ConvProblem.square(1, 1, 3, 4200, 1), "forward", "float32")
    with pytest.raises(InputError, match="larger than the padded image"):
        ConvProblem.square(1, 1, 2, 2, 1, 5, 1, 1)


def test_the_choice_is_the_faster_plan() -> None:
    fitted = load_rates().fitted()
    rows = {row.name: row.problem for row in read_table2()}
    choice = choose_plan(rows["conv5_1"], "forward", TAKEN, fitted)
    assert isinstance(choice.plan, ImplicitPlan) and len(choice.plans) == 2
    assert choice.plans[0][1] < choice.plans[1][1]
    assert isinstance(choose_plan(rows["conv3_1"], "forward", TAKEN, fitted).plan, ExplicitPlan)
    only = choose_plan(rows["conv1_1"], "forward", TAKEN, fitted)
    assert isinstance(only.plan, ExplicitPlan) and len(only.plans) == 1 and only.refusal == "C=3 is below 64"


def test_the_choice_by_running_both() -> None:
    problem = ConvProblem.square(128, 64, 3, 3, 64)
    given = operands(problem)
    choice = choose_by_running(problem, "forward", *given["forward"], TAKEN)
    assert isinstance(choice.plan, ImplicitPlan) and choice.plans[0][1] < choice.plans[1][1]
    # 128 GEMMs of 9 pixels, padded to 128, against products of whole batches.
    only = choose_by_running(problem, "backward_filter", *given["backward_filter"], TAKEN)
    assert len(only.plans) == 1 and only.refusal == "C=64 is below 128"


@pytest.mark.parametrize("phase", PHASES)
def test_columns_of_padding_alone_that_begin_before_the_image(phase: Phase) -> None:
    """As the first of y's columns has them where a rank has no other: no CPE gets a row, on any level."""
    problem = ConvProblem(2, 2, 3, Axis(5, 5, 2, padding=1), Axis(2, 1, 1, 3, 2))
    given = operands(problem)[phase]
    for level in ("messages", "exact", "fast"):
        run = run_conv(explicit_plan(problem, phase, TAKEN, "float64"), *given, level=level)
        assert np.array_equal(run.result, reference(problem, phase, *given)) and not run.result.any()


@pytest.mark.parametrize("phase", ["forward", "backward_data"])
def test_a_trial_s_clock_has_the_transfers_of_the_run_alone(phase: Phase) -> None:
    """With a stride a tap meets one row of several."""
    problem = ConvProblem.square(1, 3, 33, 33, 4, 11, 4, 0)
    run = run_conv(explicit_plan(problem, phase, TAKEN), *operands(problem)[phase], log=True)
    operations = run.plan.move_counts.get_ops + run.plan.move_counts.put_ops  # type: ignore[union-attr]
    bytes_s = TAKEN.transfer_s(run.moved.get) + TAKEN.transfer_s(run.moved.put)
    by_moves = trial_seconds(run, TAKEN) - clock_seconds(run.events, TAKEN, by_cycles=True)
    assert by_moves == pytest.approx(bytes_s + -(-operations // 64) * TAKEN.dma_round_s)


@pytest.mark.parametrize("phase", PHASES)
def test_templates_name_their_contexts_and_nothing_else(phase: Phase) -> None:
    def names(template: str) -> set[str]:
        source = data_file("templates", "sw26010", f"{template}.py.jinja").read_text(encoding="utf-8")
        found = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(source))
        return found | (names("columns_sizes") if '"columns_sizes' in source else set())

    plan = implicit_plan(ODD[1], phase)
    assert names("implicit") == set(implicit_context(plan, messages=True))
    for kind in ("im2col", "col2im"):
        context = set(columns_context(kind, ODD[1], "float32"))
        assert names(kind) == names(f"{kind}_mesh") == context


def test_programs_are_python_that_reads_well() -> None:
    texts = [
        implicit_program(implicit_plan(problem, phase), messages=messages)
        for problem in ODD
        for phase in PHASES
        for messages in (True, False)
    ]
    texts += [
        columns_program(kind, problem, "float32", messages=messages)
        for problem in ODD
        for kind in ("im2col", "col2im")
        for messages in (True, False)
    ]
    texts += [transform_program(Transform(70, 2, 5, 5, "float32", "to_implicit"))]
    pools = (Pooling(3, 70, 8, 8, 2), Pooling(1, 2, 7, 9001, 3), Pooling(1, 2, 6, 9000, 3, "average"))
    texts += [print_it(pool) for pool in pools for print_it in (pooling_program, pooling_backward_program)]
    for text in texts:
        ast.parse(text)
        assert max(map(len, text.splitlines())) <= 120, text


@pytest.mark.parametrize("shape", [(5, 3, 7, 9), (70, 2, 9, 9), (1, 1, 3, 3), (130, 4, 8, 8)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layout_transforms(shape: tuple[int, int, int, int], dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    forth, back = (Transform(*shape, dtype, direction) for direction in ("to_implicit", "to_explicit"))  # type: ignore[arg-type]
    turned, counts = run_transform(forth, x)
    assert np.array_equal(turned, x.transpose(2, 3, 1, 0))
    assert counts == transform_counts(forth)
    again, counts = run_transform(back, turned)
    assert np.array_equal(again, x)
    assert counts == transform_counts(back)
    with pytest.raises(InputError, match="the transformation has"):
        run_transform(back, x if shape != (1, 1, 3, 3) else x[..., 0])


@pytest.mark.parametrize("sizes", [(2, 3, 8, 8, 2), (2, 3, 9, 7, 2), (1, 2, 6, 9000, 3), (3, 70, 8, 8, 2)])
@pytest.mark.parametrize("kind", ["max", "average"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pooling(sizes: tuple[int, int, int, int, int], kind: Any, dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal(sizes[:4]).astype(dtype)
    pooling = Pooling(*sizes, kind, dtype)
    y, counts = run_pooling(pooling, x)
    pool = torch.nn.functional.max_pool2d if kind == "max" else torch.nn.functional.avg_pool2d
    want = pool(torch.tensor(x), sizes[4]).numpy()
    assert abs(y - want).max() <= (0 if kind == "max" else 1e-15 if dtype == "float64" else 2e-7)
    read = sizes[0] * sizes[1] * (sizes[2] // sizes[4]) * sizes[4] * (sizes[3] // sizes[4]) * sizes[4]
    assert counts.get_bytes >= read * x.itemsize and counts.put_bytes == y.nbytes
    assert (pooling.strip < sizes[3] // sizes[4]) == (sizes[3] == 9000)  # only such rows come in strips


@pytest.mark.parametrize(
    "sizes", [(2, 3, 8, 8, 2), (2, 3, 9, 7, 2), (1, 2, 7, 9001, 3), (3, 70, 8, 8, 2), (3, 70, 8, 9, 2), (1, 1, 5, 5, 5)]
)
@pytest.mark.parametrize("kind", ["max", "average"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pooling_backward(sizes: tuple[int, int, int, int, int], kind: Any, dtype: str) -> None:
    rng = np.random.default_rng(0)
    pooling = Pooling(*sizes, kind, dtype)
    x = rng.integers(-3, 4, sizes[:4]).astype(dtype)  # with many equal elements in a window
    dy = rng.standard_normal(pooling.out_shape).astype(dtype)
    given = torch.tensor(x, requires_grad=True)
    pool = torch.nn.functional.max_pool2d if kind == "max" else torch.nn.functional.avg_pool2d
    pool(given, sizes[4]).backward(torch.tensor(dy))
    assert given.grad is not None
    dx, counts = run_pooling_backward(pooling, dy, x if kind == "max" else None)
    assert np.array_equal(dx, given.grad.numpy())
    assert counts.get_bytes >= dy.nbytes + (
        x[:, :, : sizes[2] // sizes[4] * sizes[4]].nbytes // 2 if kind == "max" else 0
    )
    assert counts.put_bytes >= dx.nbytes and (counts.put_bytes == dx.nbytes or sizes[3] == 9001)


def test_pooling_backward_refuses_other_tensors() -> None:
    pooling = Pooling(1, 1, 4, 4, 2, dtype="float64")
    with pytest.raises(InputError, match="needs x"):
        run_pooling_backward(pooling, np.zeros((1, 1, 2, 2)))
    with pytest.raises(InputError, match=r"dY is \[1, 1, 4, 4\]"):
        run_pooling_backward(pooling, np.zeros((1, 1, 4, 4)), np.zeros((1, 1, 4, 4)))


@settings(max_examples=15)
@given(st.integers(1, 7), st.integers(1, 7), st.sampled_from(["fast", "exact", "messages"]), st.booleans())
def test_dw_of_several_images_is_summed_in_ldm(n: int, images: int, level: Any, whole: bool) -> None:
    images = min(n, images)
    axis = Axis(5, 5, 1) if whole else Axis(5, 4, 2, 1, 0)  # the columns of the first are x itself
    problem = ConvProblem(n, 3, 4, axis, axis)
    plan = explicit_plan(problem, "backward_filter", taken_rates(), "float64", images)
    assert sum(gemm.images * times for gemm, times in plan.products) == n
    rng = np.random.default_rng(n)
    x, dy = (rng.standard_normal(shape) for shape in operand_shapes(problem, "backward_filter"))
    run = run_conv(plan, x, dy, level=level)  # its events are the closed form's
    assert np.abs(run.result - reference(problem, "backward_filter", x, dy)).max() < 1e-12
    once = conv_counts(explicit_plan(problem, "backward_filter", taken_rates(), "float64"))
    moved = run.counts.put_bytes - n * plan.move_counts.put_bytes
    assert moved * n == (once.put_bytes - n * plan.move_counts.put_bytes) * len(range(0, n, images))


def test_several_images_are_of_a_sum_alone() -> None:
    problem = ConvProblem.square(4, 3, 5, 5, 4)
    for phase, images in (("forward", 2), ("backward_data", 2), ("backward_filter", 5), ("backward_filter", 0)):
        with pytest.raises(InputError, match=r"images by products of|nothing to multiply"):
            explicit_plan(problem, phase, taken_rates(), images=images)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has no Triton kernel"):
        triton_gemm(explicit_plan(problem, "backward_filter", taken_rates(), images=2).gemm)


def test_more_images_a_product_pay_where_dw_is_large_and_planes_small() -> None:
    small, large = ConvProblem.square(32, 512, 14, 14, 512), ConvProblem.square(32, 256, 56, 56, 256)
    seconds = {(p, phase, images): blocked(p, phase, images).seconds
               for p in (small, large) for phase in PHASES for images in (1, 32)}  # fmt: skip
    assert seconds[small, "backward_filter", 1] > 1.3 * seconds[small, "backward_filter", 32]
    assert 1.0 < seconds[large, "backward_filter", 1] / seconds[large, "backward_filter", 32] < 1.1
    assert seconds[large, "forward", 1] < seconds[large, "forward", 32]
    text, right = blocked_run(ConvProblem.square(3, 2, 5, 5, 4), 2)
    assert right and "events equal" in text and blocked_text(small, [1, 8]).count("backward_filter") == 2
