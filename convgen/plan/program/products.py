"""The best ways of a product by its own price, its values stored as it likes them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from convgen.algebra.involved import NAME
from convgen.algebra.wants import layout
from convgen.cost.rows import Price
from convgen.operations.row import Operation
from convgen.plan.program.candidates import Way, all_ways, made, wanted
from convgen.program.rows import kept

MOST = 6
MOST_SLOWER = 3  # a way whose local work takes so many times the fastest's is not looked at


def best_ways(operation: Operation, price: Price, parameters: tuple[bool, ...], count: int) -> tuple[Way, ...]:
    """The best of all ways of a product, at most `MOST`.

    Args:
        parameters: by operand, whether it is one.
    """
    return _best(operation, price, parameters)[:count]


@lru_cache(maxsize=4096)
def _best(operation: Operation, price: Price, parameters: tuple[bool, ...]) -> tuple[Way, ...]:
    numbered = enumerate(all_ways(operation, price.grid))
    ways = sorted((price.local(operation, w, dict(roles)), i, (w, roles)) for i, (w, roles) in numbered)
    best: list[tuple[int, int, Way]] = []
    for local, number, way in ways:
        worst = best[-1][0] if len(best) == MOST else None
        if local > MOST_SLOWER * ways[0][0] or (worst is not None and local * (1 + len(parameters)) > worst):
            break
        cost = _own_ps(operation, price, parameters, way, local, worst)
        best = sorted([*best, (cost, number, way)])[:MOST]
    return tuple(way for _, _, way in best)


def _own_ps(
    operation: Operation, price: Price, parameters: tuple[bool, ...], way: Way, local: int, most: int | None
) -> int:
    """Picoseconds of a row with its gradients by the vjp; where they are more than `most`, some number that is."""
    signature, roles = operation.signatures[way[0]], dict(way[1])
    tensors = price.tensors(signature)
    total = local * (1 + len(parameters))
    for result in signature.results:
        sets, makes = tensors[result.name], layout(tensors[result.name], NAME, signature.wants(result, roles))
        stored = tuple(made(result, signature, roles))
        costs = price.reduced(sets, makes, stored, signature.reduction)
        costs = costs + price.fetched(sets, stored, replace(makes, partial=()))
        total += int(costs.min())
    for operand, parameter in sorted(zip(signature.inputs, parameters, strict=True), key=lambda pair: not pair[1]):
        if most is not None and total > most:
            break
        sets = tensors[operand.name]
        stored = ((kept if parameter else wanted)(operand, signature, roles),)
        wants = layout(sets, NAME, signature.wants(operand, roles))
        found = layout(sets, NAME, signature.gradient(operand, roles))
        total += int(price.fetched(sets, stored, wants)[0] + price.collected(sets, found, stored)[0])
    return total
