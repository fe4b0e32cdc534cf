"""Imported before any test, so before torch: see convgen/verify/__init__.py."""

import os

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
