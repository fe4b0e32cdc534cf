"""The convolutions that PyTorch and ONNX publish to test with, as local problems, and what is wrong with a run of one.

`python bench/published_cases.py` says how they are read and compared, and runs them by every family of kernels.
"""

from __future__ import annotations

import random
import sys
import time
import unittest
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import torch
from kernel_cases import LETTERS, PHASES, SM_90, interpret, reference, to_tf32
from torch import Tensor

from convgen.kernels.config import Config
from convgen.kernels.families import FAMILIES, GpuFamily, aten
from convgen.kernels.problem import LocalDim, Problem
from convgen.program.nodes import Phase
from convgen.verify.program import TORCH_DTYPES

DTYPES = ("float32", "tfloat32", "bfloat16", "float64")
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "tfloat32": 2.0**-24, "bfloat16": 2.0**-8}
OTHERS = 2  # configurations beside the default one
INSTALL = "pip install --target build/onnx --no-deps onnx protobuf ml_dtypes, then PYTHONPATH=build/onnx"


# ---- Cases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """A published convolution, as a rank without neighbours has it.

    Attributes:
        given: x, w, dy and bias; x and dy change places where it is transposed.
        phase: what makes the published result: forward, or backward_data where it is transposed.
        published: that result, float32 or wider; transposed without the bias, which no kernel of a gradient adds.
    """

    source: str
    name: str
    phase: Phase
    dims: tuple[LocalDim, ...]
    groups: int
    given: Mapping[str, Tensor]
    published: Tensor

    def problem(self, phase: Phase, dtype: str, memory_format: str) -> Problem:
        filters, channels = self.given["w"].shape[:2]
        return Problem(
            phase=phase, batch=len(self.given["x"]), channels=channels, filters=filters // self.groups,
            groups=self.groups, dims=self.dims, dtype=dtype, memory_format=memory_format,
            bias=phase == "forward" and "bias" in self.given,
        )  # fmt: skip

    def rounded(self, dtype: str) -> dict[str, Tensor]:
        """Operands in a type; TF32's to 11 bits, so that kernels need not round."""
        made = {n: t.to(TORCH_DTYPES[dtype]) for n, t in self.given.items()}
        return {n: to_tf32(t) for n, t in made.items()} if dtype == "tfloat32" else made

    def is_published_in(self, dtype: str) -> bool:
        """Whether the type holds what the published result was made of."""
        read = {"forward": ("x", "w", "bias"), "backward_data": ("dy", "w")}[self.phase]
        values = self.rounded(dtype)
        return all(torch.equal(values[n].double(), self.given[n].double()) for n in read if n in self.given)


