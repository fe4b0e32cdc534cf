"""Types under torch.autocast: those to which operands are cast, and those of local code's results."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from convgen.algebra.signature import Operand
from convgen.late import torch
from convgen.operations.row import Operation, standing
from convgen.operations.typed import under

AUTOCAST = ("float32", "bfloat16", "float16")  # types that torch.autocast casts


def taken_as(kind: str, tensors: Sequence[Any], low: Any) -> list[Any]:
    """Operands cast as torch.autocast casts those of an operation of this kind (spec/autocast.py).

    Args:
        low: autocast's type; None where it is off.
    """
    if not kind or low is None:
        return list(tensors)
    types = [getattr(torch, name) for name in AUTOCAST]
    found = [t is not None and t.dtype in types for t in tensors]
    wide = torch.float32 if kind == "float32" else low
    if kind == "widest":
        kinds = [t.dtype for t, f in zip(tensors, found, strict=True) if f]
        wide = low if all(k == low for k in kinds) else torch.float32
    return [t.to(wide) if f and t.dtype != wide else t for t, f in zip(tensors, found, strict=True)]


def taken_each(kinds: Sequence[str], operands: Sequence[Any], low: Any) -> list[Any]:
    """Operands cast as autocast casts each by its kind; what is no tensor stays as it is.

    Args:
        kinds: for each operand its kind; empty where nothing is cast.
    """
    found = list(operands)
    for kind in {*kinds}:
        places = [k for k, one in enumerate(kinds) if one == kind and isinstance(found[k], torch.Tensor)]
        for k, tensor in zip(places, taken_as(kind, [found[k] for k in places], low), strict=True):
            found[k] = tensor
    return found


def usual_types(results: Sequence[Operand], given: Sequence[str]) -> tuple[str, ...]:
    """The types of results where a row says none: int64 for integers, else the type of the first operand of floats."""
    first = next((kind for kind in given if "float" in kind), "float32")
    return tuple("int64" if r.integer else first for r in results)


class _Asked(threading.local):
    """Whether this thread runs local code to learn types, without computing; kernels can't run so."""

    types = False


ASKED = _Asked()


@lru_cache(maxsize=1 << 13)
def types_under(
    operation: Operation, way: int, reads: tuple[str, ...], kinds: tuple[str, ...], low: str
) -> tuple[str, ...]:
    """The types of local code's results for operands of these types under autocast, found by running it on tensors
    without memory.

    Args:
        kinds: how autocast takes each operand, or empty; low: autocast's type.
    """
    operation, narrow = under(operation, low), getattr(torch, low)
    signature = operation.signatures[way]
    at = replace(standing(signature, {i: (0, n) for i, n in signature.extents}), low=narrow)
    shapes = [[hi - lo for lo, hi in operand] for operand in at.inside]
    given = [torch.empty(s, dtype=getattr(torch, kind), device="meta") for s, kind in zip(shapes, reads, strict=True)]
    given = taken_each(kinds, given, narrow)
    try:
        ASKED.types = True
        with torch.no_grad():
            return tuple(_type(t) for t in operation.local(way, at, *given))
    except (RuntimeError, NotImplementedError, ValueError, IndexError):  # local code can't run without memory
        types = [_type(t) for t in given]
        if signature.reduction == "merge":  # moments are float32 at least
            types = ["float64" if "float64" in types else "float32"]
        return usual_types(signature.results, types)
    finally:
        ASKED.types = False


def _type(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
