"""A PyTorch module compiled into a temporary package and run on virtual ranks, against the module itself."""

from __future__ import annotations

import importlib
import itertools
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from convgen.algebra.grid import Grid
from convgen.cost.network import volume as volume_of
from convgen.network_compiler import CompiledNetwork, compile_network
from convgen.passes.contract import NetworkPass
from convgen.program.other_sizes import program_like
from convgen.spec.exported import graph_of
from convgen.spec.exported_state import as_pairs
from convgen.spec.graph import Graph
from convgen.verify.virtual import World

Tensors = dict[str, torch.Tensor]
COUNT = itertools.count()


@dataclass(frozen=True)
class Imported:
    """A module's graph, with its constants, for one mode."""

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    graph: Graph
    constants: Tensors
    seconds: float


def imported(module: nn.Module, *inputs: torch.Tensor, train: bool = True) -> Imported:
    start = perf_counter()
    graph, constants = graph_of(module.train(train), inputs, name="net")
    return Imported(module, inputs, graph, constants, perf_counter() - start)


@dataclass(frozen=True)
class Errors:
    """Largest errors of all ranks, relative to the largest of the tensor (of gradients of parameters: to it, or to a
    thousandth of the largest of all). `volume`: what differs between bytes counted and said."""

    outputs: float
    inputs: float
    parameters: float
    buffers: float
    volume: str
    compiled: float
    sent: int
    worst: dict[str, str] = field(default_factory=dict[str, str])
    steps: float = 0.0
    limit: float = 1e-8

    @property
    def right(self) -> bool:
        small = max(self.inputs, self.parameters, self.buffers) <= 1e-8 and self.steps <= self.limit
        return self.outputs <= 1e-9 and small and not self.volume


@dataclass(frozen=True)
class Training:
    """Steps of SGD with momentum after the first gradients: a new batch each, the first one's gradients of outputs."""

    batches: tuple[tuple[torch.Tensor, ...], ...]
    dys: Mapping[int, torch.Tensor]
    rate: float

    def run(self, parameters: Sequence[torch.Tensor], call: Callable[..., Any]) -> None:
        """Of parameters that have their first gradients. `call` takes whole tensors and gives them.

        A gradient that is added to what is left of the ones before is the momentum, and takes no memory of its own.
        """
        optimizer: Any = torch.optim.SGD(parameters, self.rate)
        optimizer.step()
        for xs in self.batches:
            for p in parameters:
                if p.grad is not None:
                    p.grad.mul_(0.9)
            ys = [t for t in tree_flatten(call(*xs))[0] if t is not None]
            smooth = [k for k in self.dys if ys[k].requires_grad]  # some are of inputs alone
            torch.autograd.backward([ys[k] for k in smooth], [self.dys[k] for k in smooth])
            optimizer.step()


@dataclass
class Truth:
    """What a module computes on one device: once, for any number of grids.

    Attributes:
        before: parameters, buffers and constants.
        buffers: after one forward pass.
        after: parameters and buffers after the steps of `training`, if there are any.
    """

    module: nn.Module
    call: Callable[..., Any]
    xs: list[torch.Tensor]
    ys: list[torch.Tensor]
    dys: dict[int, torch.Tensor]
    dxs: list[torch.Tensor]
    before: Tensors
    gradients: Tensors
    buffers: Tensors
    training: Training | None
    after: Tensors
    files: list[Any]

    @cached_property
    def change(self) -> dict[str, float]:
        """Of each floating tensor, over the steps: at least a thousandth of the largest of all."""
        names = [n for n, t in self.after.items() if t.is_floating_point() and t.numel() and n in self.before]
        found = {n: apart(self.after[n], self.before[n]) for n in names}
        floor = max(1e-3 * max(found.values(), default=0.0), 1e-30)
        return {n: max(c, floor) for n, c in found.items()}

    @cached_property
    def limit(self) -> float:
        """Ten times what a unit in the last place of each parameter moves the module's own steps, at most 1e-6."""
        if not self.training:
            return 1e-8
        held = {n: t.detach().clone() for n, t in self.module.state_dict().items()}
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in self.module.parameters():
                off = torch.randint(0, 2, p.shape, generator=generator).to(p.dtype) * 2 - 1
                p.mul_(1 + off * torch.finfo(p.dtype).eps)
        _train(self.module, self.call, self.training, self.gradients)
        state = self.module.state_dict()
        far = [apart(as_pairs(state[n]), self.after[n]) / c for n, c in self.change.items()]
        _set(self.module, held)
        return max(1e-8, min(10 * max(far, default=0.0), 1e-6))


