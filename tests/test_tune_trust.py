"""Kernels whose speed is known, and noise: what is stored as sure is right, and a busy machine hides few gains."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from planted_times import BUSY, QUIET, WILD, Noise, counted

from convgen.tune.intervals import LEAST
from convgen.tune.rounds import MORE, Length, Racer, run

DRAWN = 40


@pytest.mark.parametrize(("noise", "share"), [(QUIET, 1.0), (BUSY, 0.9), (WILD, 0.7)], ids=["quiet", "busy", "wild"])
def test_what_is_sure_is_right_whatever_the_noise(noise: Noise, share: float, tmp_path: Path) -> None:
    """No slower kernel is ever sure; of pairs of runs that are sure at most one in twenty differs; gains are found."""
    c = counted(tmp_path, noise, DRAWN)
    assert c.wrong == 0 and c.missed <= 0.02 * 3 * DRAWN
    assert c.pairs > DRAWN / 4 and c.flips <= c.pairs / 20
    assert c.of > DRAWN and c.found >= share * c.of


def test_a_race_goes_on_while_it_is_open_and_no_longer() -> None:
    def rounds(gain: float, noise: float, gains: tuple[float, ...] = (1.0, 1.03), **more: float) -> int:
        rng, ran = Random(1), [0.0]

        def call(s: float) -> float:
            ran[0] += s
            return s * (1 + noise * rng.random())

        first, other = Racer("ATen", lambda: call(1e-3)), Racer("a", lambda: call(1e-3 / gain))
        given = {"rounds": 12, "seconds": 60.0, "ran_s": 60.0, "gains": gains} | more
        run(first, [other], Length(**given), lambda: ran[0])  # type: ignore[arg-type]
        return len(other.laps)

    assert rounds(2.0, 0.1) == 12 and rounds(1.0, 1e-4) == 12  # far from both, or as near as anyone cares
    assert 12 < rounds(1.06, 0.3) < MORE * 12
    assert rounds(1.03, 1.0) == MORE * 12
    assert rounds(1.03, 1.0, ran_s=0.0) == rounds(1.03, 1.0, seconds=0.0) == LEAST
    assert 12 < rounds(1.03, 1.0, ran_s=0.1) < 60
    assert rounds(2.0, 0.0, calls=40) == 40


def test_kernels_that_are_behind_leave_the_race() -> None:
    rng = Random(2)
    took = {"a": 1.0, "b": 1.001, "c": 1.5, "slow": 3.0}
    racing = {n: Racer(n, lambda s=s: 1e-3 * s * (1 + 0.2 * rng.random())) for n, s in took.items()}
    first = Racer("ATen", lambda: 2e-3 * (1 + 0.2 * rng.random()))
    run(first, list(racing.values()), Length(rounds=12, seconds=60.0, ran_s=60.0), lambda: 0.0)
    counts = {n: len(r.laps) for n, r in racing.items()}
    assert counts["slow"] == counts["c"] == 12 < counts["a"] == counts["b"] == len(first.laps)
    assert racing["slow"].out and not racing["a"].out
