"""Relations against their definition `row`, and against the matrices that ATen's operators make of unit vectors."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from random import Random

import numpy as np
import pytest
import torch

from convgen.algebra import relations
from convgen.algebra.blocks import span
from convgen.algebra.relations import Blocks, Clamp, Ratio, ReadBy, Relation, Reverse, Table, Taps, Through
from convgen.operations.linear_maps import of_unit_vectors, table
from convgen.operations.upsampling import Upsample

DRAWS = 120 * int(os.environ.get("DRAWS", "1"))
AROUND = 40  # rows of a tensor are looked for so far outside of it
FAR = 100  # and rows that read it


def taps(draw: Random) -> Taps:
    return Taps(draw.randint(1, 5), draw.randint(1, 4), draw.randint(-3, 6), draw.randint(1, 3))


def rows_of(draw: Random) -> Table:
    starts = [draw.randint(0, 9) for _ in range(AROUND)]
    return Table(tuple((s, s + draw.randint(0, 3)) for s in starts))


def blocks_of(draw: Random) -> Blocks:
    return Blocks(draw.randint(0, 12), tuple(draw.randint(1, 3) for _ in range(draw.randint(1, 3))))


def clamp(draw: Random) -> Clamp:
    below, extent = draw.randint(-3, 6), draw.randint(1, 12)
    return Clamp(extent, below, draw.randint(max(-3, -extent - below), 6))


RELATIONS: dict[str, Callable[[Random], Relation]] = {
    "taps": taps,
    "read by": lambda draw: ReadBy(taps(draw)),
    "ratio": lambda draw: Ratio(draw.randint(1, 6), draw.randint(1, 6), draw.randint(1, 3)),
    "reverse": lambda draw: Reverse(draw.randint(1, 12)),
    "clamp": clamp,
    "clamped by": lambda draw: clamp(draw).inverse,
    "table": rows_of,
    "blocks": blocks_of,
    "block of": lambda draw: blocks_of(draw).inverse,
    "through": lambda draw: Through(
        taps(draw), draw.randint(1, 12), draw.choice((taps, lambda d: ReadBy(taps(d))))(draw)
    ),
}
# Whose windows are the smallest interval: where stride and dilation leave gaps, ReadBy's ends may be read by no row.
HULLS = frozenset(RELATIONS) - {"read by", "through"}


def some_block(draw: Random) -> tuple[int, int]:
    lo = draw.randint(0, 12)
    return lo, lo + draw.choice((0, 1, 1, 2, 5))


@pytest.mark.parametrize("kind", RELATIONS)
def test_a_window_holds_every_row_that_is_read(kind: str) -> None:
    draw = Random(f"window {kind}")
    for _ in range(DRAWS):
        relation, (a, b) = RELATIONS[kind](draw), some_block(draw)
        lo, hi = relation.window(a, b)
        read = {r for o in range(a, b) for r in relation.row(o)}
        assert read <= set(range(lo, hi)), (relation, a, b)
        if a == b:
            assert lo == hi, (relation, a, b)
        elif kind in HULLS:
            assert (lo, hi) == ((min(read), max(read) + 1) if read else (lo, lo)), (relation, a, b)


@pytest.mark.parametrize("kind", RELATIONS)
def test_a_hull_has_the_rows_of_a_window_that_lie_in_the_tensor(kind: str) -> None:
    """Of windows of any size and place, and of arrays of them."""
    draw = Random(f"hull {kind}")
    for _ in range(DRAWS):
        relation, extent = RELATIONS[kind](draw), draw.randint(1, 12)
        windows = [(lo, lo + draw.choice((0, 1, 2, 5, 9))) for lo in (draw.randint(-20, 20) for _ in range(4))]
        hulls = [relation.hull(*window, extent) for window in windows]
        for (lo, hi), (first, last) in zip(windows, hulls, strict=True):
            assert 0 <= first <= last <= extent, (relation, lo, hi, extent)
            assert [*range(first, last)] == [row for row in range(lo, hi) if 0 <= row < extent]
        found = relation.hull(*(np.array(side) for side in zip(*windows, strict=True)), extent)
        assert [*zip(*(side.tolist() for side in found), strict=True)] == hulls


@pytest.mark.parametrize("kind", RELATIONS)
def test_integers_need_no_numpy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relations, "np", None)
    draw = Random(f"integers {kind}")
    for _ in range(DRAWS // 4):
        relation, extent = RELATIONS[kind](draw), draw.randint(1, 12)
        window = relation.window(*some_block(draw))
        ends = [*window, *relation.hull(*window, extent)]
        assert {type(n) for n in ends} == {int}


@pytest.mark.parametrize("kind", RELATIONS)
def test_arrays_of_blocks_as_integers(kind: str) -> None:
    draw = Random(f"arrays {kind}")
    for _ in range(DRAWS // 4):
        relation, blocks = RELATIONS[kind](draw), [some_block(draw) for _ in range(6)]
        lo, hi = relation.window(*(np.array(side) for side in zip(*blocks, strict=True)))
        assert [*zip(lo.tolist(), hi.tolist(), strict=True)] == [relation.window(*block) for block in blocks]


@pytest.mark.parametrize("kind", [k for k in RELATIONS if k != "table"])
def test_an_inverse_has_every_row_that_reads_a_row(kind: str) -> None:
    """And no other: exactly so. Its own inverse is the relation."""
    draw = Random(f"inverse {kind}")
    for _ in range(DRAWS):
        relation = RELATIONS[kind](draw)
        if isinstance(relation, Ratio) and relation.a != 1 != relation.unit:
            with pytest.raises(ValueError, match="closed form"):
                _ = relation.inverse
            continue
        for row in range(12):
            readers = {o for o in range(-FAR, FAR) if row in relation.row(o)}
            found = relation.inverse.row(row)
            assert set(found) == readers, (relation, row)
            assert len(found) == len(readers), (relation, row)
        for o in range(AROUND):
            assert set(relation.inverse.inverse.row(o)) == set(relation.row(o)), (relation, o)


def test_blocks_are_what_ranks_hold() -> None:
    draw = Random("blocks")
    for _ in range(DRAWS):
        found = blocks_of(draw)
        for o, index in enumerate(product(*map(range, found.sizes))):
            lo, hi = span(found.extent, found.extent or 1, found.sizes, index, 0)
            assert [*found.row(o)] == [*range(lo, hi)], (found, o)


def test_the_inverse_of_a_table_is_the_hull_of_what_reads() -> None:
    draw = Random("inverse table")
    for _ in range(DRAWS // 4):
        relation = rows_of(draw)
        for row in range(15):  # some behind all that are read
            readers = [o for o in range(AROUND) if row in relation.row(o)]
            assert set(readers) <= set(relation.inverse.row(row))
            assert relation.inverse.window(row, row + 1) == ((readers[0], readers[-1] + 1) if readers else (0, 0))


def test_its_window_begins_and_ends_at_rows_whose_windows_reach_the_block() -> None:
    """Closed form, so not always the hull, but no wider than rows whose own windows meet the block."""
    draw = Random("reach")
    for _ in range(DRAWS):
        forward, (a, b) = taps(draw), some_block(draw)
        lo, hi = ReadBy(forward).window(a, b)
        near = [
            o
            for o in range(-AROUND, AROUND)
            if a < b and forward.window(o, o + 1)[0] < b and forward.window(o, o + 1)[1] > a
        ]
        assert [*range(lo, hi)] == near, (forward, a, b)


Operator = Callable[[torch.Tensor], torch.Tensor]


def convolution(draw: Random) -> tuple[Relation, Operator, int]:
    k, s, p, d, n = draw.randint(1, 3), draw.randint(1, 3), draw.randint(0, 2), draw.randint(1, 2), draw.randint(5, 12)
    w = torch.ones(1, 1, k, dtype=torch.float64)
    return Taps(k, s, p, d), lambda x: torch.conv1d(x.movedim(0, 1), w, None, s, p, d).movedim(0, 1), n


def transposed(draw: Random) -> tuple[Relation, Operator, int]:
    k, s, d, n = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 2), draw.randint(2, 9)
    w, p = torch.ones(1, 1, k, dtype=torch.float64), draw.randint(0, (d * (k - 1)) // 2)
    back = torch.conv_transpose1d
    return ReadBy(Taps(k, s, p, d)), lambda x: back(x.movedim(0, 1), w, None, s, p, 0, 1, d).movedim(0, 1), n


def adaptive(draw: Random) -> tuple[Relation, Operator, int]:
    n, out = draw.randint(1, 12), draw.randint(1, 12)
    return Ratio(n, out), lambda x: torch.adaptive_avg_pool1d(x, [out]), n


def average(draw: Random) -> tuple[Relation, Operator, int]:
    s, p = draw.randint(1, 3), draw.randint(0, 1)
    return Taps(2, s, p), lambda x: torch.nn.functional.avg_pool1d(x, 2, s, p), draw.randint(2, 12)


def flip(draw: Random) -> tuple[Relation, Operator, int]:
    n = draw.randint(1, 9)
    return Reverse(n), lambda x: x.flip(2), n


def replicate(draw: Random) -> tuple[Relation, Operator, int]:
    below, above, n = draw.randint(0, 3), draw.randint(0, 3), draw.randint(1, 9)
    return Clamp(n, below, above), lambda x: torch.nn.functional.pad(x, [below, above], "replicate"), n


def pad_and_slice(draw: Random) -> tuple[Relation, Operator, int]:
    p, s = draw.randint(0, 3), draw.randint(1, 3)
    return Taps(stride=s, pad=p), lambda x: torch.nn.functional.pad(x, [p, p])[..., ::s], draw.randint(1, 9)


@pytest.mark.parametrize(
    "kind",
    [convolution, transposed, adaptive, average, flip, replicate, pad_and_slice],
    ids=lambda kind: kind.__name__,
)
def test_relations_are_what_operators_read(kind: Callable[[Random], tuple[Relation, Operator, int]]) -> None:
    """Row o of an operator's matrix is zero exactly where the relation says that it reads nothing."""
    draw = Random(f"matrix {kind.__name__}")
    for _ in range(DRAWS // 4):
        relation, operator, n = kind(draw)
        for o, row in enumerate(of_unit_vectors(operator, n)):
            assert set(row.nonzero().flatten().tolist()) == {r for r in relation.row(o) if 0 <= r < n}, (relation, n, o)


def test_a_table_is_the_hull_of_a_matrix() -> None:
    reflected = of_unit_vectors(lambda x: torch.nn.functional.pad(x, [2, 1], "reflect"), 4)
    assert table(reflected).window(0, 3) == (0, 3)  # rows 2, 1, 0
    assert table(torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0]])).rows == ((1, 4), (0, 0))


def test_hulls_of_interpolation_need_no_matrix() -> None:
    """Of extents far larger than what a row reads, up and down, with scales of one's own."""
    draw = Random("hulls")
    for _ in range(DRAWS // 2):
        n, size = draw.randint(1, 90), draw.randint(1, 90)
        mode = draw.choice(("nearest", "nearest-exact", "linear", "bicubic", "linear-aa", "bicubic-aa"))
        scales = (size / n * draw.choice((1.0, 0.9, 1.1)),) if draw.random() < 0.3 and "aa" not in mode else None
        corners = draw.random() < 0.3 and "nearest" not in mode
        columns = ((), ()) if mode in ("nearest", "nearest-exact", "linear") else ((2,), (2,))
        shape, out = (1, 1, n, *columns[0]), (size, *columns[1])
        some = None if scales is None else (*scales, *(1.0 for _ in columns[0]))
        operation = Upsample(shape, out, mode, corners, some)
        matrix, relation = operation.matrix(2), operation.relation(2)
        assert [relation.window(o, o + 1) for o in range(size)] == [*table(matrix).rows], operation
