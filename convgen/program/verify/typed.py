"""What a conversion's name says: how the type changes, and over which ranks; of layers and networks alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from convgen.algebra.grid import Grid
from convgen.algebra.layout import Axes, Layout
from convgen.algebra.redistribute import Kind
from convgen.algebra.signature import Reduction
from convgen.program.verify.facts import Counts


def untyped(
    kind: Kind, src: Layout, dst: Layout, missing: Callable[[], Counts], reduction: Reduction | None = None
) -> str:
    """What is wrong with a conversion of this kind between these types; nothing if it is typed.

    Args:
        missing: counts, by rank, elements of `dst` that it lacks of `src`; only a slice asks.
        reduction: by which an exchange adds parts that overlap, or an all_gather blocks that are addends.
    """
    if reduction is not None:
        return _unreduced(kind, src, dst)
    match kind:
        case "slice":
            if src.partial != dst.partial:
                return "addends stay addends"
            short = missing()
            return f"rank {short.argmax()} misses {short.max()} elements" if (short > 0).any() else ""
        case "all_gather":
            if src.windows != dst.windows:
                return "windows stay"
            if src.partial != dst.partial:
                return "addends stay addends"
            shorter = all(a[: len(b)] == b for a, b in zip(src.axes, dst.axes, strict=True))
            return "" if shorter and src.axes != dst.axes else "dimensions lose inner axes"
        case "reduce_scatter":
            added = _longer(src.axes, dst.axes)
            fits = src.windows == dst.windows and set(dst.partial) | added == set(src.partial) != set(dst.partial)
            return "" if fits else "axes of the sum become inner axes"
        case "all_reduce":
            fits = (src.axes, src.windows) == (dst.axes, dst.windows) and set(dst.partial) < set(src.partial)
            return "" if fits else "only the sum is made"
        case "all_to_all":
            if src.partial != dst.partial:
                return "addends stay addends"
            ends = ((set(a[n:]), set(b[n:])) for a, b, n in _common(src.axes, dst.axes))
            fits = src.windows == dst.windows and src.used == dst.used and not any(old & new for old, new in ends)
            return "" if fits and src.axes != dst.axes else "inner axes change their dimension"
        case "exchange":
            return "sums can't be exchanged" if src.partial or dst.partial else ""


def _unreduced(kind: Kind, src: Layout, dst: Layout) -> str:
    """What is wrong with a conversion that reduces, though its kind does not by nature."""
    match kind:
        case "all_gather":
            fits = (src.axes, src.windows) == (dst.axes, dst.windows) and set(dst.partial) < set(src.partial)
            return "" if fits else "only the reduction is made"
        case "exchange":
            if dst.has_window or dst.partial:
                return "its result is whole blocks"
            return "" if src.has_window else "no parts overlap"
        case _:
            return "it has no reduction of its own"


def collective_over(kind: Kind, src: Layout, dst: Layout, grid: Grid) -> Axes:
    """The axes along which the ranks of a slice or a collective differ, which is no exchange."""
    if kind == "slice":
        return ()
    if added := set(src.partial) - set(dst.partial):
        return grid.ordered(added)
    if kind == "all_gather":
        return grid.ordered(src.used - dst.used)
    return grid.ordered(a for old, new in zip(src.axes, dst.axes, strict=True) for a in new if a not in old)


def _common(old: tuple[Axes, ...], new: tuple[Axes, ...]) -> Iterator[tuple[Axes, Axes, int]]:
    """Axes of each dimension before and after, and how many outer ones are the same."""
    for a, b in zip(old, new, strict=True):
        yield a, b, next((n for n, (p, q) in enumerate(zip(a, b, strict=False)) if p != q), min(len(a), len(b)))


def _longer(short: tuple[Axes, ...], long: tuple[Axes, ...]) -> set[str]:
    """Axes that `long` has inside of those of `short`; all of them where it does not continue those."""
    added: set[str] = set()
    for a, b in zip(short, long, strict=True):
        added |= set(b[len(a) :] if b[: len(a)] == a else a + b)
    return added
