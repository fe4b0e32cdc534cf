"""GEMM on the mesh: truth, equal bits and counts on both levels, edges, blocking, precision."""

from __future__ import annotations

import ast
import itertools

import jinja2
import jinja2.meta
import numpy as np
import pytest

from convgen.errors import InputError
from convgen.resources import data_file
from convgen.sw26010.gemm.counts import gemm_counts
from convgen.sw26010.gemm.plan import GemmPlan, resident
from convgen.sw26010.gemm.program import gemm_context, gemm_program
from convgen.sw26010.gemm.run import run_gemm
from convgen.sw26010.machine.faults import LdmOverflow


def problem(m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m + 100 * n + 10000 * k)
    return tuple(rng.standard_normal(shape) for shape in ((m, k), (k, n), (m, n)))  # type: ignore[return-value]


def error(plan: GemmPlan, level: str = "fast") -> float:
    """Largest error in units of sqrt(k) max|A| max|B|."""
    a, b, c = problem(plan.m, plan.n, plan.k)
    run = run_gemm(plan, a, b, c, level=level)  # type: ignore[arg-type]
    return float(abs(run.c - (c + a @ b)).max() / (np.sqrt(plan.k) * abs(a).max() * abs(b).max()))


def test_counts_of_64_cubed() -> None:
    plan = resident(64, 64, 64)
    run = run_gemm(plan, *problem(64, 64, 64), level="messages")
    counts = run.counts
    assert (counts.putr, counts.putc, counts.vmad, counts.cycles) == (2048, 4096, 65536, 1440)
    assert (counts.getr, counts.getc) == (7 * 2048, 7 * 4096)
    assert (counts.get_bytes, counts.put_bytes) == (8 * 3 * 64 * 64, 8 * 64 * 64)
    assert run.ldm_bytes == plan.ldm_bytes == 1536
    assert counts == gemm_counts(plan)


def test_counts_of_512_cubed() -> None:
    plan = GemmPlan(m=512, n=512, k=512, bm=512, bn=512, bk=128)
    run = run_gemm(plan, *problem(512, 512, 512))
    counts = run.counts
    assert counts.putr == counts.putc == 512**3 // 128 == 1048576
    assert counts.getr == counts.getc == 7340032
    assert counts.vmad == 33554432 and counts.issued_flops == plan.issued_flops == plan.useful_flops == 2 * 512**3
    assert run.ldm_bytes == plan.ldm_bytes == 65536
    assert counts == gemm_counts(plan)
    a, b, c = problem(512, 512, 512)
    assert abs(run.c - (c + a @ b)).max() <= 1e-12 * np.sqrt(512) * abs(a).max() * abs(b).max()


def test_largest_resident_cube() -> None:
    assert resident(416, 416, 416).ldm_bytes == 64896
    assert resident(512, 512, 512).ldm_bytes == 98304
    for level in ("fast", "messages"):
        with pytest.raises(LdmOverflow):
            run_gemm(resident(512, 512, 512), *problem(512, 512, 512), level=level)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="98304 B"):
        resident(512, 512, 512).check_ldm()


