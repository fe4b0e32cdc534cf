"""Offsets beyond 2**31 elements, by index arithmetic: a program's addresses are recorded, memory is not touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import PHASES, SM_90
from triton.runtime import interpreter as upstream

from convgen.kernels.config import Config
from convgen.kernels.families import FAMILIES, box, converted, depthwise, gemm, packed, pointer, tiled
from convgen.kernels.load import load_text
from convgen.kernels.problem import LocalDim, Problem
from convgen.kernels.source import Kernel, kernel_module
from convgen.verify.interpreter import interpreted


def plane(kernel: int, x: int, stride: int = 1) -> tuple[LocalDim, ...]:
    pad = kernel // 2
    y = (x + 2 * pad - kernel) // stride + 1
    return tuple(LocalDim(name, x, y, kernel, stride, 1, pad) for name in "HW")


def big(phase: str, memory_format: str, **changes: Any) -> Problem:
    values: dict[str, Any] = {
        "phase": phase,
        "batch": 5,
        "channels": 96,
        "filters": 80,
        "dims": plane(3, 2800),
        "dtype": "bfloat16",
        "memory_format": memory_format,
    }
    return Problem(**(values | changes))


BIG = [
    *(
        (pointer, big(phase, f, **more))
        for phase in PHASES
        for f in ("contiguous", "channels_last")
        for more in ({}, {"x_parts": 2, "y_parts": 2}, {"groups": 2}, {"dims": plane(3, 2800, 2)})
    ),
    # One plane of channels beyond 2**31: the channel's own offset is wide.
    *((pointer, big(phase, "contiguous", batch=1, channels=400, filters=300)) for phase in PHASES),
    *(
        (gemm, big(phase, f, dims=plane(1, 56), batch=9000))
        for phase in PHASES
        for f in ("contiguous", "channels_last")
    ),
    *(
        (gemm, big(phase, "contiguous", dims=plane(1, 2800), channels=600, filters=601, batch=1))
        for phase in PHASES[:2]
    ),
    *(
        (packed, big(phase, f, channels=3, batch=100))
        for phase in ("forward", "backward_filter")
        for f in ("contiguous", "channels_last")
    ),
    # The launch that makes channels last, and the one that writes where they are not, or by output phase.
    *((converted, big(phase, "contiguous", **more)) for phase in PHASES for more in ({}, {"x_parts": 2, "y_parts": 2})),
    (converted, big("backward_data", "contiguous", dims=plane(3, 2800, 2))),
    (tiled, big("backward_filter", "channels_last", dtype="tfloat32", batch=9, channels=64, filters=48, y_parts=2)),
    (box, big("backward_data", "channels_last", dims=plane(3, 2800, 2))),
    *(
        (depthwise, big(phase, f, channels=1, filters=1, groups=300))
        for phase in PHASES
        for f in ("contiguous", "channels_last")
    ),
]


class Recorder:
    """Instead of memory: which elements of which operand a program would touch."""

    def __init__(self, bases: dict[str, int]) -> None:
        self.bases, self.touched = bases, dict[str, list[np.ndarray]]()

    def note(self, pointers: Any, mask: Any) -> None:
        addresses = pointers.data.reshape(-1).astype(object)
        kept = np.broadcast_to(mask.data, pointers.data.shape).reshape(-1) if mask is not None else slice(None)
        for name, base in self.bases.items():
            offsets = np.array([int(a) - base for a in addresses[kept]], dtype=object)
            near = offsets[(offsets >= -(2**44)) & (offsets < 2**44)] if len(offsets) else offsets
            if len(near):
                self.touched.setdefault(name, []).append(near)


def short(config: Config, problem: Problem) -> Config:
    """The same tiles in so many pieces that a program of backward-filter takes two steps."""
    if problem.phase != "backward_filter":
        return config
    if "BP" not in config.tile:
        return replace(config, split=2**18)
    return replace(config, split=-(-problem.pixels // (2 * config.tile["BP"])))


def run_last_programs(
    problem: Problem, family: Any, monkeypatch: pytest.MonkeyPatch, *, open: bool
) -> tuple[Recorder, dict[str, int]]:
    """The last program of each launch's grid, and of the first launch the last for its first tensor: where their loads
    and stores would go, and how many elements there are. What the copy engine copies is not looked at."""
    kernel = Kernel((problem,), short(family.default(problem, SM_90), problem), SM_90, open)
    module = load_text(kernel_module([kernel]))
    found: list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(module, "launch", lambda f, grid, *args, **constants: found.append((f, grid, args, constants)))
    p = problem
    elements = {
        "x": p.elements["x"] * p.x_parts,
        "w": p.elements["w"] * p.x_parts * p.y_parts,
        "y": p.elements["y"] * p.y_parts,
    }
    # A tensor of one element stands for each operand, in an address range of its own.
    tensors = {name: torch.zeros(64, dtype=torch.bfloat16) for name in elements}
    rows = (tuple(d.x for d in p.dims), tuple(d.y for d in p.dims), tuple(d.below for d in p.dims))
    sizes = module.Sizes(p.batch, *rows, p.channels, p.filters, p.groups)
    order = {"forward": "xwy", "backward_data": "ywx", "backward_filter": "yxw"}[p.phase]
    monkeypatch.setattr(module.torch, "empty", lambda *a, **k: torch.zeros(64))
    getattr(module, p.phase)(*(tensors[t] for t in order), sizes)
    bases = {name: (i + 1) << 50 for i, name in enumerate("xwy")}
    recorder, places = Recorder(bases), list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]()
    for function, grid, args, constants in found:
        if "TILE" in constants:  # tensors one behind the other
            counts = [n * -(-c // 64) * -(-r // 64) for n, c, r in zip(args[2::5], args[3::5], args[4::5], strict=True)]
            places += [(function, (sum(counts[: i + 1]) - 1, 0, 0), args, constants) for i in range(len(counts))]
        elif "SPLIT" not in constants:
            places.append((function, tuple(n - 1 for n in grid), args, constants))
    at: list[tuple[int, ...]] = []
    builder: Any = upstream.InterpreterBuilder
    interpreted(found[0][0])

    def grid_index(self: Any, x: int, y: int, z: int) -> None:
        self.grid_idx = at[-1]

    def load_box(self: Any, descriptor: Any, *rest: Any) -> Any:
        shape = [getattr(n, "value", n) for n in descriptor.block_shape]
        return upstream.TensorHandle(np.zeros(shape, dtype=np.uint16), descriptor.base.dtype.element_ty)

    def load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        recorder.note(pointers, mask)
        kind = pointers.get_element_ty()
        return upstream.TensorHandle(np.zeros(pointers.data.shape, dtype=np.uint16), kind)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> None:
        recorder.note(pointers, mask)

    monkeypatch.setattr(builder, "set_grid_idx", grid_index)
    monkeypatch.setattr(builder, "create_masked_load", load)
    monkeypatch.setattr(builder, "create_descriptor_load", load_box)
    monkeypatch.setattr(builder, "create_descriptor_store", lambda *rest: None)
    monkeypatch.setattr(builder, "create_masked_store", store)
    monkeypatch.setattr(builder, "create_load", lambda self, pointers, *rest: load(self, pointers, None, None))

    by_id = {id(tensor): name for name, tensor in tensors.items()}
    pointer_of = torch.Tensor.data_ptr

    def data_ptr(self: torch.Tensor) -> int:
        name = by_id.get(id(self))
        return bases[name] if name else pointer_of(self)

    monkeypatch.setattr(torch.Tensor, "data_ptr", data_ptr)
    # The interpreter would copy the tensors; their addresses are what counts here.
    monkeypatch.setattr(upstream.GridExecutor, "_init_args_hst", lambda self, a, k: (a, k), raising=False)
    monkeypatch.setattr(upstream.GridExecutor, "_restore_args_dev", lambda self, *rest: None, raising=False)
    for function, place, args, constants in places:
        at.append(place)
        with np.errstate(all="ignore"):
            interpreted(function)[(1, 1, 1)](*args, **constants)
    return recorder, elements


@pytest.mark.parametrize(
    ("family", "problem", "open"),
    [*((*one, False) for one in BIG), *((*one, True) for one in BIG[::3])],
    ids=lambda v: getattr(v, "NAME", "open" if v is True else None),
)
def test_offsets_are_wide(family: Any, problem: Problem, open: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert family.refusal(problem, SM_90) is None
    assert family in FAMILIES and isinstance(family.default(problem, SM_90), Config)
    recorder, elements = run_last_programs(problem, family, monkeypatch, open=open)
    farthest = 0
    for name, offsets in recorder.touched.items():
        every = np.concatenate(offsets)
        assert all(o % 2 == 0 for o in every)
        lowest, highest = min(every) // 2, max(every) // 2
        assert 0 <= lowest <= highest < elements[name], f"{name}: {lowest} to {highest} of {elements[name]}"
        farthest = max(farthest, highest)
    assert farthest >= 2**31, f"{elements}, {farthest}"
