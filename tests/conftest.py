"""Imported before any test, so before torch: see convgen/verify/__init__.py."""

import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib.machinery import SourceFileLoader
from multiprocessing import forkserver
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import sampling
from hypothesis import HealthCheck, settings

import convgen.verify  # sets MKL up for forked ranks

os.environ["CONVGEN_CACHE"] = os.devnull + "-no-cache"  # whoever tunes has another one
# The suite is of CPUs, whatever machine it runs on. Where torch is built for GPUs autograd starts threads as soon as it
# knows of one, or of one that tracing makes up, and a process can't be forked after that: it looks before there is any.
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""
# pytest's processes fill the cores, and a process is safest to fork while no kernel has run on several threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.ones(1, requires_grad=True).sum().backward()
# Syntax trees and traced programs are many small objects that live on: Python's own 700 between two looks at what is
# garbage are a third of the time that tests take to be collected, and a tenth of what tracing takes.
gc.set_threshold(20_000, 20, 20)
PACKAGE = Path(convgen.verify.__file__).parents[1]
# The same draws in every run, with no word on how long they take: a failure is a change's, not the day's.
settings.register_profile(
    "suite", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
# Hypothesis draws numbers and texts that the imported code has, too. It may have them from convgen, but not from the
# modules that tests generate: parsing them takes longer than the tests, and which there are differs by process.
providers: Any = sys.modules.get("hypothesis.internal.conjecture.providers")
if hasattr(providers, "is_local_module_file"):
    providers.is_local_module_file = lambda path: Path(path).is_relative_to(PACKAGE)

# What compiles or interprets kernels, runs whole modules, emulates, starts processes or measures: not for `make quick`.
SLOW = (
    "test_bench", "test_calibrate", "test_docs", "test_examples", "test_fuzz", "test_kernels", "test_local",
    "test_module", "test_resources", "test_runtime", "test_sw26010", "test_torch", "test_training",
    "test_transposed", "test_tune",
)  # fmt: skip
# One look each at what these would find.
QUICK = ("test_any_layer", "test_processes_and_virtual_ranks_agree_bit_by_bit")


# Settled: of the cases that a test of these is given, a plain run takes one and a share of the others (sampling.py).
SETTLED = (
    "test_algebra", "test_bench", "test_cost", "test_kernels", "test_local", "test_module",
    "test_networks_gpu", "test_networks_samples", "test_operation", "test_overlap", "test_schedule", "test_sw26010",
    "test_torch", "test_transposed", "test_tune",
)  # fmt: skip
# What every run takes: the rules of the house, and what its pages say.
ALWAYS = ("test_docs", "test_house", "test_resources")
# What other processors, cores or threads might change: all that computes. For `make check-machines`.
MACHINE = (
    "test_calibrate", "test_cost", "test_docs", "test_envelope", "test_examples", "test_local", "test_module",
    "test_network", "test_operation", "test_plan", "test_process", "test_runtime", "test_sw26010", "test_timeline",
    "test_torch", "test_training", "test_transposed", "test_tune",
)  # fmt: skip
# What another torch or triton might change. For `make check-newest`.
VERSIONS = (
    "test_aten", "test_envelope", "test_import", "test_kernels_add", "test_kernels_launches", "test_kernels_module",
    "test_kernels_truth", "test_module_order", "test_module_processes", "test_networks_calls", "test_networks_gpu",
    "test_networks_parallel", "test_networks_torch", "test_process_groups", "test_torch", "test_training_scripts",
)  # fmt: skip


plainly_compiled = SourceFileLoader.source_to_code


@lru_cache(16)
def compiled(text: bytes) -> CodeType:
    return compile(text, "<generated>", "exec", dont_inherit=True)


def in_file(code: CodeType, path: str) -> CodeType:
    consts = tuple(in_file(c, path) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=path, co_consts=consts)


def compiled_once(loader: SourceFileLoader, data: Any, path: Any, **options: Any) -> CodeType:
    """Networks' runtimes are alike from package to package, and Python takes a tenth of a second for one."""
    if isinstance(data, bytes) and not options and Path(path).name.startswith("_convgen_runtime_"):
        return in_file(compiled(data), path)
    return plainly_compiled(loader, data, path, **options)


SourceFileLoader.source_to_code = compiled_once


@pytest.fixture
def doubles() -> Iterator[None]:
    """What tensors are where nothing is said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where packages lie that several tests run."""
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(scope="session")
def forks() -> multiprocessing.context.ForkServerContext:
    """Forks processes that have torch, and what tuning wants, from one that runs nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "torch._dynamo",
            "convgen.tune.worker",
            "convgen.tune.bench_cpu",
            "convgen.tune.ahead",
            "convgen.kernels.facts",
        ]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parent.parent), prepend=os.pathsep)
        forkserver.ensure_running()
    return context


@pytest.fixture
def forked(forks: multiprocessing.context.ForkServerContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that would begin with an interpreter of its own, which takes two seconds to import torch, is forked."""
    usual = multiprocessing.get_context
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind=None: forks if kind == "spawn" else usual(kind))


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Races of as few rounds as an interval takes, whatever they leave open."""
    monkeypatch.setattr("convgen.tune.tuner.RACE_S", 0.0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What imports and caches hold stays: the garbage collector need not go over it again, a fifth of all time."""
    if item.path not in frozen:
        frozen.add(item.path)
        gc.collect()
        gc.freeze()
        list_operators_once()


def list_operators_once() -> None:
    """torch.export asks for torch's composite operators of every namespace there is, each time again, a tenth of all
    that importing takes: they are there after the first time."""
    export: Any = sys.modules.get("torch._export.utils")
    if export is not None and not hasattr(export._materialize_cpp_cia_ops, "cache_info"):
        export._materialize_cpp_cia_ops = cache(export._materialize_cpp_cia_ops)


frozen: set[Path] = set()  # before each file


# A search may find one rank best for networks as small as these; tests/test_networks_letters.py has what is said of it.
IDLE = pytest.mark.filterwarnings("ignore::convgen.errors.IdleAxisWarning")


def pytest_report_header() -> str:
    return f"cases: {sampling.said()}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Of a quiet run, whose header nobody sees."""
    if terminalreporter.verbosity < 0:
        terminalreporter.write_line(f"cases: {sampling.said()}")


# torch says of code of its own that it is old, where a test's is the first to use it.
TORCHS_OWN = (
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    settled: dict[tuple[Path, str], list[str]] = {}
    passed_over: set[str] = set()
    quick: set[str] = set()
    for item in items:
        for mark in (IDLE, *TORCHS_OWN):
            item.add_marker(mark)
        stem, name = Path(item.path).stem, getattr(item, "originalname", item.name)
        if stem.startswith(SLOW) and (name not in QUICK or name in quick):
            item.add_marker("slow")
        quick.add(name)
        for marker, stems in (("machine", MACHINE), ("versions", VERSIONS)):
            if stem.startswith(stems):
                item.add_marker(marker)
        if not stem.startswith(ALWAYS) and not sampling.is_taken(f"{stem} {name}"):
            passed_over.add(item.nodeid)
        if stem.startswith(SETTLED):
            settled.setdefault((item.path, name), []).append(item.nodeid)
    if sampling.ALL or any("::" in arg for arg in config.args):
        return
    left_out = {case for cases in settled.values() for case in {*cases} - sampling.chosen(cases)}
    if not config.option.markexpr and not any(arg.endswith(".py") for arg in config.args):
        left_out |= passed_over
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]
