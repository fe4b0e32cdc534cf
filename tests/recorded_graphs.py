"""torch.cuda's graphs without a GPU: what runs while one is recorded, a thread a device, runs again in a replay.

As on a device, what is recorded is not run: memory from before is as it was, and what was made meanwhile holds rubbish
until a replay writes it, there where it was recorded. What would wait for the host is an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from convgen.verify import interpreter
from convgen.verify.virtual import VirtualTransport

HOST = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "lift_fresh", "_unique2", "masked_select")
HERE = threading.local()


def tensors(found: Any) -> list[Tensor]:
    return [t for t in tree_leaves(found) if isinstance(t, Tensor)]


def memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def as_it_lies(t: Tensor) -> Tensor:
    """Its memory, whatever becomes of its shape."""
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())


class Recorder(TorchDispatchMode):
    """What runs meanwhile, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], object]] = []
        self.made: dict[int, Any] = {}  # memory by its number
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def changes(self, t: Tensor) -> None:
        """Memory is written that may be from before."""
        if memory(t) not in self.made and memory(t) not in self.before:
            whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
            self.before[memory(t)] = whole, whole.clone()

    def makes(self, out: Tensor) -> None:
        self.made[memory(out)] = out.untyped_storage()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is not Tensor and not issubclass(t, torch.nn.Parameter) for t in types):
            return NotImplemented  # DTensors and Blocks do it with what they hold
        name, kwargs = func._schema.name, kwargs or {}
        if name.startswith("convgen::"):
            with self:
                return torch._library.custom_ops.OPDEFS[name]._init_fn(*args, **kwargs)
        if name.removeprefix("aten::") in HOST:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        given = {memory(t) for t in tensors((args, kwargs))}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes or "batch_norm" in name:  # which does not say that it writes running statistics
                for t in tensors(value):
                    self.changes(t)
        if torch.Tag.inplace_view in func.tags:  # of what the host knows of a tensor
            return func(*args, **kwargs)
        there, those = tree_map_only(Tensor, as_it_lies, (args, kwargs))
        out = func(*args, **kwargs)
        fresh = [memory(t) not in given for t in tensors(out)]
        for t, is_fresh in zip(tensors(out), fresh, strict=True):
            if is_fresh:
                self.makes(t)
        results = [as_it_lies(t) for t in tensors(out)]

        def again() -> None:
            for t, new, is_fresh in zip(results, tensors(func(*there, **those)), fresh, strict=True):
                if is_fresh:
                    t.copy_(new)

        self.steps.append(again)
        return out

    def end(self) -> None:
        with torch.no_grad():
            for whole, was in self.before.values():
                whole.copy_(was)
            for storage in self.made.values():
                storage.fill_(0xA5)

    def replay(self) -> None:
        with torch.no_grad():
            for step in self.steps:
                step()


class CUDAGraph:
    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def replay(self) -> None:
        assert self.recorder is not None
        self.recorder.replay()

    def pool(self) -> tuple[int, int]:
        return (0, 0)


@contextmanager
def graph(made: CUDAGraph, pool: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    assert getattr(HERE, "recorder", None) is None and capture_error_mode == "thread_local"
    made.recorder = HERE.recorder = Recorder()
    try:
        with made.recorder:
            yield
    finally:
        HERE.recorder = None
        made.recorder.end()


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


def launch(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
    """In the place of a module's: recorded, too."""
    recorder: Recorder | None = getattr(HERE, "recorder", None)

    def run() -> None:
        with _disable_current_modes():
            interpreter.launch(kernel, grid, *args, **constants)

    if recorder is not None:
        for t in [getattr(a, "base", a) for a in args]:
            if isinstance(t, Tensor):
                recorder.changes(t)
        recorder.steps.append(run)
    run()


class RecordedTransport(VirtualTransport):
    """A rank's end whose collectives are recorded, too."""

    def start(self, kind: str, tensor: Tensor, splits: Any, group: Any, lane: str) -> Any:
        recorder: Recorder | None = getattr(HERE, "recorder", None)
        begun = super().start
        with _disable_current_modes() if recorder else nullcontext():
            flights = [begun(kind, tensor, splits, group, lane)]
        if recorder is None:
            return flights[0]
        recorder.steps.append(lambda: flights.append(begun(kind, tensor, splits, group, lane)))
        return Landing(recorder, flights)


class Landing:
    def __init__(self, recorder: Recorder, flights: list[Any]) -> None:
        self.recorder, self.flights = recorder, flights

    def wait(self) -> Tensor:
        with _disable_current_modes():
            out = self.flights.pop().wait().clone()
        self.recorder.makes(out)
        self.recorder.steps.append(lambda: out.copy_(self.flights.pop().wait()))
        return out


def fake_graphs(runtime: Any, patch: pytest.MonkeyPatch) -> None:
    """torch.cuda's for a runtime, whose modules are for a CPU in the place of a device."""
    states: dict[str, Any] = {
        "CUDAGraph": CUDAGraph, "graph": graph, "Stream": Stream, "current_stream": Stream,
        "stream": lambda _: nullcontext(), "synchronize": lambda: None,
        "get_rng_state": lambda: torch.zeros(1), "set_rng_state": lambda _: None,
    }  # fmt: skip
    for name, fake in states.items():
        patch.setattr(torch.cuda, name, fake)
    if runtime is not None:
        patch.setattr(runtime, "refuse_graphs", lambda *_: None)
        patch.setattr(runtime, "is_recorded", lambda _: getattr(HERE, "recorder", None) is not None)
        patch.setattr(runtime, "BY_HAND", 0, raising=False)  # few numbers are drawn on the host for a CPU alone


def as_recorded(end: VirtualTransport) -> RecordedTransport:
    return RecordedTransport(end._world, end.rank)


class NoHost(TorchDispatchMode):
    """A step of which nothing comes from the host or goes there: `meta` tensors are the device's."""

    def __enter__(self) -> Any:
        HERE.no_host = True  # torch.tensor(..., device="meta") is no call that a mode sees
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        HERE.no_host = False
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is not Tensor and not issubclass(t, torch.nn.Parameter) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        where = {t.device.type for t in (*tensors((args, kwargs)), *tensors(out)) if t.dim()}
        name = func._schema.name.removeprefix("aten::")
        assert len(where) < 2 and name not in HOST, f"{name} between the device and the host: {where}"
        return out
