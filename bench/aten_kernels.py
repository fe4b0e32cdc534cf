"""What calls of ATen launch on a GPU, and how often each launch reads and writes its operands; and the least of both.

A call that the table doesn't know is one launch, which reads each operand once and writes each result once. So is a
Triton launch here but for what L2 doesn't hold (step_traffic.py). Sources are files of PyTorch (v2.9), under
aten/src/ATen/native; where a library computes (cuDNN), the operands once.

| call | launches | passes | source |
|---|---|---|---|
| convolution | 1, and 1 that adds a bias in place | operands not as another has them are copied | Convolution.cpp |
| convolution_backward | 1 for dx, 1 for dw, 1 for db | dy in each | Convolution.cpp |
| batch norm, training | statistics; what is renewed; normalise | x twice, y | cuda/Normalization.cuh |
| its gradient | sums; dx | x and dy twice, dx | cuda/Normalization.cuh |
| batch norm, evaluation | 1 | x, y | cuda/Normalization.cu |
| its gradient | sums; dx | x and dy; dy, dx | cuda/Normalization.cu |
| batch_norm_update_stats | statistics; what is renewed | x | cuda/Normalization.cu |
| group norm | moments; numbers a channel; normalise | x twice, y | cuda/group_norm_kernel.cu |
| its gradient | sums; numbers a channel; dx; dw and db | x and dy twice, dx | cuda/group_norm_kernel.cu |
| layer norm | 1: rows stay in registers or L1 | x, y | cuda/layer_norm_kernel.cu |
| its gradient | dx; dw and db | x and dy twice, dx | cuda/layer_norm_kernel.cu |
| _foreach_copy_ | 1 for 64 tensors or 320 pieces of 65,536 elements | each | cuda/MultiTensorApply.cuh |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

FOREACH_TENSORS, FOREACH_PIECES, FOREACH_PIECE = 64, 320, 65536  # of a launch with two lists; elements of a piece


@dataclass(frozen=True)
class Counted:
    """Of a call.

    Attributes:
        kind: of what it computes.
        launches: kernels; moved: bytes that they read and write.
        least: bytes, where each activation and gradient is written once, and read once for each pass that must see all
            of it before the next one begins: what is done element by element, and copies, are part of other passes.
    """

    kind: str
    launches: int
    moved: int
    least: int


def size(t: Any) -> int:
    """Bytes of a tensor's distinct elements."""
    if not isinstance(t, Tensor):
        return 0
    return prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride) * t.element_size()


def order(t: Tensor) -> list[int]:
    """Dimensions of more than one index, the outermost in memory first."""
    return sorted((d for d, n in enumerate(t.shape) if n > 1), key=lambda d: -t.stride(d))


def changes_format(source: Tensor, made: Tensor) -> bool:
    """Whether a copy of an activation or of weights lies otherwise; one that spreads a number does not."""
    same = source.shape == made.shape and source.dim() > 2 and 0 not in source.stride()
    return same and made.numel() > 0 and order(source) != order(made)


def _convolution(args: Sequence[Any], made: Sequence[Any]) -> Counted:
    x, w, bias = args[:3]
    (y,) = made
    once = size(x) + size(w) + size(y)
    added = 2 * size(y) + size(bias) if bias is not None else 0
    return Counted("convolutions", 1 + (bias is not None), once + added, once + size(bias))


def _convolution_backward(args: Sequence[Any], made: Sequence[Any]) -> Counted:
    dy, x, w = args[:3]
    dx, dw, db = made
    passes = [(dx, size(w) + size(dx)), (dw, size(x) + size(dw)), (db, size(db))]
    bytes_of = [size(dy) + rest for t, rest in passes if t is not None]
    return Counted("convolutions", len(bytes_of), sum(bytes_of), sum(bytes_of))


def _batch_norm(args: Sequence[Any], made: Sequence[Any]) -> Counted:
    x, training = args[0], next(a for a in args if isinstance(a, bool))
    passes = 2 * size(x) + size(made[0])
    return Counted("norms", 3, passes, passes) if training else Counted("norms", 1, 2 * size(x), 0)


def _batch_norm_backward(args: Sequence[Any], made: Sequence[Any]) -> Counted:
    dy, x = args[:2]
    training, wants = next(a for a in args if isinstance(a, bool)), args[-1]
    sums = training or wants[1] or wants[2]
    dx = size(dy) * 2 + (size(x) if training else 0) if wants[0] else 0
    moved = (size(dy) + size(x) if sums else 0) + dx
    return Counted("norms", sums + wants[0], moved, moved)


def _statistics(args: Sequence[Any], made: Sequence[Any]) -> Counted:
    return Counted("norms", 2, size(args[0]), size(args[0]))


def _norm(launches: int, reads: int) -> Callable[[Sequence[Any], Sequence[Any]], Counted]:
    def counted(args: Sequence[Any], made: Sequence[Any]) -> Counted:
        x, y = args[0], made[0]
        return Counted("norms", launches, reads * size(x) + size(y), 2 * size(x) + size(y))

    return counted


def _norm_backward(launches: int) -> Callable[[Sequence[Any], Sequence[Any]], Counted]:
    def counted(args: Sequence[Any], made: Sequence[Any]) -> Counted:
        dy, x = args[:2]
        moved = 2 * size(dy) + 2 * size(x) + size(made[0])
        return Counted("norms", launches, moved, moved)

    return counted


def _foreach_copy(args: Sequence[Any], made: Sequence[Any]) -> Counted:
    pieces = sum(-(-t.numel() // FOREACH_PIECE) for t in made)
    launches = max(-(-len(made) // FOREACH_TENSORS), -(-pieces // FOREACH_PIECES))
    return Counted("copies", launches, sum(map(size, (*args[1], *made))), 0)


TABLE: dict[str, Callable[[Sequence[Any], Sequence[Any]], Counted]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "batch_norm_update_stats": _statistics,
    "native_group_norm": _norm(3, 2),
    "native_group_norm_backward": _norm_backward(4),
    "native_layer_norm": _norm(1, 1),
    "native_layer_norm_backward": _norm_backward(2),
    "_foreach_copy_": _foreach_copy,
}
NOTHING = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "resize_"))
COPIES = frozenset(("clone", "copy_", "_to_copy", "cat", "contiguous", "_foreach_copy_"))
PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "attention"))
POOLING = ("max_pool", "avg_pool", "upsample", "_adaptive_avg_pool")


def kind_of(name: str) -> str:
    """Of a call that the table doesn't know."""
    if name in COPIES:
        return "copies"
    if name in PRODUCTS:
        return "products"
    if any(one in name for one in POOLING):
        return "pooling"
    return "reductions" if name in ("sum", "mean", "var_mean", "amax", "_softmax", "_log_softmax") else "elementwise"


def counted(name: str, args: Sequence[Any], made: Sequence[Any], of_sum: bool) -> Counted:
    """Of a call that writes something.

    Args:
        args: in the schema's order. of_sum: of a rectifier's gradient, that what is rectified is a sum: then the
            gradient has two readers, and of the sum's addends none says what was rectified.
    """
    if name in TABLE:
        return TABLE[name](args, made)
    read = list(tensors(args))
    written = sum(map(size, made))
    moved, kind = sum(map(size, read)) + written, kind_of(name)
    if kind == "copies" and len(made) == 1 and name == "copy_":
        moved = size(args[1]) + written
    if kind in ("products", "reductions") or (kind == "pooling" and "upsample" not in name):
        return Counted(kind, 1, moved, moved)
    least = 0
    if name in ("add", "add_") and len(read) > 1 and read[0].shape == read[1].shape:
        least = size(read[1])
    if name == "threshold_backward" and of_sum:
        least = size(args[1]) + written
    return Counted(kind, 1, moved, least)


def tensors(args: Sequence[Any]) -> Any:
    """Of arguments, those in lists too, each once."""
    seen: set[int] = set()
    for a in args:
        for t in a if isinstance(a, (list, tuple)) else (a,):
            if isinstance(t, Tensor) and id(t) not in seen:
                seen.add(id(t))
                yield t
