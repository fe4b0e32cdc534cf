"""What ATen's convolutions get wrong on a CPU, and that a module's local convolutions don't.

    python bench/local_fuzz.py [--seconds 120] [--cases 1000000] [--seed 0] [--show CASE]

Small layers at random: 1-D to 3-D, both memory formats and odd strides where an extent is 1, float64 float32 bfloat16
float16, one channel, groups, strides, dilations, padding; all three phases. Each result of aten.convolution and
aten.convolution_backward, and of the text that convgen prints for the same problem, is compared with sums tap by tap in
float64, within what rounding explains. Memory is filled with NaN before each call, so that what is not written is
seen; a child process does the work, so that a crash is a line of the report. Prints the wrong ones by kind; the exit
status says whether the module had any.
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from convgen.emit.paste import shared_runtime
from convgen.kernels.load import load_text

PHASES = ("forward", "backward_data", "backward_filter")
DTYPES = ("float32", "float32", "bfloat16", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Case:
    """A local problem: numbers of a group, and how its tensors lie in memory."""

    number: int
    dtype: str
    form: str  # contiguous, channels_last, or odd: contiguous, with any stride where an extent is 1
    batch: int
    groups: int
    channels: int
    filters: int
    x: tuple[int, ...]
    y: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    bias: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def memory_format(self) -> torch.memory_format:
        last = {2: torch.channels_last, 3: torch.channels_last_3d} if self.form == "channels_last" else {}
        return last.get(len(self.x), torch.contiguous_format)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "x": (self.batch, self.groups * self.channels, *self.x),
            "w": (self.groups * self.filters, self.channels, *self.kernel),
            "y": (self.batch, self.groups * self.filters, *self.y),
        }

    @property
    def kind(self) -> str:
        """Which of the kinds that templates/runtime/local.py lists, if it is wrong."""
        sides = list(zip(self.x, self.y, self.kernel, self.stride, self.padding, self.dilation, strict=True))
        if any(all(not 0 <= i * s - p + j * d < x for i in range(y) for j in range(k)) for x, y, k, s, p, d in sides):
            return "windows that all miss x"
        if self.y[-1] == 1 and self.stride[-1] > 1 and self.channels == 1:
            return "one last pixel and a stride"
        if any(d * (k - 1) + 1 > x for x, _, k, _, _, d in sides):
            return "a window longer than x"
        if any(p and d * (k - 1) + 1 + s > x for x, _, k, s, p, d in sides):
            return "a window nearly as long as x"
        return "another"


def draw(seed: int, number: int) -> Case:
    rng = random.Random(f"{seed} {number}")
    dims = rng.choice((1, 2, 2, 3, 3))
    while True:
        x = tuple(rng.randint(1, {1: 12, 2: 8, 3: 6}[dims]) for _ in range(dims))
        kernel = tuple(rng.randint(1, 4) for _ in x)
        stride = tuple(rng.choice((1, 1, 1, 2, 3)) for _ in x)
        dilation = tuple(rng.choice((1, 1, 1, 1, 2, 3)) for _ in x)
        padding = tuple(rng.choice((0, 0, 1, 2, 3, 4)) for _ in x)
        spans = [n + 2 * p - d * (k - 1) - 1 for n, p, d, k in zip(x, padding, dilation, kernel, strict=True)]
        if min(spans) >= 0:
            break
    counts = (1, 1, 2, 3, 5, 8, 16) if rng.random() < 0.7 else (1, 2, 4, 16, 24, 32, 48)
    return Case(
        number=number,
        dtype=rng.choice(DTYPES),
        form=rng.choice(("contiguous", "odd") if dims == 1 else ("contiguous", "channels_last", "odd")),
        batch=rng.randint(1, 4),
        groups=rng.choice((1, 1, 1, 2, 3)),
        channels=rng.choice(counts),
        filters=rng.choice(counts),
        x=x,
        y=tuple(n // s + 1 for n, s in zip(spans, stride, strict=True)),
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        bias=rng.random() < 0.3,
    )


# ---- One case ------------------------------------------------------------------------------------------------------


def laid(value: Tensor, case: Case, rng: random.Random) -> Tensor:
    """A tensor as the case has its operands in memory."""
    made = torch.empty(value.shape, dtype=case.torch_dtype, memory_format=case.memory_format).copy_(value)
    if case.form != "odd":
        return made
    pairs = zip(made.shape, made.stride(), strict=True)
    return made.as_strided(made.shape, [rng.choice((1, step)) if n == 1 else step for n, step in pairs])


@cache
def runtime() -> ModuleType:
    """What a generated module convolves with."""
    return load_text(shared_runtime().text)


@cache
def layer_of(case: Case) -> Any:
    sides = zip(case.x, case.y, case.kernel, case.stride, case.padding, case.dilation, strict=True)
    shapes = case.shapes()
    spec = {
        "name": "fuzz", "layer": "conv", "grid": {"N": 1}, "options": {"sums": "ordered"}, "input": shapes["x"],
        "out_channels": shapes["w"][0], "groups": case.groups,
    }  # fmt: skip
    return runtime().Layer(
        spec, "", file="", device="cpu", dtype=case.torch_dtype, memory_format=case.memory_format,
        spatial=tuple(runtime().Spatial(*side) for side in sides), stored={},
    )  # fmt: skip


def by_aten(case: Case, phase: str, x: Tensor, w: Tensor, dy: Tensor, bias: Tensor | None) -> Tensor:
    rest = (case.stride, case.padding, case.dilation, False, [0] * len(case.x), case.groups)
    if phase == "forward":
        return torch.ops.aten.convolution(x, w, bias, *rest)
    which = PHASES.index(phase) - 1
    return torch.ops.aten.convolution_backward(dy, x, w, None, *rest, [which == 0, which == 1, False])[which]


def by_module(case: Case, phase: str, x: Tensor, w: Tensor, dy: Tensor, bias: Tensor | None) -> Tensor:
    layer, shapes, padding = layer_of(case), case.shapes(), list(case.padding)
    if phase == "forward":
        return runtime().conv_forward(layer, x, w, bias, padding, shapes["y"])
    if phase == "backward_data":
        return runtime().conv_backward_data(layer, dy, w, padding, shapes["x"])
    return runtime().conv_backward_filter(layer, dy, x, padding, shapes["w"])


WAYS = {"ATen": by_aten, "module": by_module}


def over_limit(case: Case, phase: str, way: str) -> float:
    """Error of a result over what rounding explains."""
    rng, generator = random.Random(case.number), torch.Generator().manual_seed(case.number)
    x, w, dy = (laid(torch.randn(s, generator=generator), case, rng) for s in case.shapes().values())
    bias = torch.randn(case.groups * case.filters, generator=generator).to(case.torch_dtype) if case.bias else None
    bias = bias if phase == "forward" else None
    made = {"forward": dy, "backward_data": x, "backward_filter": w}[phase]
    poison = [torch.full_like(made, math.nan) for _ in range(3)]  # the memory that the result will get
    del poison
    found = WAYS[way](case, phase, x, w, dy, bias)
    error, limit = runtime().error_and_limit(layer_of(case), phase, x, w, dy, bias, case.padding, found)
    return error / limit if limit else math.inf if error else 0.0


# ---- All of them ---------------------------------------------------------------------------------------------------


def work(way: str, seed: int, first: int, last: int, seconds: float) -> None:
    """Results first to last, three a case, on one thread: what is at work goes to stderr, what is wrong to stdout."""
    torch.set_num_threads(1)
    end, number = time.monotonic() + seconds, first
    while number < last and time.monotonic() < end:
        sys.stderr.write(f"{number}\n")
        over = over_limit(draw(seed, number // 3), PHASES[number % 3], way)
        if not over <= 1:
            print(number, over, flush=True)
        number += 1
    sys.stderr.write(f"{number}\n")


def collect(way: str, seed: int, last: int, seconds: float) -> tuple[int, dict[int, float]]:
    """How many results there were, and the wrong ones, over what rounding explains; a crash is -1.

    After a crash a new child goes on behind it: a call that writes where it should not may bring down a later one.
    """
    end, number, wrong = time.monotonic() + seconds, 0, dict[int, float]()
    while number < last and (left := end - time.monotonic()) > 0:
        child = [sys.executable, __file__, "--worker", way, "--first", str(number)]
        limits = ["--seed", str(seed), "--cases", str(-(-last // 3)), "--seconds", str(left)]
        ran = subprocess.run([*child, *limits], check=False, capture_output=True, text=True)
        wrong |= {int(n): float(over) for n, over in (line.split() for line in ran.stdout.splitlines())}
        if ran.returncode > 0:
            raise SystemExit(ran.stderr[-3000:])
        at = [line for line in ran.stderr.splitlines() if line.isdigit()]
        number = int(at[-1])
        if ran.returncode == 0:
            break
        wrong[number] = -1
        number += 1
    return number, wrong


def kinds(seed: int, wrong: dict[int, float]) -> list[tuple[str, ...]]:
    """A line a kind: what it is, how many, of which types, dimensions and formats, and the worst."""
    found: dict[tuple[str, str, str], list[tuple[Case, float]]] = defaultdict(list)
    for number, over in wrong.items():
        case = draw(seed, number // 3)
        one = " of one channel a group" if case.channels == 1 else ""
        what = "a crash" if over < 0 else "wrong" if over > 10 else "rounded more"
        found[case.kind, PHASES[number % 3] + one, what].append((case, over))

    def several(values: list[str]) -> str:
        return " ".join(sorted(set(values)))

    lines: list[tuple[str, ...]] = []
    for (kind, phase, what), pairs in sorted(found.items()):
        cases, worst = [case for case, _ in pairs], max(over for _, over in pairs)
        types = several([f"{len(c.x)}-D {c.dtype}" for c in cases])
        forms = several([c.form for c in cases])
        lines.append((kind, phase, types, forms, str(len(cases)), what, f"{worst:.2g}" if worst > 0 else ""))
    return lines


HEADINGS = ("kind", "phase", "types", "memory", "results", "what", "worst over the limit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120, help="for each of ATen and the module")
    parser.add_argument("--cases", type=int, default=10**6, help="at most; three results each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, metavar="N", help="print case N and its three results' errors, and no more")
    parser.add_argument("--worker", choices=tuple(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.seed, options.first, 3 * options.cases, options.seconds)
        return
    if options.show is not None:
        case = draw(options.seed, options.show)
        print(case)
        for phase in PHASES:
            print(f"module {phase}: {over_limit(case, phase, 'module'):.3g} of what rounding explains", flush=True)
            print(f"ATen   {phase}: {over_limit(case, phase, 'ATen'):.3g}", flush=True)
        return
    broken = 0
    for way in WAYS:
        count, wrong = collect(way, options.seed, 3 * options.cases, options.seconds)
        print(f"{way}: {len(wrong)} of {count} results wrong, seed {options.seed}, torch {torch.__version__}, "
              f"{torch.backends.cpu.get_cpu_capability()}")  # fmt: skip
        if wrong:
            print("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS))
            print("\n".join("| " + " | ".join(line) + " |" for line in kinds(options.seed, wrong)))
            print(f"cases, for --show: {' '.join(str(n // 3) for n in list(wrong)[:20])}")
        broken += len(wrong) if way == "module" else 0
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
