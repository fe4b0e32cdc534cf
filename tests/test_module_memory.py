"""What a module allocates is what its schedule's steps add up to, rank by rank, and nothing that they do not name.

Measured by a dispatch mode that sees every storage made inside run_forward and run_backward, and its end. ATen's
workspaces stay unseen, and what a transport makes for itself is left out; what it hands back counts.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from generate import algorithm_problem
from module_memory import memory
from modules import Case, draw, make
from sampling import cases_of, draws
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from convgen.algebra.conv import Conv, Spatial
from convgen.algebra.grid import Grid
from convgen.program.nodes import PHASES, is_convolution
from convgen.spec.layer import Options
from convgen.verify.fits import most_elements
from convgen.verify.program import global_tensors
from convgen.verify.virtual import VirtualTransport, World

BATCH = 10
GRADIENTS = (("dx", "dw", "db"), ("dx",), ("dw",), ("db",), ("dx", "dw"))


class Allocations(TorchDispatchMode):
    """Bytes of the storages that were made under this mode, are alive, and have been read or written.

    Memory that nothing touches is none: of the operand whose gradient it makes, convolution_backward wants the shape.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.paused = False
        self._known: weakref.WeakSet[Any] = weakref.WeakSet(t.untyped_storage() for t in given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.paused and func is not torch.ops.aten.empty.memory_format:
            touched = list(args)
            if func is torch.ops.aten.convolution_backward.default:
                del touched[2 if args[-1][1] else 1]
            self.count((touched, out))
        return out

    def count(self, out: Any) -> None:
        for tensor in tree_leaves(out):
            if type(tensor) is Tensor and (storage := tensor.untyped_storage()) not in self._known:
                self._known.add(storage)
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes())

    def _change(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


class Watched:
    """A transport whose own tensors are not counted; its results are, while its arguments are still alive."""

    def __init__(self, end: VirtualTransport) -> None:
        self.end, self.rank, self.size = end, end.rank, end.size
        self.mode: Allocations | None = None

    def __getattr__(self, kind: str) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            mode = self.mode
            if mode is None:
                return getattr(self.end, kind)(*args)
            mode.paused = True
            result = getattr(self.end, kind)(*args)
            mode.paused = False
            mode.count(result)
            return result

        return call


def measure(case: Case) -> list[list[int]]:
    """For every rank the peak bytes of forward, what it leaves, and the peaks of backward for each of GRADIENTS."""
    layer, given = case.module, global_tensors(case.layer)

    def program(end: VirtualTransport) -> list[int]:
        transport = Watched(end)
        mesh = layer.init_mesh(transport=transport)
        local = {name: layer.scatter(name, value, mesh) for name, value in given.items()}
        here = layer.LAYER.here(layer.mesh_key(mesh), case.layer.conv.batch)

        def peak(call: Callable[..., Any], *args: Any) -> tuple[Any, Allocations]:
            with torch.no_grad(), Allocations([a for a in args if isinstance(a, Tensor)]) as mode:
                transport.mode = mode
                out = call(*args)
                transport.mode = None
            return out, mode

        out, mode = peak(layer.run_forward, local["x"], local["w"], local.get("bias"), here)
        values = {**local, **dict(zip(("y", *case.schedule.held()), out, strict=True))}
        measured = [mode.peak, mode.live]
        names = layer.run_backward.__code__.co_varnames[: layer.run_backward.__code__.co_argcount]
        arguments = [values[n] for n in names[: names.index("here")]]
        for wanted in GRADIENTS:
            _, mode = peak(layer.run_backward, *arguments, here, *(g in wanted for g in ("dx", "dw", "db")))
            measured.append(mode.peak)
        return measured

    return World(case.layer.grid.ranks).run(program)


def predict(case: Case) -> list[list[int]]:
    """The same from the steps."""
    last = case.layer.memory_format == "channels_last"
    whole = memory(case.schedule, case.space, channels_last=last)
    left = case.space.elements(dict(case.schedule.stored)["y"]) + whole.held
    rows = [whole.peak["forward"], left]
    for wanted in GRADIENTS:
        peak = memory(case.schedule, case.space, channels_last=last, gradients=wanted).peak
        rows.append(np.maximum(peak["backward_data"], peak["backward_filter"]))
    return (np.stack(rows, axis=1) * case.layer.element_bytes).tolist()


@pytest.mark.parametrize(
    "batch", [range(s, s + BATCH) for s in [BATCH * k for k in cases_of(60 // BATCH, "peaks")]], ids=str
)
def test_peaks_are_what_the_steps_add_up_to(batch: range) -> None:
    for seed in batch:
        case = draw(7000 + seed)
        measured, predicted = measure(case), predict(case)
        if case.layer.memory_format == "contiguous":
            assert measured == predicted, case
        else:
            # ATen makes its results contiguous here; putting one into the layer's format is a copy for a moment.
            copies = [case.space.elements(s.type) for _, s in case.schedule.steps() if is_convolution(s)]
            most = np.max(copies, axis=0) * case.layer.element_bytes
            for rank, (a, b) in enumerate(zip(measured, predicted, strict=True)):
                assert a[1] == b[1], case
                assert all(x <= y + most[rank] for x, y in zip(a, b, strict=True)), case


CONV = Conv(4, 6, 8, (Spatial("H", 8, kernel=3, pad_lo=1, pad_hi=1), Spatial("W", 6, kernel=3, pad_lo=1, pad_hi=1)))
X, W, Y = 6 * 8 * 6, 8 * 6 * 9, 8 * 8 * 6  # elements of x and y a sample, and of w


def peaks(algorithm: str, **grid: int) -> list[int]:
    """Elements at the peak of forward, backward-data and backward-filter, and what is held, of rank 0; measured too."""
    problem = algorithm_problem(algorithm, CONV, Grid(tuple(grid.items())))
    name = "memory_" + "_".join((algorithm.replace("-", "_"), *(f"{k}{v}" for k, v in grid.items())))
    case = make(problem, name, random.Random(0), memory_format="contiguous", options=Options())
    assert measure(case) == predict(case)
    m = memory(case.schedule, case.space)
    return [int(m.peak[p][0]) for p in ("forward", "backward_data", "backward_filter")] + [int(m.held[0])]


def test_nothing_that_the_schedule_does_not_name() -> None:
    """Results, addends of sums, and what travels."""
    assert peaks("sample", N=1) == [4 * Y, 4 * X, 4 * X + W, 0]
    # dw is summed over the samples: the addend and the sum.
    assert peaks("sample", N=2) == [2 * Y, 2 * X, 2 * X + 2 * W, 0]
    # Groups and channels split without a copy of x or w; partial y is packed by filter, then reduced.
    assert peaks("stationary-x", C=2)[0] == 4 * Y + 4 * Y + 4 * Y // 2
    # x with a halo row, of which a column of 6 channels is sent and received; forward keeps it for backward.
    sides = 4 * 6 * 6
    assert peaks("spatial", H=2)[::3] == [4 * X // 2 + 2 * sides + 4 * Y // 2, 4 * X // 2 + 2 * sides]


def test_a_check_allows_for_all_of_it() -> None:
    """What `convgen check` expects is never less, and not three times as much."""
    for seed in range(draws(100)):
        case = draw(9000 + seed)
        exact = memory(case.schedule, case.space, channels_last=case.layer.memory_format == "channels_last")
        peak = max(int(exact.peak[phase].sum()) for phase in PHASES) + int(exact.held.sum())
        assert peak <= most_elements(case.schedule, case.space) <= 3 * peak, case
