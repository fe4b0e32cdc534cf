# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""Phases of a layer, and steps of a network, as CUDA graphs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from .blocks import Block, Unmapped
from .envelope import enter
from .mesh import Place
from .transport import shared

if TYPE_CHECKING:
    from .conv_module import ConvModule


# One launch from the host for all kernels and collectives of a phase, or of a step. A graph reads and writes the memory
# that it was recorded with: what is given is copied to where it reads, and what is made from where it writes. It is
# recorded after one rehearsal, in which kernels are compiled and loaded, process groups connected and tables brought to
# the device; what the rehearsal has changed is brought back, so that nothing but time tells that it has been.
#
# Sources: PyTorch's notes on CUDA graphs (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs);
# NCCL's user guide (collectives may be recorded, by all ranks alike, and graphs go before communicators).


def refuse_graphs(name: str, device: str, place: Place) -> None:
    """Refuse what can't be recorded, before anything runs."""
    if device != "cuda":
        raise RuntimeError(f"{name}: CUDA graphs are for GPUs, this is compiled for {device}: --target cuda, or hip")
    if os.environ.get("CONVGEN_CHECK_LOCAL") == "1":
        raise RuntimeError(
            f"{name}: CONVGEN_CHECK_LOCAL=1 reads results on the host, which a CUDA graph can't: unset it"
        )
    if len(place.ranks) > 1 and hasattr(place.transport, "process_group") and dist.group.WORLD is not None:
        backend = dist.group.WORLD._get_backend(torch.device(device)).name()
        if backend != "nccl":
            raise RuntimeError(
                f"{name}: of backends NCCL's collectives alone can be in a CUDA graph, this is {backend}"
            )


def rehearsed(run: Callable[[], object], keeps: Sequence[Tensor]) -> None:
    """Run once, on a stream beside the current one, and undo what that changes.

    Args:
        keeps: the plain tensors that it may change, besides random states.
    """
    with torch.no_grad():
        before = [t.clone() for t in keeps]
    on_host, on_device = torch.get_rng_state(), torch.cuda.get_rng_state()
    own, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    beside.wait_stream(own)
    try:
        with torch.cuda.stream(beside):
            run()
    finally:
        own.wait_stream(beside)
        with torch.no_grad():
            for t, old in zip(keeps, before, strict=True):
                t.copy_(old)
        torch.set_rng_state(on_host)
        torch.cuda.set_rng_state(on_device)
    torch.cuda.synchronize()


def recorded(name: str, run: Callable[[], Any], place: Place, pool: Any = None) -> tuple[Any, Any]:
    """A CUDA graph of `run`, and what `run` returns: the tensors to which the graph writes its results.

    Other threads may ask the device for memory, or whether events are over, as NCCL's watchdog does: "thread_local".
    """
    graph, counters = torch.cuda.CUDAGraph(), shared.setdefault("counters", {})
    counters["graph"] = {}  # its own, so that it may run beside others, and beside launches without a graph
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            made = run()
            land(place.transport)
    except Exception as error:
        cause = error.__context__ or error
        raise RuntimeError(
            f"{name}: this can't be recorded as a CUDA graph: {cause}. Nothing in it may read results on the host, and "
            "no loss of an earlier step may still be there (del it)"
        ) from error
    finally:
        counters.pop("graph", None)
    return graph, made


def land(transport: Any) -> None:
    """Let lanes that were recorded on end before the graph does."""
    for lane in shared.get("lanes", {}).get(transport, {}).values():
        stream = getattr(lane, "stream", None)
        if stream is not None:
            with torch.cuda.stream(stream):
                is_recorded = torch.cuda.is_current_stream_capturing()
            if is_recorded:
                torch.cuda.current_stream().wait_stream(stream)


def misfit(given: Any, wanted: Tensor) -> str:
    """Words for why a tensor can't be copied to where a graph reads it; "" if it can."""
    if not isinstance(given, Tensor) or isinstance(given, (DTensor, Block)):
        return f"wants this rank's plain block, got {type(given).__name__}"
    if given.shape != wanted.shape or given.dtype != wanted.dtype or given.device != wanted.device:
        said = [f"{t.dtype} {list(t.shape)} on {t.device}" for t in (wanted, given)]
        return f"was recorded as {said[0]}, got {said[1]}: a graph has one shape, record another"
    if torch.is_grad_enabled() and given.requires_grad and not wanted.requires_grad:
        return "requires a gradient, and did not when the graph was recorded: record another"
    return ""


def fault_of(check: Callable[..., None], *given: Any) -> Exception | None:
    """The exception that a check of arguments raises, which the envelope tells the other ranks; None if it passes."""
    try:
        check(*given)
    except Exception as error:
        return error
    return None


