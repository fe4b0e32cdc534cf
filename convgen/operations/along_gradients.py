"""Gradients of operators along a whole dimension, or that pick by an operand's numbers, as autograd has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convgen.late import torch
from convgen.operations.row import read_here


@dataclass(frozen=True, slots=True)
class Course:
    """The gradient of one operand.

    Attributes:
        reads: the numbers of the operands that it reads; `y` and `i` are the first and the second result.
        back: makes the gradient from dy, from what it reads, from the arguments that are no operands, and from its
            shape.
    """

    reads: str
    back: Callable[[Any, Any, Any, list[int]], Any]


def _of_rows(k: int, keep: int | None = None) -> tuple[Course]:
    """The courses of an operator that picks elements along a dimension and says where they lie.

    Args:
        k: the place of the dimension among its arguments; `keep`: the place of whether the dimension stays, None if it
            does.
    """

    def back(dy: Any, read: Any, numbers: Any, shape: list[int]) -> Any:
        stays = keep is None or numbers[keep]
        return torch.ops.aten.value_selecting_reduction_backward(dy, numbers[k], read[0], shape, stays)

    return (Course("i", back),)


def _wide(t: Any, dims: Any, keep: bool, shape: list[int]) -> Any:
    """A result along some dimensions, with extents of 1 in these."""
    over = {d % len(shape) for d in ([dims] if isinstance(dims, int) else dims or range(len(shape)))}
    return t if keep else t.reshape([1 if d in over else n for d, n in enumerate(shape)])


def _largest(dy: Any, read: Any, numbers: Any, shape: list[int]) -> Any:
    """The gradient of the largest or least: equal elements share it."""
    (x, y), (dims, keep), over = read, numbers, [*range(len(shape))] if numbers[0] == () else numbers[0]
    there = _wide(y, dims, keep, shape) == x
    return _wide(dy, dims, keep, shape) * there / there.sum(over, keepdim=True)


def _log_of_sum(dy: Any, read: Any, numbers: Any, shape: list[int]) -> Any:
    (x, y), (dims, keep) = read, numbers
    return _wide(dy, dims, keep, shape) * (x - _wide(y, dims, keep, shape)).exp()


# By ATen's name, the course of each operand; None: it has no gradient.
COURSES: Mapping[str, tuple[Course | None, ...]] = {
    "max.dim": _of_rows(0, 1),
    "min.dim": _of_rows(0, 1),
    "median.dim": _of_rows(0, 1),
    "mode": _of_rows(0, 1),
    "kthvalue": _of_rows(1, 2),
    "topk": _of_rows(1),
    "sort": _of_rows(0),
    "sort.stable": _of_rows(1),
    "amax": (Course("0y", _largest),),
    "amin": (Course("0y", _largest),),
    "logsumexp": (Course("0y", _log_of_sum),),
    "cumsum": (Course("", lambda dy, t, n, shape: dy.flip(n[0]).cumsum(n[0]).flip(n[0])),),
    "tril": (Course("", lambda dy, t, n, shape: dy.tril(n[0])),),
    "triu": (Course("", lambda dy, t, n, shape: dy.triu(n[0])),),
    "gather": (Course("1", lambda dy, t, n, shape: dy.new_zeros(shape).scatter_add_(n[0], t[0], dy)), None),
    "scatter_add": (
        Course("", lambda dy, t, n, shape: dy),
        None,
        Course("1", lambda dy, t, n, shape: dy.gather(n[0], t[0])),
    ),
    "scatter.src": (
        Course("1", lambda dy, t, n, shape: dy.scatter(n[0], t[0], 0)),
        None,
        Course("1", lambda dy, t, n, shape: dy.gather(n[0], t[0])),
    ),
    "scatter.value": (Course("1", lambda dy, t, n, shape: dy.scatter(n[0], t[0], 0)), None),
    "index_add": (
        Course("", lambda dy, t, n, shape: dy),
        None,
        Course("1", lambda dy, t, n, shape: dy.index_select(n[0], t[0]) * n[1]),
    ),
}


def courses_of(op: str, smooth: Sequence[bool]) -> tuple[Course | None, ...] | None:
    """The courses of an operator's operands; None where a differentiable operand has none."""
    found = COURSES.get(op)
    if found is None or len(found) != len(smooth):
        return None
    return None if any(one and course is None for one, course in zip(smooth, found, strict=True)) else found


def kept_of_course(
    courses: Sequence[Course | None], wanted: Sequence[bool], operands: Sequence[Any], results: Sequence[Any]
) -> tuple[Any, ...]:
    """The operands and the results that gradients read; None in the place of the others."""
    read = {r for course, asked in zip(courses, wanted, strict=True) if course and asked for r in course.reads}
    named = [*zip(map(str, range(len(operands))), operands, strict=True), *zip("yi", results, strict=False)]
    return tuple(t if name in read else None for name, t in named) if read else ()


def gradients_by_course(
    courses: Sequence[Course | None], numbers: Any, at: Any, wanted: Sequence[bool], kept: Sequence[Any], dy: Any
) -> tuple[Any, ...]:
    """The operands' gradients, from the first result's gradient."""
    count, found = len(wanted), list[Any]()
    for k, (course, asked) in enumerate(zip(courses, wanted, strict=True)):
        if course is None or not asked:
            found.append(None)
            continue
        read = [kept[count + "yi".index(r) if r in "yi" else int(r)] for r in course.reads]
        found.append(course.back(dy, read, numbers, read_here(at, k)))
    return tuple(found)
