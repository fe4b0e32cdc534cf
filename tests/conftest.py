"""Imported before any test, so before torch: see convgen/verify/__init__.py."""

import os

import convgen.verify  # noqa: F401  sets MKL up for forked ranks

os.environ["CONVGEN_CACHE"] = os.devnull + "-no-cache"  # whoever tunes has another one
