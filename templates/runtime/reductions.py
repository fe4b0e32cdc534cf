# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""One number of a whole tensor, from the blocks of it that ranks hold: norms, sums, extremes."""

# A rank's part is made by local code; the ranks that together hold every block once send each other theirs, and each
# combines them in the same order. So the number is the same on all ranks, a tensor like any other, and every rank has
# to ask for it.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .mesh import places
from .transport import Group


class NumberOf(NamedTuple):
    """How a number of a whole tensor is made.

    Attributes:
        part: of a rank's elements, in a wide type; takes what the operation was said_by_name for, too.
        joined: of the parts, along dimension 0.
        empty: what a rank without elements has.
    """

    part: Callable[[Tensor, dict[str, Any]], Tensor]
    joined: Callable[[Tensor, dict[str, Any]], Tensor]
    empty: Callable[[dict[str, Any]], float]


def wide_type(x: Tensor, said: dict[str, Any]) -> torch.dtype:
    """What parts are made and sent in."""
    kind = said.get("dtype") or x.dtype
    return torch.promote_types(kind, torch.float32) if kind.is_floating_point or kind.is_complex else torch.int64


def _sum(x: Tensor, said: dict[str, Any]) -> Tensor:
    return x.sum(dtype=wide_type(x, said))


def _order(said: dict[str, Any]) -> float:
    return float(said.get("ord", 2))


def _norm(x: Tensor, said: dict[str, Any]) -> Tensor:
    return torch.linalg.vector_norm(x, _order(said), dtype=wide_type(x, said))


def _powers(x: Tensor, said: dict[str, Any]) -> Tensor:
    return _norm(x, said) ** _order(said)


def _norm_of_norms(parts: Tensor, said: dict[str, Any]) -> Tensor:
    return parts.sum(0) if _order(said) == 0 else torch.linalg.vector_norm(parts, _order(said), 0)  # 0 counts


def _norm_of_nothing(said: dict[str, Any]) -> float:
    return math.inf if _order(said) < 0 else 0.0


_SUM = NumberOf(_sum, lambda parts, _: parts.sum(0), lambda _: 0)
_NORM = NumberOf(_norm, _norm_of_norms, _norm_of_nothing)
_LARGEST = NumberOf(lambda x, _: x.amax(), lambda parts, _: parts.amax(0), lambda _: -math.inf)
_SMALLEST = NumberOf(lambda x, _: x.amin(), lambda parts, _: parts.amin(0), lambda _: math.inf)
REDUCTIONS: dict[str, NumberOf] = {
    "sum": _SUM,
    "mean": _SUM,
    "count_nonzero": NumberOf(lambda x, _: x.count_nonzero(), _SUM.joined, _SUM.empty),
    "linalg_vector_norm": _NORM,
    "_foreach_norm": _NORM,
    "_foreach_powsum": NumberOf(_powers, _SUM.joined, _SUM.empty),
    "amax": _LARGEST,
    "max": _LARGEST,
    "amin": _SMALLEST,
    "min": _SMALLEST,
    "any": NumberOf(lambda x, _: x.any().to(torch.uint8), _LARGEST.joined, lambda _: 0),
    "all": NumberOf(lambda x, _: x.all().to(torch.uint8), _SMALLEST.joined, lambda _: 1),
}  # fmt: skip
# Of `max`, `any` and their like those that give one number; of the others dimensions are said_by_name.
TO_ONE = ("default", "Scalar", "dim_IntList", "dim")


def said_by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, defaults filled in."""
    wanted = func._schema.arguments
    said: dict[str, Any] = {a.name: a.default_value for a in wanted if a.has_default_value() or a is wanted[0]}
    return said | {a.name: value for a, value in zip(wanted, args, strict=False)} | kwargs


def reduces_to_one(func: Any, name: str, said: dict[str, Any]) -> bool:
    """Whether an operation makes one number of each Block, for which there is a way."""
    if name not in REDUCTIONS or func._overloadname not in TO_ONE:
        return False
    if func._overloadname == "dim" and name not in ("mean",):  # max.dim has indices, too
        return False
    x, dims = next(iter(said.values())), said.get("dim")
    if isinstance(x, (list, tuple)) or not dims:
        return True
    return {d % x.dim() for d in ([dims] if isinstance(dims, int) else dims)} == set(range(x.dim()))


def numbers_of(name: str, blocks: Sequence[Any], said: dict[str, Any]) -> list[Tensor]:
    """The number of each Block's whole tensor: a message for each set of ranks."""
    how = REDUCTIONS[name]
    parts = [_part(how, b._block, said) for b in blocks]
    together: dict[tuple[int, tuple[int, ...], torch.dtype], list[int]] = {}
    for i, (b, part) in enumerate(zip(blocks, parts, strict=True)):
        together.setdefault((id(_end(b.held)), b.held.blocks, part.dtype), []).append(i)
    for (_, ranks, _), members in together.items():
        mine, end = torch.stack([parts[i] for i in members]), _end(blocks[members[0]].held)
        if len(ranks) > 1:
            got = end.all_gather(mine, [len(mine)] * len(ranks), Group(ranks, "ordered"))
            mine = how.joined(got.view(len(ranks), -1), said)
        for i, made in zip(members, mine, strict=True):
            parts[i] = made
    return [_as_asked(name, b, made, said) for b, made in zip(blocks, parts, strict=True)]


def _part(how: NumberOf, x: Tensor, said: dict[str, Any]) -> Tensor:
    if x.numel():
        return how.part(x, said)
    kind = how.part(x.new_ones(1), said).dtype  # of a rank that has some
    value = how.empty(said)
    if math.isinf(value) and not kind.is_floating_point:
        value = (torch.iinfo(kind).max if value > 0 else torch.iinfo(kind).min) if kind != torch.bool else value > 0
    return torch.full((), value, dtype=kind, device=x.device)


def _end(held: Any) -> Any:
    if held.key not in places:
        raise RuntimeError(f"{held.name}: the mesh that it lies on is not there in this process")
    return places[held.key].transport


def _as_asked(name: str, block: Any, made: Tensor, said: dict[str, Any]) -> Tensor:
    """In the type and shape that torch gives it."""
    if name == "mean":
        made = made / math.prod(block.held.whole)
    if name in ("any", "all"):
        made = made.bool()
    elif made.is_floating_point():
        made = made.to(said.get("dtype") or block.dtype)
    # Of one part it may be a view of what was sent.
    return made.clone().view([1] * block.dim() if said.get("keepdim") else [])


def found_infinite(blocks: Sequence[Any], found: Tensor) -> None:
    """What GradScaler asks of gradients: whether any is infinite, on any rank that holds some of them."""
    sets = {(id(_end(b.held)), b.held.blocks): _end(b.held) for b in blocks}
    for (_, ranks), end in sets.items():
        if len(ranks) > 1:
            got = end.all_gather(found.view(-1), [found.numel()] * len(ranks), Group(ranks, "ordered"))
            found.copy_(got.view(len(ranks), *found.shape).amax(0))
