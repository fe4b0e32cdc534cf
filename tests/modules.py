"""Random layers, made into modules and run on virtual ranks: what the tests of generated modules share.

A case is drawn from a seed and nothing else. It goes to its module through lowering, the passes and the emitter
directly: reading YAML and choosing roles have tests of their own.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from generate import Problem, named_problem, random_problem
from passing import passed
from torch import Tensor

from convgen.algebra.conv import PHASES
from convgen.algebra.layout import Layout
from convgen.algebra.roles import Roles
from convgen.algebra.space import Space
from convgen.compiler import pipeline
from convgen.emit.module import emit_module
from convgen.emit.volume import volume
from convgen.kernels.choose import choose_kernels
from convgen.passes.contract import SchedulePass
from convgen.program.build import lower
from convgen.program.nodes import Schedule, reads
from convgen.program.text import show
from convgen.spec.layer import Distribution, Layer, Options
from convgen.spec.target import read_target
from convgen.verify.program import TORCH_DTYPES, load_module
from convgen.verify.virtual import Sent, VirtualTransport, World

GRADIENT_OF = {"x": "dx", "w": "dw", "bias": "dbias"}
TENSOR_OF = {"y": "y", "dx": "x", "dw": "w", "dbias": "bias"}
FORMATS = {
    "contiguous": lambda dims: torch.contiguous_format,
    "channels_last": lambda dims: {2: torch.channels_last, 3: torch.channels_last_3d}[dims],
}
_folder = tempfile.mkdtemp(prefix="convgen-modules-")
atexit.register(shutil.rmtree, _folder, ignore_errors=True)


@dataclass(frozen=True)
class Case:
    """A layer, where its tensors are stored, and each phase's roles."""

    layer: Layer
    stored: Mapping[str, Layout] = field(hash=False)
    roles: Mapping[str, Roles] = field(hash=False)
    passes: tuple[SchedulePass, ...] = ()  # instead of the layer's pipeline

    @cached_property
    def space(self) -> Space:
        return Space(self.layer.conv, self.layer.grid, virtual_padding=self.layer.target.pads_virtually)

    @cached_property
    def schedule(self) -> Schedule:
        schedule = lower(self.layer.name, self.space, self.stored, self.roles, bias=self.layer.conv.bias)
        passes = self.passes or pipeline(self.layer)
        return passed(schedule, self.space, *passes, target=self.layer.target)

    @cached_property
    def source(self) -> str:
        kernels = choose_kernels(self.layer, self.schedule, self.space) if self.layer.target.is_gpu else ()
        return emit_module(self.layer, self.schedule, self.space, kernels)

    @cached_property
    def module(self) -> ModuleType:
        path = Path(_folder) / f"{self.layer.name}.py"
        whole = path.with_suffix(f".{os.getpid()}")  # ranks that are forked before a module was asked for write it each
        whole.write_text(self.source, encoding="utf-8")
        whole.replace(path)
        return load_module(path, interpret=self.layer.target.is_gpu)

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.layer.dtype]

    @property
    def memory_format(self) -> torch.memory_format:
        return FORMATS[self.layer.memory_format](len(self.layer.conv.spatial))

    def with_batch(self, batch: int) -> Case:
        """The same module's case for another number of samples: its volume and blocks follow."""
        case = replace(self, layer=replace(self.layer, conv=replace(self.layer.conv, batch=batch)))
        case.__dict__.update(schedule=self.schedule, module=self.module)
        return case

    def volume(self) -> dict[str, list[dict[str, Any]]]:
        return volume(self.schedule, self.space, self.layer.element_bytes)

    def __str__(self) -> str:
        conv, layer = self.layer.conv, self.layer
        return f"{layer.name} {conv}\n{layer.dtype} {layer.memory_format} {layer.options}\n{show(self.schedule)}"


# ---- Drawing -------------------------------------------------------------------------------------------------------


