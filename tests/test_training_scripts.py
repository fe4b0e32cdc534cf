"""Training as people write it, by the same lines on one process and on two, with both kinds of parameters.

The scripts are those of training_ranks.py that need torch alone; what is refused is so on all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import training_ranks
from training_ranks import KINDS
from training_steps import Script

MIXED = "mixed torch.Tensor and DTensor"
FLATTENED = "Attempted to flatten multiple dimensions"  # torch 2.11, of a DTensor that is split behind the first
BLOCKS = "would take blocks for whole tensors"
COMPILED = "what it computes is compiled"
# Of two kinds of parameters in one list torch's operations on lists want one.
OF_DTENSORS = {
    "AdamW, foreach=True": MIXED,
    "AdamW, fused=True": MIXED,
    "EMA: AveragedModel, get_ema_multi_avg_fn, buffers": MIXED,
    "L-BFGS": f"{MIXED}|{FLATTENED}",
    "a backbone and an ordinary head, foreach=True, clip_grad_norm_": MIXED,
    "weight decay in the loss": MIXED,
}
OF_BOTH = {
    "Adafactor": BLOCKS,
    "L-BFGS": BLOCKS,
    "Muon by hand, of convolutions too": BLOCKS,
    "SWA: update_bn": COMPILED,
    "gradient centralisation": BLOCKS,
}
REFUSED = {"dtensors": OF_BOTH | OF_DTENSORS, "blocks": OF_BOTH}
# A Block's shape is this rank's: what a script takes from it differs (docs/torch.md), and of Muon the ranks part.
WRONG, LEFT_OUT = ("rates by fan-in",), ("torch's Muon (bfloat16) of the head, AdamW of the rest",)
OF_COPIES = (
    "AdamW, fused=True", "L-BFGS", "Muon by hand, of convolutions too", "gradient centralisation",
    "rates by fan-in", "torch's Muon (bfloat16) of the head, AdamW of the rest",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(packages: Path, monkeypatch: pytest.MonkeyPatch, doubles: None) -> None:
    monkeypatch.setenv("CONVGEN_CACHE", str(packages / "cache"))


def outcomes(
    grid: str,
    names: Sequence[str],
    kinds: Sequence[str] = KINDS,
    among: Sequence[Script] = training_ranks.OF_TORCH,
) -> dict[tuple[str, str], Any]:
    """By script and kind."""
    (case,) = [case for case in training_ranks.CASES if case.name == grid]
    runs = [(s, kind) for s in among if s.name in names for kind in kinds]
    assert {s.name for s, _ in runs} == set(names)
    found = training_ranks.run(case, runs)
    return {(s.name, kind): one for (s, kind), one in zip(runs, found, strict=True)}


def test_with_split_and_ragged_parameters() -> None:
    names = [s.name for s in training_ranks.OF_TORCH if s.name not in LEFT_OUT]
    for (name, kind), found in outcomes("C=2, ragged", names).items():
        refusal = REFUSED[kind].get(name)
        expected = "wrong" if name in WRONG else "refused" if refusal else "right"
        assert found.verdict == expected, f"{name}, {kind}: {found}"
        assert refusal is None or re.search(refusal, found.text), f"{name}, {kind}: {found}"


# Torch has no `_foreach_copy_` of DTensors.
OF_LISTS = {"bfloat16 with float32 copies, foreach": "_foreach_copy_"}


@pytest.mark.parametrize("grid", ["N=2", "C=2, even"])
def test_mixed_precision(grid: str) -> None:
    """Types are one process's, and so are the steps that a scaler skips, and its scales."""
    found = outcomes(grid, [s.name for s in training_ranks.MIXED], KINDS, training_ranks.MIXED)
    for (name, kind), one in found.items():
        refusal = OF_LISTS.get(name) if kind == "dtensors" else None
        assert one.verdict == ("refused" if refusal else "right"), f"{name}, {kind}: {one}"
        assert refusal is None or refusal in one.text, f"{name}, {kind}: {one}"


def test_scalers_skip_a_step() -> None:
    """Of what test_mixed_precision compares with: one step is not there, and the scale is halved in it."""
    case = training_ranks.CASES[0]
    for s in training_ranks.MIXED:
        if "overflow" in s.name:
            true = training_ranks.truth(s, case)
            assert true["steps"].tolist() == [1, 2, 4, 5, 6], s.name
            assert true["scales"].tolist() == [64, 128, 64, 64, 128, 128], s.name
            assert all(t.isfinite().all() for n, t in true.items() if n.startswith("model")), s.name


def test_with_parameters_that_all_ranks_hold() -> None:
    """Gradients lie in memory as their parameters do; a Block that is the whole tensor takes what a tensor takes."""
    for (name, kind), found in outcomes("H=2", OF_COPIES).items():
        assert found.verdict == "right", f"{name}, {kind}: {found}"


def test_what_a_script_gives_is_compared() -> None:
    """A result of another number, shape or name is none of one process's."""
    import torch

    true = {"model w": torch.tensor([1.0, -2.0, float("inf")]), "losses": torch.tensor([0.5])}
    assert training_ranks.error_of(dict(true), true)[0] == 0
    far = training_ranks.error_of(true | {"model w": torch.tensor([1.0, -2.5, float("inf")])}, true)
    assert far[1] == "model w" and far[0] > 0
    assert training_ranks.error_of(true | {"losses": torch.tensor([float("nan")])}, true) == (float("inf"), "losses")
    assert training_ranks.error_of({"losses": true["losses"]}, true)[0] == float("inf")
    assert training_ranks.error_of(true | {"losses": torch.zeros(2)}, true)[0] == float("inf")


def test_ranks_that_part_are_said_to() -> None:
    right, refused = training_ranks.Outcome("right", 1e-16), training_ranks.Outcome("refused", text="ValueError: no")
    assert training_ranks.of_ranks([right, refused]).verdict == "parted"
    assert training_ranks.of_ranks([refused, refused]).verdict == "refused"
    assert training_ranks.of_ranks([right, training_ranks.Outcome("wrong", 0.1, "model w")]).verdict == "wrong"
