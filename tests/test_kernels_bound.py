"""The bound of a kernel: its loop as the assembler made it, cycles by hand, and what the kernels of layers reach."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from kernel_cases import PHASES, SM_90
from sampling import ALL, draws
from scripts import bench_script
from triton.tools.tensor_descriptor import TensorDescriptor

from convgen.kernels.bound import Bound, bound_of, resident
from convgen.kernels.choose import choose
from convgen.kernels.config import Config
from convgen.kernels.estimate import data_sheet, estimated_s, step_cycles
from convgen.kernels.facts import bound, facts, launches
from convgen.kernels.families import FAMILIES, box, of_gpu, pointer
from convgen.kernels.loops import Loop, matrix_loop
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.work import whole_products
from convgen.spec.target import read_target

LOOP = """\
.text.kernel:
        /*0000*/                   LDG.E.U16 R1, desc[UR4][R2.64] ;
.L_x_2:
        /*0010*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0020*/                   IMAD.WIDE R4, R5, 0x2, R6 ;
        /*0030*/              @!PT LDS RZ, [RZ] ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R7], desc[UR4][R4.64], P1 ;
        /*0050*/                   LDGSTS.E [R7+0x100], desc[UR4][R4.64] ;
        /*0060*/                   LDSM.16.M88.4 R8, [R9] ;
        /*0070*/                   WARPGROUP.ARRIVE ;
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R24, R8, gdesc[UR8], R24 ;
        /*0090*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], R24, gsb0 ;
        /*00a0*/               @P2 BRA `(.L_x_1) ;
        /*00b0*/                   STG.E [R2], R3 ;
"""


def test_a_loop_is_read() -> None:
    loop = matrix_loop(LOOP)
    assert loop is not None
    assert loop.by_class == {"matrix": 2, "copy 16": 1, "copy 4": 1, "shared": 2, "integer": 1, "wait": 1, "other": 1}
    assert loop.instructions == 9 and loop.narrowest_copy == 4
    assert loop.products == 2 * 16 * 128 * 16  # a warp's quarter of 64 rows
    assert loop.matrix_bytes == (128 + 64 + 128) * 16 * 2 // 4  # the first reads its rows from registers
    assert loop.moved_bytes == 32 * (16 + 4) + 4 * 128  # copies and a load; what never runs moves nothing


def test_a_wait_for_all_matrix_instructions_is_found() -> None:
    """Behind it, up to the next one, no unit is at work; one that leaves an instruction at work exposes nothing."""
    loop = matrix_loop(LOOP)
    assert loop is not None and loop.exposed == 0
    for left, exposed in (("0x0", 7), ("0x1", 0)):  # a branch, and all in front of the first matrix instruction
        wait = f"        /*0098*/                   WARPGROUP.DEPBAR.LE gsb0, {left} ;\n        /*00a0*/"
        loop = matrix_loop(LOOP.replace("        /*00a0*/", wait, 1))
        assert loop is not None and loop.exposed == exposed and loop.by_class["wait"] == 2


def test_unrolled_steps_are_read_from_the_first_copy_on() -> None:
    straight = "\n".join(line for line in LOOP.splitlines() if "BRA" not in line)
    loop = matrix_loop(straight)
    assert loop is not None and loop.instructions == 9 and loop.by_class["copy 2"] == 1
    assert matrix_loop("\n".join(line for line in LOOP.splitlines() if "HGMMA" not in line)) is None


def test_other_matrix_instructions() -> None:
    loop = matrix_loop("/*0010*/ HMMA.16816.F32.BF16 R1, R2, R3, R1 ;\n/*0020*/ HMMA.1688.F32.TF32 R1, R2, R3, R1 ;\n")
    assert loop is not None and loop.products == 16 * 8 * 16 + 16 * 8 * 8 and loop.matrix_bytes == 0


def square(phase: str, size: int = 14, channels: int = 256, kernel: int = 3, **changes: object) -> Problem:
    d = LocalDim("H", size, size, kernel, 1, 1, kernel // 2)
    values = {
        "batch": 32, "channels": channels, "filters": channels, "dims": (d, replace(d, name="W")),
        "dtype": "bfloat16", "memory_format": "channels_last",
    }  # fmt: skip
    return Problem(phase=phase, **(values | changes))  # type: ignore[arg-type]


def test_cycles_by_hand() -> None:
    """128 x 128 x 64 of bfloat16: 512 cycles of the matrix units, 200 to issue 8 warps' 100; shared
    memory has 32 KiB of copies, and by each of two warp groups its own 64 rows and all columns."""
    p, config = square("forward", batch=4), Config("pointer", (("BP", 128), ("BF", 128), ("BC", 64)), 8, 3)
    loop = Loop(
        (("matrix", 4), ("integer", 95), ("tensor copy", 1)), 4 * 16 * 128 * 16, 4 * (64 + 128) * 16 * 2 // 4, 0, 16
    )
    b = bound_of(p, config, loop, SM_90, bytes_per_s=1e12, floor_s=1e-6)
    assert b is not None
    assert dict(b.step_cycles) == {"matrix": 512.0, "issue": 200.0, "shared": (32768 + 2 * 4 * 192 * 32) / 128}
    assert b.limit == "shared" and b.share == 512 / 640 and b.share_by_issue == 1.0
    assert (b.programs, b.waves, b.steps) == (7 * 2, 1, 9 * 4)
    assert b.useful == pytest.approx(784 / (7 * 128))
    assert b.times_us["loop"] == pytest.approx(36 * 640 / 1.83e3)
    assert b.times_us["memory"] == pytest.approx(p.bytes / 1e6) and b.us == b.times_us["loop"]
    assert b.ideal_us == pytest.approx(max(p.bytes / 1e6, whole_products(p) / (2048 * 132 * 1.83e3)))
    twice = bound_of(p, config, replace(loop, products=2 * loop.products), SM_90, bytes_per_s=1e12, floor_s=1e-6)
    assert twice is not None and twice.step_cycles["issue"] == 100  # two steps in one pass
    serial, few = replace(loop, exposed=30), replace(config, warps=4)
    for programs, how, waits in ((1, few, True), (2, few, False), (1, config, False), (0, few, False)):
        b = bound_of(p, how, serial, SM_90, bytes_per_s=1e12, floor_s=1e-6, programs=programs)
        assert b is not None and b.step_cycles.get("waits") == (b.step_cycles["matrix"] + 30 if waits else None)
    assert [resident(n, shared, 4, SM_90) for n, shared in ((255, 1024), (64, 100 << 10), (168, 228000))] == [2, 2, 1]
    assert bound_of(p, config, None, SM_90, bytes_per_s=1e12, floor_s=1e-6) is None
    assert bound_of(p, config, loop, read_target("hip:gfx942").known(), bytes_per_s=1e12, floor_s=1e-6) is None


def of(p: Problem) -> tuple[Bound, int, int]:
    """Bound, bytes spilled and the narrowest copy of the kernel that an untuned problem gets."""
    kernel = choose((p,), SM_90)
    (launch,) = [one for one in launches(kernel, p) if one.name == kernel.name]
    found = facts(launch, SM_90, loops=True)
    b = bound(kernel, p, launch, found)
    assert b is not None and found.loop is not None, kernel.config
    return b, found.spill_bytes, found.loop.narrowest_copy


@pytest.mark.parametrize("phase", PHASES)
def test_bound_of_layers_four_ways(phase: str) -> None:
    """3x3, of a halo, of a stride, and 1x1: matrix units wait for no instruction, and all copies are of 16 bytes."""
    halves = tuple(replace(d, stride=2, x=28) for d in square(phase).dims)
    window = square(
        phase, batch=32, rim=2, dims=(replace(square(phase).dims[0], x=6, y=4, below=0), square(phase).dims[1])
    )
    few = square(phase, channels=64, filters=256)
    cases = {
        "samples": (square(phase, batch=8), 0.9), "channels": (few, 0.9), "halo": (window, 0.8),
        "stride": (square(phase, dims=halves, batch=8), 0.9), "1x1": (square(phase, kernel=1, batch=32), 0.9),
    }  # fmt: skip
    for name, (p, share) in cases.items():
        b, spilled, narrowest = of(p)
        assert b.share_by_issue >= share, (name, b)
        assert spilled == 0 and narrowest == 16, name


@pytest.mark.parametrize("phase", PHASES)
def test_bound_of_contiguous_layers(phase: str) -> None:
    """Channels made last by a launch before, which is counted, or read where they lie by asynchronous copies."""
    flat = {"memory_format": "contiguous"}
    window = tuple(replace(d, x=6, y=4, below=0) if d.name == "H" else d for d in square(phase).dims)
    halves = tuple(replace(d, stride=2, x=28) for d in square(phase).dims)
    cases = {
        "3x3": square(phase, **flat), "halo": square(phase, rim=2, dims=window, **flat),
        "stride": square(phase, dims=halves, **flat), "1x1": square(phase, size=28, kernel=1, **flat),
    }  # fmt: skip
    for name, p in cases.items():
        b, spilled, narrowest = of(p)
        assert b.share >= 0.5 and b.share_by_issue >= 0.8 and spilled == 0, (name, b)
        assert narrowest == 16, name
        if name != "1x1":
            assert choose((p,), SM_90).config.family == "converted", name
            assert b.times_us["around"] >= 4.0 and b.us >= b.times_us["floor"] + b.times_us["around"]


@pytest.mark.parametrize("phase", PHASES)
def test_bound_of_four_bytes(phase: str) -> None:
    """Nothing is copied by less than 16 bytes, whatever the operand; TF32 is rounded on the way. TF32's filter
    gradients have a column operand that is written back, which bounds them."""
    rounded = "round_f32_to_tf32" in TensorDescriptor.__annotations__  # before triton 3.7, in registers
    for dtype, least in (("tfloat32", 0.55 if phase == "backward_filter" or not rounded else 0.8), ("float32", 0.9)):
        for name, p in {
            "3x3": square(phase, dtype=dtype),
            "1x1": square(phase, size=28, kernel=1, dtype=dtype),
        }.items():
            b, spilled, narrowest = of(p)
            rounds = dtype == "tfloat32" and not rounded
            assert b.share >= least and b.share_by_issue >= (0.7 if rounds else 0.9), (dtype, name, b)
            assert spilled == 0 and narrowest == 16, (dtype, name)
            if dtype == "float32":
                assert b.step_cycles["matrix"] == b.matrix_cycles, name  # three products for one, no more


def test_few_pixels_stay_as_they_lie() -> None:
    """Where one launch is all that there is to save, none goes before."""
    for phase in PHASES:
        p = square(phase, size=7, channels=16, batch=1, memory_format="contiguous")
        assert choose((p,), SM_90).config.family == "pointer"


def test_large_problems_wait_for_nothing() -> None:
    """Where there is work enough, the tile is wide enough for shared memory too."""
    for phase in PHASES:
        b, spilled, _ = of(square(phase, size=56))
        assert b.share >= 0.9 and spilled == 0 and b.us * 0.75 <= b.ideal_us, (phase, b)


@pytest.mark.parametrize("phase", PHASES)
def test_matrix_instructions_of_pieces_wait_for_earlier_ones_alone(phase: str) -> None:
    """No sum is written between them: a loop that may have no step would have its zeros there."""
    cases = [square(phase, channels=512, size=7), square(phase, channels=512, size=7, batch=8)]
    if phase == "backward_filter":
        cases += [square(phase, size=56, channels=c, filters=f) for c, f in ((128, 128), (128, 256), (256, 256))]
    for p in cases:
        kernel = choose((p,), SM_90)
        (launch,) = [one for one in launches(kernel, p) if one.name == kernel.name]
        loop = facts(launch, SM_90, loops=True).loop
        assert kernel.config.family == "box" and loop is not None and loop.exposed == 0, kernel.config
        assert kernel.config.split > 1 or phase == "backward_filter"


def test_many_programs_have_pieces_that_fill_the_device() -> None:
    """72 tiles: 3 pieces are two waves of which a fifth is idle, 11 are six whole ones."""
    p = square("backward_filter", size=28, channels=512, batch=128)
    config = box.default(p, SM_90)
    assert box.filter_programs(p, config) == 72 and config.split == 11
    b, w = of(p)[0], box.work(p, replace(config, split=3))
    assert (b.waves, b.steps, w.programs, w.steps) == (6, 143, 216, 523)  # the launch that adds 11 takes 24 us of 504
    assert b.us < 0.9 * 2 * w.steps * 1024 / 1.83e3  # cycles of a step's products


def test_the_estimate_ranks_like_the_bound() -> None:
    """A tile of 32 filters costs more than the default, and so do pointers."""
    p, device = square("forward", size=28), data_sheet(SM_90, "bfloat16")
    small = Config("box", (*box.default(p, SM_90).tiles[:3], ("BF", 32), ("BC", 64)), 4, 3)
    configs = (box.default(p, SM_90), small, pointer.default(p, SM_90))
    estimates = [
        estimated_s(p, c, f.work(p, c), SM_90, device) for c, f in zip(configs, (box, box, pointer), strict=True)
    ]
    assert estimates[0] == min(estimates)


@pytest.mark.parametrize("phase", PHASES)
def test_closed_forms_are_what_is_counted(phase: str) -> None:
    """Products and shared memory of a step, also where columns are written back, or TF32 is rounded on the way."""
    rounded = "round_f32_to_tf32" in TensorDescriptor.__annotations__
    for i, dtype in enumerate(("bfloat16", "float32", *(["tfloat32"] * rounded))):
        wide, few = square(phase, size=56, dtype=dtype), square(phase, dtype=dtype, batch=8)
        for p in (wide, few) if ALL else ((wide, few)[i % 2],):
            config = choose((p,), SM_90).config
            b, closed = of(p)[0], step_cycles(p, config, of_gpu(config).work(p, config), SM_90)  # type: ignore[arg-type]
            assert closed["matrix"] == b.step_cycles["matrix"], (p, config)
            assert closed["shared"] == pytest.approx(b.step_cycles["shared"], rel=0.15), (dtype, config)


def test_kernels_on_paper() -> None:
    """A regime a problem; shares of the least time, the model's below the bound's."""
    study = bench_script("kernels_on_paper")
    lines = [line.split() for line in study.table(("vgg16",), (8,), "bfloat16")][1:]
    assert {line[2] for line in lines} <= set(study.REGIMES) and len(lines) >= 2
    wanted = sum(1 for _ in study.problems(("vgg16",), (8,), "bfloat16"))
    assert sum(int(line[3]) for line in lines) == wanted
    for *_, least, model, needed in lines:
        assert 0 < float(model) <= float(least) <= 1 and float(needed) == pytest.approx(float(model) / 1.5, abs=0.01)


def test_times_that_others_measured_are_beside_the_models() -> None:
    """No bound is above what somebody measured."""
    study = bench_script("kernels_on_paper")
    lines = list(study.beside())
    assert len(lines) == len(study.PUBLISHED) + 2
    for one in study.PUBLISHED:
        config, seconds = study.best(one.problem)
        assert study.bound_us(one.problem, config) <= min(seconds * 1e6, one.measured_us), one.what


def test_a_default_is_a_legal_configuration() -> None:
    """Whatever channels and filters; a stride halves what a step may have of the former, where they are pairs'."""
    rng = random.Random(7)
    sizes = [(c, c, 1) for c in (16, 24, 48, 64, 512)]
    sizes += [(c, f, 2) for c in (48, 80) for f in (16, 48)] + [
        (8 * rng.randint(1, 20), 8 * rng.randint(1, 20), rng.choice((1, 2, 4))) for _ in range(draws(6))
    ]
    for phase in PHASES:
        for channels, filters, stride in sizes:
            d = replace(square(phase).dims[0], x=8 * stride, y=8, stride=stride)
            dtype = rng.choice(("bfloat16", "bfloat16", "float32", "tfloat32"))
            p = square(phase, channels=channels, filters=filters, dims=(d, replace(d, name="W")), dtype=dtype)
            for family in FAMILIES:
                if family.refusal(p, SM_90) is None:
                    assert family.default(p, SM_90) == next(iter(family.configs(p, SM_90)))
