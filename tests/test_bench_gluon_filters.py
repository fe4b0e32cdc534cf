"""A filter gradient in Gluon, as bench/gluon_filters.py counts it: what it compiles to, and that its text is right.

Triton's interpreter does not run Gluon. Here its functions run as plain Python: warps are threads, barriers count, and
a product is made when it is waited for, not before, so that a slot freed too early is read with what came behind.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from scripts import bench_script
from test_kernels_bound import square

from convgen.kernels.facts import Launch
from convgen.kernels.problem import Problem

pytest.importorskip("triton.experimental.gluon", reason="this triton has no Gluon")
study = bench_script("gluon_filters")
PATIENCE_S = 60


class Number(int):
    """A program's number."""

    def to(self, _: object) -> Number:
        return self


class Pointer:
    """Elements of a tensor from here on."""

    def __init__(self, base: torch.Tensor, at: Any = 0) -> None:
        self.base, self.at, self.dtype = base, at, SimpleNamespace(element_ty=base.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.base, self.at + more)


class Barrier:
    """Completes a phase when as many as it was made for have arrived, and the bytes that were expected."""

    def __init__(self) -> None:
        self.count = self.missing = self.bytes = self.completed = 0
        self.changed = threading.Condition()

    def add(self, arrived: int, more_bytes: int) -> None:
        with self.changed:
            self.missing, self.bytes = self.missing - arrived, self.bytes + more_bytes
            assert self.missing >= 0
            if not self.missing and not self.bytes:
                self.completed, self.missing = self.completed + 1, self.count
                self.changed.notify_all()

    def start(self, count: int) -> None:
        self.count = self.missing = count

    def wait(self, phase: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.completed % 2 != phase, PATIENCE_S), "nobody arrives"


class Barriers(list[Barrier]):
    index = list.__getitem__


class Shared:
    """A buffer, or a view of one."""

    def __init__(self, of: torch.Tensor) -> None:
        self.of = of

    def index(self, i: int) -> Shared:
        return Shared(self.of[i])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.of.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.of.permute(order))


class Sums:
    """Of products, of which some are yet to be made."""

    def __init__(self, shape: list[int]) -> None:
        self.made, self.behind = torch.zeros(shape), []

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        assert not self.behind
        return self.made.to(dtype)


def multiply(a: Shared, b: Shared, acc: Sums, *, is_async: bool) -> Sums:
    assert is_async
    acc.behind.append((a.of, b.of))
    return acc


def wait_for(most: int, deps: list[Sums]) -> Sums:
    (acc,) = deps
    while len(acc.behind) > most:
        a, b = acc.behind.pop(0)
        acc.made += a.float() @ b.float()
    return acc


def copy_box(source: Any, corner: list[int], barrier: Barrier, to: Shared) -> None:
    """Zeros outside."""
    box = torch.zeros(source.block_shape, dtype=source.base.dtype)
    ends = [min(c + n, e) for c, n, e in zip(corner, source.block_shape, source.shape, strict=True)]
    inside = [slice(max(c, 0), max(e, 0)) for c, e in zip(corner, ends, strict=True)]
    part = source.base[tuple(inside)]
    box[tuple(slice(s.start - c, s.start - c + n) for s, c, n in zip(inside, corner, part.shape, strict=True))] = part
    to.of.copy_(box)
    barrier.add(0, -box.numel() * box.element_size())


def in_parallel(parts: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    assert warps == [4, 1] and 2 * registers[0] + registers[1] <= 512  # 65536 registers, of groups of 128 threads
    failed: list[BaseException] = []

    def run(function: Any, args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def store(to: Pointer, values: torch.Tensor, mask: torch.Tensor) -> None:
    to.base[to.at[mask]] = values[mask]


def allocate(dtype: torch.dtype, shape: list[int], _: object) -> Any:
    if dtype == torch.int64:
        return Barriers(Barrier() for _ in range(shape[0]))
    return Shared(torch.full(shape, torch.nan, dtype=dtype))


def as_python(launch: Launch) -> None:
    """Run a launch, program by program."""
    program: list[int] = []
    language = SimpleNamespace(
        bfloat16=torch.bfloat16, float32=torch.float32, int64=torch.int64, static_range=range, cdiv=study.ceil_div,
        maximum=max, minimum=min, program_id=lambda axis: Number(program[axis]), allocate_shared_memory=allocate,
        warp_specialize=in_parallel, zeros=lambda shape, *_: Sums(shape), store=store,
        arange=lambda start, end, _: torch.arange(start, end), SliceLayout=lambda *_: None,
        NVMMADistributedLayout=lambda *_: None,
    )  # fmt: skip
    barriers = SimpleNamespace(
        MBarrierLayout=lambda: None, init=lambda b, count: b.start(count), wait=lambda b, phase: b.wait(phase),
        expect=lambda b, n: b.add(1, n), arrive=lambda b, pred: pred and b.add(1, 0),
    )  # fmt: skip
    names: dict[str, Any] = {
        "gl": language, "mbarrier": barriers, "copy_box": copy_box, "warpgroup_mma": multiply,
        "warpgroup_mma_wait": wait_for, "fence_async_shared": lambda: None, "range": range,
    }  # fmt: skip
    for name in ("copies", "products", "filter_gradient"):
        names[name] = FunctionType(getattr(study, name).fn.__code__, names)
    constants = {n: v for n, v in launch.constants.items() if n != "num_warps"}
    for i in range(launch.grid[0]):
        for j in range(launch.grid[1]):
            program[:] = i, j
            args = [Pointer(a) if isinstance(a, torch.Tensor) else a for a in launch.args]
            names["filter_gradient"](*args, **constants)


def problem(kernel: int, stride: int = 1, size: int = 6, **changes: Any) -> Problem:
    p = square("backward_filter", size=size, kernel=kernel, **({"batch": 3, "channels": 72, "filters": 136} | changes))
    return replace(p, dims=tuple(replace(d, x=size * stride, stride=stride) for d in p.dims))


@pytest.mark.parametrize(
    ("p", "size"),
    [
        (problem(1, size=28), study.Size(64, 64, False, (1, 1, 64), 2)),  # more steps than slots
        (problem(1, filters=200), study.Size(128, 64, False, (1, 1, 64))),
        (problem(1, stride=2, size=12), study.Size(64, 128, False, (2, 4, 8), 2)),
        (problem(3), study.Size(64, 64, True, (1, 8, 8))),
        (problem(3, batch=9, size=5), study.Size(64, 128, False, (2, 4, 8), 4)),
    ],
    ids=["1x1", "one piece", "stride", "turned", "3x3"],
)
def test_its_text_makes_the_filter_gradient(p: Problem, size: Any) -> None:
    generator = torch.Generator().manual_seed(p.batch)
    dy, x = (
        torch.randint(-2, 3, (p.batch, n, *rows), generator=generator).bfloat16()
        for n, rows in ((p.filters, [d.y for d in p.dims]), (p.channels, [d.x for d in p.dims]))
    )
    made = torch.full((size.split, p.filters, p.taps, p.channels), torch.nan)
    launch = study.launch_of(p, size, dy.movedim(1, -1).contiguous(), x.movedim(1, -1).contiguous(), made)
    as_python(replace(launch, args=tuple(a.view(-1) if a is made else a for a in launch.args)))
    shape = (p.filters, p.channels, *(d.kernel for d in p.dims))
    d = p.dims[0]
    wanted = torch.nn.grad.conv2d_weight(x.float(), shape, dy.float(), stride=d.stride, padding=d.below)
    assert torch.equal(made.sum(0), wanted.flatten(2).movedim(1, -1))  # small integers are exact


def test_it_compiles_and_its_loop_waits_for_no_product() -> None:
    p = problem(3, size=28, channels=256, filters=256)
    found = study.compiled(p, study.Size(64, 256, False, (1, 8, 8), 4))
    loop = found.loop
    assert loop is not None and found.registers == 168 and found.spill_bytes == 0  # 65536 of 384 threads
    assert found.shared_bytes <= study.SM_90.shared_bytes
    assert loop.exposed == 0 and loop.moved_bytes == 0
    assert loop.by_class["matrix"] == study.PIXELS // 16 and loop.by_class["tensor copy"] > 0
    assert loop.matrix_bytes == 4 * (64 + 256) * 16 * 2 // 4  # both operands from shared memory, a warp's share
    assert loop.products * 8 == 128 * 256 * study.PIXELS and loop.instructions < 100


def test_it_saves_nothing_where_none_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "TILES", ((128, 256),))
    p = problem(3, size=56, channels=256, filters=256, batch=32)
    bounded, at_once, sized, us = study.row(p)
    assert bounded == at_once == sized and us >= at_once * 0.99  # the kernel that users get waits for none either
    assert study.row(replace(p, groups=2, channels=128, filters=128)) is None
    assert study.row(problem(3, stride=2, size=28, channels=256, filters=256)) is None
