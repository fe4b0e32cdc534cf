"""Imported before any test, so before torch: see convgen/verify/__init__.py."""

import convgen.verify  # noqa: F401  sets MKL up for forked ranks
