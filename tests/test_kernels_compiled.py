"""What kernels compile to, without a GPU: no spills, matrix instructions, 16-byte loads, shared memory that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest
from kernel_cases import LETTERS, PHASES, interpret, operands, reference
from sampling import ALL

from convgen.compiler import compile_layer
from convgen.kernels.choose import choose
from convgen.kernels.config import largest
from convgen.kernels.facts import Launch, facts, launches
from convgen.kernels.families import FAMILIES, depthwise
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.source import Kernel
from convgen.resources import data_file
from convgen.spec.reader import read_csv
from convgen.spec.target import Target, read_target

SM_90 = read_target("cuda:sm_90").known()
GRIDS = {"channels": ({"C": 4}, "stationary-x"), "filters": ({"F": 4}, "stationary-y"), "space": ({"H": 4}, "spatial")}


@cache
def resnet50(grid: str, dtype: str, memory_format: str) -> tuple[tuple[Problem, ...], ...]:
    """The local problems, by rank, of each of ResNet-50's convolutions on four ranks; equal ones once."""
    axes, algorithm = GRIDS[grid]
    layers = read_csv(data_file("tuning", "layers", "resnet50.csv"), grid=axes, algorithm=algorithm, dtype=dtype)
    found: dict[tuple[Problem, ...], None] = {}
    for layer in layers:
        layer = replace(layer, memory_format="channels_last", target=SM_90)
        layer = replace(layer, memory_format=memory_format)  # type: ignore[arg-type]
        if grid == "space" and layer.conv.spatial[0].out < 4:
            continue  # fewer rows than ranks
        for kernel in compile_layer(layer).kernels():
            found.setdefault(kernel.problems)
    return tuple(found)


def kernels(problems: tuple[Problem, ...], target: Target) -> Iterator[Kernel]:
    """Every family's default that takes all ranks' problems."""
    for family in FAMILIES:
        if all(family.refusal(p, target) is None for p in problems):
            yield Kernel(problems, family.default(largest(problems), target), target)


def launched(kernel: Kernel, p: Problem) -> tuple[Launch, list[Launch]]:
    """The launch of products, and those that arrange and sum around it."""
    found = launches(kernel, p)
    (main,) = [one for one in found if one.name == kernel.name]
    return main, [one for one in found if one is not main]


def reads_aligned(kernel: Kernel, p: Problem) -> bool:
    """Whether an operand lies so that 16 bytes can be read at once: by pixels' channels, or by samples' rows."""
    if p.channels * p.filters == 0:
        return False
    if kernel.config.family == "packed":
        return p.phase == "forward" and p.channels * p.taps * p.element_bytes % 16 == 0
    if p.channels_last:
        return p.channels * p.element_bytes % 16 == 0 and p.filters * p.element_bytes % 16 == 0
    rows = 1
    for d in p.dims:
        rows *= d.y
    whole = p.phase == "backward_filter" or kernel.config.family == "gemm"
    return whole and all(r.memory_format == "contiguous" for r in kernel.problems) and rows * p.element_bytes % 16 == 0


@pytest.mark.parametrize(
    ("grid", "dtype", "memory_format", "families"),
    [
        ("channels", "bfloat16", "channels_last", "all" if ALL else "few"),
        *(
            [
                ("channels", "bfloat16", "contiguous", "few"),
                ("space", "float16", "channels_last", "few"),
                ("channels", "float32", "channels_last", "few"),
                ("filters", "bfloat16", "channels_last", "few"),
                ("channels", "float32", "contiguous", "few"),
                ("channels", "tfloat32", "channels_last", "few"),
            ]
            * ALL
        ),
    ],
)
@pytest.mark.parametrize("phase", PHASES)
def test_resnet50_four_ways(grid: str, dtype: str, memory_format: str, families: str, phase: str) -> None:
    """Every family's default, or only that of the family that a module would have, one problem for each
    configuration ("few")."""
    seen, wide = 0, 0
    compiled: set[object] = set()
    for problems in resnet50(grid, dtype, memory_format):
        if problems[0].phase != phase:
            continue
        if not ALL and min(seen - 1, wide) >= 5:
            break
        for kernel in islice(kernels(problems, SM_90), None if families == "all" else 1):
            for p in set(problems):
                # Samples and rows are arguments: what is compiled differs only by these.
                channels = (p.channels, p.filters) if families == "all" else ()
                alike = kernel.config, channels, p.taps, p.x_parts, p.y_parts, p.rim, p.dims[0].stride
                if alike in compiled:
                    continue
                compiled.add(alike)
                if kernel.config.family == "aten":
                    assert not launches(kernel, p)
                    continue
                main, rest = launched(kernel, p)
                found = facts(main, SM_90)
                where = f"{kernel.config} for {p}: {found}"
                assert found.spill_bytes == 0, where
                assert found.shared_bytes <= SM_90.shared_bytes, where
                assert found.registers <= 255, where
                assert found.matrix_instructions > 0 or p.channels * p.filters == 0, where
                if reads_aligned(kernel, p):
                    assert found.widest_global_load_bytes == 16, where
                    wide += 1
                assert all(facts(launch, SM_90).spill_bytes == 0 for launch in rest), where
                seen += 1
    assert seen >= 5 and wide >= 5, (seen, wide)


