"""Random networks of rows with roles and storage of their own each, forward and backward, against autograd."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest
from random_networks import a_network

from convgen.algebra.signature import Signature

DRAWS = int(os.environ.get("DRAWS", "1"))


@pytest.mark.parametrize("seed", range(25 * DRAWS))
def test_a_network_of_rows_is_right_whatever_its_layouts(seed: int) -> None:
    a_network(Random(f"network {seed}")).check()


def all_of_them() -> None:
    for seed in range(25):
        a_network(Random(f"network {seed}")).check()


@pytest.mark.parametrize("roles_count", [True, False], ids=["summed over every axis of copies", "never summed"])
def test_a_table_of_adjoints_is_wrong_somewhere(roles_count: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adjoint of a copy is a sum behind rows whose ranks do different work, and nothing behind one that every rank
    runs alike: whoever says either without looking at roles is found.
    """
    right = Signature.gradient

    def by_table(self: Signature, operand: Any, roles: Any) -> Any:
        wanted = right(self, operand, roles)
        copies = tuple(f"a{i}" for i in range(3) if f"a{i}" not in wanted.split_by)
        return wanted._replace(partial=copies if roles_count else ())

    monkeypatch.setattr(Signature, "gradient", by_table)
    with pytest.raises(AssertionError):
        all_of_them()
