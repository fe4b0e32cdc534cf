"""[INT]'s AlexNet, derived from schedules: Eqs. 2-6 with the numbers put in by hand, and what the text says of best
grids."""

from __future__ import annotations

from math import ceil, log2

import pytest

from convgen.papers import integrated as study

# Milliseconds by hand: the equations evaluated with 2 us and 4 bytes / 6e9 a word.
EQ5 = {
    (1, 8): 71.210, (8, 1): 2362.975, (2, 8): 204.475, (1, 32): 78.893, (2, 64): 61.338, (4, 128): 36.302,
    (512, 1): 2695.536,
}  # fmt: skip
EQ6 = {
    (1, 8): 71.210, (2, 4): 62.610, (8, 1): 138.796, (4, 4): 50.540, (4, 8): 36.707, (8, 16): 21.004, (16, 32): 12.490,
    (512, 1): 144.040,
}  # fmt: skip
# P: best grid of Eq. 5, of Eq. 6. [INT] 3: "on 512 processes, the best performance is observed with 4x128"; with 8
# processes "the benefit of the integrated approach is not realized".
BEST = {8: ((1, 8), (2, 4)), 16: ((1, 16), (4, 4)), 128: ((2, 64), (8, 16)), 512: ((4, 128), (16, 32))}


def test_milliseconds() -> None:
    for grid, expected in EQ5.items():
        assert study.seconds(*grid, frozenset(), study.Reading()) * 1e3 == pytest.approx(expected, abs=5e-4), grid
    for grid, expected in EQ6.items():
        assert study.seconds(*grid, study.CONVS, study.Reading()) * 1e3 == pytest.approx(expected, abs=5e-4), grid


@pytest.mark.parametrize("processes", BEST)
def test_best_grids_and_domains(processes: int) -> None:
    five, six = BEST[processes]
    assert study.best(processes, frozenset(), study.Reading())[1:] == five
    time_s, *grid = study.best(processes, study.CONVS, study.Reading())
    assert tuple(grid) == six
    assert time_s < study.best(processes, frozenset(), study.Reading())[0], "[INT] Fig. 7 better than Fig. 6"
    assert study.best_domain(*six, study.Reading()) == study.CONVS


def test_pure_model_batch_and_domain() -> None:
    """Eqs. 2, 3 and 4 are the ends of the grids: by their sums over d_i and W_i."""
    d = (290400, 186624, 64896, 64896, 43264, 4096, 4096, 1000)
    w = (34848, 307200, 884736, 663552, 442368, 37748736, 16777216, 4096000)
    alpha, beta, p = 2e-6, 4 / 6e9, 32
    model = 3 * sum(alpha * ceil(log2(p)) + 2048 * (p - 1) / p * beta * n for n in d)
    batch = 2 * sum(alpha * ceil(log2(p)) + (p - 1) / p * beta * n for n in w)
    assert study.seconds(p, 1, frozenset(), study.Reading()) == pytest.approx(model, rel=1e-9)
    assert study.seconds(1, p, frozenset(), study.Reading()) == pytest.approx(batch, rel=1e-9)
    convs = (
        (227, 3, 55, 96, 11),
        (27, 96, 27, 256, 5),
        (13, 256, 13, 384, 3),
        (13, 384, 13, 384, 3),
        (13, 384, 13, 256, 3),
    )
    halos = sum(2 * alpha + beta * 2048 * (k // 2) * (xw * xc + yw * yc) for xw, xc, yw, yc, k in convs)
    sums = 2 * sum(alpha * ceil(log2(p)) + (p - 1) / p * beta * n for n in w[:5])
    full = 3 * sum(alpha * ceil(log2(p)) + 2048 * (p - 1) / p * beta * n for n in d[5:])
    assert study.seconds(p, 1, study.CONVS, study.Reading()) == pytest.approx(halos + sums + full, rel=1e-9)


def test_readings_of_the_text() -> None:
    """At P = 512 the best grid of Eq. 5 is 4 x 128 whichever way the text is read."""
    by_hand = {
        "beta per word, literally": 9.316, "words of 8 bytes": 72.284, "weights without groups": 36.769,
        "sums from i = 0": 40.052, "dx as large as the layer's x": 29.913,
    }  # fmt: skip
    for name, reading in study.READINGS.items():
        time_s, pr, pc = study.best(512, frozenset(), reading)
        assert (pr, pc) == (4, 128), name
        if name in by_hand:
            assert time_s * 1e3 == pytest.approx(by_hand[name], abs=5e-4), name


def test_only_collectives_of_the_schedule_count() -> None:
    size = study.alexnet()[1]
    assert sorted(study.expressions(size, "F")) == ["dw", "dx", "y"]
    assert sorted(study.expressions(size, "H")) == ["dw", "dy_halo", "x_halo"]


def test_figures_draw_and_answer_their_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing is what the least work of a sample would be: the best grids are those of the text by any such time."""
    monkeypatch.setattr(study, "computing_s", lambda samples: 1e-3 * samples)
    figure = study.scaling("fig6")
    assert figure.found["int.fig6.best512"] == 4 and figure.found["int.fig6.best8"] == 1
    assert figure.found["int.4.ratio"] == pytest.approx(1.5 * 2048 / 4096, rel=0.01)  # 3 sums over 2
    by_rows = {s.name: dict(s.points) for s in study.scaling("fig7").series}
    for series in figure.series:
        assert min(by_rows[series.name].values()) < min(y for _, y in series.points)


def test_a_sample_computes_longer_among_fewer() -> None:
    """[INT] 2.2: by calls and weights that few samples share, and by a process's extents, which one number lacks."""
    each = [study.computing_s(n) / n for n in (1, 2, 16, 256)]
    assert each == sorted(each, reverse=True) and each[0] > 2 * each[-1]
    machine = study.load_machine(study.MACHINE)
    shares = [machine.convolution_flops_per_s("float32", "forward", (384, 384, 9, 169 * n, 1, 1)) for n in (1, 2, 16)]
    assert shares == sorted(shares) and shares[0] < shares[-1]