def small(phase: str, dtype: str, memory_format: str, dims: int = 2, stride: int = 1, groups: int = 1) -> Problem:
    rows = tuple(LocalDim(name, 12, 12 if stride == 1 else 6, 3, stride, 1, 1) for name in LETTERS[dims])
    return Problem(
        phase=phase,  # type: ignore[arg-type]
        batch=4,
        channels=1 if groups > 1 else 32,
        filters=1 if groups > 1 else 64,
        groups=groups,
        dims=rows,
        dtype=dtype,
        memory_format=memory_format,
    )


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("cuda:sm_80", ("bfloat16", "float32")),
        ("cuda:sm_100", ("float16", "tfloat32")),
        ("hip:gfx942", ("bfloat16", "float16", "float32", "tfloat32")),
        ("hip:gfx90a", ("tfloat32",)),
        ("hip:gfx950", ("tfloat32",)),
    ],
)
@pytest.mark.parametrize("phase", PHASES)
def test_other_architectures(name: str, dtypes: tuple[str, ...], phase: str) -> None:
    target = read_target(name).known()
    for dtype in dtypes:
        for memory_format in ("channels_last", "contiguous"):
            for kernel in kernels((small(phase, dtype, memory_format),), target):
                if kernel.config.family == "aten":
                    continue
                main, rest = launched(kernel, kernel.problem)
                for launch in (main, *rest):
                    found = facts(launch, target)
                    assert found.shared_bytes <= target.shared_bytes, (kernel.config, found)
                    assert found.matrix_instructions or launch is not main, (kernel.config, found)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_dimensions_strides_and_depthwise(dims: int) -> None:
    memory_format = "contiguous" if dims == 1 else "channels_last"
    for phase in PHASES:
        strided = small(phase, "bfloat16", memory_format, dims, stride=2)
        grouped = small(phase, "bfloat16", memory_format, dims, groups=48)
        rimmed = replace(small(phase, "bfloat16", memory_format, dims), rim=2)
        for p in (strided, grouped, rimmed):
            (kernel, *_) = kernels((p,), SM_90)
            found = facts(launched(kernel, p)[0], SM_90)
            assert found.spill_bytes == 0, (kernel.config, found)
            assert (found.matrix_instructions > 0) != (kernel.config.family == depthwise.NAME)


def test_float64_compiles() -> None:
    for phase in PHASES:
        p = small(phase, "float64", "contiguous")
        (kernel, *_) = kernels((p,), SM_90)
        assert facts(launches(kernel, p)[0], SM_90).spill_bytes == 0


@pytest.mark.parametrize("name", ["cuda:sm_90", "cuda:sm_100"])
@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous"])
def test_few_channels_of_float64_compile(name: str, memory_format: str) -> None:
    target = read_target(name).known()
    p = replace(small("forward", "float64", memory_format), channels=3)
    kernel = choose((p,), target)
    assert kernel.config.family == "packed"
    assert facts(launches(kernel, p)[0], target).spill_bytes == 0


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_extents_of_one(dims: int) -> None:
    """Arguments that are 1 are constants to the compiler: everything still compiles."""
    turn = 0
    for phase in PHASES:
        for kernel_size, stride in ((1, 1), (3, 1), (3, 2), (1, 2)):
            turn += 1
            for memory_format in ("channels_last" if dims == 2 else "contiguous",):
                rows = tuple(LocalDim(name, 1, 1, kernel_size, stride, 1, kernel_size // 2) for name in LETTERS[dims])
                channelled = ((1, 32, 64, 1), (1, 32, 64, 2), (1, 3, 64, 1), (2, 16, 16, 1), (3, 1, 2, 1))
                # Over phases and dimensions each of these meets each kernel.
                some = [channelled[(turn + dims + i) % 5] for i in range(2 if ALL else 1)]
                for groups, channels, filters, parts in some:
                    p = Problem(
                        phase=phase, batch=1, channels=channels, filters=filters, groups=groups, dims=rows,
                        dtype="bfloat16", memory_format=memory_format, x_parts=parts, y_parts=parts,
                    )  # fmt: skip  # type: ignore[arg-type]
                    (kernel, *_) = kernels((p,), SM_90)
                    for launch in launches(kernel, p):
                        assert 0 < facts(launch, SM_90).registers <= 255


@pytest.mark.parametrize("phase", PHASES)
def test_float64_of_amd(phase: str) -> None:
    """No matrices of float64 for gfx942: sums of products, which are as right and spill nothing."""
    target = read_target("hip:gfx942").known()
    for taps, name in ((1, "gemm"), (3, "pointer")):
        d = LocalDim("H", 6, 6, taps, 1, 1, taps // 2)
        p = Problem(
            phase=phase, batch=2, channels=20, filters=24, dims=(d, replace(d, name="W")), dtype="float64",
            memory_format="channels_last",
        )  # fmt: skip  # type: ignore[arg-type]
        kernel = choose((p,), target)
        assert kernel.config.family == name
        main, _ = launched(kernel, p)
        found = facts(main, target)
        assert found.spill_bytes == 0 and found.shared_bytes <= target.shared_bytes
        given = operands(p, 1)
        got = interpret(p, kernel.config, given, target=target)
        assert float((got - reference(p, given)).abs().max()) <= 1e-12 * float(reference(p, given).abs().max())