def draw(seed: int, *, algorithm: str | None = None, least: int = 1, most: int = 8, transposed: bool = False) -> Case:
    """A random layer on `least` to `most` ranks: a named algorithm, or any storage with any roles."""
    rng = random.Random(f"{seed} {algorithm} {least} {most}{' transposed' * transposed}")
    while True:
        if algorithm:
            problem = named_problem(rng, most, algorithm, transposed=transposed)
        else:
            problem = random_problem(rng, most, transposed=transposed)
        if problem.grid.ranks >= least:
            break
    name = f"{algorithm or 'layer'}_{seed}_{least}_{most}{'_transposed' * transposed}".replace("-", "_")
    return make(problem, name, rng)


def make(problem: Problem, name: str, rng: random.Random, **changes: Any) -> Case:
    """A case of a problem; what the problem leaves open is drawn, unless given in `changes`."""
    conv, grid, stored, roles = problem
    last = len(conv.spatial) > 1 and rng.random() < 0.4
    options = Options(hold_x=rng.choice(("gathered", "stored")), sums=rng.choice(("ordered", "ordered", "native")))
    layer = Layer(
        name=name,
        conv=conv,
        dtype="float64",
        memory_format="channels_last" if last else "contiguous",
        grid=grid,
        algorithm=None,
        distribution=Distribution(x=stored["x"].axes, w=stored["w"].axes, y=stored["y"].axes),
        options=options,
    )
    return Case(replace(layer, **changes), stored, roles)


def on_gpu(case: Case, target: str = "cuda:sm_90") -> Case:
    """The same case for a GPU, under another name; its module runs in Triton's interpreter."""
    return replace(case, layer=replace(case.layer, target=read_target(target), name=f"{case.layer.name}_gpu"))


def on_mesh(case: Case, options: Options) -> Case:
    """The same case for the emulated mesh of an SW26010, under another name."""
    name = f"{case.layer.name}_mesh{options.core_groups}"
    return replace(case, layer=replace(case.layer, target=read_target("sw26010"), name=name, options=options))


def with_dtype(case: Case, dtype: str) -> Case:
    """The same case in another type, under another name."""
    return replace(case, layer=replace(case.layer, dtype=dtype, name=f"{case.layer.name}_{dtype}"))


# ---- Running -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """What one rank has after forward and backward: its blocks, and what its transport counted."""

    blocks: dict[str, Tensor]
    sent: tuple[Sent, ...]


def run(
    case: Case,
    given: Mapping[str, Tensor],
    *,
    need: Sequence[str] = ("x", "w", "bias"),
    dy_of_sum: bool = False,
    world: Any = None,
    ranks: Sequence[int] | None = None,
) -> list[Ran]:
    """Forward and backward on virtual ranks, through the module's public interface.

    Args:
        need: tensors that require a gradient.
        dy_of_sum: backward of y.sum(), whose dy is an expanded scalar, instead of the given dy.
        world: what to run on instead of a World; its `run` gives each rank its transport.
        ranks: of the world in grid order, where it is another.
    """
    layer, batch = case.module, case.layer.conv.batch

    def program(end: VirtualTransport) -> Ran:
        mesh = layer.init_mesh(layer.DEVICE, transport=end, ranks=ranks)
        local = {name: layer.scatter(name, value, mesh, batch=batch) for name, value in given.items()}
        for name in need:
            if name in local:
                local[name].requires_grad_()
        y = layer.conv(local["x"], local["w"], local.get("bias"), mesh=mesh, batch=batch)
        if y.requires_grad:
            y.sum().backward() if dy_of_sum else y.backward(local["dy"])
        blocks = {"y": y.detach()}
        for name, gradient in GRADIENT_OF.items():
            if name in local and local[name].grad is not None:
                blocks[gradient] = local[name].grad
        return Ran(blocks, tuple(getattr(end, "sent", ())))

    ran = (world or World(case.layer.grid.ranks)).run(program)
    return ran if ranks is None else [ran[r] for r in ranks]


# ---- Comparing -----------------------------------------------------------------------------------------------------


