"""What a GPU reaches by a rank's extents: never more of what is larger, layers as networks' rows, files."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from sampling import draws
from scripts import bench_script

from convgen.cost.machine import Machine
from convgen.cost.machines import load_machine
from convgen.cost.tiles import SIDES, Tiles
from convgen.cost.work import taken_back
from convgen.errors import InputError
from convgen.kernels.choose import choose
from convgen.kernels.estimate import adding_s, busy_s, data_sheet
from convgen.kernels.families import of_gpu
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.work import whole_products
from convgen.operations.convolution import Convolution
from convgen.operations.row import Launch, Work
from convgen.program.nodes import PHASES
from convgen.resources import data_file
from convgen.spec.layer import DTYPES
from convgen.spec.reader import read_csv
from convgen.spec.target import read_target

GPUS = ("cuda", "dgx_h200", "hip")
CHANNELS, FILTERS, TAPS, PIXELS, GROUPS, STEP = range(6)


def drawn(draw: Random) -> tuple[Tiles, str, list[int]]:
    """A device, a phase, and a shape; none too large for exact sums."""
    device = Tiles(
        processors=draw.choice((1, 7, 80, 132, 304)), reading=draw.choice((1.0, 40.0, 90.5)),
        adding=draw.choice((0.5, 30.0, 200.0)),
    )  # fmt: skip
    sizes = [draw.choice((draw.randint(1, 20), draw.randint(1, 600))) for _ in range(2)]
    taps, groups = draw.choice((1, 3, 9, 49)), draw.choice((1, 1, 2, 32))
    return device, draw.choice(PHASES), [*sizes, taps, draw.randint(1, 1 << draw.randint(1, 18)), groups, 1]


def seconds(device: Tiles, phase: str, shape: list[int]) -> float:
    """Of a device that makes a product a second in whole tiles."""
    channels, filters, taps, pixels, groups, _ = shape
    return channels * filters * taps * pixels * groups / device.share(phase, tuple(shape))


def test_what_is_larger_takes_no_less() -> None:
    """By any of its extents: channels, filters, taps, pixels, groups."""
    draw = Random("larger")
    for number in range(draws(400)):
        device, phase, shape = drawn(draw)
        larger = list(shape)
        larger[draw.randrange(GROUPS + 1)] += draw.choice((1, draw.randint(1, 300)))
        assert seconds(device, phase, larger) >= seconds(device, phase, shape) * (1 - 1e-12), (number, phase, shape)


def test_fewer_samples_reach_no_more() -> None:
    """So many times the samples reach at least as much of the peak. Of others that are no multiple it may be less, by
    the last wave: as one sample more than fills the device."""
    draw = Random("samples")
    for number in range(draws(400)):
        device, phase, shape = drawn(draw)
        more = [n * draw.randint(2, 40) if k == PIXELS else n for k, n in enumerate(shape)]
        assert device.share(phase, tuple(more)) >= device.share(phase, tuple(shape)) * (1 - 1e-12), (number, shape)
        assert 0 < device.share(phase, tuple(shape)) <= 1
    device = Tiles(processors=132, reading=64.0, adding=60.0)
    wave = 132 * 128
    full, over = (device.share("forward", (256, 256, 9, pixels, 1, 1)) for pixels in (wave, wave + 56))
    assert over < 0.9 * full


def test_a_share_of_the_work_takes_no_less_than_its_share() -> None:
    """Of k ranks the busiest takes at least a k-th, whichever extent they split: what bounds a plan's seconds."""
    draw = Random("split")
    for number in range(draws(400)):
        device, phase, shape = drawn(draw)
        split = draw.choice((CHANNELS, FILTERS, PIXELS, GROUPS))
        ranks = draw.randint(2, 32)
        part = [-(-n // ranks) if k == split else n for k, n in enumerate(shape)]
        assert ranks * seconds(device, phase, part) >= seconds(device, phase, shape) * (1 - 1e-12), (number, shape)


def test_shares_by_hand() -> None:
    """132 tiles of 128 by 256 fill 132 processors: all of the peak. As many of 64 by 64 are read in twice the time
    of their products. Of 3 channels 16 are multiplied, or, tap beside tap, 16 for each 8 there."""
    device = Tiles(processors=132, reading=64.0, adding=1e9)  # tiles are whole from 128 by 128 on
    assert (128, 256) in SIDES
    whole = (64, 256, 9, 132 * 128, 1, 1)
    assert device.share("forward", whole) == 1
    assert device.share("forward", (64, 250, 9, 132 * 128, 1, 1)) == pytest.approx(250 / 256)
    assert device.share("forward", (64, 256, 9, 33 * 64, 1, 1)) == 1 / 2
    assert device.share("forward", (3, 256, 9, 132 * 128, 1, 1)) == pytest.approx(3 * 9 / (2 * 2 * 16))
    assert device.share("forward", (3, 256, 1, 132 * 128, 1, 1)) == pytest.approx(3 / 16)
    # dx of a stride of 2 by 2: each quarter of x's rows has one of 4 taps, and what is summed are filters
    assert device.share("backward_data", (256, 64, 4, 33 * 128, 1, 4)) == 1
    # dw of 9 taps, 128 filters and 128 channels: 72 tiles of 32 by 64 are least, where adding is too dear to share them
    alone = 128 * 128 * 9 / (132 * 64 * (32 + 64))
    assert device.share("backward_filter", (128, 128, 9, 1 << 20, 1, 1)) == pytest.approx(alone)
    assert replace(device, adding=1.0).share("backward_filter", (128, 128, 9, 1 << 20, 1, 1)) > 0.9
    # 512 groups of one channel, by no matrix units: 1024 elements a program, sixteen times as slow
    assert device.share("forward", (1, 1, 9, 132 << 10, 512, 1)) == 1 / 16


def test_a_rank_of_fewer_samples_reaches_no_more_of_the_peak() -> None:
    """Of layers on the machines that there are, memory and launches included."""
    for name in GPUS:
        machine = load_machine(name)
        for layer in read_csv(data_file("tuning", "layers", "resnet50.csv"), grid={"N": 1}, algorithm="sample")[::7]:
            conv = layer.conv
            pixels = [n * conv.spatial[0].out * conv.spatial[1].out for n in (1, 2, 4, 8, 16, 32, 64)]
            step = conv.spatial[0].stride * conv.spatial[1].stride
            for phase in PHASES:
                rates = [
                    machine.convolution_flops_per_s(
                        "bfloat16", phase, (conv.channels, conv.filters, conv.taps, n, 1, step)
                    )
                    for n in pixels
                ]
                assert rates == sorted(rates) and rates[-1] <= machine.flops_per_s("bfloat16"), (layer.name, phase)


def test_kernels_take_what_tiles_say() -> None:
    """Of the kernels that nobody has tuned, by their own closed forms: extents that no landscape has."""
    draw, target, off = Random("kernels"), read_target("cuda:sm_90").known(), list[float]()
    device, tiles = data_sheet(target, "bfloat16"), load_machine("cuda").tiles
    assert tiles is not None
    for _ in range(draws(60)):
        k, rows = draw.choice((1, 3)), draw.choice((7, 14, 20, 28, 40))
        dim = LocalDim("H", rows, rows, k, 1, 1, k // 2)
        p = Problem(
            phase=draw.choice(PHASES), batch=draw.randint(1, 64), channels=8 * draw.randint(2, 96),
            filters=8 * draw.randint(2, 96), dims=(dim, replace(dim, name="W")), dtype="bfloat16",
            memory_format="channels_last",
        )  # fmt: skip
        config = choose((p,), target).config
        work = of_gpu(config).work(p, config)
        assert work is not None
        kernel = busy_s(p, config, work, target, device) + adding_s(work, target)
        pixels = p.batch * rows * rows
        share = tiles.share(p.phase, (p.channels, p.filters, p.taps, pixels, 1, 1))
        floor = max(device.floor_s, p.bytes / device.bytes_per_s)
        off.append(max(2 * whole_products(p) / device.flops_per_s / share, floor) / max(kernel, floor))
    logs = sorted(abs(math.log(n)) for n in off)
    assert math.exp(logs[len(logs) // 2]) < 1.2 and math.exp(logs[9 * len(logs) // 10]) < 2, off


def test_a_machine_without_tiles_has_one_number() -> None:
    plain = replace(load_machine("cuda"), tiles=None)
    assert not plain.by_shape and load_machine("cuda").by_shape
    assert plain.convolution_flops_per_s("float32", "forward", (3, 4, 9, 10, 1, 1)) == plain.flops_per_s("float32")


def test_gradients_of_a_convolution_are_the_phases_that_make_them() -> None:
    conv = read_csv(data_file("tuning", "layers", "resnet50.csv"), grid={"N": 1}, algorithm="sample")[0].conv
    one = Launch(Convolution("forward", conv), Work(10, 20), (0, 1))
    found = [*taken_back([one], (0, 1))]
    assert [(n, done.operation.name, done.work) for n, done in found] == [
        (1, "conv_backward_data", Work(10, 20)), (1, "conv_backward_filter", Work(10, 20)),
    ]  # fmt: skip
    assert [done.operation.name for _, done in taken_back([one], (0, 1), (0,))] == ["conv_backward_filter"]
    # Behind another launch it reads what that has made, as x.
    first = Launch(Convolution("forward", conv), Work(1, 2), (0, 1))
    names = [done.operation.name for _, done in taken_back([first, replace(one, operands=(2,))], (0, 2))]
    assert names == ["conv_backward_data", "conv_backward_data", "conv_backward_filter"]


def test_the_processors_are_those_that_kernels_are_sized_for() -> None:
    """Of the device that a target is taken to be."""
    for target, names in (("cuda:sm_90", ("cuda", "dgx_h200")), ("hip:gfx942", ("hip",))):
        for name in names:
            tiles = load_machine(name).tiles
            assert tiles is not None and tiles.processors == read_target(target).processors
    assert load_machine("cuda").tiles == load_machine("dgx_h200").tiles


@pytest.mark.slow
def test_machine_files_have_what_is_fitted() -> None:
    """And say how far it is off: of launches that products bound, by constants that are fitted to other networks."""
    bench = bench_script("tiles")
    known, tiles = [*bench.launches()], load_machine("cuda").tiles
    assert tiles is not None
    found = bench.fit(known, tiles.processors)
    assert (found.reading, found.adding) == pytest.approx((tiles.reading, tiles.adding), rel=0.02)
    others = bench.fit([one for one in known if one.network != "vgg16"], tiles.processors)
    off = [abs(math.log(one.seconds(others) / one.bound_s)) for one in known
           if one.network == "vgg16" and one.counts(others)]  # fmt: skip
    assert len(off) > 300 and math.exp(statistics.median(off)) < 1.25


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("3", "tiles is no mapping"),
        ("{processors: 132}", "reading, adding in tiles is missing"),
        ("{processors: 1.5, reading: 1, adding: 1}", "tiles.processors can't be 1.5"),
        ("{processors: 0, reading: 1, adding: 1}", "tiles.processors can't be 0"),
        (f"{{processors: {10**40}, reading: 1, adding: 1}}", "doesn't fit in 64 bits"),
        ("{processors: 132, reading: -1, adding: 1}", "tiles.reading can't be -1"),
        ("{processors: 132, reading: 1, adding: .inf}", "tiles.adding can't be"),
        ("{processors: 132, reading: 1, adding: 1, waves: 2}", "unknown key 'waves' in tiles"),
    ],
)
def test_wrong_tiles_are_refused(said: str, why: str, tmp_path: Path) -> None:
    text, file = data_file("tuning", "machines", "cpu.yaml").read_text(), tmp_path / "m.yaml"
    file.write_text(f"{text}tiles: {said}\n")
    with pytest.raises(InputError) as caught:
        load_machine(str(file))
    assert why in caught.value.fact and caught.value.hint


def test_any_extents_have_a_share() -> None:
    """As large as files may say: finite, above 0."""
    huge = 1 << 60
    for name in GPUS:
        machine: Machine = load_machine(name)
        for phase in PHASES:
            for shape in ((huge, huge, huge, float(huge) ** 2, huge, huge), (1, 1, 1, 1.0, 1, 1)):
                assert all(0 < machine.convolution_flops_per_s(d, phase, shape) < 1e30 for d in DTYPES)