def truth_of(given: Imported, *, steps: int = 0, reference: Callable[..., Any] | None = None) -> Truth:
    """What the module, or `reference`, computes on one device; the module's state stays as it was."""
    module, call, files = given.module, reference or given.module, []
    before = _kept({n: t.detach() for n, t in module.state_dict().items()} | given.constants, files)
    xs = [x.clone().requires_grad_(x.is_floating_point()) for x in given.inputs]
    module.zero_grad()
    ys = [t for t in tree_flatten(call(*xs))[0] if t is not None]
    smooth = [k for k, t in enumerate(ys) if t.requires_grad]
    generator = torch.Generator().manual_seed(1)
    dys = {k: torch.randn(ys[k].shape, generator=generator, dtype=ys[k].dtype) for k in smooth}
    torch.autograd.backward([ys[k] for k in smooth], [dys[k] for k in smooth])
    gradients = _kept({n: p.grad for n, p in module.named_parameters() if p.grad is not None}, files)
    module.zero_grad()
    buffers = {n: as_pairs(b).clone() for n, b in module.named_buffers()}
    dxs = [torch.zeros_like(x) if x.grad is None else x.grad for x in xs]
    training, after = None, Tensors()
    if steps:
        size = [sum(float(t.norm()) ** 2 for t in ts) for ts in ((before[n] for n in gradients), gradients.values())]
        batches = tuple(tuple(random_input(x.shape, k) for x in given.inputs) for k in range(1, steps))
        training = Training(batches, dys, 1e-4 * (size[0] / max(size[1], 1e-30)) ** 0.5)
        _train(module, call, training, gradients)
        after = _kept({n: t.detach() for n, t in module.state_dict().items()}, files)
    _set(module, before)
    ys = [y.detach() for y in ys]
    return Truth(module, call, xs, ys, dys, dxs, before, gradients, buffers, training, after, files)


def _kept(tensors: Tensors, files: list[Any]) -> Tensors:
    """Copies, of complex ones as pairs: in a file that is mapped, where they are large, so that they take no memory
    that nobody reads."""
    if sum(t.numel() * t.element_size() for t in tensors.values()) < 1 << 27:
        return {n: as_pairs(t).clone() for n, t in tensors.items()}
    files.append(tempfile.TemporaryDirectory())  # that lasts as long as the list that has it
    file = Path(files[-1].name) / "tensors.pt"
    torch.save({n: as_pairs(t).clone() for n, t in tensors.items()}, file)
    return torch.load(file, mmap=True, weights_only=True)


def _train(module: nn.Module, call: Any, training: Training, grads: Tensors) -> None:
    for n, p in module.named_parameters():
        p.grad = _like(p, grads[n]).clone() if n in grads else None
    training.run([*module.parameters()], call)
    module.zero_grad()


def _set(module: nn.Module, state: Tensors) -> None:
    with torch.no_grad():
        for n, t in (*module.named_parameters(), *module.named_buffers()):
            if n in state:
                t.copy_(_like(t, state[n]))


