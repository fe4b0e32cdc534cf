"""The bet: layouts, windows, reductions and gradients of every operation follow from its signature alone.

Random operations, relations and grids with *free* roles and storage: named layouts would hide mistakes. Against the
reference's autograd: results, the vjp of local code, and the gradients that are rows of their own, with roles of
their own.
"""

from __future__ import annotations

import os
from random import Random

import pytest
from operation_cases import CASES, check

DRAWS = 12 * int(os.environ.get("DRAWS", "1"))


@pytest.mark.parametrize("kind", CASES)
def test_any_roles_and_storage_give_the_whole_operation_and_its_gradients(kind: str) -> None:
    draw = Random(f"bet {kind}")
    for _ in range(DRAWS):
        check(draw, *CASES[kind](draw))
