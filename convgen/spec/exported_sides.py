"""Conditions of sizes on whose other side a module computes the same.

A module may ask for a size and compute the same whatever the answer: diffusers' decoders make a batch of 64 samples
contiguous. torch.export keeps each such question as a guard. So the module is traced on the other side of the bound
too, on tensors whose memory is never touched. If the graph is the same and asks for nothing new, the condition is
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from convgen.errors import InputError
from convgen.spec.extents import Condition

BOUNDS = ("<", "<=", ">", ">=")  # signs of conditions that large enough, or small enough, sizes violate
MOST = 1 << 22  # samples times rows that are tried: a bound beyond, as of 2**31 elements, matters to nobody
STEPS = 64  # moves towards the other side that are tried


class Side(NamedTuple):
    """A trace at other sizes: whether its graph is the example's, and the conditions under which it holds."""

    alike: bool
    conditions: Sequence[Condition]


def needless(
    conditions: Sequence[Condition], own: Mapping[str, int], trace: Callable[[Mapping[str, int]], Side]
) -> list[Condition]:
    """The conditions on whose other side the module computes the same.

    Args:
        own: the example's sizes, at which all conditions hold.
        trace: traces the module at sizes. InputError, RuntimeError or MemoryError from it keep a condition.
    """

    seen: dict[tuple[int, ...], bool] = {}

    def alike(at: Mapping[str, int]) -> bool:
        try:
            side = trace(at)
        except (InputError, RuntimeError, MemoryError):
            return False
        return side.alike and all(c in conditions or not c.holds(own) for c in side.conditions)

    def same(broken: Sequence[Condition], more: Sequence[Condition] = ()) -> bool:
        """Trace where these conditions fail and no others, but for some of `more`; gives whether the graph is alike."""
        at = _beyond(broken, [c for c in conditions if c not in broken and c not in more], own)
        if at is None:
            return False
        key = tuple(at.values())
        if key not in seen:
            seen[key] = alike(at)
        return seen[key]

    left, found = [c for c in conditions if c.sign in BOUNDS], list[Condition]()
    while (one := next((c for c in left if same([c], found)), None)) is not None:
        left.remove(one)
        found.append(one)  # the first bound that fails lets the next one be tried
    return found if len(found) < 2 or same(found) else []


def _beyond(broken: Sequence[Condition], others: Sequence[Condition], own: Mapping[str, int]) -> dict[str, int] | None:
    """Sizes at which these conditions fail and the others hold, in multiples of the example's; None: none is near."""
    at = dict(own)
    for _ in range(STEPS):
        left = [c for c in broken if c.holds(at)]
        if not left:
            return at
        for moved in _moved(at, own, left[0]):
            if all(c.holds(moved) for c in others):
                at = moved
                break
        else:
            return None
    return None


def _moved(at: Mapping[str, int], own: Mapping[str, int], towards: Condition) -> Iterator[dict[str, int]]:
    """Sizes with one letter doubled, or halved; if the condition fails then, as near to its bound as it still fails.

    The smallest letter is doubled first, or the largest halved.
    """
    grow = towards.sign in ("<", "<=")
    for a in sorted(towards.letters, key=lambda a: at[a] if grow else -at[a]):
        n = 2 * at[a] if grow else at[a] // 2
        if n < 2 or prod({**at, a: n}.values()) > MOST:
            continue
        if grow and not towards.holds({**at, a: n}):
            few, many = at[a] // own[a], n // own[a]
            while many - few > 1:
                middle = (few + many) // 2
                few, many = (middle, many) if towards.holds({**at, a: middle * own[a]}) else (few, middle)
            n = many * own[a]
        yield {**at, a: n}
