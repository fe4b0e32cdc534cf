"""The parameters of DistConv's published tests: as many cases as its files have, and some of each kind right."""

from __future__ import annotations

from random import Random

import distconv_cases
import pytest
import torch
from sampling import draws


@pytest.mark.parametrize("kind", ["strides", "splitting", "periodic", "transposed", "channels_last", "wrong"])
def test_published_cases_are_right(kind: str) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        cases = [*distconv_cases.KINDS[kind](8)]
        for case in Random(kind).sample(cases, draws(5)):
            assert case.check().right, case
    finally:
        torch.set_default_dtype(before)


def test_as_many_cases_as_there_are() -> None:
    """Splits of two dimensions are theirs in both orders, with 36 zero-padded and circular ones each on 9 ranks."""
    counts = {name: len([*kind(8)]) for name, kind in distconv_cases.KINDS.items()}
    assert counts["basic"] == 2 * 18
    assert counts["strides"] == 2 * 18
    assert counts["splitting"] == 144 + 36 + 18
    assert counts["periodic"] == 72
    assert counts["transposed"] == 2 * 54
    assert counts["channels_last"] == 2 * 15
    assert counts["with_ddp"] == 18
