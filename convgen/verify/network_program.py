"""What every rank runs in a network's check, and the single device that ranks are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from convgen.operations.dropout import EVALUATION
from convgen.packages import runtime_of
from convgen.spec.graph import FLOATS, Graph, Value
from convgen.verify.graph_reference import run_graph

STEPS = 3  # steps of training
RATE, MOMENTUM = 1e-3, 0.9  # the learning rate and the momentum of its SGD
KINDS = (
    "outputs", "gradients of inputs", "gradients of parameters", "buffers", "change of parameters", "changed buffers",
    "outputs in evaluation",
)  # fmt: skip
OUTPUTS, OF_INPUTS, OF_PARAMETERS, BUFFERS, CHANGE, CHANGED, EVALUATED = KINDS
LATER = (CHANGE,)
SUMMED = (OF_PARAMETERS, CHANGE, CHANGED, EVALUATED)  # kinds that depend on sums of parameters' gradients

Box = tuple[tuple[int, int], ...]
Results = dict[str, dict[str, tuple[Box, Tensor]]]  # a rank's, by kind and name: its box of the whole, and the block


@dataclass(frozen=True)
class Given:
    """What all ranks and the reference begin with; floats are rounded to the network's types.

    Attributes:
        state: parameters, buffers and constants.
        inputs, gradients: by step, the inputs, and the gradients that outputs are given.
        autocast: the type of the torch.autocast under which ranks run; "" for none.
    """

    graph: Graph
    state: dict[str, Tensor]
    inputs: tuple[dict[str, Tensor], ...]
    gradients: tuple[dict[str, Tensor], ...]
    autocast: str = ""

    def cast(self, device: str) -> torch.autocast:
        """The autocast under which forward is run."""
        return torch.autocast(device, getattr(torch, self.autocast or "bfloat16"), enabled=bool(self.autocast))

    @property
    def trains(self) -> bool:
        return "train" in self.graph.modes

    @property
    def evaluates(self) -> bool:
        return "eval" in self.graph.modes


@dataclass(frozen=True)
class RankRun:
    """What a rank has in the end.

    Attributes:
        sent: by part of a step, (collective, bytes, lane) in order.
        account: what an SW26010's core group did in the second step.
    """

    results: Results
    sent: dict[str, list[tuple[str, int, str]]] = field(default_factory=dict[str, "list[tuple[str, int, str]]"])
    account: Any = None


def given_of(graph: Graph, tensors: Mapping[str, Tensor], seed: int = 0, autocast: str = "") -> Given:
    """Random inputs and state: parameters by their kind, positive running variances; `given` values are as they are."""
    graph = graph.at()
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for value in (*graph.parameters, *graph.buffers, *graph.constants):
        dtype: torch.dtype = getattr(torch, value.dtype)
        known = tensors.get(value.name)
        state[value.name] = (_state(value, generator) if known is None else known.detach()).to(dtype)
    results = {v.name: v for call in graph.calls for v in call.results if v is not None}
    held = {v.name: v for v in (*graph.inputs, *graph.parameters, *graph.buffers, *graph.constants)}
    outputs = {name: (results | held)[value] for name, value in graph.outputs}
    steps = range(STEPS if "train" in graph.modes else 1)
    inputs = tuple({v.name: _drawn(v, generator) for v in graph.inputs} for _ in steps)
    gradients = tuple(
        {n: _drawn(v, generator, 1 / math.sqrt(max(math.prod(_shape(v)), 1))) for n, v in outputs.items()
         if v.dtype in FLOATS}
        for _ in steps
    )  # fmt: skip
    return Given(graph, state, inputs, gradients, autocast)


def _shape(value: Value) -> tuple[int, ...]:
    return tuple(n for n in value.shape if isinstance(n, int))


def _drawn(value: Value, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    """Normal numbers for floats; for integers 0 and 1, indices that any table has."""
    if value.dtype not in FLOATS:
        return torch.randint(0, 2, _shape(value), generator=generator).to(getattr(torch, value.dtype))
    drawn = scale * torch.randn(_shape(value), dtype=torch.float64, generator=generator)
    return drawn.to(getattr(torch, value.dtype))


def _state(value: Value, generator: torch.Generator) -> Tensor:
    """A parameter or buffer, about as torch initialises it, but with no element 0 or 1."""
    kind, _, number = value.init.partition(":")
    if value.dtype not in FLOATS:
        return torch.zeros(_shape(value), dtype=torch.int64)
    drawn = torch.randn(_shape(value), dtype=torch.float64, generator=generator)
    match kind:
        case "ones":
            return 0.5 + torch.rand(_shape(value), dtype=torch.float64, generator=generator)
        case "zeros" | "given" | "":
            return 0.2 * drawn
        case "fill":
            return float(number) + 0.2 * drawn
        case "normal":
            return drawn
        case _:
            return drawn / math.sqrt(int(number))


# ---- The reference ----


def truth_of(graph: Graph, given: Given, *, doubles: bool = True, shaken: bool = False) -> dict[str, dict[str, Tensor]]:
    """What one device computes, by kind and name.

    Args:
        doubles: whether it computes in float64; else each value has the graph's type, or the type under autocast.
        shaken: whether all that is given is rounded in another way.
    """
    generator = torch.Generator().manual_seed(1)
    graph, autocast = given.graph, "" if doubles else given.autocast

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        own = tensor.dtype
        if shaken:
            off = torch.randint(0, 2, tensor.shape, generator=generator).double() * 2 - 1
            tensor = tensor.double() * (1 + off * torch.finfo(tensor.dtype).eps)
        return tensor.to(torch.float64 if doubles else own, copy=True)

    state = {n: moved(t) for n, t in given.state.items()}
    learnt = [v.name for v in graph.parameters if state[v.name].is_floating_point() and not v.frozen]
    before = {n: state[n].clone() for n in learnt}
    for n in learnt:
        state[n].requires_grad_()
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    optimizer: Any = torch.optim.SGD([state[n] for n in learnt], RATE, MOMENTUM) if learnt else None
    steps = [{n: moved(t) for n, t in one.items()} for one in given.inputs]
    for k, inputs in enumerate(steps):
        for x in inputs.values():
            x.requires_grad_(k == 0 and x.is_floating_point())
        seed = 0, k if given.trains else EVALUATION + k
        made = run_graph(graph, state | inputs, training=given.trains, seed=seed, autocast=autocast)
        for n in learnt:
            state[n].grad = None
        _backward(made.outputs, {n: moved(g) for n, g in given.gradients[k].items()})
        state |= made.updates
        if k == 0:
            found[OUTPUTS] = {n: t.detach() for n, t in made.outputs.items()}
            found[OF_INPUTS] = {n: x.grad for n, x in inputs.items() if x.grad is not None}
            found[OF_PARAMETERS] = {n: g.clone() for n in learnt if (g := state[n].grad) is not None}
            found[BUFFERS] = {n: state[n].clone() for n in made.updates}
        if given.trains and optimizer is not None:
            optimizer.step()
    if given.trains:
        found[CHANGE] = {n: state[n].detach() - before[n] for n in learnt}
        found[CHANGED] = {v.name: state[v.name] for v in graph.buffers if v.name in found[BUFFERS]}
    if given.trains and given.evaluates:
        with torch.no_grad():
            seed = 0, EVALUATION
            found[EVALUATED] = run_graph(graph, state | steps[0], training=False, seed=seed, autocast=autocast).outputs
    return found


def _backward(outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    several = [(outputs[n], g) for n, g in gradients.items() if outputs[n].requires_grad]
    if several:
        torch.autograd.backward([y for y, _ in several], [g.to(y.dtype) for y, g in several])


# ---- A rank ----


def run_rank(
    package: Any, given: Given, mesh: Any, sent: list[Any], told: Callable[[int], None] = lambda _: None
) -> RankRun:
    """Train and evaluate on one rank, through the package's public interface.

    Args:
        sent: the list in which the rank's transport counts.
        told: is called with the number of each step when it begins.
    """
    net, local = package.NET, runtime_of(package).local
    here, graph = net.here(mesh), given.graph
    held: dict[str, list[tuple[str, int, str]]] = {}
    account: Any = net.programs and net.programs.report(net, mesh)
    did: Any = None
    found: Results = {kind: {} for kind in KINDS}
    model = package.Network(mesh)
    model.load_full({n: t for n, t in given.state.items() if n in net.state})
    model.train(given.trains)
    parameters: dict[str, Any] = {v.name: model.get_parameter(v.name) for v in graph.parameters}
    before = {n: local(p).clone() for n, p in parameters.items()}

    def put(kind: str, name: str, block: Tensor | None, of: str | None = None) -> None:
        if block is not None:
            found[kind][name] = (here.held(net.stored[of or name]), block.detach().clone().cpu())

    learnt = [p for p in parameters.values() if p.requires_grad]
    optimizer: Any = torch.optim.SGD(learnt, RATE, MOMENTUM) if learnt else None
    if optimizer is not None and account is not None:
        optimizer = package.SGD(model, RATE, MOMENTUM)
    for k, whole in enumerate(given.inputs):
        told(k)
        inputs = {n: package.scatter(n, x, mesh) for n, x in whole.items()}
        for x in inputs.values():
            x.requires_grad_(k == 0 and x.is_floating_point())
        model.zero_grad()
        if account is not None:
            account.clear()
        start = len(sent)
        with given.cast(net.device):
            outputs = by_name(graph, model(*inputs.values()))
        middle = len(sent)
        _backward(outputs, {n: package.scatter(n, g, mesh) for n, g in given.gradients[k].items()})
        if k < 2:
            held["forward"] = [(s.collective, s.bytes, s.lane) for s in sent[start:middle]]
            part = "backward" if k else "backward of inputs, too"
            held[part] = [(s.collective, s.bytes, s.lane) for s in sent[middle:]]
        if k == 0:
            for n, y in outputs.items():
                put(OUTPUTS, n, y)
            for n, x in inputs.items():
                put(OF_INPUTS, n, x.grad)
            for n, p in parameters.items():
                put(OF_PARAMETERS, n, None if p.grad is None else local(p.grad))
            for n, _ in graph.updates:
                put(BUFFERS, n, local(model.get_buffer(n)))
        if given.trains and optimizer is not None:
            optimizer.step()
        if account is not None and k < 2:
            did = deepcopy(account)
    if given.trains:
        for n, p in parameters.items():
            if p.requires_grad:
                put(CHANGE, n, local(p) - before[n])
        for n, _ in graph.updates:
            put(CHANGED, n, local(model.get_buffer(n)))
    if given.trains and given.evaluates:
        model.eval()
        with torch.no_grad(), given.cast(net.device):
            outputs = model(*(package.scatter(n, x, mesh) for n, x in given.inputs[0].items()))
        for n, y in by_name(graph, outputs).items():
            put(EVALUATED, n, y)
    return RankRun(found, held, did)


def by_name(graph: Graph, made: Any) -> dict[str, Tensor]:
    """A package's outputs, by name."""
    if isinstance(made, dict):
        return cast("dict[str, Tensor]", made)
    several = cast("tuple[Tensor, ...]", made) if isinstance(made, tuple) else (made,)
    return {n: t for (n, _), t in zip(graph.outputs, several, strict=True)}
