"""Steps of training in mixed precision on ranks are as far from the module's as a unit in the last place takes it."""

from __future__ import annotations

import pytest
from sampling import cases_of
from steps_on_ranks import LIMIT, MIXES, Steps, WithKernels
from test_networks_autocast import X, made

KINDS = ("residual", "decoder", "next", "attends")
GRIDS = ({"N": 2}, {"H": 2}, {"C": 2}, {"N": 2, "H": 2})
CASES = [(kind, mix, GRIDS[(i + k) % 4]) for i, kind in enumerate(KINDS) for k, mix in enumerate(MIXES)]


def steps_of(kind: str, mix: str) -> Steps:
    return Steps(made(kind), X.shape, MIXES[mix], count=5, draws=1)


@pytest.mark.parametrize("case", cases_of(len(CASES), "steps in mixed precision"))
def test_steps_are_within_rounding(case: int) -> None:
    """`python bench/mixed_steps.py` has larger models, and all grids."""
    kind, mix, grid = CASES[case]
    steps = steps_of(kind, mix)
    assert steps.is_repeated
    # On another processor other draws come: the bench's limit is of many, this one of three.
    far, fault = steps.check(grid, ("blocks", "dtensors")[case % 2], limit=4)
    assert not fault, (kind, mix, grid, str(far), str(steps.unit), fault)


@pytest.mark.parametrize("mix", ["autocast to bfloat16", "autocast to float16"])
def test_steps_of_kernels(mix: str) -> None:
    """A GPU's package that is compiled for autocast, in the interpreter: its kernels of the low type train as well."""
    steps = Steps(WithKernels(), (2, 8, 8, 9), MIXES[mix], count=3, draws=2, kernels=True)
    far, fault = steps.check({"H": 2}, limit=4)
    assert steps.ran and not fault, (str(far), str(steps.unit), fault)


def test_what_is_no_rounding_is_told() -> None:
    """Ranks that compute in another type, and a module whose inputs are some units off."""
    steps = steps_of("residual", "autocast to bfloat16")
    assert steps.apart(steps.own(lambda x: 32 * x.sign())).units(steps.unit) > LIMIT
    steps.mix = MIXES["autocast to float16"]
    assert steps.check({"N": 2})[1].startswith("types of output 0")
