# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
# (what torch leaves untyped or private, and calls by another signature than it declares)
"""One number of a whole tensor, from the blocks of it that ranks hold: norms, sums, extremes."""

# A rank's part is made by local code; the ranks that together hold every block once send each other theirs, and each
# combines them in the same order. So the number is the same on all ranks, a tensor like any other, and every rank has
# to ask for it.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .mesh import places
from .transport import Group

SUMS = ("sum", "mean", "count_nonzero", "_foreach_powsum")
NORMS = ("linalg_vector_norm", "_foreach_norm")
REDUCTIONS = frozenset({*SUMS, *NORMS, "amax", "max", "amin", "min", "any", "all"})
# Of `max`, `any` and their like, the overloads that give one number; the others are asked for dimensions.
TO_ONE = ("default", "Scalar", "dim_IntList", "dim")


def _order(said: dict[str, Any]) -> float:
    return float(said.get("ord", 2))


def part_of(name: str, x: Tensor, said: dict[str, Any]) -> Tensor:
    """This rank's part of a number, made of its block's elements in a wide type."""
    kind: torch.dtype = said.get("dtype") or x.dtype
    wide = torch.promote_types(kind, torch.float32) if kind.is_floating_point or kind.is_complex else torch.int64
    if "norm" in name or name == "_foreach_powsum":
        found = torch.linalg.vector_norm(x, _order(said), dtype=wide)
        return found if name in NORMS else found ** _order(said)
    match name:
        case "sum" | "mean":
            return x.sum(dtype=wide)
        case "count_nonzero":
            return x.count_nonzero()
        case "any" | "all":
            return (x.any() if name == "any" else x.all()).to(torch.uint8)
        case _:
            return x.amax() if name in ("amax", "max") else x.amin()


def joined_parts(name: str, parts: Tensor, said: dict[str, Any]) -> Tensor:
    """The number that the ranks' parts, along dimension 0, make together."""
    if name in SUMS or (name in NORMS and _order(said) == 0):  # norms of order 0 count elements, so they add up
        return parts.sum(0)
    if name in NORMS:
        return torch.linalg.vector_norm(parts, _order(said), 0)
    return parts.amax(0) if name in ("amax", "max", "any") else parts.amin(0)


def part_of_nothing(name: str, said: dict[str, Any]) -> float:
    """The part of a rank that holds no elements: it changes nothing."""
    if name in NORMS:
        return math.inf if _order(said) < 0 else 0.0
    return {"all": 1, "amax": -math.inf, "max": -math.inf, "amin": math.inf, "min": math.inf}.get(name, 0)


def said_by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """An operation's arguments by name, with defaults filled in."""
    wanted = func._schema.arguments
    said: dict[str, Any] = {a.name: a.default_value for a in wanted if a.has_default_value() or a is wanted[0]}
    return said | {a.name: value for a, value in zip(wanted, args, strict=False)} | kwargs


def reduces_to_one(func: Any, name: str, said: dict[str, Any]) -> bool:
    """Whether an operation makes one number of each Block, and one that this file can make."""
    if name not in REDUCTIONS or func._overloadname not in TO_ONE:
        return False
    if func._overloadname == "dim" and name != "mean":  # max.dim has indices, too
        return False
    x, dims = next(iter(said.values())), said.get("dim")
    if isinstance(x, (list, tuple)) or not dims:
        return True
    return {d % x.dim() for d in ([dims] if isinstance(dims, int) else dims)} == set(range(x.dim()))


def numbers_of(name: str, blocks: Sequence[Any], said: dict[str, Any]) -> list[Tensor]:
    """The number of each Block's whole tensor; one message for each set of ranks."""
    parts = [_part(name, b._block, said) for b in blocks]
    together: dict[tuple[int, tuple[int, ...], torch.dtype], list[int]] = {}
    for i, (b, part) in enumerate(zip(blocks, parts, strict=True)):
        together.setdefault((id(_end(b.held)), b.held.blocks, part.dtype), []).append(i)
    for (_, ranks, _), members in together.items():
        mine, end = torch.stack([parts[i] for i in members]), _end(blocks[members[0]].held)
        if len(ranks) > 1:
            got = end.all_gather(mine, [len(mine)] * len(ranks), Group(ranks, "ordered"))
            mine = joined_parts(name, got.view(len(ranks), -1), said)
        for i, made in zip(members, mine, strict=True):
            parts[i] = made
    return [_as_asked(name, b, made, said) for b, made in zip(blocks, parts, strict=True)]


def _part(name: str, x: Tensor, said: dict[str, Any]) -> Tensor:
    if x.numel():
        return part_of(name, x, said)
    kind, value = part_of(name, x.new_ones(1), said).dtype, part_of_nothing(name, said)
    if math.isinf(value) and not kind.is_floating_point:
        value = (torch.iinfo(kind).max if value > 0 else torch.iinfo(kind).min) if kind != torch.bool else value > 0
    return torch.full((), value, dtype=kind, device=x.device)


def _end(held: Any) -> Any:
    if held.key not in places:
        raise RuntimeError(f"{held.name}: the mesh that it lies on is not there in this process")
    return places[held.key].transport


def _as_asked(name: str, block: Any, made: Tensor, said: dict[str, Any]) -> Tensor:
    """The number in the type and shape that torch gives it."""
    if name == "mean":
        made = made / math.prod(block.held.whole)
    if name in ("any", "all"):
        made = made.bool()
    elif made.is_floating_point():
        made = made.to(said.get("dtype") or block.dtype)
    # Made of one part, it may be a view of what was sent.
    return made.clone().view([1] * block.dim() if said.get("keepdim") else [])


def found_infinite(blocks: Sequence[Any], found: Tensor) -> None:
    """Set `found`, as GradScaler asks, where any gradient is infinite on any rank that holds some of it."""
    sets = {(id(_end(b.held)), b.held.blocks): _end(b.held) for b in blocks}
    for (_, ranks), end in sets.items():
        if len(ranks) > 1:
            got = end.all_gather(found.view(-1), [found.numel()] * len(ranks), Group(ranks, "ordered"))
            found.copy_(got.view(len(ranks), *found.shape).amax(0))
