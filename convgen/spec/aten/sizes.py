"""Rows that hold for all sizes of a graph's open extents, found from a few sizes.

At one size, extents may look equal that are not: a single sample looks like a broadcast dimension. So rows are
described at *probes*, sizes that no other extent has. A number that differs between probes becomes the expression of
letters that gives it at every probe. Tables with an entry for each row are no numbers: a network with such a table has
its own sizes only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, cast

from convgen.errors import InputError
from convgen.operations.bound import Bound
from convgen.operations.row import Operation
from convgen.operations.views import MANY
from convgen.spec.aten.describe import Described, describe
from convgen.spec.extents import Extent, Tree, extents_in
from convgen.spec.graph import Graph

MORE = 2003  # a prime, as MANY is
# By letter other than N, a size for each probe; multiples of these, or neighbours, where conditions ask for it.
PRIMES = {
    "T": (37, 53, 71, 89, 41),
    "D": (79, 107, 139, 97, 113),
    "H": (149, 191, 227, 163, 211),
    "W": (181, 131, 173, 239, 199),
}
SAMPLES = (MANY, MORE, 1511, 2203, 613)
STEPS = (*range(1, 17), 20, 24, 28, 32, 48, 64, 96, 128, 256)  # multiples that networks ask for
Sizes = Mapping[str, int]


class _NoExpressionError(Exception):
    """No expression of letters gives a number that differs between probes, or something that is no number differs."""


class AnySizes(NamedTuple):
    """A graph's rows, for all its sizes.

    Attributes:
        graph: the graph; with its own sizes as numbers, if its rows can't be said for others.
        here: rows at its own sizes.
        many: rows at the first probe; `more`: at other probes, where more than the number of samples is open.
        sizes: its own, and each probe's.
        extents: those of the graph.
    """

    graph: Graph
    here: Described
    many: Described
    more: tuple[Described, ...]
    sizes: tuple[dict[str, int], ...]
    extents: tuple[Extent, ...]


def for_any_sizes(graph: Graph, device: str = "") -> AnySizes:
    """The graph and its rows. If rows can't be said for all numbers of samples, they are for the graph's own number.

    Args:
        device: as `describe` takes it.
    Raises:
        InputError: an operator draws random numbers, or changes an operand, and no row describes it; or rows can't be
            said for any sizes of other open extents.
    """
    if graph.letters:
        probes = probes_of(graph)
        at_probes = tuple(describe(graph.at(sizes), device) for sizes in probes)
        extents = tuple(dict.fromkeys(e for c in graph.calls for e in _extents(c)))
        fit = Fit(probes, extents)
        try:
            here = _at(at_probes, fit, graph.sizes)
            many, *others = (_there(at_probes, k) for k in range(len(probes) if graph.open else 1))
            more = tuple(others)
            return AnySizes(graph, here, many, more, (graph.sizes, *probes[: 1 + len(more)]), extents)
        except _NoExpressionError as error:
            if graph.open:
                said = ", ".join(letter for letter, _ in graph.open)
                fact = f"{graph.name} can't be compiled for any {said}: {error}"
                raise InputError(fact, hint="an import without them open, for one size") from None
    graph = graph.at()
    found = describe(graph, device)
    return AnySizes(graph, found, found, (), (graph.sizes,), ())


def described(graph: Graph) -> Described:
    """A graph's rows for its own sizes."""
    return for_any_sizes(graph).here


def _extents(call: Any) -> Iterable[Extent]:
    yield from extents_in(call.args)
    for v in call.results:
        if v is not None:
            yield from extents_in(v.shape)


def probes_of(graph: Graph) -> tuple[dict[str, int], ...]:
    """Sizes that fulfil a graph's equations, though not its bounds, and that no other extent has.

    Raises:
        InputError: no such sizes are found.
    """
    if not graph.open:
        return tuple({"N": n} for n in SAMPLES[:2])
    kept = [c for c in graph.conditions if c.sign in ("==", "!=")]
    found: list[dict[str, int]] = []
    for k in range(len(SAMPLES)):
        sizes = {"N": SAMPLES[k]} if graph.is_dynamic else {"N": graph.batch}
        for letter, _ in graph.open:
            of_it = [c for c in kept if letter in c.letters and c.letters <= {*sizes, letter}]
            tried = (p * step + r for step in STEPS for p in PRIMES[letter][k : k + 1] for r in range(step))
            fits = (n for n in tried if all(c.holds({**sizes, letter: n}) for c in of_it))
            if (n := next(islice(fits, 1), None)) is None:
                said = "; ".join(map(str, of_it))
                raise InputError(f"{graph.name}: no {letter} is found for which {said}", ("conditions",))
            sizes[letter] = n
        found.append(sizes)
    return tuple(found)


