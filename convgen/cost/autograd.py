"""What backward needs of a row's local code: the operation says it, or torch does, run on tensors without memory.

Equal rows are asked for once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from convgen.cost.flight_memory import Part
from convgen.late import torch
from convgen.operations.autocast import taken_each
from convgen.operations.row import At, Interval, Operation, standing

Kept = tuple[str, int, int]  # "operand", "result" or "within"; its number; bytes
Stands = tuple[
    tuple[tuple[str, Interval], ...], tuple[tuple[Interval, ...], ...], tuple[tuple[Interval, ...], ...]
]  # an At
OfPart = tuple[Stands, tuple[tuple[int, ...], ...], bool]


def kept_of(
    operation: Operation,
    way: int,
    parts: Sequence[Part],
    dtypes: Sequence[str],
    grads: Sequence[bool],
    early: int | None,
    kinds: tuple[str, ...] = (),
    low: str = "",
) -> tuple[tuple[Kept, ...], dict[int, int]]:
    """What local code keeps for backward; and results that are views of operands: result -> operand.

    Args:
        parts: what the rank computes at once; the results of several parts are put together.
        grads: by operand, whether it wants a gradient.
        early: the operand whose strips are put together.
        kinds: by operand how autocast takes it; `low`: its type, "" where it is off.
    """
    alike = tuple((_stands(part.at), part.reads, part.strip) for part in parts)
    return _asked(operation, way, alike, tuple(dtypes), tuple(grads), early, kinds if low else (), low)


@lru_cache(maxsize=1 << 12)
def spreads(operation: Operation, way: int) -> bool:
    """Whether an operation's only operand has a gradient of few numbers that are read at many places, as a mean has."""
    signature = operation.signatures[way]
    if len(signature.inputs) != 1:
        return False
    (x,), at = signature.inputs, standing(signature, {i: (0, n) for i, n in signature.extents})
    try:
        with torch.no_grad():
            given = torch.empty(x.shape, device="meta")
            if not operation.has_vjp(way, at, given):
                return False
            made, kept = operation.kept(way, at, (True,), given)
            (gradient,) = operation.vjp(way, at, (True,), kept, *made)
    except (RuntimeError, NotImplementedError, ValueError, IndexError):
        return False
    return gradient is not None and 0 in gradient.stride()


def _stands(at: At) -> Stands:
    return tuple(at.blocks.items()), at.windows, at.inside


@lru_cache(maxsize=1 << 12)
def _asked(
    operation: Operation,
    way: int,
    parts: tuple[OfPart, ...],
    dtypes: tuple[str, ...],
    grads: tuple[bool, ...],
    early: int | None,
    kinds: tuple[str, ...],
    low: str,
) -> tuple[tuple[Kept, ...], dict[int, int]]:
    narrow = getattr(torch, low) if low else None
    storage: dict[int, tuple[str, int]] = {}
    runs: list[tuple[At, list[Any]]] = []
    for (blocks, windows, inside), reads, strip in parts:
        operands: list[Any] = []
        for k, (dtype, shape) in enumerate(zip(dtypes, reads, strict=True)):
            operands.append(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
            if not (strip and k == early):
                storage[_place(operands[-1])] = "operand", k
        taken = taken_each(kinds, operands, narrow)  # a cast makes a tensor of its own, which counts as within
        given = [t.requires_grad_(grad) for t, grad in zip(taken, grads, strict=True)]
        runs.append((At(dict(blocks), windows, inside, low=narrow), given))
    saved: list[Any] = []

    def pack(tensor: Any) -> Any:
        saved.append(tensor)
        return tensor

    try:
        if any(grads) and all(operation.has_vjp(way, at, *given) for at, given in runs):
            with torch.no_grad():
                each = [operation.kept(way, at, grads, *given) for at, given in runs]
            made = [t for results, _ in each for t in results]
            saved += [t for _, kept in each for t in kept if isinstance(t, torch.Tensor)]
        else:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, _same):
                made = [t for at, given in runs for t in operation.local(way, at, *given)]
    except (RuntimeError, NotImplementedError, ValueError, IndexError):  # can't run without memory: it keeps all it has
        both: list[Kept] = [("operand", k, 0) for k, g in enumerate(grads) if g]
        return (*both, *(("result", j, 0) for j in range(len(operation.signatures[way].results)))), {}
    aliases = dict[int, int]()
    if len(parts) == 1:
        aliases = {j: storage[_place(t)][1] for j, t in enumerate(made) if _place(t) in storage}
        storage |= {_place(t): ("result", j) for j, t in enumerate(made) if _place(t) not in storage}
    found: dict[tuple[str, int], int] = {}
    for tensor in saved:
        kind, number = storage.get(_place(tensor), ("within", _place(tensor)))
        found[kind, number] = max(found.get((kind, number), 0), tensor.untyped_storage().nbytes())
    return tuple((kind, number, size) for (kind, number), size in found.items()), aliases


def _same(tensor: Any) -> Any:
    return tensor


def _place(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata
