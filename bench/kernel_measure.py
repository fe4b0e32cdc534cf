"""What bench/kernels.py does on a device: operands, ATen's variants, candidates, checks, and times by CUDA graphs."""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convgen.kernels.config import ceil_div
from convgen.kernels.families import FAMILIES
from convgen.kernels.load import load_text
from convgen.kernels.problem import Problem
from convgen.kernels.source import Kernel, kernel_module
from convgen.kernels.target import Target, parse_target

FORMATS = ("channels_last", "contiguous")
TORCH = {"float32": torch.float32, "tfloat32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 1e-5, "tfloat32": 2.0**-9, "bfloat16": 2.0**-7}  # largest error over the largest |result|
GUARD = 64  # elements of NaN before and behind an operand; a multiple of 16 bytes
ROUNDS = 15
SLOW = 3.0  # times the fastest: what takes longer is not raced, unless it is the best of its family
COMPILE_S = 60.0  # a candidate that compiles for longer is left out
FLOOR = """import triton
import triton.language as tl


@triton.jit
def floor_copy(source, target):
    i = tl.program_id(0) % 256 * 128 + tl.arange(0, 128)
    tl.store(target + i, tl.load(source + i))
"""


class DeviceLost(RuntimeError):
    """A kernel broke the device's context; the process can't go on."""


class Wrong(RuntimeError):
    """A result that is not the convolution's."""


def cause(error: BaseException) -> str:
    """One line of an exception."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


# ---- Operands and the reference ------------------------------------------------------------------------------------


def shapes(p: Problem) -> dict[str, tuple[int, ...]]:
    """Logical shapes: N C rows, F C taps, N F rows; parts are side by side."""
    channels, filters = p.channels * p.x_parts, p.filters * p.y_parts
    return {
        "x": (p.batch, p.groups * channels, *(d.x for d in p.dims)),
        "w": (p.groups * filters, channels, *(d.kernel for d in p.dims)),
        "dy": (p.batch, p.groups * filters, *(d.y for d in p.dims)),
    }


def result_of(p: Problem) -> tuple[str, int]:
    """The operand that the result is like, and its parts."""
    return {"forward": ("dy", p.y_parts), "backward_data": ("x", p.x_parts), "backward_filter": ("w", 1)}[p.phase]


def logical(flat: Tensor, shape: tuple[int, ...], last: bool, parts: int = 1) -> Tensor:
    """Parts, N, C, rows of elements in memory order: a view. `shape` is the whole's, without parts."""
    n, c, *rows = shape
    if last:
        return flat.view(parts, n, *rows, c // parts).movedim(-1, 2)
    return flat.view(parts, n, c // parts, *rows)


def side_by_side(whole: Tensor, parts: int) -> Tensor:
    """The same dimensions as `logical` gives, of an ordinary tensor: a view."""
    return whole.unflatten(1, (parts, whole.shape[1] // parts)).movedim(1, 0)


def above(p: Problem) -> list[int]:
    """Zero rows above x's last one, a dimension."""
    return [(d.y - 1) * d.stride + d.dilation * (d.kernel - 1) + 1 - d.below - d.x for d in p.dims]


def sides(p: Problem) -> list[int]:
    """Both paddings as torch.nn.functional.pad wants them."""
    return [n for d, hi in reversed(list(zip(p.dims, above(p), strict=True))) for n in (d.below, hi)]


class Operands:
    """x, w, dy of a problem in both memory formats with NaN around them, and the result in float64.

    Attributes:
        reference: y, dx or dw by ATen in float64, with explicit padding and without cuDNN.
    """

    def __init__(self, p: Problem, device: str) -> None:
        self.problem, self.device, self.shapes = p, device, shapes(p)
        generator = torch.Generator(device).manual_seed(0)
        self.given = {
            n: torch.randn(shape, generator=generator, device=device).to(TORCH[p.dtype])
            for n, shape in self.shapes.items()
        }
        self.reference = self._reference()
        self.scale = float(self.reference.abs().max()) or 1.0
        self._flat: dict[tuple[str, bool], Tensor] = {}

    def _reference(self) -> Tensor:
        p = self.problem
        x, w, dy = (self.given[n].double() for n in ("x", "w", "dy"))
        x.requires_grad_(p.phase == "backward_data")
        w.requires_grad_(p.phase == "backward_filter")
        wide = [max(n, 0) for n in sides(p)]
        cut = torch.nn.functional.pad(torch.nn.functional.pad(x, wide), [min(n, 0) for n in sides(p)])
        convolve = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[len(p.dims) - 1]
        strides, dilations = tuple(d.stride for d in p.dims), tuple(d.dilation for d in p.dims)
        with torch.backends.cudnn.flags(enabled=False):
            y = convolve(cut, w, None, stride=strides, dilation=dilations, groups=p.groups)
            if p.phase == "forward":
                return y
            return torch.autograd.grad(y, x if p.phase == "backward_data" else w, dy)[0]

    def parts(self, name: str) -> int:
        return {"x": self.problem.x_parts, "w": 1, "dy": self.problem.y_parts}[name]

    def flat(self, name: str, last: bool) -> Tensor:
        """An operand's elements as they lie in memory; made once a format."""
        if (name, last) not in self._flat:
            shape, parts = self.shapes[name], self.parts(name)
            flat = self.poisoned(math.prod(shape))[GUARD:-GUARD]
            logical(flat, shape, last, parts).copy_(side_by_side(self.given[name], parts))
            self._flat[name, last] = flat
        return self._flat[name, last]

    def poisoned(self, elements: int) -> Tensor:
        """NaN: so many elements, and guards around them."""
        return torch.full((elements + 2 * GUARD,), math.nan, dtype=TORCH[self.problem.dtype], device=self.device)

    @cached_property
    def whole(self) -> Tensor:
        """What results are written to, guards included."""
        return self.poisoned(math.prod(self.shapes[result_of(self.problem)[0]]))

    @property
    def out(self) -> Tensor:
        return self.whole[GUARD:-GUARD]

    def written(self, last: bool) -> Tensor:
        """The result that lies in `out`, in the dimensions of `logical`."""
        name, parts = result_of(self.problem)
        return logical(self.out, self.shapes[name], last, parts)

    def error(self, result: Tensor) -> float:
        """Largest error over the largest |result|; NaN where the result has one. Of an ordinary tensor, or parts."""
        wanted = self.reference
        if result.dim() > wanted.dim():
            wanted = side_by_side(wanted, result.shape[0])
        return float((result.double() - wanted).abs().max()) / self.scale

    def check_guards(self) -> None:
        if not (self.whole[:GUARD].isnan().all() and self.whole[-GUARD:].isnan().all()):
            raise Wrong("written outside of the result")


# ---- ATen ----------------------------------------------------------------------------------------------------------


@contextmanager
def accuracy(dtype: str) -> Iterator[None]:
    """cuDNN with benchmark mode, and cuBLAS, at the accuracy of a type: TF32 only in tfloat32.

    By the flags that every version has: a process that sets the newer fp32_precision as well can't read these, as
    convgen's own ATen family does. ATen's error is recorded beside convgen's.
    """
    tf32, matmul = dtype == "tfloat32", torch.backends.cuda.matmul
    before = matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction = tf32, False
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=tf32):
            yield
    finally:
        matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction = before


def pads_alike(p: Problem) -> bool:
    """Whether ATen, which pads both sides alike, can without padding by hand."""
    return all(d.below >= 0 and 0 <= d.below - hi < d.stride for d, hi in zip(p.dims, above(p), strict=True))


def aten_calls(p: Problem) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """From x, w, dy to the result: the convolution, and a matrix product where that is the same."""
    calls = {"convolution": aten_convolution(p)}
    if p.is_pointwise and p.groups == 1:
        calls["matmul"] = aten_matmul(p)
    return calls


def aten_convolution(p: Problem) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    alike, both, pad = pads_alike(p), sides(p), torch.nn.functional.pad
    stride, dilation, zeros = [d.stride for d in p.dims], [d.dilation for d in p.dims], [0] * len(p.dims)
    padding = [d.below for d in p.dims] if alike else zeros
    rest = (stride, padding, dilation, False, zeros, p.groups)
    back = torch.ops.aten.convolution_backward

    def forward(x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
        return torch.ops.aten.convolution(x if alike else pad(x, both), w, None, *rest)

    def backward_data(x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
        if alike:
            return back(dy, x, w, None, *rest, [True, False, False])[0]
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        rows = [d.x + d.below + hi for d, hi in zip(p.dims, above(p), strict=True)]
        like = torch.empty(
            (*x.shape[:2], *rows), dtype=x.dtype, device=x.device,
            memory_format=torch.channels_last if last else torch.contiguous_format,
        )  # fmt: skip
        wide = back(dy, like, w, None, *rest, [True, False, False])[0]
        if min(both) < 0:
            return pad(wide, [-n for n in both])
        return wide[(..., *(slice(d.below, d.below + d.x) for d in p.dims))]  # a view: as cheap as can be

    def backward_filter(x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
        return back(dy, x if alike else pad(x, both), w, None, *rest, [False, True, False])[1]

    return {"forward": forward, "backward_data": backward_data, "backward_filter": backward_filter}[p.phase]


def aten_matmul(p: Problem) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """1x1, stride 1: pixels by channels where channels are last, else channels by pixels for each sample."""

    def rows(t: Tensor) -> Tensor:
        return t.movedim(1, -1).reshape(-1, t.shape[1])

    def run(x: Tensor, w: Tensor, dy: Tensor) -> Tensor:
        weight, last = w.flatten(1), x.movedim(1, -1).is_contiguous() and dy.movedim(1, -1).is_contiguous()
        if p.phase == "backward_filter":  # contiguous: of each sample, and their sum
            product = rows(dy).T @ rows(x) if last else (dy.flatten(2) @ x.flatten(2).mT).sum(0)
            return product.view(w.shape)
        read, matrix = (x, weight.T) if p.phase == "forward" else (dy, weight)
        if last:
            flat = rows(read) @ matrix
            return flat.view(read.shape[0], *read.shape[2:], -1).movedim(-1, 1)
        return (matrix.T @ read.flatten(2)).unflatten(2, read.shape[2:])

    return run


def aten_variants(work: Operands) -> dict[str, tuple[bool, Callable[[], Tensor]]]:
    """ATen's calls by label: whether channels are last, and the call with what it copies of parts, before and after."""
    p = work.problem
    name, parts = result_of(p)

    def bound(call: Callable[[Tensor, Tensor, Tensor], Tensor], last: bool) -> Callable[[], Tensor]:
        tensors = {n: logical(work.flat(n, last), work.shapes[n], last, work.parts(n)) for n in work.shapes}
        wholes = {n: t[0] if t.shape[0] == 1 else empty_like_whole(t, work.shapes[n], last) for n, t in tensors.items()}
        unpacked = [n for n, t in tensors.items() if t.shape[0] > 1 and n != name]

        def run() -> Tensor:
            for n in unpacked:
                side_by_side(wholes[n], work.parts(n)).copy_(tensors[n])
            result = call(wholes["x"], wholes["w"], wholes["dy"])
            return work.written(last).copy_(side_by_side(result, parts)) if parts > 1 else result

        return run

    return {
        f"{kind} {form}": (form == "channels_last", bound(call, form == "channels_last"))
        for kind, call in aten_calls(p).items()
        for form in FORMATS
    }


def empty_like_whole(pieces: Tensor, shape: tuple[int, ...], last: bool) -> Tensor:
    """A tensor that parts are unpacked to; zeros, since ATen may look at it where it is no operand."""
    return logical(torch.zeros(math.prod(shape), dtype=pieces.dtype, device=pieces.device), shape, last)[0]


# ---- Candidates ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A family's kernel in one configuration and memory format."""

    kernel: Kernel

    @property
    def label(self) -> str:
        config = self.kernel.config
        return f"{config.family} {self.kernel.problem.memory_format}" + (f" {config}" if config.tiles else "")


def candidates(p: Problem, target: Target, families: Sequence[str], more: int) -> list[Candidate]:
    """Every family's default in both formats, and `more` of its configurations, evenly spaced."""
    found: list[Candidate] = []
    for form in FORMATS:
        local = replace(p, memory_format=form)
        for family in FAMILIES:
            if family.NAME in families and family.refusal(local, target) is None:
                default = family.default(local, target)
                rest = [c for c in dict.fromkeys(family.configs(local, target)) if c != default]
                step = len(rest) / more if more and len(rest) > more else 1.0
                spaced = [rest[int((i + 0.5) * step)] for i in range(min(more, len(rest)))]
                found += [Candidate(Kernel((local,), c, target)) for c in (default, *spaced)]
    return found


def bind(work: Operands, kernel: Kernel) -> Callable[[], None]:
    """A call of the kernel's module on the operands."""
    p = kernel.problem
    module = load_text(kernel_module([kernel]))
    rows = (tuple(d.x for d in p.dims), tuple(d.y for d in p.dims), tuple(d.below for d in p.dims))
    sizes = module.Sizes(p.batch, *rows, p.channels, p.filters, p.groups)
    order = {"forward": ("x", "w"), "backward_data": ("dy", "w"), "backward_filter": ("dy", "x")}[p.phase]
    args = (*(work.flat(n, p.channels_last) for n in order), work.out, sizes)
    function = getattr(module, p.phase)
    return lambda: function(*args)


def floor_launch(work: Operands, programs: int) -> Callable[[], None]:
    """An almost empty kernel of so many programs."""
    kernel = load_text(FLOOR).floor_copy
    source, target = (torch.zeros(256 * 128, device=work.device) for _ in range(2))
    return lambda: kernel[(programs,)](source, target, num_warps=4)


def grid_class(p: Problem) -> int:
    """Programs of the launch floor for a problem: tiles of 128x64 elements of its result, up to a power of four."""
    name, _ = result_of(p)
    programs = ceil_div(math.prod(shapes(p)[name]), 128 * 64)
    return 4 ** max(2, math.ceil(math.log(programs, 4) - 1e-9))


# ---- Compiling ahead -----------------------------------------------------------------------------------------------


class _NoDevice:
    """In Triton's place for a driver: compiles for a target that this process does not use."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(target.kind, target.arch, target.warp)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@cache
def _driven(target: Target) -> None:
    import triton

    triton.runtime.driver.set_active(_NoDevice(target))


def quiet() -> None:
    """A compiling process says nothing: its failures are returned."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def compile_only(kernel: Kernel) -> str:
    """Fill Triton's cache with what a kernel launches; why it can't, or nothing. In a process of its own."""
    try:
        from convgen.kernels.facts import launches

        _driven(kernel.target)
        for launch in launches(kernel, kernel.problem):
            launch.function.warmup(*launch.args, grid=launch.grid, **launch.constants)
    except Exception as error:
        return cause(error) or type(error).__name__
    return ""


class Compilers:
    """Processes that compile candidates before they are launched; with none, the launch compiles."""

    def __init__(self, jobs: int) -> None:
        self.pool = multiprocessing.get_context("spawn").Pool(jobs, quiet) if jobs else None
        self.trusted = False  # once something compiled, what does not is the candidate's fault
        self.waiting: dict[str, dict[str, Any]] = {}

    def submit(self, key: str, found: Sequence[Candidate]) -> None:
        if self.pool is not None and key not in self.waiting:
            compiled = [c for c in found if c.kernel.config.family != "aten"]
            self.waiting[key] = {c.label: self.pool.apply_async(compile_only, (c.kernel,)) for c in compiled}

    def failures(self, key: str) -> dict[str, str]:
        """Wait for a problem's candidates: those that don't compile, and why."""
        failed: dict[str, str] = {}
        end = time.monotonic() + COMPILE_S
        for label, result in self.waiting.pop(key, {}).items():
            try:
                text = result.get(max(0.01, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                text = f"compiling took more than {COMPILE_S:.0f} s, or killed the compiler"
            self.trusted |= not text
            if text:
                failed[label] = text
        return failed if self.trusted else {}

    def close(self) -> None:
        if self.pool is not None:
            self.pool.terminate()


# ---- Times ---------------------------------------------------------------------------------------------------------


class Clock:
    """Times on the current CUDA device."""

    device = "cuda"

    @cached_property
    def stream(self) -> Any:
        """Where launches are captured; one, since memory is kept a stream."""
        return torch.cuda.Stream()

    def tidy(self) -> None:
        torch.cuda.empty_cache()

    def sync(self) -> None:
        torch.cuda.synchronize()

    def alive(self) -> bool:
        try:
            self.sync()
        except RuntimeError:
            return False
        return True

    def lap(self, replays: Sequence[Callable[[], object]]) -> list[float]:
        """Run each once in turn; seconds of each."""
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in replays]
        for replay, (start, end) in zip(replays, pairs, strict=True):
            start.record()
            replay()
            end.record()
        self.sync()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def capture(self, run: Callable[[], object], launches: int) -> tuple[Callable[[], object], bool]:
        """So many launches as one CUDA graph; as a loop, and False, where they can't be captured."""

        def loop() -> None:
            for _ in range(launches):
                run()

        try:
            graph = torch.cuda.CUDAGraph()
            self.sync()
            with torch.cuda.stream(self.stream):
                run()  # what is done once a stream, as making a workspace, must not be captured
                self.stream.synchronize()
                graph.capture_begin()
                try:
                    loop()
                finally:
                    graph.capture_end()
            self.sync()
        except Exception:
            if not self.alive():
                raise
            return loop, False
        return graph.replay, True


@dataclass
class Entrant:
    """What is timed: its call, what is recorded of it, and its launches once they are captured."""

    label: str
    run: Callable[[], object]
    record: dict[str, Any] = field(default_factory=dict)
    launches: int = 1
    replay: Callable[[], object] | None = None
    estimate: float = math.inf

    def probe(self, clock: Clock) -> None:
        """Estimate a launch's seconds by a short graph."""
        launches = 10 if clock.lap([self.run])[0] < 1e-3 else 1
        replay, graphed = clock.capture(self.run, launches)
        clock.lap([replay])
        self.estimate = max(min(clock.lap([replay, replay])) / launches, 1e-7)
        self.record |= {"us": self.estimate * 1e6, "graph": graphed, "raced": False}

    def prepare(self, clock: Clock) -> None:
        """Capture launches for 1 ms, at least 10 of them unless they take more than 10 ms, at least one."""
        seconds = max(1e-3, min(10 * self.estimate, 10e-3))
        self.launches = max(1, min(1000, math.ceil(seconds / self.estimate)))
        self.replay, self.record["graph"] = clock.capture(self.run, self.launches)


def race(entrants: Sequence[Entrant], clock: Clock, rounds: int = ROUNDS) -> None:
    """Replay all in turn, round by round, beginning with another each time; median, p20 and p80 of a launch."""
    for _ in range(3):
        clock.lap([e.replay for e in entrants if e.replay])
    laps: dict[str, list[float]] = {e.label: [] for e in entrants}
    for i in range(rounds):
        order = [*entrants[i % len(entrants) :], *entrants[: i % len(entrants)]]
        for e, seconds in zip(order, clock.lap([e.replay for e in order if e.replay]), strict=True):
            laps[e.label].append(seconds / e.launches * 1e6)
    for e in entrants:
        p20, *_, p80 = statistics.quantiles(laps[e.label], n=5)
        e.record |= {
            "us": statistics.median(laps[e.label]), "p20": p20, "p80": p80, "launches": e.launches, "raced": True,
        }  # fmt: skip


def ceilings(clock: Clock, size: int = 8192, elements: int = 1 << 28) -> dict[str, Any]:
    """What the device reaches: flop/s of a matrix product in each type, and bytes/s, read and written, of a copy.

    float32 has the better of IEEE products and a third of TF32's: three of those give its accuracy.
    """
    found: dict[str, float] = {}

    def seconds(run: Callable[[], object]) -> float:
        entrant = Entrant("ceiling", run)
        run()
        entrant.probe(clock)
        entrant.prepare(clock)
        race([entrant], clock)
        return entrant.record["us"] / 1e6

    for dtype, kind in TORCH.items():
        a, b = (torch.randn((size, size), device=clock.device).to(kind) for _ in range(2))
        out = torch.empty_like(a)
        with accuracy(dtype):
            found[dtype] = 2 * size**3 / seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
    source = torch.zeros(elements, device=clock.device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size() / seconds(lambda: target.copy_(source))
    flops = found | {"float32": max(found["float32"], found["tfloat32"] / 3)}
    return {"flops_per_s": flops, "float32_ieee_flops_per_s": found["float32"], "bytes_per_s": copied}


def device_facts() -> tuple[dict[str, str], Target]:
    """Names and versions that results belong to, and the target that kernels are made for."""
    import triton

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip:
        target = parse_target(f"hip:{properties.gcnArchName.split(':')[0]}")
    else:
        target = parse_target(f"cuda:sm_{properties.major}{properties.minor}")
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        shown = []
    return {
        "device": properties.name,
        "driver": shown[0] if shown else "unknown",
        "cuda": str(torch.version.cuda or torch.version.hip),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
    }, target


# ---- One problem ---------------------------------------------------------------------------------------------------


@contextmanager
def marked(marker: Path, key: str, label: str, clock: Clock) -> Iterator[None]:
    """While a candidate first runs, a file says which: it stays behind if the process or its device is lost."""
    marker.write_text(f"{key}\n{label}\n", encoding="utf-8")
    try:
        yield
    except Exception as error:
        if not clock.alive():
            raise DeviceLost(f"{label}: {cause(error)}") from error
        marker.unlink()
        raise
    except BaseException:
        marker.unlink()
        raise
    marker.unlink()


def checked(work: Operands, run: Callable[[], object], last: bool) -> float:
    """Run a kernel on a poisoned result; its error."""
    work.whole.fill_(math.nan)
    run()
    work.check_guards()
    error = work.error(work.written(last))
    if not error <= TOLERANCE[work.problem.dtype]:
        raise Wrong(f"error {error:.2e} of the largest |result|, at most {TOLERANCE[work.problem.dtype]:.1e}")
    return error


def measure(
    p: Problem,
    key: str,
    found: Sequence[Candidate],
    left_out: dict[str, str],
    clock: Clock,
    marker: Path,
) -> dict[str, Any]:
    """Check and time a problem's candidates and ATen; what is recorded of it.

    Args:
        left_out: label -> cause of candidates that are not tried.
    """
    left_out = dict(left_out)
    with accuracy(p.dtype):
        work = Operands(p, clock.device)
        entrants = _aten_entrants(work, left_out, clock)
        kernels = _kernel_entrants(work, key, found, left_out, clock, marker)
        floor = Entrant("floor", floor_launch(work, grid_class(p)))
        floor.run()
        racing = [floor, *entrants, *_fast(kernels)]
        for e in (floor, *entrants):
            e.probe(clock)
        for e in racing:
            e.prepare(clock)
        race(racing, clock)
    return {
        "floor": floor.record | {"programs": grid_class(p)},
        "aten": {e.label: e.record for e in entrants},
        "kernels": {e.label: e.record for e in kernels},
        "left_out": left_out,
    }


def _aten_entrants(work: Operands, left_out: dict[str, str], clock: Clock) -> list[Entrant]:
    entrants: list[Entrant] = []
    for label, (last, run) in aten_variants(work).items():
        padded = label.startswith("convolution") and not pads_alike(work.problem)
        try:
            error = work.error(run())
            clock.sync()
        except Exception as failure:
            if not clock.alive():
                raise DeviceLost(cause(failure)) from failure
            left_out[f"ATen {label}"] = cause(failure)
            continue
        entrants.append(Entrant(label, run, {"error": error, "padded_by_hand": padded, "channels_last": last}))
    return entrants


def _kernel_entrants(
    work: Operands, key: str, found: Sequence[Candidate], left_out: dict[str, str], clock: Clock, marker: Path
) -> list[Entrant]:
    """Candidates that run and are right, with an estimate of their time."""
    entrants: list[Entrant] = []
    for candidate in found:
        kernel, label = candidate.kernel, candidate.label
        if label in left_out:
            continue
        record = {
            "family": kernel.config.family, "format": kernel.problem.memory_format, "config": kernel.config.as_dict(),
        }  # fmt: skip
        try:
            with marked(marker, key, label, clock):
                run = bind(work, kernel)
                error = checked(work, run, kernel.problem.channels_last)
                entrant = Entrant(label, run, record | {"error": error})
                entrant.probe(clock)
        except DeviceLost:
            raise
        except Exception as failure:
            left_out[label] = cause(failure)
            continue
        entrants.append(entrant)
    return entrants


def _fast(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Those not much slower than the fastest, and the best of each family and format."""
    best: dict[tuple[str, str], Entrant] = {}
    for e in sorted(entrants, key=lambda e: e.estimate):
        best.setdefault((e.record["family"], e.record["format"]), e)
    limit = SLOW * min((e.estimate for e in entrants), default=0.0)
    return [e for e in entrants if e.estimate <= limit or any(e is b for b in best.values())]
