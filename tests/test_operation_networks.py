"""Random networks of rows with roles and storage of their own each, forward and backward, against autograd."""

from __future__ import annotations

import os
from random import Random

import pytest
from random_networks import a_network

DRAWS = int(os.environ.get("DRAWS", "1"))


@pytest.mark.parametrize("seed", range(25 * DRAWS))
def test_a_network_of_rows_is_right_whatever_its_layouts(seed: int) -> None:
    a_network(Random(f"network {seed}")).check()
