"""Imported before any test, so before torch: see convgen/verify/__init__.py."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import convgen.verify  # noqa: F401  sets MKL up for forked ranks

os.environ["CONVGEN_CACHE"] = os.devnull + "-no-cache"  # whoever tunes has another one
# pytest's processes fill the cores, and a process is safest to fork while no kernel has run on several threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The same draws in every run, with no word on how long they take: a failure is a change's, not the day's.
settings.register_profile(
    "suite", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

# What compiles or interprets kernels, runs whole modules, emulates, starts processes or measures: not for `make quick`.
SLOW = (
    "test_bench", "test_calibrate", "test_docs", "test_examples", "test_fuzz", "test_kernels", "test_local",
    "test_module", "test_resources", "test_runtime", "test_sw26010", "test_torch", "test_transposed", "test_tune",
)  # fmt: skip
# One look each at what these would find.
QUICK = ("test_any_layer[range(0, 10)]", "test_processes_and_virtual_ranks_agree_bit_by_bit[0-float64]")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).stem.startswith(SLOW) and item.name not in QUICK:
            item.add_marker("slow")