class Fit:
    """Numbers at probes as expressions of letters.

    Args:
        sizes: of each probe.
        extents: the graph's; expressions are made from these, and from their products and sums.
    """

    def __init__(self, sizes: Sequence[Sizes], extents: Iterable[Extent]) -> None:
        self.sizes = tuple(sizes)
        letters = [letter for letter in sizes[0] if len({s[letter] for s in sizes}) > 1]
        trees: list[Tree] = [*letters, *(e.tree for e in extents if e.letters <= {*letters})]
        if len(letters) < 2 and letters == ["N"]:  # a number of samples, or a multiple of it
            trees = ["N"]
        self._found: dict[tuple[int, ...], Tree] = {}
        for tree in trees:
            self._found.setdefault(self._at(tree), tree)
        one = [*self._found.items()]
        self._products: list[tuple[tuple[int, ...], Tree]] = [*one]
        if trees != ["N"]:
            for i, (_, a) in enumerate(one):
                for _, b in one[i:]:
                    product: Tree = ("*", a, b)
                    if (key := self._at(product)) not in self._found:
                        self._found[key] = product
                        self._products.append((key, product))
        self._plain = one
        self._only_samples = trees == ["N"]

    def _at(self, tree: Tree) -> tuple[int, ...]:
        e = Extent(tree)
        return tuple([e.at(s) for s in self.sizes])

    def __call__(self, values: Sequence[int]) -> int | Extent:
        """The expression for these numbers, one a probe. Raises _NoExpressionError: none is found."""
        key = tuple(values)
        if len({*key}) == 1:
            return key[0]
        if key not in self._found:
            self._found[key] = self._made(key)
        return Extent(self._found[key])

    def _made(self, key: tuple[int, ...]) -> Tree:
        for base, tree in self._products:
            if all(base) and all(v % b == 0 for v, b in zip(key, base, strict=True)):
                times = {v // b for v, b in zip(key, base, strict=True)}
                if len(times) == 1:
                    return ("*", times.pop(), tree)
        if not self._only_samples:
            for base, tree in self._products:
                for times in (1, -1, 2, 3, 4, -2):
                    rest = {v - times * b for v, b in zip(key, base, strict=True)}
                    if len(rest) == 1:
                        return _sum(tree if times == 1 else ("*", times, tree), rest.pop())
            for base, tree in self._plain:  # a sum of two expressions and a number
                left = [v - b for v, b in zip(key, base, strict=True)]
                for other, second in self._products:
                    for times in (1, -1, 2, -2):
                        rest = {v - times * b for v, b in zip(left, other, strict=True)}
                        if len(rest) == 1:
                            term: Tree = second if abs(times) == 1 else ("*", abs(times), second)
                            return _sum(("+" if times > 0 else "-", tree, term), rest.pop())
        raise _NoExpressionError(f"a number is {', '.join(map(str, key))} at {', '.join(map(str, self.sizes))}")


def _sum(tree: Tree, constant: int) -> Tree:
    return tree if not constant else ("+", tree, constant) if constant > 0 else ("-", tree, -constant)


def _at(probes: Sequence[Described], fit: Fit, sizes: Sizes) -> Described:
    """The rows at other sizes."""
    first, *others = probes
    for other in others:
        if len(first.rows) != len(other.rows) or first.tensors.keys() != other.tensors.keys():
            raise _NoExpressionError("a call has other rows at other sizes")
    known: dict[tuple[tuple[Operation, ...], str], Operation] = {}

    def operation(ones: tuple[Operation, ...]) -> Operation:
        key = (ones, repr(ones[0]))  # repr tells 2 from 2.0, which are equal
        if key not in known:
            known[key] = cast("Operation", _sized(ones, fit, sizes)).for_any(*ones[:2])
        return known[key]

    rows: list[Bound] = []
    for ones in zip(*(p.rows for p in probes), strict=True):
        if len({(r.reads, r.makes) for r in ones}) > 1:
            raise _NoExpressionError(f"{ones[0].module or 'the module'} has other rows at other sizes")
        try:
            made = operation(tuple([r.operation for r in ones]))
        except _NoExpressionError as error:
            where = ones[0].module or "the module"
            raise _NoExpressionError(f"{where}, {ones[0].operation.name}: {error}") from None
        rows.append(replace(ones[0], operation=made))
    tensors = {
        n: replace(t, shape=_sized(tuple([p.tensors[n].shape for p in probes]), fit, sizes))
        for n, t in first.tensors.items()
    }
    return replace(first, rows=tuple(rows), tensors=tensors)


def _there(probes: Sequence[Described], k: int) -> Described:
    """The rows at a probe, with signatures that hold for all sizes."""
    pairs = zip(*(p.rows for p in probes[:2]), probes[k].rows, strict=True)
    rows = (replace(r, operation=r.operation.for_any(a.operation, b.operation)) for a, b, r in pairs)
    return replace(probes[k], rows=tuple(rows))


def _sized(ones: tuple[Any, ...], fit: Fit, sizes: Sizes) -> Any:
    """From something at each probe, the same at other sizes."""
    a = ones[0]
    if all(one is a for one in ones):
        return a
    kinds = dict.fromkeys(str(type(one).__name__) for one in ones)
    if len(kinds) > 1:
        raise _NoExpressionError(" and ".join(kinds))
    if is_dataclass(a):
        names = [f.name for f in fields(a) if f.init]
        each = {n: tuple([getattr(one, n) for one in ones]) for n in names}
        found = {n: _sized(v, fit, sizes) for n, v in each.items() if any(x is not v[0] for x in v)}
        return replace(a, **found) if found else a  # type: ignore[type-var]
    if isinstance(a, tuple):
        if len({len(one) for one in ones}) > 1:
            raise _NoExpressionError("a table of so many entries")
        return tuple([_sized(v, fit, sizes) for v in zip(*ones, strict=True)])
    if isinstance(a, Mapping):
        raise _NoExpressionError("a mapping")
    if isinstance(a, int) and not isinstance(a, bool) and len({*ones}) > 1:
        found = fit(ones)
        return found if isinstance(found, int) else found.at(sizes)
    if any(one != a for one in ones):
        raise _NoExpressionError(f"{', '.join(map(str, ones))}")
    return a
