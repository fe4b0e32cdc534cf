"""Reads from striped disk arrays: bytes and arrays by closed form and byte by byte, seconds against small steps."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from convgen.commands.main import cli
from convgen.errors import InputError
from convgen.sw26010.storage.reading import Disks, at_least_s, drawn_starts, read_together, single_split_s
from convgen.sw26010.storage.striping import IMAGE_BYTES, MIB, Striping

stripings = st.builds(Striping, st.integers(1, 7), st.integers(1, 13))


@settings(max_examples=150)
@given(stripings, st.integers(0, 200), st.integers(0, 90))
def test_bytes_of_arrays_are_what_every_byte_says(striping: Striping, start: int, size: int) -> None:
    home = [byte // striping.stripe_bytes % striping.arrays for byte in range(start, start + size)]
    counted = [home.count(array) for array in range(striping.arrays)]
    assert striping.array_bytes(start, size).tolist() == counted
    assert striping.touched(start, size) == len(set(home)) <= striping.most_touched(size)
    pieces = striping.pieces(start, size)
    assert [array for array, part in pieces for _ in range(part)] == home
    assert all(one[0] != other[0] for one, other in pairwise(pieces))


@settings(max_examples=50)
@given(stripings, st.integers(1, 60))
def test_the_most_and_the_mean_are_those_over_all_starts(striping: Striping, size: int) -> None:
    period = striping.arrays * striping.stripe_bytes
    assert max(striping.touched(start, size) for start in range(period)) == striping.most_touched(size)
    mean = np.mean([striping.stripes(start, size) for start in range(striping.stripe_bytes)])
    assert striping.mean_stripes(size) == pytest.approx(float(mean))


def in_small_steps(striping: Striping, disks: Disks, starts: list[int], size: int, step: float) -> list[float]:
    """The same sharing, a little at a time."""
    left = [striping.pieces(start, size) for start in starts]
    ends, now = [0.0] * len(starts), 0.0
    while any(left):
        on = [pieces[0][0] for pieces in left if pieces]
        for i, pieces in enumerate(left):
            if pieces:
                array, part = pieces[0]
                part -= step * min(disks.link_bytes_per_s, disks.array_bytes_per_s / on.count(array))  # type: ignore[assignment]
                left[i] = [(array, part), *pieces[1:]] if part > 0 else pieces[1:]
                if not left[i]:
                    ends[i] = now + step
        now += step
    return ends


@settings(max_examples=25)
@given(stripings, st.lists(st.integers(0, 100), min_size=1, max_size=6), st.integers(1, 30), st.integers(1, 12))
def test_seconds_are_those_of_sharing_in_small_steps(
    striping: Striping, starts: list[int], size: int, link: int
) -> None:
    disks = Disks(8.0, float(link))
    run = read_together(striping, disks, starts, size)
    assert run.moved.sum() == size * len(starts)
    assert run.last_s >= at_least_s(striping, disks, starts, size) * (1 - 1e-9)
    step = size / 8 / 400
    slow = in_small_steps(striping, disks, starts, size, step)
    # A piece may end a step late, and so may everything after it; readers shift by as much.
    slack = step * 2 * (1 + sum(len(striping.pieces(start, size)) for start in starts))
    assert run.seconds.tolist() == pytest.approx(slow, abs=slack)


@settings(max_examples=50)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 40))
def test_reads_inside_stripes_take_what_the_closed_form_says(processes: int, size: int, link: int) -> None:
    disks = Disks(10.0, float(link))
    one = read_together(Striping(1, 64), disks, [0] * processes, size)
    assert one.last_s == pytest.approx(single_split_s(disks, processes, size))
    striping = Striping(4, 64)  # a stripe each, dealt out evenly
    dealt = read_together(striping, disks, [64 * i for i in range(processes)], size)
    most = -(-processes // 4)
    assert dealt.last_s == pytest.approx(max(size / link, most * size / 10.0))


def test_the_paper_s_read_touches_two_arrays_at_most() -> None:
    striping, size = Striping(32, 256 * MIB), 256 * IMAGE_BYTES
    assert size == 192 * MIB
    assert striping.most_touched(size) == 2
    assert striping.mean_stripes(size) == pytest.approx(1.75)
    assert Striping(1, 256 * MIB).most_touched(size) == 1


def test_the_paper_s_bound_holds_on_average_and_not_for_every_array() -> None:
    found = json.loads(call("io", "--processes", "256,1024", "--json"))
    for row in found["rows"]:
        assert row["processes_an_array"] <= row["paper_processes_an_array"] < row["processes_on_the_busiest"]
        assert row["striped_bytes_per_s"] > 10 * row["single_split_bytes_per_s"]


def call(*arguments: object) -> str:
    return CliRunner().invoke(cli, ["sw26010", *map(str, arguments)], catch_exceptions=False).output


def test_io_prints_its_table() -> None:
    text = call("io", "--processes", "1,32")
    assert "at most 2 arrays, 1.75 on average" in text and "[SW] 2N/arrays" in text
    same = call("io", "--processes", "8", "--arrays", 1)
    assert "at most 1 array," in same


def test_what_cannot_be_read_is_refused() -> None:
    for arguments, words in (
        (("--processes", "0"), "whole numbers from 1"),
        (("--processes", "4,x"), "whole numbers from 1"),
        (("--batch", str(2**20), "--processes", "9000"), "whole numbers from 1 to 8192"),
    ):
        done = CliRunner().invoke(cli, ["sw26010", "io", *arguments])
        assert isinstance(done.exception, InputError) and words in str(done.exception)
    with pytest.raises(InputError, match="hold no file"):
        Striping(0, 1)
    with pytest.raises(InputError, match="from a file of"):
        drawn_starts(1, 10, 9, 1, 0)
    with pytest.raises(InputError, match="B/s"):
        Disks(0.0)
