# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch and arrays leave untyped)
"""A rank's part of a global tensor, as slices; and that part, read from any array with a shape and slices."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .layout import Box

Where = tuple[slice, ...]


def as_slices(box: Box) -> Where:
    """Slices of the global tensor."""
    return tuple([slice(lo, max(lo, hi)) for lo, hi in box])


def around(boxes: Sequence[Box]) -> Box:
    """The smallest box around these boxes; empty boxes don't count, unless all of them are empty."""
    full = [box for box in boxes if all(hi > lo for lo, hi in box)] or [boxes[0]]
    return tuple([(min(lo for lo, _ in pairs), max(hi for _, hi in pairs)) for pairs in zip(*full, strict=True)])


def read_region(array: Any, region: Where, name: str, kind: torch.dtype | None) -> Tensor:
    """The part of an array at a region, contiguous, in memory of its own.

    Args:
        array: a tensor, or anything that takes numpy's slices: an array in memory, mapped, or in a file.
        name: the network's and the value's, for messages.
        kind: the type of the result; None keeps the array's.

    Raises:
        ValueError: the array gives another shape, has masked elements, or numbers that the type can't have.
        RuntimeError: the array can't be read there; the error that it raised is the cause.
    """
    wanted = tuple([s.stop - s.start for s in region])
    try:
        part = array[region] if all(wanted) else _nothing(array, wanted)
    except Exception as error:
        fact = f"{name}: {of_array(array)} can't be read at {in_words(region)}: {type(error).__name__}: {error}"
        raise RuntimeError(fact) from error
    found = part.detach().cpu() if isinstance(part, Tensor) else _as_tensor(part, name, kind)
    if tuple(found.shape) != wanted:
        raise ValueError(f"{name}: {of_array(array)} gives {tuple(found.shape)} at {in_words(region)}, not {wanted}")
    return _converted(found, name, kind).clone(memory_format=torch.contiguous_format)


def _nothing(array: Any, shape: tuple[int, ...]) -> Any:
    """An empty part, for a rank that holds nothing: no file is read for it."""
    kind = getattr(array, "dtype", torch.get_default_dtype())
    if isinstance(kind, torch.dtype):
        return torch.empty(shape, dtype=kind)
    return _numpy().empty(shape, dtype=kind)


def _numpy() -> Any:
    """The module numpy, imported only where an array needs it: a package itself imports torch alone."""
    return importlib.import_module("numpy")


def of_array(array: Any) -> str:
    """An array in words, for messages."""
    kind, shape = type(array), tuple(getattr(array, "shape", ()))
    return f"{kind.__module__.partition('.')[0]}'s {kind.__name__} of {shape}"


def in_words(region: Where) -> str:
    """A region as one writes slices."""
    return f"[{', '.join(f'{s.start}:{s.stop}' for s in region)}]"


def _as_tensor(part: Any, name: str, kind: torch.dtype | None) -> Tensor:
    """A part of an array as a tensor, in the machine's byte order and in a type that torch has."""
    np = _numpy()
    if isinstance(part, np.ma.MaskedArray):
        masked: Any = part
        if masked.mask is not np.ma.nomask and masked.mask.any():
            raise ValueError(f"{name}: {int(masked.mask.sum())} elements are missing (masked); fill them first")
        part = masked.data
    found: Any = np.asarray(part)
    if found.dtype.kind not in "biufc":
        if kind is None or not kind.is_floating_point or found.dtype.names or found.dtype.kind != "V":
            raise ValueError(f"{name}: numbers are wanted, and the array is of {found.dtype}")
        found = found.astype(np.float32)  # bfloat16 of ml_dtypes and others' small types
    native = found.dtype.newbyteorder("=")
    if native.kind == "u" and native.itemsize in (2, 4):  # torch converts few of these
        native = np.dtype({2: np.int32, 4: np.int64}[native.itemsize])
    if native.kind == "f" and native.itemsize > 8:
        native = np.dtype(np.float64)
    if native.kind == "u" and native.itemsize == 8:
        if found.size and int(found.max()) >= 2**63:
            raise ValueError(f"{name}: {found.max()} is more than int64 has")
        native = np.dtype(np.int64)
    return torch.from_numpy(np.array(found, dtype=native, order="C"))


def _converted(found: Tensor, name: str, kind: torch.dtype | None) -> Tensor:
    """Numbers converted to the type that is wanted: real numbers to floats, any to complex ones, integers to an integer
    type that holds them."""
    if kind is None or found.dtype == kind:
        return found
    if kind.is_floating_point or kind.is_complex:
        if found.is_complex() and not kind.is_complex:
            raise ValueError(f"{name}: {kind} is wanted, and the array is of {found.dtype}")
        made = found.to(kind)
        more = _reach_of(found.dtype) > _reach_of(kind) and not bool(made.isfinite().all())
        if more and bool((made.isinf() & ~found.isinf()).any()):
            raise ValueError(f"{name}: {kind} is wanted, and the array has numbers beyond {_reach_of(kind):.5g}")
        return made
    made = found.to(kind)
    alike = not (found.is_floating_point() or found.is_complex() or (kind == torch.bool and found.dtype != kind))
    if not (alike and bool((made.to(found.dtype) == found).all())):
        raise ValueError(f"{name}: {kind} is wanted, and the array has numbers of {found.dtype} that it can't have")
    return made


def _reach_of(kind: torch.dtype) -> float:
    """The largest number of a type, or the largest part of a complex one."""
    if kind == torch.bool:
        return 1.0
    return torch.finfo(kind).max if kind.is_floating_point or kind.is_complex else torch.iinfo(kind).max