def local(
    source: str,
    name: str,
    transposed: bool,
    operands: tuple[Tensor, Tensor, Tensor | None],
    result: Tensor,
    below: Sequence[int],
    *,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Case:
    """The case of an operator's operands (activation, weights, bias), with a random gradient of its result."""
    activation, w, bias = operands
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    x, dy = (gradient, activation) if transposed else (activation, gradient)
    dims = tuple(
        LocalDim(*d)
        for d in zip(LETTERS[w.dim() - 2], x.shape[2:], dy.shape[2:], w.shape[2:], stride, dilation, below, strict=True)
    )
    given, phase = {"x": x, "w": w, "dy": dy}, "forward"
    if transposed:
        phase = "backward_data"
        result = result if bias is None else result.double() - bias.double().view(-1, *[1] * len(dims))
    elif bias is not None:
        given["bias"] = bias
    case = Case(source, name, phase, dims, groups, given, result)  # type: ignore[arg-type]
    p = case.problem(case.phase, "float64", "contiguous")
    values = case.rounded("float64")
    want = reference(p, values)
    if want.shape != result.shape or not is_near(want, result, as_published(p, values, result)):
        raise click.ClickException(f"{source} {name} is read as {p}, whose result is another one than the published")
    return case


def opinfo(seed: int) -> Iterator[Case]:
    """PyTorch's samples, their results by the operator itself in float64."""
    if find_spec("expecttest") is None:  # what test cases are derived from, which samples do without
        stand_in: Any = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    torch.manual_seed(seed)
    for op in op_db:
        if op.name.startswith("nn.functional.conv"):
            samples = op.sample_inputs("cpu", torch.float32, requires_grad=False)
            for number, sample in enumerate(samples):
                yield of_sample(f"{op.name.removeprefix('nn.functional.')} {number}", op.op, sample)


def of_sample(name: str, operator: Callable[..., Tensor], sample: Any) -> Case:
    """The case of a SampleInput: input, args (weights, bias) and kwargs of a function of torch.nn.functional."""
    x, (w, bias), options = sample.input, (*sample.args, None)[:2], sample.kwargs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # padding="same" around an even kernel copies x
        y = operator(x.double(), w.double(), None if bias is None else bias.double(), **options)
    if x.dim() < w.dim():
        x, y = x[None], y[None]

    def of_dims(option: str, default: int) -> list[int]:
        value = options.get(option, default)
        values = [value] if isinstance(value, int) else list(value)
        return values * (w.dim() - 2) if len(values) == 1 else values

    dilation, padding = of_dims("dilation", 1), options.get("padding", 0)
    if padding == "same":
        below = [d * (k - 1) // 2 for d, k in zip(dilation, w.shape[2:], strict=True)]
    else:
        below = [0] * len(dilation) if padding == "valid" else of_dims("padding", 0)
    return local(
        "opinfo", name, "transpose" in name, (x, w, bias), y, below, stride=of_dims("stride", 1), dilation=dilation,
        groups=options.get("groups", 1),
    )  # fmt: skip


def onnx(seed: int) -> Iterator[Case]:
    """The cases of ONNX's backends; nothing of them is drawn."""
    try:
        from onnx.backend.test.loader import load_model_tests
    except ImportError as error:
        raise MissingError(f"onnx can't be imported ({error}): {INSTALL}") from None
    for kind in ("node", "pytorch-converted", "pytorch-operator"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it makes the cases of all operators, of which some overflow
            found = load_model_tests(kind=kind)
        for test in sorted(found, key=lambda test: test.name):
            yield from of_model(f"{kind} {test.name}", test)


def of_model(name: str, test: Any) -> Iterator[Case]:
    """The cases of a model, one a set of data, if it is one convolution."""
    from onnx import helper, load, load_tensor, numpy_helper

    folder = Path(test.model_dir) if test.model is None else None
    if folder is not None and not (folder / "model.onnx").exists():
        return
    graph = (test.model if folder is None else load(folder / "model.onnx")).graph
    if [node.op_type for node in graph.node] not in (["Conv"], ["ConvTranspose"]):
        return
    (node,) = graph.node
    stored = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    names = [i.name for i in graph.input if i.name not in stored]

    def array(path: Path) -> Any:
        return numpy_helper.to_array(load_tensor(path))

    data = test.data_sets or (
        ([array(s / f"input_{n}.pb") for n in range(len(names))], [array(s / "output_0.pb")])
        for s in sorted(folder.glob("test_data_set_*"))  # type: ignore[union-attr]
    )
    options = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    for inputs, (result,) in data:
        values = stored | dict(zip(names, inputs, strict=True))
        operands = [torch.tensor(values[n]) for n in node.input]
        yield of_node(name, node.op_type == "ConvTranspose", (*operands, None)[:3], torch.tensor(result), options)


def of_node(name: str, transposed: bool, operands: Any, result: Tensor, options: Mapping[str, Any]) -> Case:
    """The case of a Conv or ConvTranspose by its attributes (ONNX's Operators.md)."""
    activation, w, _ = operands
    count = w.dim() - 2
    stride, dilation = (options.get(n, [1] * count) for n in ("strides", "dilations"))
    auto, below = options.get("auto_pad", b"NOTSET").decode(), options.get("pads", [0] * count)[:count]
    if auto.startswith("SAME") or "output_shape" in options:
        fine, coarse = (result, activation) if transposed else (activation, result)
        sides = zip(fine.shape[2:], coarse.shape[2:], w.shape[2:], stride, dilation, strict=True)
        whole = [(y - 1) * s + d * (k - 1) + 1 - x for x, y, k, s, d in sides]
        if transposed:
            whole = [n + more for n, more in zip(whole, options.get("output_padding", [0] * count), strict=True)]
        else:
            whole = [max(n, 0) for n in whole]
        below = [n // 2 if auto == "SAME_UPPER" else n - n // 2 for n in whole]
    return local(
        "onnx", name, transposed, operands, result, below, stride=stride, dilation=dilation,
        groups=options.get("group", 1),
    )  # fmt: skip


class MissingError(click.ClickException):
    """An optional package is not there."""


SOURCES: dict[str, Callable[[int], Iterator[Case]]] = {"opinfo": opinfo, "onnx": onnx}


# ---- One run -------------------------------------------------------------------------------------------------------


def rounding(p: Problem, given: dict[str, Tensor], want: Tensor, dtype: str) -> Tensor:
    """What sums and the result's rounding in a type explain, by element: the worst case [Higham 2002, 3.1], twice."""
    terms = {
        "forward": p.channels * p.taps + p.bias,
        "backward_data": p.filters * p.taps,
        "backward_filter": p.pixels,
    }[p.phase] + 2
    sums = terms * ROUNDOFF["float64" if dtype == "float64" else "float32"]
    if dtype == "float32":
        sums += 2.0**-21  # what three products of TF32 leave out
    return ROUNDOFF[dtype] * want.abs() + 2 * sums * reference(p, {n: t.abs() for n, t in given.items()})


def as_published(p: Problem, given: dict[str, Tensor], want: Tensor) -> Tensor:
    """The rounding of a result that may be published in float32."""
    return rounding(p, given, want, "float32") + rounding(p, given, want, p.dtype)


def is_near(found: Tensor, want: Tensor, limit: Tensor) -> bool:
    return bool(((found.double() - want.double()).abs() <= limit).all())  # NaN is not


def fault(case: Case, p: Problem, config: Config) -> str | None:
    """What is wrong with a run; None if nothing is."""
    given = case.rounded(p.dtype)
    try:
        first, second = (interpret(p, config, given) for _ in range(2))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    want = reference(p, given)
    wanted = [("float64's", want, rounding(p, given, want, p.dtype))]
    if p.phase == case.phase and case.is_published_in(p.dtype):
        wanted.append(("the published", case.published, as_published(p, given, want)))
    for name, value, limit in wanted:
        if not is_near(first, value, limit):
            error = (first.double() - value.double()).abs()
            off = int((~(error <= limit)).sum())
            return f"{off} of {error.numel()} are not {name}, by {float(error.nan_to_num(torch.inf).max()):.3g}"
    return None if torch.equal(first, second) else "two runs differ"


# ---- All of them ---------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Of a source by a family. `wrong`: in full."""

    cases: set[str] = field(default_factory=set)
    runs: int = 0
    wrong: list[str] = field(default_factory=list)


Tallies = dict[tuple[str, str], Tally]  # by source and family


def problems(cases: Sequence[Case], seed: int) -> list[tuple[Case, Problem, GpuFamily]]:
    """Each beside a family that takes it: of all cases and families one at random, then another; large ones last."""
    found: list[tuple[bool, int, Case, Problem, GpuFamily]] = []
    for case in cases:
        formats = ("contiguous", "channels_last")[: len(case.dims)]
        every = [case.problem(phase, dtype, form) for phase in PHASES for dtype in DTYPES for form in formats]
        taken = [
            (p, family)
            for p in every
            for family in FAMILIES
            # Of ATen's on a CPU float64's alone is not oneDNN's (bench/local_fuzz.py), and none rounds to TF32.
            if family.refusal(p, SM_90) is None and (family.NAME != aten.NAME or p.dtype == "float64")
        ]
        random.Random(f"{seed} {case.name}").shuffle(taken)
        turns: Counter[str] = Counter()
        for p, family in taken:
            found.append((is_large(p), turns[family.NAME], case, p, family))
            turns[family.NAME] += 1
    return [(case, p, family) for _, _, case, p, family in sorted(found, key=lambda one: one[:2])]


def is_large(p: Problem) -> bool:
    """Minutes in the interpreter."""
    return p.pixels * p.taps * p.groups > 100_000


def configurations(p: Problem, family: GpuFamily, rng: random.Random) -> list[Config]:
    """The default one, and but for large problems some others."""
    first = family.default(p, SM_90)
    others = [c for c in family.configs(p, SM_90) if c != first and not is_large(p)]
    return [first, *rng.sample(others, min(OTHERS, len(others)))]


def run_all(some: Sequence[tuple[Case, Problem, GpuFamily]], seed: int, seconds: float) -> tuple[Tallies, int]:
    """Runs by source and family, and of how many problems, until the time is over."""
    end, rng, tallies = time.monotonic() + seconds, random.Random(seed), dict[tuple[str, str], Tally]()
    for begun, (case, p, family) in enumerate(some):
        for config in configurations(p, family, rng):
            if time.monotonic() > end:
                return tallies, begun
            tally = tallies.setdefault((case.source, family.NAME), Tally())
            what = fault(case, p, config)
            tally.cases.add(case.name)
            tally.runs += 1
            if what is not None:
                tally.wrong.append(f"{case.source} {case.name}: {what}\n  {p}\n  {config}")
    return tallies, len(some)
