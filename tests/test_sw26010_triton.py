"""The mesh's blocking as a Triton kernel: equal results in the interpreter, and it compiles for a GPU without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jinja2
import jinja2.meta
import numpy as np
import pytest

from convgen.resources import data_file
from convgen.sw26010.gemm.plan import GemmPlan
from convgen.sw26010.gemm.run import run_gemm
from convgen.sw26010.gemm.triton import power_of_two, triton_context, triton_gemm

CASES = (
    GemmPlan(m=64, n=64, k=64, bm=64, bn=64, bk=64),
    GemmPlan(m=40, n=7, k=20, bm=32, bn=8, bk=16, a_transposed=True, b_transposed=True),
    GemmPlan(m=30, n=19, k=50, bm=32, bn=24, bk=56, dtype="float32", accumulate=False),
)
RUN_CASES = CASES[1:]  # several blocks, padded, turned or not; the interpreter takes seconds for each
RUN = """
import importlib.util, sys
import numpy as np, torch
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("module", folder + "/module.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    a, b, c = (torch.from_numpy(np.load(f"{folder}/{name}.npy")) for name in "abc")
    np.save(folder + "/result.npy", module.gemm(a, b, c).numpy())
    try:
        module.gemm(a[1:], b, c)
    except ValueError as error:
        assert "A is" in str(error)
    else:
        raise AssertionError("a wrong shape was taken")
"""
COMPILE = """
import importlib.util, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
spec = importlib.util.spec_from_file_location("module", sys.argv[1] + "/module.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sizes = dict(M=module.M, N=module.N, K=module.K, BK=module.BK, ML=module.ML, NL=module.NL, KL=module.KL)
sizes |= dict(MP=16, NP=16, KP=16)
signature = dict.fromkeys("ABC", "*fp64") | dict.fromkeys(sizes, "constexpr")
source = ASTSource(module.cpe, signature, constexprs=sizes)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
assert ".target sm_90" in compiled.asm["ptx"]
assert "f64" in compiled.asm["ptx"]
"""


def python(code: str, *arguments: object, interpret: bool) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_kernel_equals_the_mesh(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    folders, wanted = [], []
    for number, plan in enumerate(RUN_CASES):
        rng = np.random.default_rng(number)
        a, b, c = (rng.standard_normal(s) for s in ((plan.m, plan.k), (plan.k, plan.n), (plan.m, plan.n)))
        wanted.append(run_gemm(plan, a, b, c if plan.accumulate else None, level="exact").c)
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "module.py").write_text(triton_gemm(plan))
        memory = (a if plan.a_transposed else a.T, b if plan.b_transposed else b.T, c.T)
        for name, matrix in zip("abc", memory, strict=True):
            np.save(folder / f"{name}.npy", np.ascontiguousarray(matrix, dtype=plan.dtype))
        folders.append(folder)
    python(RUN, *folders, interpret=True)
    for plan, folder, want in zip(RUN_CASES, folders, wanted, strict=True):
        result = np.load(folder / "result.npy").T
        assert result.dtype == plan.dtype
        if plan.dtype == "float32":  # summed in double and rounded once, on both
            assert np.array_equal(result, want)
        else:
            assert abs(result - want).max() <= 1e-13


def test_the_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "module.py").write_text(triton_gemm(CASES[0]))
    python(COMPILE, tmp_path, interpret=False)


def test_the_template_names_its_context_and_nothing_else() -> None:
    source = data_file("templates", "sw26010", "gemm_triton.py.jinja").read_text(encoding="utf-8")
    names = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(source))
    assert names == set(triton_context(CASES[0]))


def test_tiles_are_padded_to_powers_of_two() -> None:
    assert [power_of_two(extent) for extent in (1, 16, 17, 52, 64)] == [16, 16, 32, 64, 64]
