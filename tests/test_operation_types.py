"""Types of what operations make, and of their gradients, beside torch's: operands of each call of ATen's families have
types of floats at random. What torch itself refuses is left out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import brute
import pytest
import torch
import torch.nn.functional as F
from networks_on_ranks import draw_parameters, random_input
from operation_cases import stored
from test_aten import FAMILIES, SHAPE
from torch import Tensor

from convgen.algebra.grid import Grid
from convgen.algebra.signature import Signature
from convgen.operations.calls import Slot
from convgen.operations.calls import call as run_operator
from convgen.operations.row import At
from convgen.spec.aten.describe import describe
from convgen.spec.exported import graph_of
from convgen.spec.graph import Call, Graph, Ref, Value, refs
from convgen.spec.graph_edit import BATCH_NORM
from convgen.verify.graph_reference import run_graph

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DRAWS = 4  # a call
UNCHECKED = ("fractional_max_pool2d",)  # of operands of several types torch reads memory that is not theirs
Values = Mapping[str, Tensor]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def calls_of(family: str) -> list[tuple[Call, Values]]:
    """The family's calls that read floats, with what they read, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module = FAMILIES[family]()
        draw_parameters(module)
        x = random_input(SHAPE)
        graph, values = graph_of(module.train(family == "norms"), (x,), name="net")
        graph = graph.at(len(x))
        values |= {n: t.detach() for n, t in module.state_dict().items()} | {graph.inputs[0].name: x}
        found: list[tuple[Call, Values]] = []
        for call in graph.calls:
            reads = {n: values[n] for arg in call.args for n in refs(arg)}
            made = run_graph(alone(call, reads), reads).outputs
            values |= {n: t.detach() for n, t in made.items()}
            if any(t.is_floating_point() for t in reads.values()):
                found.append((call, reads))
        return found
    finally:
        torch.set_default_dtype(before)


def alone(call: Call, reads: Values) -> Graph:
    """A graph of one call."""
    inputs = tuple(Value(name=n, shape=tuple(t.shape), dtype=name_of(t.dtype)) for n, t in reads.items())
    made = tuple((v.name, v.name) for v in call.results if v is not None)
    return Graph(
        name="one", source="", modes=("train",), batch=SHAPE[0], inputs=inputs, parameters=(), buffers=(), constants=(),
        calls=(call,), updates=(), outputs=made, aliases=(),
    )  # fmt: skip


def by_torch(call: Call, reads: Values) -> list[Any]:
    """What torch makes of operands of these types.

    Raises:
        RuntimeError: it refuses them.
    """

    def given(arg: Any) -> Any:
        return reads[arg.name] if isinstance(arg, Ref) else [*map(given, arg)] if isinstance(arg, tuple) else arg

    if call.op == BATCH_NORM:
        x, w, b, mean, variance, *how = map(given, call.args)
        new = [None if t is None else t.clone() for t in (mean, variance)]
        return [F.batch_norm(x, *new, w, b, *how[:3]), *new]
    operands: list[Tensor] = []

    def slot(arg: Any) -> Any:
        if isinstance(arg, Ref):
            operands.append(reads[arg.name])
            return Slot(len(operands) - 1)
        return tuple(map(slot, arg)) if isinstance(arg, tuple) else arg

    args = tuple(map(slot, call.args))
    made: Any = run_operator("reshape" if call.op == "view" else call.op, args, tuple(operands))
    return [*made] if isinstance(made, (tuple, list)) else [made]


def mixed(draw: Random, reads: Values, *, several: bool) -> dict[str, Tensor]:
    """Operands of one or two types at random."""
    kinds = draw.sample(FLOATS, 2 if several and draw.random() < 0.7 else 1)
    return {n: t.to(draw.choice(kinds)) if t.is_floating_point() else t for n, t in reads.items()}


def on_one_rank(signature: Signature, values: Sequence[Tensor]) -> tuple[At, list[Tensor]]:
    """Where all of a row stands, and what local code takes of whole operands."""
    one = Grid((("N", 1),))
    stand = brute.stand(one, 0, signature, {})
    held = [stored(Random(0), one, t.double() if t.is_floating_point() else t) for t in values]
    return stand.at, [
        brute.fetch(v, [stand.reads[k]])[0].to(t.dtype) for k, (v, t) in enumerate(zip(held, values, strict=True))
    ]


def wrong(call: Call, graph: Graph, reads: Values) -> list[str]:
    """Results of the rows of a call, and gradients of their operands, whose types are not torch's."""
    described = describe(graph)
    values, found = dict(reads), list[str]()

    def compare(what: str, made: Any, name: str) -> None:
        wanted = described.tensors[name].dtype
        if made is not None and name_of(made.dtype) != wanted:
            types = ", ".join(name_of(t.dtype) for t in reads.values())
            found.append(f"{call.op} of {types}: {what} of {name} is {name_of(made.dtype)}, not {wanted}")

    for bound in described.rows:
        operation = bound.operation
        signature = operation.signatures[0]
        whole = [values[n] for n in bound.reads]
        at, operands = on_one_rank(signature, whole)
        results = operation.local(0, at, *operands)
        for name, made in zip(bound.makes, results, strict=True):
            if name:
                compare("the value", made, name)
                values[name] = made
        wanted = [o.gradient and t.is_floating_point() for o, t in zip(signature.inputs, operands, strict=True)]
        dys = [torch.ones_like(y) if o.gradient else None for o, y in zip(signature.results, results, strict=True)]
        known: dict[str, Any] = dict(zip([o.name for o in signature.inputs], whole, strict=True))
        for result, y, dy in zip(signature.results, results, dys, strict=True):
            known |= {result.name: y, f"d{result.name}": dy}
        if not any(wanted) or not any(dy is not None for dy in dys):
            continue
        if operation.has_vjp(0, at, *operands):
            _, kept = operation.kept(0, at, wanted, *operands)
            for name, g in zip(bound.reads, operation.vjp(0, at, wanted, kept, *dys), strict=True):
                compare("the gradient", g, name)
        for operand, derived in operation.gradients.items():
            name = bound.reads[[o.name for o in signature.inputs].index(operand)]
            there, reads_there = on_one_rank(derived.operation.signatures[0], [known[r] for r in derived.reads])
            (g,) = derived.operation.local(0, there, *reads_there)
            compare("the gradient by a row", g, name)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_results_and_gradients_have_torchs_types(family: str) -> None:
    draw, done, found = Random(family), 0, list[str]()
    for call, reads in calls_of(family):
        for _ in range(DRAWS):
            given = mixed(draw, reads, several=call.op not in UNCHECKED)
            try:
                with warnings.catch_warnings(action="ignore"):
                    leaves = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in given.items()}
                    made = by_torch(call, leaves)
                    smooth = [t for t in made if isinstance(t, Tensor) and t.requires_grad]
                    torch.autograd.backward(smooth, [torch.ones_like(t) for t in smooth])
            except (RuntimeError, NotImplementedError, ValueError):
                continue
            results = tuple(
                None if v is None else replace(v, dtype=name_of(t.dtype))
                for v, t in zip(call.results, made, strict=False)
            )
            graph = alone(replace(call, results=results), given)
            found += wrong(call, graph, given)
            done += 1
    assert done and not found, "\n".join(dict.fromkeys(found))
