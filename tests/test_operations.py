"""The bet: layouts, windows, reductions and gradients of every operation follow from its signature alone.

Random operations, relations and grids with *free* roles and storage: named layouts would hide mistakes. Against the
reference's autograd: results, the vjp of local code, and the gradients that are rows of their own, with roles of
their own. `bench/bet.py` draws thousands.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import brute
import pytest
from network_cases import ALL_CASES as CASES
from operation_cases import check

from convgen.algebra.relations import Ratio, ReadBy, Table, Taps
from convgen.algebra.signature import Signature
from convgen.operations.average_pooling import AveragePool
from convgen.operations.moments import Moments
from convgen.operations.reductions import Reduce
from convgen.operations.row import At
from convgen.operations.rows import Rolled, Wrapped

DRAWS = 12 * int(os.environ.get("DRAWS", "1"))


@pytest.mark.parametrize("kind", CASES)
def test_any_roles_and_storage_give_the_whole_operation_and_its_gradients(kind: str) -> None:
    draw = Random(f"bet {kind}")
    for _ in range(DRAWS):
        check(draw, *CASES[kind](draw))


# ---------------------------------------------------------------- what is planted is found
def _shorter(relation: type) -> Callable[[pytest.MonkeyPatch], None]:
    """Windows of several rows lose their last one."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        window = relation.window

        def short(self: Any, lo: Any, hi: Any) -> tuple[Any, Any]:
            first, last = window(self, lo, hi)
            return first, max(last - 1, first + 1) if last > first else last

        patch.setattr(relation, "window", short)

    return plant


def _one_round(patch: pytest.MonkeyPatch) -> None:
    """What comes round is a row off."""
    for operation in (Wrapped, Rolled):
        starts: Any = operation.starts
        patch.setattr(operation, "starts", property(lambda self, of=starts: (of.fget(self)[0] + 1, *of.fget(self)[1:])))


def _never_partial(patch: pytest.MonkeyPatch) -> None:
    wants = Signature.wants
    patch.setattr(Signature, "wants", lambda *asked: wants(*asked)._replace(partial=()))


def _copies_of_gradients(patch: pytest.MonkeyPatch) -> None:
    """Where an operand is copied, its gradient would be whole: nothing summed over roles that don't split it."""
    gradient = Signature.gradient
    patch.setattr(Signature, "gradient", lambda *asked: gradient(*asked)._replace(partial=()))


def _sums_of_copies(patch: pytest.MonkeyPatch) -> None:
    """Gradients summed over axes without a role, too, as a table of adjoints has it: copies counted several times."""
    gradient = Signature.gradient

    def summed(self: Signature, operand: Any, roles: Any) -> Any:
        right = gradient(self, operand, roles)
        return right._replace(partial=tuple(f"a{i}" for i in range(3) if f"a{i}" not in right.split_by))

    patch.setattr(Signature, "gradient", summed)


def _no_window_overlaps(patch: pytest.MonkeyPatch) -> None:
    """What windows have found at rows of others is not added there."""
    gradient = Signature.gradient

    def apart(self: Signature, operand: Any, roles: Any) -> Any:
        right = gradient(self, operand, roles)
        return right._replace(pieces=tuple(p._replace(axes=()) if p.relation else p for p in right.pieces))

    patch.setattr(Signature, "gradient", apart)


def _local_counts(patch: pytest.MonkeyPatch) -> None:
    """Padding of a window counts by what a rank has of it."""
    patch.setattr(AveragePool, "counts", lambda self, d: tuple(t.kernel for t in [self.taps[d - 2]] * self.out[d - 2]))


def _local_means(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reduce, "local", lambda self, way, at, x: (x.mean(self.over, keepdim=self.keep),))


def _local_positions(patch: pytest.MonkeyPatch) -> None:
    """Masks and positions by what is here."""
    local: dict[Any, Any] = {}
    for row in {type(CASES[kind](Random(0))[0]) for kind in ("dropout", "attention")}:
        local[row] = row.local

        def here(self: Any, way: int, at: At, *operands: Any) -> Any:
            blocks = {i: (0, hi - lo) for i, (lo, hi) in at.blocks.items()}
            return local[type(self)](self, way, replace(at, blocks=blocks), *operands)

        patch.setattr(row, "local", here)


def _merged_as_sums(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(brute.REDUCE, "merge", brute.REDUCE["sum"])


def _vjp_of_a_merge(patch: pytest.MonkeyPatch) -> None:
    """Torch's vjp of local code where parts are merged."""
    patch.setattr(Moments, "gradients", {})
    patch.setattr(Signature, "partial", lambda self, roles: ())


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]]] = {
    "a window one row short": (_shorter(Taps), ("convolution", "max pool", "average pool")),
    "a gradient's window one row short": (_shorter(ReadBy), ("convolution", "transposed convolution")),
    "groups one channel short": (_shorter(Ratio), ("convolution", "adaptive average pool", "view", "pixel shuffle")),
    "a table one row short": (_shorter(Table), ("upsample",)),
    "what comes round a row off": (_one_round, ("round the end",)),
    "no partial results": (_never_partial, ("convolution", "moments", "linear, matrix product", "sum, mean")),
    "gradients of copies not summed": (_copies_of_gradients, ("bias, affine, prelu", "convolution", "normalise")),
    "gradients summed over axes without a role": (_sums_of_copies, ("pointwise", "linear, matrix product", "softmax")),
    "halos of gradients not added": (_no_window_overlaps, ("max pool", "upsample", "convolution")),
    "counts of a rank": (_local_counts, ("average pool",)),
    "means of a rank": (_local_means, ("sum, mean",)),
    "positions of a rank": (_local_positions, ("dropout", "attention")),
    "moments added": (_merged_as_sums, ("moments",)),
    "the vjp of a merge": (_vjp_of_a_merge, ("moments",)),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every kind that it concerns, within a few draws: else the test above could not fail."""
    plant, kinds = PLANTED[mistake]
    plant(monkeypatch)
    for kind in kinds:
        assert _found(kind), kind


def _found(kind: str) -> bool:
    draw = Random(f"planted {kind}")
    for _ in range(60):
        operation, given = CASES[kind](draw)
        try:
            check(draw, operation, given)
        except (AssertionError, RuntimeError, IndexError, ValueError):
            return True
    return False
