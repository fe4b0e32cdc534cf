"""Passes for a GPU's kernels, in an order in which each finds what it needs."""

from __future__ import annotations

from convgen.passes.contract import NetworkPass
from convgen.passes.fuse_chains import FuseChains
from convgen.passes.fuse_epilogues import FuseEpilogues
from convgen.passes.fuse_forms import FuseForms
from convgen.passes.fuse_masks import FuseMasks

FUSING: tuple[NetworkPass, ...] = (FuseEpilogues(), FuseMasks(), FuseChains(), FuseForms())