def _like(t: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(pairs) if t.is_complex() and not pairs.is_complex() else pairs


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, nan if there is one, without a tensor of them all."""
    assert a.shape == b.shape, (a.shape, b.shape)
    if not a.numel():
        return 0.0
    pairs = zip(a.detach().reshape(-1).split(1 << 22), b.detach().reshape(-1).split(1 << 22), strict=True)
    return torch.stack([(p.double() - q.double()).abs().max() for p, q in pairs]).max().item()


class Turns(World):
    """Virtual ranks of which one computes at a time, until it waits: what they hold for a moment isn't held by all."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._turn = threading.Lock()

    def run(self, program: Callable[[Any], Any]) -> list[Any]:
        def one(end: Any) -> Any:
            with self._turn:
                return program(end)

        return super().run(one)

    def leave(self, *key: Any) -> Any:
        self._turn.release()
        try:
            return super().leave(*key)
        finally:
            self._turn.acquire()


def check(
    given: Imported,
    grid: Mapping[str, int],
    *,
    reference: Callable[..., Any] | None = None,
    seed: int = 0,
    passes: Sequence[NetworkPass] = (),
    steps: int = 0,
    truth: Truth | None = None,
) -> Errors:
    """Compiles for a grid and compares outputs, gradients, buffers and bytes with the module's (or `reference`'s).

    Args:
        passes: that the program goes through, instead of those that a timeline finds.
        steps: of training, whose state is compared too; where it is more than 1e-8 off, with ten times what a unit
            in the last place of each parameter moves one device's own, at most 1e-6.
        truth: of the same module, steps and reference, where it is known.
    """
    graph = given.graph
    start = perf_counter()
    compiled = compile_network(graph, Grid(tuple(grid.items())))
    if passes:
        compiled = with_passes(compiled, *passes)
    files = compiled.package().files
    seconds = perf_counter() - start
    true = truth or truth_of(given, steps=steps, reference=reference)
    smooth = [*true.dys]

    with package(files) as net:
        names = [v.name for v in graph.inputs]

        def program(end: Any) -> tuple[Any, ...]:
            mesh = net.init_mesh("cpu", transport=end)
            model = net.Network(mesh, seed=seed)
            known = {n: t for n, t in true.before.items() if n in model._known or n in model._aliases}
            model.load_full(known)
            model.train(given.module.training)
            blocks = [net.scatter(n, x.detach(), mesh) for n, x in zip(names, true.xs, strict=True)]
            blocks = [b.requires_grad_(b.is_floating_point()) for b in blocks]
            out = model(*blocks)
            forward = len(end.sent)
            parts = [t for t in tree_flatten(out)[0] if t is not None]
            whole = [net.gather(name, t, mesh) for (name, _), t in zip(graph.outputs, parts, strict=True)]
            gathered = len(end.sent)
            assert [k for k, t in enumerate(whole) if t.requires_grad] == smooth, "other outputs have gradients"
            torch.autograd.backward([whole[k] for k in smooth], [true.dys[k] for k in smooth])
            sent = [(s.collective, s.bytes) for s in end.sent]
            runtime = sys.modules[type(model).__mro__[1].__module__]
            here = model._net.here(mesh)
            dxs = [
                None if b.grad is None else runtime.gathered(b.grad, model._net.split(n, x.shape[0]), here)
                for n, b, x in zip(names, blocks, true.xs, strict=True)
            ]
            done = [t.detach() for t in whole]
            del out, parts, whole, blocks

            def each(pick: Callable[[Any], Any], truths: Tensors) -> dict[str, float]:
                """How far each whole tensor is from its own, one after the other."""
                found: dict[str, float] = {}
                with torch.no_grad():
                    for n, value in model._known.items():
                        if n in model._net.stored and n in truths and (block := pick(value)) is not None:
                            block = runtime.local(block)
                            found[n] = apart(runtime.gathered(block, model._net.stored[n], here), truths[n])
                return found

            grads = each(lambda t: t.grad, true.gradients)
            full = each(lambda t: t, true.buffers)

            def call(*inputs: torch.Tensor) -> Any:
                out = model(*(net.scatter(n, x, mesh) for n, x in zip(names, inputs, strict=True)))
                parts = [t for t in tree_flatten(out)[0] if t is not None]
                return [net.gather(name, t, mesh) for (name, _), t in zip(graph.outputs, parts, strict=True)]

            then: dict[str, float] = {}
            if true.training:
                true.training.run([p for p in model.parameters() if p.is_floating_point()], call)
                then = each(lambda t: t, {n: true.after[n] for n in true.change})
            return done, dxs, grads, full, sent[:forward], sent[gathered:], then

        found = Turns(Grid(tuple(grid.items())).ranks).run(program)
    worst: dict[str, str] = {}

    def largest(each: Iterator[tuple[str, float]], what: str) -> float:
        most = 0.0
        for name, one in each:
            if not one <= most:
                most, worst[what] = one, name
        return most

    def relative(pairs: Iterator[tuple[str, torch.Tensor, torch.Tensor]], floor: float) -> Iterator[tuple[str, float]]:
        for name, a, b in pairs:
            yield name, apart(a, b) / max(_size(b), floor)

    ys = (("output", a, b) for one in found for a, b in zip(one[0], true.ys, strict=True))
    triples = ((n, g, t) for one in found for n, g, t in zip(names, one[1], true.dxs, strict=True))
    dxs = ((n, torch.zeros_like(t) if g is None else g, t) for n, g, t in triples)
    sizes = {n: _size(g) for n, g in true.gradients.items()}
    floor = max(1e-3 * max(sizes.values(), default=0.0), 1e-30)
    missing = [n for one in found for n in set(sizes) - set(one[2]) if sizes[n]]
    assert not missing, f"no gradient of {missing}"
    far = largest(((n, e / true.change[n]) for one in found for n, e in one[6].items()), "steps")
    return Errors(
        largest(relative(ys, 1e-30), "outputs"),
        largest(relative(dxs, 1e-12), "inputs"),
        largest(((n, e / max(sizes[n], floor)) for one in found for n, e in one[2].items()), "parameters"),
        largest(((n, e / max(_size(true.buffers[n]), 1e-6)) for one in found for n, e in one[3].items()), "buffers"),
        volume(compiled, [one[4] for one in found], [one[5] for one in found]),
        seconds,
        sum(b for one in found for half in one[4:6] for _, b in half),
        worst,
        far,
        1e-8 if far <= 1e-8 else true.limit,
    )


def _size(t: torch.Tensor) -> float:
    return apart(t, torch.zeros((), dtype=t.dtype).expand(t.shape))


def with_passes(compiled: CompiledNetwork, *passes: NetworkPass) -> CompiledNetwork:
    """The same with these passes alone."""
    program = compiled.plain
    for one in passes:
        program = one.run(program)
    return replace(compiled, program=program, other=program_like(program, compiled.any_sizes.many))


def volume(compiled: CompiledNetwork, forward: Sequence[Any], backward: Sequence[Any]) -> str:
    """The first difference between bytes counted and said, in whatever order."""
    said_of = volume_of(compiled.program, of_inputs=True)
    for name, counted in (("forward", forward), ("backward", backward)):
        steps = said_of[name]
        for rank, got in enumerate(counted):
            said = Counter((s["collective"], s["bytes_sent_per_rank"][rank]) for s in steps)
            if (more := Counter(got)) != said:
                return f"{name} of rank {rank}: counted and not said {more - said}, said and not counted {said - more}"
    return ""


@contextmanager
def package(files: Mapping[str, str]) -> Iterator[Any]:
    """The package of these files, imported."""
    with tempfile.TemporaryDirectory() as directory:
        name = f"convgen_test_network_{next(COUNT)}"
        path = Path(directory) / name
        path.mkdir()
        for file, text in files.items():
            (path / file).write_text(text)
        sys.path.insert(0, directory)
        try:
            yield importlib.import_module(name)
        finally:
            sys.path.remove(directory)
            for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[module]


def draw_parameters(module: nn.Module, seed: int = 0) -> None:
    """Anew: heads of zeros and scales of 1e-6 hide errors. Matrices so that activations keep their size; vectors are
    those that were there (ones, zeros) and something beside."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() > 1 and p.numel() > max(p.shape):
                fan = p[0].numel()
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * (1.4 / fan**0.5))
            else:
                base = p.mean().round()
                p.copy_(base + 0.2 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        for name, b in module.named_buffers():
            if b.is_floating_point() and name.endswith(("running_mean", "running_var")):
                b.copy_(b + 0.2 * torch.rand(b.shape, generator=generator, dtype=b.dtype))


def random_input(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