@pytest.mark.parametrize(("m", "n", "k"), list(itertools.product((1, 7, 31, 33), (1, 8, 33), (1, 31, 100))))
def test_edges(m: int, n: int, k: int) -> None:
    plan = resident(m, n, k)
    assert error(plan) <= 1e-14
    run = run_gemm(plan, *problem(m, n, k), level="exact")
    assert run.counts == gemm_counts(plan)
    assert plan.useful_flops == 2 * m * n * k <= plan.issued_flops == run.counts.issued_flops


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("double_buffer", [True, False])
def test_levels_agree_bit_by_bit_and_event_by_event(dtype: str, turned: tuple[bool, bool], double_buffer: bool) -> None:
    plan = GemmPlan(
        m=70, n=19, k=33, bm=64, bn=16, bk=16, dtype=dtype, double_buffer=double_buffer,  # type: ignore[arg-type]
        a_transposed=turned[0], b_transposed=turned[1], accumulate=not turned[1],
    )  # fmt: skip
    a, b, c = problem(70, 19, 33)
    operands = (a, b, c) if plan.accumulate else (a, b)
    runs = [run_gemm(plan, *operands, level=level) for level in ("messages", "exact", "fast")]
    assert np.array_equal(runs[0].c, runs[1].c)
    assert runs[0].counts == runs[1].counts == runs[2].counts == gemm_counts(plan)
    assert runs[0].ldm_bytes == runs[1].ldm_bytes == plan.ldm_bytes
    assert runs[0].c.dtype == dtype
    want = a.astype(dtype).astype(float) @ b.astype(dtype).astype(float)
    want = want + c.astype(dtype) if plan.accumulate else want
    if dtype == "float32":  # computed in double, rounded once
        assert np.array_equal(runs[0].c, want.astype(np.float32))
    else:
        assert abs(runs[2].c - want).max() < 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_plans_at_random(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, n, k = (int(extent) for extent in rng.integers(1, 70, 3))
    blocks = {"bm": 32 * int(rng.integers(1, 4)), "bn": 8 * int(rng.integers(1, 8)), "bk": 8 * int(rng.integers(1, 6))}
    flags = ("accumulate", "double_buffer", "a_transposed", "b_transposed")
    plan = GemmPlan(m=m, n=n, k=k, **blocks, **{flag: bool(rng.integers(2)) for flag in flags})
    a, b, c = problem(m, n, k)
    operands = (a, b, c) if plan.accumulate else (a, b)
    runs = [run_gemm(plan, *operands, level=level) for level in ("messages", "exact", "fast")]
    assert np.array_equal(runs[0].c, runs[1].c)
    assert runs[0].counts == runs[1].counts == runs[2].counts == gemm_counts(plan)
    assert abs(runs[2].c - (a @ b + (c if plan.accumulate else 0))).max() <= 1e-12


def test_float32_converts_what_it_moves() -> None:
    plan = GemmPlan(m=64, n=32, k=32, bm=32, bn=16, bk=16, dtype="float32", accumulate=False)
    counts = gemm_counts(plan)
    # Every block of A and B widened, 4 elements an instruction, and C narrowed once.
    assert counts.convert == (2 * 64 * 32 + 2 * 32 * 32 + 64 * 32) // 4
    assert counts.get_bytes == 4 * (2 * 64 * 32 + 2 * 32 * 32)
    double = GemmPlan(m=64, n=32, k=32, bm=32, bn=16, bk=16, accumulate=False)
    assert gemm_counts(double).convert == 0 and gemm_counts(double).messages == counts.messages


def test_blocks_beyond_ldm() -> None:
    plan = GemmPlan(m=1100, n=300, k=260, bm=512, bn=128, bk=64)
    assert error(plan) <= 1e-13
    assert plan.blocks == (3, 3, 5)


@pytest.mark.parametrize("change", [{"bm": 16}, {"bn": 12}, {"bk": 0}, {"m": 0}, {"dtype": "bfloat16"}], ids=str)
def test_a_plan_that_cannot_work_is_refused(change: dict[str, object]) -> None:
    right: dict[str, object] = {"m": 8, "n": 8, "k": 8, "bm": 32, "bn": 8, "bk": 8}
    GemmPlan(**right)  # type: ignore[arg-type]
    with pytest.raises(InputError):
        GemmPlan(**{**right, **change})  # type: ignore[arg-type]


def test_operands_that_do_not_match_are_refused() -> None:
    a, b, c = problem(8, 8, 8)
    with pytest.raises(InputError, match=r"A is \[8, 8\], the plan has \[16, 8\]"):
        run_gemm(resident(16, 8, 8), a, b, c)
    with pytest.raises(InputError, match="adds to C"):
        run_gemm(resident(8, 8, 8), a, b)


def test_the_template_names_its_context_and_nothing_else() -> None:
    context = set(gemm_context(resident(8, 8, 8), messages=True))
    source = data_file("templates", "sw26010", "gemm.py.jinja").read_text(encoding="utf-8")
    assert jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(source)) == context


@pytest.mark.parametrize("messages", [True, False])
def test_the_program_is_python_that_reads_well(messages: bool) -> None:
    text = gemm_program(GemmPlan(m=512, n=512, k=512, bm=512, bn=512, bk=128), messages=messages)
    ast.parse(text)
    assert max(map(len, text.splitlines())) <= 120
    assert ("cpe.putr" in text) == messages
