"""convgen/papers: the list of what the papers say in numbers, and each number beside the models'."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from convgen.papers.statements import statements


def test_the_list_has_every_cell_and_every_text() -> None:
    """By hand: [SP] 39, 33 and 26 times, 30, 24 and 17 gains; [SW] 70 times and 38 rates of Table 2."""
    assert sum(s.where.startswith("6.3") for s in statements()) == 10
    tables = Counter((s.paper, s.where) for s in statements() if s.where.startswith("Table") and s.asked)
    assert tables == {
        ("CF", "Table 1"): 9, ("SP", "Table I"): 39 + 30, ("SP", "Table II"): 33 + 24, ("SP", "Table III"): 26 + 17,
        ("SW", "Table 2"): 70 + 38, ("SW", "Table 3"): 15 + 10,
    }  # fmt: skip


def test_what_is_said_again_names_a_statement_of_the_list() -> None:
    named = {s.name: s for s in statements()}
    for one in statements():
        assert (one.value is None) == (one.sign == "picture" or (one.sign == "words" and one.value is None))
        if one.sign == "again":
            found = re.search(r"\(([\w.]+\w)", one.says)
            assert found is not None, one
            first = named[found[1]]
            assert first.asked and first.value is not None and one.value is not None
            assert (one.value / 100 if one.unit == "percent" else one.value) == pytest.approx(first.value, rel=0.06)
