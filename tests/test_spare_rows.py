"""Convolutions that are given rows behind their last window make what they make without them."""

from __future__ import annotations

import random

import pytest
import torch

from convgen.algebra.conv import Conv, Spatial
from convgen.operations.convolution import Convolution
from convgen.operations.row import standing
from convgen.operations.spare import spare_rows, with_spare


@pytest.mark.parametrize("seed", range(12))
def test_rows_behind_the_last_window_change_nothing(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    spatial = tuple(
        Spatial(name, draw.randint(6, 13), draw.randint(1, 3), draw.randint(2, 4), draw.randint(0, 1)) for name in "HW"
    )
    conv = Conv(2, 3, 4, spatial)
    forward, by_filter = Convolution("forward", conv), Convolution("backward_filter", conv)
    signature = forward.signatures[0]
    blocks = {i: (0, n - (draw.random() < 0.3 and i in "HW")) for i, n in signature.extents}
    at, of_filter = (standing(one.signatures[0], blocks) for one in (forward, by_filter))
    if not all(hi > lo for rows in at.inside for lo, hi in rows):
        pytest.skip("an empty block")
    held = [*at.inside[0][:2], *((lo, min(s.extent, hi + draw.randint(0, 5)))
            for s, (lo, hi) in zip(spatial, at.inside[0][2:], strict=True))]  # fmt: skip
    spare = spare_rows(forward, 0, at, [held, None])
    wide = with_spare(at, spare)
    of_wide = with_spare(of_filter, spare_rows(by_filter, 0, of_filter, [None, held]))
    assert of_wide.inside[1] == wide.inside[0]
    x, w = (torch.randn(o.shape, dtype=torch.float64) for o in signature.inputs)
    narrow, wider = (x[tuple(slice(*rows) for rows in one.inside[0])] for one in (at, wide))
    for (lo, hi), (_, last), (_, end), s in zip(
        wide.inside[0][2:], at.inside[0][2:], held[2:], spatial, strict=True
    ):  # either all that is there, or what is read
        assert lo <= last <= hi <= end and (hi == end if 0 < end - last < s.stride and hi != last else hi == last)
    (made,), (same,) = forward.local(0, at, narrow, w), forward.local(0, wide, wider, w)
    torch.testing.assert_close(same, made)
    dy, both = torch.randn_like(made), (True, True)
    dx, dw = forward.vjp(0, at, both, forward.kept(0, at, both, narrow, w)[1], dy)
    wider_dx, wider_dw = forward.vjp(0, wide, both, forward.kept(0, wide, both, wider, w)[1], dy)
    torch.testing.assert_close(wider_dw, dw)
    sides = [
        n for (_, hi), (_, end) in zip(at.inside[0][:1:-1], wide.inside[0][:1:-1], strict=True) for n in (0, end - hi)
    ]
    torch.testing.assert_close(wider_dx, torch.nn.functional.pad(dx, sides))
    torch.testing.assert_close(by_filter.local(0, of_wide, dy, wider)[0], dw)
    torch.testing.assert_close(by_filter.local(0, of_filter, dy, narrow)[0], dw)
