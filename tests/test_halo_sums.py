"""What several ranks have addends of, added where it is stored: as one sum in rank order would be, to the bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from runtime_parts import ROOT

assert (ROOT / "templates").is_dir(), "which runtime_parts has put on the path"
from runtime.travel import add_up, cells_of  # noqa: E402


def box(rng: random.Random, within: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return tuple((lo, hi) for lo, hi in (sorted((rng.randint(*side), rng.randint(*side))) for side in within))


@pytest.mark.parametrize("seed", range(20))
def test_cells_add_up_as_a_whole_does(seed: int) -> None:
    rng = random.Random(seed)
    manual_seed: Any = torch.manual_seed
    manual_seed(seed)
    kept = tuple((lo, lo + rng.randint(1, 6)) for lo in (rng.randint(0, 5) for _ in range(rng.randint(1, 3))))
    ranks = rng.randint(1, 5)
    me, dtype = rng.randrange(ranks), rng.choice((torch.bfloat16, torch.float32))
    boxes = [None if r == me else box(rng, kept) for r in range(ranks)]
    own = torch.randn([hi - lo for lo, hi in kept]).to(dtype)
    come = [None if b is None else torch.randn([hi - lo for lo, hi in b]).to(dtype) for b in boxes]
    wanted = torch.zeros(own.shape)
    for b, part in zip(boxes, come, strict=True):
        where = tuple(slice(lo - k, hi - k) for (lo, hi), (k, _) in zip(b or kept, kept, strict=True))
        wanted[where] += own if part is None else part
    out = own.clone()
    for cell in cells_of(kept, boxes):
        assert len(cell.addends) > 1
        rows = out[cell.at]
        add_up(rows, [rows if k is None else come[k][where] for k, where in cell.addends], torch.float32)
    assert torch.equal(out, wanted.to(dtype))