def assert_true(
    case: Case, ran: Sequence[Ran], truth: Mapping[str, Tensor], tolerances: Mapping[str, float] | None = None
) -> None:
    """Every rank's block of every result is its part of the reference, in the layer's type and memory format."""
    for name, tensor in TENSOR_OF.items():
        if name not in truth:
            continue
        whole = truth[name]
        boxes = case.space.held(dict(case.schedule.stored)[tensor])
        scale = float(whole.abs().max()) or 1.0
        first: dict[tuple[int, ...], Tensor] = {}
        for rank, one in enumerate(ran):
            part = whole[tuple(slice(int(lo), int(hi)) for lo, hi in boxes[rank])]
            block = one.blocks[name]
            where = f"{name} on rank {rank} of\n{case}"
            assert block.shape == part.shape, f"{tuple(block.shape)} instead of {tuple(part.shape)}: {where}"
            assert block.dtype == case.dtype, where
            if part.numel():
                assert tensor == "bias" or block.is_contiguous(memory_format=case.memory_format), f"strides of {where}"
                error = float((block.double() - part).abs().max()) / scale
                limit = tolerances[name] if tolerances else 1e-12
                assert error <= limit, f"error {error:.3g} > {limit:.3g} in {where}"
            other = first.setdefault(tuple(boxes[rank].flatten().tolist()), block)
            assert torch.equal(other, block), f"copies differ: {where}"


def assert_counted(case: Case, ran: Sequence[Ran], needed: Iterable[str] = ("dx", "dw", "dbias")) -> None:
    """What the transport counted is VOLUME: rank by rank, step by step, in order, in the steps' groups.

    Args:
        needed: gradients that were asked for; the steps that only others need are left out.
    """
    wanted = steps_needed(case.schedule, needed)
    steps = [s for phase in PHASES for s in case.volume()[phase] if s["step"] in wanted]
    for rank, one in enumerate(ran):
        expected = [
            (s["collective"], case.layer.grid.group(rank, s["axes"]), s["bytes_sent_per_rank"][rank]) for s in steps
        ]
        counted = [(s.collective, s.group, s.bytes) for s in one.sent]
        assert counted == expected, f"rank {rank} sent {counted}, VOLUME has {expected}:\n{case}"


def steps_needed(schedule: Schedule, results: Iterable[str]) -> set[str]:
    """Names of forward's steps, and of the backward steps that these results depend on."""
    wanted = {"db" if name == "dbias" else name for name in results}
    for step in reversed((*schedule.backward_data, *schedule.backward_filter)):
        if step.result in wanted:
            wanted |= set(reads(step))
    return wanted | {step.result for step in schedule.forward}


def whole(case: Case, ran: Sequence[Ran], name: str) -> Tensor:
    """A result put together from the ranks' blocks."""
    layout = dict(case.schedule.stored)[TENSOR_OF[name]]
    boxes = case.space.held(layout)
    kernel = tuple(s.kernel for s in case.layer.conv.spatial) if layout.tensor == "w" else ()
    shape = tuple(d.extent for d in case.layer.conv.dims(layout.tensor)) + kernel
    result = torch.full(shape, torch.nan, dtype=case.dtype)
    for rank, one in enumerate(ran):
        result[tuple(slice(int(lo), int(hi)) for lo, hi in boxes[rank])] = one.blocks[name]
    return result


def assert_adjoint(case: Case, given: Mapping[str, Tensor], ran: Sequence[Ran]) -> None:
    """<Ax, dy> == <x, A'dy>, for A as a map of x and as a map of w: needs no reference."""
    y = whole(case, ran, "y").double()
    if "bias" in given:
        y = y - given["bias"].view(-1, *[1] * len(case.layer.conv.spatial))
    left = float((y * given["dy"]).sum())
    scale = float((y * given["dy"]).abs().sum()) or 1.0
    for name, gradient in (("x", "dx"), ("w", "dw")):
        right = float((given[name] * whole(case, ran, gradient).double()).sum())
        assert abs(left - right) <= 1e-11 * scale, f"<Ax, y> = {left}, <x, A'y> = {right} for {name}:\n{case}"
