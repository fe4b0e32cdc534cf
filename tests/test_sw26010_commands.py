"""Commands that run or print what the mesh does: conv --run, transform, both orientations of a GEMM, DMA, latency."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import draws

from convgen.commands.main import cli
from convgen.errors import InputError
from convgen.sw26010.conv.check import check_conv, reference
from convgen.sw26010.conv.cost import choose_plan, explicit_plan
from convgen.sw26010.conv.explicit_plan import most_columns
from convgen.sw26010.conv.layouts import Transform
from convgen.sw26010.conv.problem import Axis, ConvProblem
from convgen.sw26010.conv.run import run_conv
from convgen.sw26010.conv.transform_report import transform_text
from convgen.sw26010.gemm.cost import gemm_seconds
from convgen.sw26010.gemm.counts import gemm_counts
from convgen.sw26010.gemm.orientation import oriented
from convgen.sw26010.gemm.run import run_gemm
from convgen.sw26010.gemm.strip import watch_gemm
from convgen.sw26010.machine.dma import SIZES, Moves, events_seconds, moves_seconds, run_moves
from convgen.sw26010.machine.printing import load_program
from convgen.sw26010.machine.rates import load_rates, taken_rates

TAKEN = taken_rates()


def call(*arguments: object) -> str:
    done = CliRunner().invoke(cli, ["sw26010", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*arguments: object) -> str:
    done = CliRunner().invoke(cli, ["sw26010", *map(str, arguments)])
    assert isinstance(done.exception, InputError)
    return str(done.exception)


@st.composite
def problems(draw: Any) -> ConvProblem:
    axes: list[Axis] = []
    for _ in range(2):
        kernel, stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        padding, reach = draw(st.integers(0, 2)), dilation * (kernel - 1) + 1
        extent = draw(st.integers(max(1, reach - 2 * padding), 9))
        axes.append(Axis(extent, (extent + 2 * padding - reach) // stride + 1, kernel, stride, padding, dilation))
    return ConvProblem(draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 9)), *axes)


@settings(max_examples=draws(20))
@given(problems(), st.sampled_from(["float32", "float64"]))
def test_both_plans_of_every_phase_are_right_and_counted(problem: ConvProblem, dtype: Any) -> None:
    found = check_conv(problem, dtype, 1, "fast")
    assert [(c.phase, c.plan) for c in found] == [
        (phase, plan) for phase in ("forward", "backward_data", "backward_filter") for plan in ("explicit", "implicit")
    ]
    assert all(c.right for c in found), found


@settings(max_examples=30)
@given(problems())
def test_the_reference_is_pytorch_s(problem: ConvProblem) -> None:
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal((problem.n, problem.c, problem.h, problem.w)), requires_grad=True)
    w = torch.tensor(
        rng.standard_normal((problem.f, problem.c, problem.rows.kernel, problem.columns.kernel)), requires_grad=True
    )
    axes = (problem.rows, problem.columns)
    stride, padding, dilation = ([getattr(a, name) for a in axes] for name in ("stride", "padding", "dilation"))
    y = torch.nn.functional.conv2d(x, w, None, stride, padding, dilation)
    dy = torch.tensor(rng.standard_normal(y.shape))
    y.backward(dy)
    data, weights, out = x.detach().numpy(), w.detach().numpy(), dy.numpy()
    assert reference(problem, "forward", data, weights) == pytest.approx(y.detach().numpy())
    assert x.grad is not None and w.grad is not None
    assert reference(problem, "backward_data", out, weights) == pytest.approx(x.grad.numpy())
    assert reference(problem, "backward_filter", data, out) == pytest.approx(w.grad.numpy())


@pytest.mark.parametrize("level", ["exact", "messages"])
def test_conv_runs_groups_rectangles_and_dtypes(level: str) -> None:
    text = call(
        "conv", 1, 6, 4, 5, 4, "--kernel", "3,2", "--stride", "2,1", "--padding", "1,0", "--groups", 2,
        "--dtype", "float64", "--run", "--level", level,
    )  # fmt: skip
    assert "K=3x2 S=2x1 P=1x0 float64, 2 groups of them" in text
    assert text.count("as the closed form") == 6


def test_one_by_one_moves_nothing() -> None:
    problem = ConvProblem.square(2, 5, 6, 7, 3, kernel=1, padding=0)
    for phase in ("forward", "backward_data", "backward_filter"):
        plan = explicit_plan(problem, phase, TAKEN)
        assert not plan.moves and plan.move_ldm_bytes == 0
    assert all(c.right for c in check_conv(problem, "float32", 1, "messages"))
    strided = ConvProblem.square(2, 5, 6, 7, 3, kernel=1, padding=0, stride=2)
    assert explicit_plan(strided, "forward", TAKEN).moves
    text = call("conv", 2, 5, 6, 7, 3, "--kernel", 1, "--padding", 0, "--emit", "forward", "--plan", "explicit")
    assert "im2col" not in text


@pytest.mark.parametrize("phase", ["forward", "backward_data", "backward_filter"])
def test_the_explicit_programs_are_printed_in_their_order(phase: str) -> None:
    text = call("conv", 2, 3, 5, 6, 4, "--emit", phase, "--plan", "explicit")
    first, second = text.split("# ---- and then, for the same image")
    assert ("col2im" in second) if phase == "backward_data" else ("im2col" in first)
    for part in (first, second.split("\n", 1)[1]):
        assert callable(load_program(part))


def test_the_json_of_a_run() -> None:
    found = json.loads(call("conv", 2, 4, 5, 6, 4, "--groups", 2, "--run", "--json"))
    assert all(one["events_equal"] for one in found["run"]) and len(found["run"]) == 6
    (plan,) = found["forward"]["plans"]
    assert plan["useful_flops"] == 2 * (2 * 2 * 2 * 5 * 6 * 2 * 9)


def test_a_wide_image_has_the_implicit_plan_alone() -> None:
    problem = ConvProblem(128, 128, 64, Axis(1, 1, 1), Axis(9000, 9000, 3, padding=1))
    choice = choose_plan(problem, "forward", TAKEN, load_rates().fitted())
    assert len(choice.plans) == 1 and choice.refusal is None
    assert "at most 4,095 columns" in refused("conv", 1, 1, 9, 9000, 1)
    assert "chosen" in call("conv", 1, 1, 9, 4095, 1)  # the hint can be followed
    assert "at most" in refused("conv", 1, 1, 9, 4096, 1)


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2))
def test_the_widest_image_is_the_widest(kernel: int, stride: int, padding: int, dilation: int) -> None:
    def problem(extent: int) -> ConvProblem:
        out = (extent + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        return ConvProblem(1, 1, 1, Axis(5, 5, 1, padding=1), Axis(extent, out, kernel, stride, padding, dilation))

    widest = most_columns(problem(100).columns)
    explicit_plan(problem(widest), "backward_data", TAKEN)
    with pytest.raises(InputError, match=f"at most {widest:,} columns"):
        explicit_plan(problem(widest + 1), "backward_data", TAKEN)
    said = refused("conv", 1, 1, 1, 1, 1, "--kernel", 1, "--padding", 5000)  # no image is narrow enough
    assert "a smaller kernel, dilation or padding" in said


def test_what_is_no_convolution_is_refused() -> None:
    assert "doesn't divide C=3" in refused("conv", 1, 3, 4, 4, 4, "--groups", 2)
    assert "--padding 3, or a smaller --kernel" in refused("conv", 1, 1, 4, 4, 1, "--kernel", 9)
    assert "rows and columns" in refused("conv", 1, 1, 4, 4, 1, "--kernel", "0")
    assert "rows and columns" in refused("conv", 1, 1, 4, 4, 1, "--kernel", "3,3,3")


@settings(max_examples=15)
@given(
    st.integers(1, 40), st.integers(1, 5), st.integers(1, 9), st.integers(1, 9),
    st.sampled_from(["float32", "float64"]), st.sampled_from(["to_implicit", "to_explicit"]),
)  # fmt: skip
def test_transformations_run_as_counted(n: int, c: int, h: int, w: int, dtype: Any, direction: Any) -> None:
    text, right = transform_text(Transform(n, c, h, w, dtype, direction), run=True)
    assert right and "bit by bit" in text


def test_transform_prints_its_program() -> None:
    assert callable(load_program(call("transform", 4, 3, 5, 6, "--emit")))
    assert "run:" not in call("transform", 128, 512, 56, 56)


@settings(max_examples=15)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 40))
def test_a_gemm_either_way_is_the_same_product(m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(shape) for shape in ((m, k), (k, n), (m, n)))
    along_m, along_n = (oriented(m, n, k, "float64", None, way, TAKEN) for way in ("m", "n"))
    one, other = run_gemm(along_m.plan, a, b, c), run_gemm(along_n.plan, b.T, a.T, c.T)
    for found in (one.c, other.c.T):
        np.testing.assert_allclose(found, c + a @ b, rtol=0, atol=1e-12)
    best = oriented(m, n, k, "float64", None, "best", TAKEN)
    assert gemm_seconds(best.plan, TAKEN) == min(along_m.along_m_s or 0.0, along_n.along_n_s or 0.0)


def test_vectors_along_n_and_blocks() -> None:
    text = call("gemm", 64, 700, 300, "--vectors", "best")
    assert "vectors   along N, row-major matrices" in text and "C[700, 64]" in text
    text = call("gemm", 64, 64, 64, "--blocks", "32,8,8")
    assert "along N these blocks don't fit" in text
    assert "no multiple of 32" in refused("gemm", 64, 64, 64, "--blocks", "32,8,8", "--vectors", "n")
    assert "cannot read three numbers" in refused("gemm", 64, 64, 64, "--blocks", "9" * 5000 + ",8,8")


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("direction", ["get", "put"])
def test_dma_takes_what_the_closed_form_says(strided: bool, direction: Any) -> None:
    for size in (*SIZES, 8, 32768):
        moves = Moves(size, strided, direction, times=3)
        events, moved = run_moves(moves)
        assert moved == moves.total_bytes
        assert events_seconds(events, TAKEN, strided=strided) == pytest.approx(moves_seconds(moves, TAKEN))


def test_dma_keeps_the_text_s_numbers() -> None:
    rows = {row["bytes"]: row for row in json.loads(call("dma", "--json"))["rows"]}
    assert rows[16384]["strided_bytes_per_s"] > 27e9  # saturates around 28
    assert rows[256]["strided_bytes_per_s"] > 0.65 * 28e9  # Principle 3: at least 256 B strided, 2 KB continuous
    assert rows[2048]["continuous_bytes_per_s"] > 0.7 * 28e9
    for row in rows.values():
        if row["measured_bytes_per_s"] is not None:
            assert row["continuous_bytes_per_s"] == pytest.approx(row["measured_bytes_per_s"], rel=0.3)
    for size in (12, 24 * 1024, 65536):
        with pytest.raises(InputError, match="of whole doubles"):
            Moves(size, strided=True)


@pytest.mark.parametrize(("command", "words"), [("dma", "strided, 32 KB"), ("latency", "across a supernode")])
def test_figures(command: str, words: str, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.svg", "b.svg")]
    texts = [call(command, "--plot", path) for path in paths]
    assert "equal the closed form" in texts[0]
    assert words in paths[0].read_text() and paths[0].read_text() == paths[1].read_text()


def test_the_strip_is_of_what_the_run_did(tmp_path: Path) -> None:
    plan = oriented(33, 20, 17, "float32", (64, 24, 24), "m", TAKEN).plan
    watched, counts = watch_gemm(plan), gemm_counts(plan)
    assert sum(a for a, _ in watched.sent) == counts.putr and sum(b for _, b in watched.sent) == counts.putc
    assert {wait for waits in watched.waits for wait in waits} <= {"getr", "getc", "putr", "putc", ""}
    assert watched.waits[-1] == [""] * 64 and any(watched.worked[0])
    path = tmp_path / "strip.svg"
    call("gemm", 128, 32, 32, "--blocks", "128,32,32", "--strip", path)
    assert "t=7: 16 of A, 16 of B" in path.read_text() and "4 vectors of 4 by 4 columns" in path.read_text()
    assert "a strip is of one block" in refused("gemm", 64, 64, 64, "--blocks", "32,8,8", "--strip", path)


def test_latency_and_half_of_the_bandwidth() -> None:
    assert "half of the bandwidth at 24,000 B" in call("latency", "--latency", 2e-6)
    rows = json.loads(call("latency", "--json"))["rows"]
    assert all(row["run_equal"] for row in rows)
    assert rows[-1]["inside_bytes_per_s"] == pytest.approx(12e9, rel=0.01)
    assert rows[-1]["across_bytes_per_s"] == pytest.approx(3e9, rel=0.01)


def test_run_conv_refuses_other_shapes() -> None:
    plan = explicit_plan(ConvProblem.square(1, 2, 3, 3, 2), "forward", TAKEN)
    with pytest.raises(InputError, match="the plan has"):
        run_conv(plan, np.zeros((1, 2, 3, 4)), np.zeros((2, 2, 3, 3)))


def test_causes_add_up_and_images_are_whole_numbers() -> None:
    lines = call("conv", 128, 64, 224, 224, 64, "--causes").splitlines()
    forward = next(line for line in lines if line.startswith("forward") and "explicit" in line)
    seconds, *causes = re.findall(r"\d+\.\d+", forward)
    assert "im2col" in forward and sum(map(float, causes)) == pytest.approx(float(seconds), abs=1e-3)
    assert "events equal the closed form" in call("conv", 3, 2, 5, 5, 4, "--images", "1,3", "--run")
    for wrong in ("0", "4", "1,", "x"):
        done = CliRunner().invoke(cli, ["sw26010", "conv", "3", "2", "5", "5", "4", "--images", wrong])
        assert done.exit_code and "whole numbers from 1 to 3" in str(done.exception or done.output)


@pytest.mark.parametrize("how", [("--images", "1,3"), ("--causes",)])
def test_reports_of_a_convolution_are_of_all_groups_and_of_its_type(how: tuple[str, ...]) -> None:
    sizes = 4, 64, 56, 56, 64
    one, both = (call("conv", 4, 64 * g, 56, 56, 64 * g, *how, "--dtype", "float64", "--groups", g) for g in (1, 2))
    assert "C=64 H=56 W=56 F=64 K=3 S=1 P=1 float64" in one and "float64, 2 groups of them" in both
    seconds = [[float(t) for t in re.findall(r"\d\.\d{4}", text)] for text in (one, both)]
    np.testing.assert_allclose(seconds[1], 2 * np.array(seconds[0]), atol=2e-4)
    floats = call("conv", *sizes, *how)
    assert "float32" in floats and floats.splitlines()[2:] != one.splitlines()[2:]
    assert "a table alone" in refused("conv", *sizes, *how, "--json")


def test_operations_of_training_are_printed_and_run() -> None:
    lines = call("operations", 3, 7, 5, 4).splitlines()
    names = [line.split()[0] for line in lines[1:-1]]
    assert len(names) == len(set(names)) == 20 and lines[-1] == "run: events equal the closed forms"
    for name in names:
        assert "def program(cpe, " in call("operations", 3, 7, 5, 4, "--emit", name)
    assert call("operations", 3, 1, 1, 1).endswith("run: events equal the closed forms\n")  # a label has one class
    refused = CliRunner().invoke(cli, ["sw26010", "operations", "3", "7", "5", "4", "--emit", "x"])
    assert refused.exit_code and "no operation is named x" in str(refused.exception or refused.output)