def own_copy(given: Tensor) -> Tensor:
    """A copy with the same strides, from whose memory a graph reads what it is given."""
    return given.detach().clone().requires_grad_(given.requires_grad)


def lies(held: Sequence[Any]) -> list[tuple[int, bool]]:
    """Where parameters and buffers lie and which of them learn; if this changes, the graph reads something else."""
    inner = [getattr(t, "_block", getattr(t, "_local_tensor", t)) for t in held]
    return [(there.data_ptr(), t.requires_grad) for there, t in zip(inner, held, strict=True)]


def refuse_moved(name: str, held: Sequence[Any], recorded_at: list[tuple[int, bool]]) -> None:
    if lies(held) != recorded_at:
        raise RuntimeError(
            f"{name}: parameters or buffers have other memory, or another requires_grad, than when the graph was "
            "recorded: record it again"
        )


class GraphedPhases:
    """A layer's module whose forward and backward are a CUDA graph each; it is called as the module is.

    One call is under way at a time: a gradient of a call is asked for before the next call, or not at all. Gradients of
    gradients are refused.
    """

    def __init__(self, module: ConvModule, x: Tensor, batch: int | None) -> None:
        layer, place = module.layer, module._here().place
        self.name, self._module, self._turn = layer.name, module, 0
        refuse_graphs(layer.name, layer.device, place)
        if isinstance(x, (DTensor, Block)):
            raise TypeError(f"{layer.name}: a graph takes this rank's plain block of x, got a {type(x).__name__}")
        self.x = own_copy(x)
        wanted = [t for t in (self.x, *self._parameters) if t.requires_grad]

        def forward() -> Tensor:
            with torch.enable_grad():
                return module(self.x, batch)

        def both() -> None:
            y = forward()
            if wanted:
                torch.autograd.grad(y, wanted, torch.zeros_like(y))

        rehearsed(both, ())
        self._forward, y = recorded(layer.name, forward, place)
        self.y, self.dy, self._gradients, self._backward = y.detach(), torch.empty_like(y), list[Any](), None
        if wanted:
            self._backward, found = recorded(
                layer.name, lambda: torch.autograd.grad(y, wanted, self.dy), place, self._forward.pool()
            )
            left = iter(found)
            self._gradients = [next(left) if t.requires_grad else None for t in (self.x, *self._parameters)]
        self._recorded_at = lies(self._parameters)

    @property
    def _parameters(self) -> list[Any]:
        return [p for p in self._module._parameters.values() if p is not None]

    def __call__(self, x: Tensor) -> Tensor:
        learns = torch.is_grad_enabled() and (self._backward is not None)
        read = enter(self._module._here(), "graphed conv", {"gradients": learns}, fault=fault_of(self._check, x))
        y = ReplayedPhases.apply(self, x, *self._parameters)
        read()
        return y

    def _check(self, x: Tensor) -> None:
        wrong = misfit(x, self.x)
        if wrong:
            raise ValueError(f"{self.name}: x {wrong}")
        refuse_moved(self.name, self._parameters, self._recorded_at)
        if torch.is_autocast_enabled(self._module.layer.device):
            raise RuntimeError(
                f"{self.name}: a graph does not see autocast; give it x as {self.x.dtype}, outside of it"
            )

    def forward(self, x: Tensor) -> Tensor:
        """y in memory of its own."""
        self._turn += 1
        self.x.detach().copy_(x)
        self._forward.replay()
        return self.y.clone()

    def backward(self, turn: int, dy: Tensor) -> list[Any]:
        """Gradients of x and the parameters, in memory of their own."""
        if turn != self._turn:
            raise RuntimeError(
                f"{self.name}: the graph was called again before the gradient of this call, whose x is overwritten; a "
                "module that is called several times a step wants a graph for each: record another"
            )
        assert self._backward is not None
        self.dy.copy_(dy)
        self._backward.replay()
        return [None if g is None else g.clone() for g in self._gradients]

    @property
    def turn(self) -> int:
        """The number of the call whose tensors the graphs' memory holds."""
        return self._turn


class ReplayedPhases(Unmapped):
    """A call of a layer's graphs, as a node of autograd's graph."""

    @staticmethod
    def forward(graphs: GraphedPhases, x: Tensor, *parameters: Any) -> Tensor:
        return graphs.forward(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.graphs = inputs[0]
        ctx.turn = ctx.graphs.turn

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        found = ctx.graphs.backward(ctx.turn, dy)
        return None, *[g if need else None for g, need in zip(found, ctx.needs_input_grad[1:], strict=True)]
