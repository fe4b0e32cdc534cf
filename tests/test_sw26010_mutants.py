"""Programs of the mesh with a line changed: each ends in an error of the emulator, never in numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from convgen.sw26010.conv import run as conv_run
from convgen.sw26010.conv.cost import explicit_plan
from convgen.sw26010.conv.implicit_plan import implicit_plan
from convgen.sw26010.conv.problem import ConvProblem
from convgen.sw26010.conv.run import operand_shapes, run_conv
from convgen.sw26010.gemm import run as gemm_run
from convgen.sw26010.gemm.plan import GemmPlan
from convgen.sw26010.gemm.run import run_gemm
from convgen.sw26010.machine import faults
from convgen.sw26010.machine.core_group import SW26010
from convgen.sw26010.machine.rates import taken_rates
from convgen.sw26010.operations.channels import ChannelMap, ChannelSums
from convgen.sw26010.operations.concatenation import Concatenation
from convgen.sw26010.operations.local_response import LocalResponse
from convgen.sw26010.operations.rows import RowShift, RowSums
from convgen.sw26010.operations.softmax_loss import SoftmaxLoss
from convgen.sw26010.operations.stream import Stream
from convgen.sw26010.operations.task import run_operation
from convgen.sw26010.pooling.windows import Pool, Windows

MAXIMA = Windows(1, 5, 7, 9, 3, 2, 1, "max")
OPERATIONS = (
    Stream("relu", 700), Stream("momentum", 700, "float32", (0.1, 0.9, 0.0)),
    ChannelSums(3, 9, 10, "float32", "moments"), ChannelSums(3, 9, 10, "float32", "products"),
    ChannelMap(3, 9, 10, "float32", "combine"),
    LocalResponse(2, 9, 40, 5), LocalResponse(2, 700, 9, 5, backward=True),
    RowSums(20, 70), RowShift(20, 70), SoftmaxLoss(5, 7), SoftmaxLoss(5, 7, backward=True),
    Concatenation(3, (50, 20)), Concatenation(3, (50, 20), backward=True),
    Pool(MAXIMA), Pool(MAXIMA, backward=True),
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """An operation with another program."""

    of: Any
    text: str

    def program(self) -> str:
        return self.text

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)


def operands_of(operation: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    return [np.zeros(p.shape) if p.name == "labels" else rng.standard_normal(p.shape) for p in operation.reads]


# What is done wrong, where, and what is written there; then which errors it may end in.
MISTAKES: dict[str, tuple[str, str, tuple[type[Exception], ...]]] = {
    "a get that nobody waits for": (r"^( *)cpe\.dma_wait\(.*$", r"\1pass", (faults.DmaFault,)),
    "a get that is left out": (r"^( *)cpe\.dma_get(?:_line)?\(.*$", r"\1pass", (faults.DmaFault,)),
    "a put that one CPE leaves out": (
        r"^( *)(cpe\.dma_put(?:_line)?\(.*)$", r"\1if cpe.id: \2", (faults.AccountFault,),
    ),
    "floats that nobody widens": (r"^( *)cpe\.widen\(.*$", r"\1pass", (faults.PrecisionFault,)),
    "doubles that nobody narrows": (r"^( *)cpe\.narrow\(.*$", r"\1pass", (faults.PrecisionFault,)),
    "items less": (
        r"(range\(cpe\.(?:id|row|column)[^,]*, )([^,]+), ([^)]+)\)", r"\1\2 - \3, \3)",
        (faults.AccountFault, faults.DmaFault),
    ),
    "a row less in LDM": (
        r'(cpe\.ldm\("(?:made|x|dy)", (?:ROWS|HEIGHT|BLOCK))', r"\1 - 1", (faults.DmaFault, faults.AccountFault),
    ),
    "a row less by DMA": (r"(, 0, .*\* W\w*)\)$", r"\1 - W)", (faults.AccountFault,)),
    "an element less by DMA": (r"(, 0, .*size)\)$", r"\1 - 1)", (faults.AccountFault,)),
    "another sender": (r"if cpe\.(row|column) == t", r"if cpe.\1 == min(t, 6)", (faults.MessageFault,)),
    "a sender too few": (
        r"^( *)yield from (cpe\.put[rc]\(.*)$", r"\1if cpe.id != 9: yield from \2",
        (faults.Deadlock, faults.MessageFault),
    ),
    "a receiver too few": (
        r"(message) = (yield from cpe\.get[rc]\(t\))", r"\1 = [0.0] * 4 if t == 7 and cpe.id == 9 else (\2)",
        (faults.UndrainedFifo, faults.MessageFault),
    ),
    "LDM over 64 KiB": (
        r'(cpe\.ldm\("?\w+"?, )[^)]+(\))', rf"\g<1>1, {SW26010.ldm_bytes // 8 + 1}\2", (faults.LdmOverflow,),
    ),
}  # fmt: skip


def mutants(text: str) -> Iterator[tuple[str, str, tuple[type[Exception], ...]]]:
    """(what, text, errors), a place each."""
    for what, (pattern, instead, errors) in MISTAKES.items():
        for found in re.finditer(pattern, text, re.MULTILINE):
            yield what, text[: found.start()] + found.expand(instead) + text[found.end() :], errors


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: f"{type(o).__name__}-{getattr(o, 'kind', '')}")
def test_a_wrong_program_ends_in_an_error(operation: Any) -> None:
    operands = operands_of(operation)
    run_operation(operation, *operands)
    seen = set[str]()
    for what, text, errors in mutants(operation.program()):
        seen.add(what)
        with pytest.raises(errors):
            run_operation(Mutant(operation, text), *operands)
    assert {"a get that nobody waits for", "a put that one CPE leaves out", "LDM over 64 KiB"} <= seen


def test_every_mistake_is_made() -> None:
    made = {what for operation in OPERATIONS for what, _, _ in mutants(operation.program())}
    assert made == set(MISTAKES)


def less(text: str) -> Iterator[str]:
    """Programs of products and of columns with a line less, or a part of a loop or of a transfer, a place each."""
    for pattern, instead in (
        *((pattern, instead) for what, (pattern, instead, _) in MISTAKES.items() if "one CPE" not in what),
        (r"^( *)cpe\.dma_put\(.*$", r"\1pass"),
        (r"range\(8\)", "range(7)"),
        (r"(range\(0, )([^,()]+), (\w+)\)", r"\1\2 - \3, \3)"),
        (r"range\(0, (C \* \w+), 64\)", r"range(64, \1, 64)"),
        (r"^( *)cpe\.dma_(?:get|put)_lines\(.*$", r"\1pass"),
        (r"(, (?:LAST - FIRST|W|W_OUT))((?:, where=\w+)?)\)$", r"\1 - 1\2)"),
    ):
        for found in re.finditer(pattern, text, re.MULTILINE):
            yield text[: found.start()] + found.expand(instead) + text[found.end() :]


@pytest.mark.parametrize("level", ["messages", "fast"])
@pytest.mark.parametrize("images", [1, 2])
def test_a_wrong_product_ends_in_an_error(level: Any, images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = GemmPlan(m=40, n=9, k=20, bm=32, bn=8, bk=8, dtype="float32", a_transposed=True, images=images)
    operands = [np.ones(shape) for shape in ((images * 40, 20), (images * 20, 9), (40, 9))]
    wrongs = list(less(gemm_run.gemm_program(plan, messages=level == "messages")))
    assert np.array_equal(run_gemm(plan, *operands, level=level).c, np.full((40, 9), 20 * images + 1))
    for wrong in wrongs:
        monkeypatch.setattr(gemm_run, "gemm_program", lambda plan, *, messages, wrong=wrong: wrong)
        with pytest.raises(faults.MeshFault):
            run_gemm(plan, *operands, level=level)
    assert len(wrongs) >= 20


@pytest.mark.parametrize("phase", ["forward", "backward_filter", "backward_data"])
@pytest.mark.parametrize("program", ["columns_program", "implicit_program"])
def test_a_wrong_convolution_ends_in_an_error(phase: Any, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ConvProblem.square(2, 3, 5, 6, 4)
    plan = implicit_plan(problem, phase) if "implicit" in program else explicit_plan(problem, phase, taken_rates())
    operands = [np.ones(shape) for shape in operand_shapes(problem, phase)]
    texts: list[str] = []
    printed = getattr(conv_run, program)

    def keep(*args: Any, **kinds: Any) -> str:
        texts.append(printed(*args, **kinds))
        return texts[-1]

    monkeypatch.setattr(conv_run, program, keep)
    run_conv(plan, *operands)
    wrongs = list(less(texts[0]))
    for wrong in wrongs:
        monkeypatch.setattr(conv_run, program, lambda *_args, wrong=wrong, **_kinds: wrong)
        with pytest.raises(faults.MeshFault):
            run_conv(plan, *operands)
    assert len(wrongs) >= 5
