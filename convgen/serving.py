"""A module, or a method of one, served at any open extents: `convgen.serve`.

    served = convgen.serve(vae.decode, (torch.zeros(1, 4, 64, 64),), open={"z": {"H": 2, "W": 3}})
    image = served(z)                     # on every rank, for any height and width
    print(served.choices)                 # which layout each size has been given, and why

Several layouts share one set of parameters. Each size runs in the layout with the least modelled seconds among those
that fit. What a size takes is known before it runs: the package's steps run on tensors without memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from convgen.by_sizes import SCHEDULE, LayoutPrices, least
from convgen.cost.machines import load_machine
from convgen.cost.moving import PICOSECONDS
from convgen.errors import InputError
from convgen.exports.entry import Answer, Question, question_of
from convgen.one_set import with_forward
from convgen.packages import load_package, runtime_of
from convgen.parallel import How, on_mesh, target_of, together
from convgen.spec.exported_examples import Inputs
from convgen.spec.exported_open import Opened
from convgen.spec.extents import LETTERS
from convgen.spec.graph import Graph
from convgen.spec.text import parse_grid
from convgen.whole import Call, model_class, sizes_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

SEVERAL = 4  # ranks from which on a layout splits two extents


def serve(
    module_or_method: Any,
    examples: Inputs,
    *,
    open: Opened,
    group: ProcessGroup | None = None,
    dtype: torch.dtype | str | None = None,
    layouts: Sequence[str] | None = None,
    whole: bool = True,
    machine: str | None = None,
    limit_bytes: int | None = None,
    name: str | None = None,
) -> Served:
    """A callable for any open extents, in evaluation and without gradients. Every rank of the group calls this.

    Args:
        module_or_method: a module, or a bound method of one, as `vae.decode`; its mode and its values stay as they are.
        examples: whole arguments, as in `parallelize`.
        open: inputs' extents that are known at run time only: by letter the dimension's number, as
            {"z": {"H": 2, "W": 3}}. The number of samples is open, too, wherever the module allows it.
        group: the ranks that serve, by default all. Messages go through process groups of convgen's own, so that others
            may use this group meanwhile.
        dtype: a floating-point type, as in `parallelize`; inputs must have it.
        layouts: grids whose axes are letters, as "H=4" or "H=2,W=2". Each has as many ranks as the group, or a divisor
            of
            that: then several parts of the group compute the same. By default each open extent over all ranks; with
                four
            ranks or more, two extents over all ranks; and one rank for everything.
        whole: whether it takes and gives whole tensors on every rank; else blocks, of the layout that `at(**sizes)`
            says.
        machine: a name or a machine file, by which seconds are modelled; by default one of the device's kind.
        limit_bytes: the most bytes of tensors that a call may have at a time on a rank, beside parameters and inputs;
            the same on all ranks. A layout that takes more is not chosen; a size that fits in none is refused on all
            ranks, before anything is allocated.
        name: the network's; by default that of the class.
    Raises:
        InputError: as in `parallelize`; the group's ranks can't have a layout, or its parameters would lie in other
            blocks than the first layout's.
    """
    module = module_or_method
    if inspect.ismethod(module):
        name = name or f"{type(module.__self__).__name__}_{module.__name__}"
        module = _with_method(module)
    if not hasattr(module, "state_dict"):
        fact = f"serve= wants a torch.nn.Module or a bound method of one, got {type(module_or_method).__name__}"
        raise InputError(fact, hint="a module whose forward calls it")
    ranks = _ranks(group)
    grids = [*map(_axes, layouts)] if layouts is not None else _usual(open, len(ranks))
    _check(grids, len(ranks))
    to = target_of(group)
    kind = str(dtype or "").removeprefix("torch.")
    basis = How({}, None, machine, "global", "", "", (), to, kind)
    made: list[Layout] = []
    texts: dict[str, str] = {}
    graphs: list[Graph] = []
    with _evaluating(module):
        question = _question(module, examples, name, open)
        for axes in grids:
            how = replace(basis, axes=axes)
            prepared = together(question, how, ranks)
            package = load_package(prepared[1], files=prepared[2])
            graphs.append(prepared[0].graph)
            texts[_text(axes)] = prepared[2][SCHEDULE].decode()
            mesh = package.init_mesh(**_where(prod(axes.values()), ranks, group))
            if not made:
                model: Any = on_mesh(module, prepared, how, mesh, whole=whole)
            else:
                answer = prepared[0]
                called = type(made[0].model).__name__
                call = Call(called, answer.arguments, answer.inputs, answer.outputs, answer.results)
                model = _sharing(made[0].model, package, mesh, call, _text(axes), whole=whole)
            made.append(Layout(_text(axes), package, mesh, model.eval()))

    def prices() -> LayoutPrices:
        chosen = load_machine(machine or basis.made_for.kind)
        return LayoutPrices.read(graphs[0], texts, basis.made_for, chosen, whole=whole)

    return Served(made, prices, limit_bytes, whole)


@dataclass(frozen=True)
class Layout:
    """A network on a grid: its generated package, this rank's mesh, and the module; all layouts share parameters."""

    name: str
    package: Any
    mesh: Any
    model: Any


@dataclass(frozen=True)
class Choice:
    """What a layout takes at some sizes.

    Attributes:
        seconds: the modelled seconds of the package's program at these sizes (by_sizes.py).
        peak_bytes: the most bytes of tensors at a time, beside parameters and inputs, on the fullest rank looked at.
    """

    layout: str
    seconds: float
    peak_bytes: int


class Choices(dict[tuple[int, ...], list[Choice]]):
    """By sizes, in the order of letters, what each layout takes; the first of each list was chosen."""

    def __init__(self, letters: Sequence[str]) -> None:
        super().__init__()
        self.letters = letters

    def __str__(self) -> str:
        lines: list[str] = []
        for known, found in self.items():
            sizes = " ".join(f"{letter}={n}" for letter, n in zip(self.letters, known, strict=True))
            each = ", ".join(f"{c.layout} {c.seconds * 1e3:.3f} ms {c.peak_bytes / 2**20:.1f} MiB" for c in found)
            lines.append(f"{sizes}: {each}")
        return "\n".join(lines)


class Served:
    """A module at any open extents, on the ranks of a group.

    Attributes:
        layouts: all layouts; the first is on all ranks.
        limit_bytes: as in `serve`; the same on all ranks.
        choices: what was found for sizes that were called or asked for; printed, a line for each.
    """

    def __init__(
        self, layouts: Sequence[Layout], prices: Callable[[], LayoutPrices], limit_bytes: int | None, whole: bool
    ) -> None:
        self.layouts, self.whole, self._chooses, self._calls = tuple(layouts), whole, len(layouts) > 1, 0
        self._read = prices
        first = layouts[0].package.NET
        self.name: str = first.name
        self.choices = Choices(first.letters)
        self.limit_bytes = limit_bytes

    @property
    def limit_bytes(self) -> int | None:
        return self._limit_bytes

    @limit_bytes.setter
    def limit_bytes(self, limit: int | None) -> None:
        self._limit_bytes = limit
        self.choices.clear()
        for one in self.layouts:
            one.model.limit_bytes = limit

    def __call__(self, *args: Any, sizes: Mapping[str, int] | None = None, **keywords: Any) -> Any:
        """The module's results.

        Args:
            args, keywords: the module's, whole; or this rank's blocks, of the layout that `at(**sizes)` says.
            sizes: for blocks, N and other open extents by letter, where they aren't the examples'.
        Raises:
            ValueError, RuntimeError, on all ranks: ranks give different sizes; the module computes something else at
            such
                sizes; or these take more memory than allowed.
        """
        import torch

        with torch.no_grad():
            layout = self.layouts[0]
            if self._chooses:
                layout = self._agreed(args, keywords, sizes)
            if self.whole:
                return layout.model(*args, **keywords)
            return layout.model(*args, sizes=sizes, **keywords)

    def at(self, **sizes: int) -> Layout:
        """The layout in which these sizes run: a function of the sizes alone, the same on all ranks.

        Raises:
            ValueError: the module computes something else at such sizes; or no layout fits into `limit_bytes`.
        """
        return self._chosen(self._opened(sizes))

    def peak_bytes(self, **sizes: int) -> int:
        """The most bytes of tensors that a call of these sizes has at a time on this rank, beside parameters, buffers
        and its inputs; nothing of it is allocated, and nothing sent."""
        import torch

        with torch.no_grad():
            layout = self.at(**sizes) if self._chooses else self.layouts[0]
            return layout.model.peak_bytes(**sizes)

    def warm_up(self, shapes: Iterable[Mapping[str, int]]) -> None:
        """Make ready what calls of these sizes, by letter, need; as many sizes stay ready."""
        import torch

        every = [dict(sizes) for sizes in shapes]
        with torch.no_grad():
            for layout in self.layouts:
                chosen = [s for s in every if not self._chooses or self.at(**s) is layout]
                if chosen:
                    layout.model.warm_up(chosen)

    def _opened(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        net = self.layouts[0].package.NET
        known = net.opened(None, sizes)
        if unmet := net.unmet(known):
            raise ValueError(unmet)
        return known

    def _agreed(self, args: Sequence[Any], keywords: Mapping[str, Any], sizes: Mapping[str, int] | None) -> Layout:
        """The layout of a call, once all ranks have come with the same sizes and found the same layout for them; at one
        of so many calls, with the same values of whole inputs."""
        import torch

        first, fault = self.layouts[0], None
        net, runtime = first.package.NET, runtime_of(first.package)
        self._calls += 1
        facts: dict[str, object] = {}
        layout = first
        try:
            alike: dict[str, object] = {}  # of what a layout of one rank would not compare with the others
            if self.whole:
                inputs = first.model.call.arguments.tensors(args, keywords)
                batch, sizes = sizes_of(first.package, inputs)
                sizes = sizes if batch is None else {**sizes, "N": batch}
                alike = {name: f"{x.dtype} {x.device.type} {x.layout} {[*x.shape]}" for name, x in inputs.items()}
                if self._calls == 1 or self._calls % runtime.LOOKS == 0:
                    dense = {name: x for name, x in inputs.items() if not (x.is_meta or x.layout != torch.strided)}
                    values = ", ".join(f"{name} {runtime.sampled(x)}" for name, x in dense.items())
                    alike["values of inputs"] = values
            known = self._opened(sizes or {})
            facts = net.said(known) | {"limit_bytes": self.limit_bytes} | alike
            layout = self._chosen(known)
            facts["layout"] = layout.name
        except Exception as error:  # perhaps of this rank's arguments alone
            fault = error
        net.agree("a call", first.mesh, facts, fault)
        return layout

    def _chosen(self, known: tuple[int, ...]) -> Layout:
        found = self._choose(known)
        return next(one for one in self.layouts if one.name == found[0].layout)

    @cached_property
    def _prices(self) -> LayoutPrices:
        return self._read()

    def _choose(self, known: tuple[int, ...]) -> list[Choice]:
        """What each layout takes; first the one with the least modelled seconds among those that fit."""
        if known not in self.choices:
            sizes = dict(zip(self.choices.letters, known, strict=True))
            peaks = {one.name: self._peak(one, known) for one in self.layouts}
            times = self._prices.picoseconds(sizes)
            while len(self.choices) >= self.layouts[0].model.keeps_shapes:
                del self.choices[next(iter(self.choices))]
            names = least([one.name for one in self.layouts], times, peaks, self.limit_bytes)
            self.choices[known] = [Choice(name, times[name] / PICOSECONDS, peaks[name]) for name in names]
        found = self.choices[known]
        if self.limit_bytes is not None and found[0].peak_bytes > self.limit_bytes:
            sizes = ", ".join(f"{letter}={n}" for letter, n in zip(self.choices.letters, known, strict=True))
            each = ", ".join(f"{c.layout} takes {c.peak_bytes:,}" for c in found)
            raise ValueError(
                f"{self.name}: {sizes} fits in no layout: bytes of tensors at a time on a rank, beside parameters and "
                f"inputs: {each}; limit_bytes is {self.limit_bytes:,}; smaller extents, or more ranks"
            )
        return found

    def _peak(self, layout: Layout, known: tuple[int, ...]) -> int:
        """A layout's most bytes on the rank of the first blocks, which have the most rows; under a limit also on ranks
        of the middle and of the ends, whose halos differ."""
        import torch

        grid = layout.package.NET.grid
        ends = [(0,) if self.limit_bytes is None else sorted({0, n // 2, n - 1}) for n in grid.values()]
        peak = 0
        for at in product(*ends):
            me = 0
            for n, one in zip(grid.values(), at, strict=True):
                me = me * n + one
            with torch.no_grad(), torch.autocast(layout.package.NET.device, enabled=False):  # of the sizes alone
                peak = max(peak, layout.model.foreseen(known, me).peak_bytes)
        return peak


# ---- What is served ----


class _Once(Question):
    """A question that remembers its answer: it is asked for each layout."""

    def known(self) -> Answer | None:
        return vars(self).get("answer") or super().known()

    def keep(self, answer: Answer) -> None:
        vars(self)["answer"] = answer
        super().keep(answer)


def _question(module: Any, examples: Inputs, name: str | None, opened: Opened) -> Question:
    found = question_of(module, examples, name, opened)
    return _Once(module, examples, name, found.key, found.why, opened)


def _with_method(method: Any) -> Any:
    import torch

    owner = method.__self__
    if not isinstance(owner, torch.nn.Module):
        fact = f"{method.__qualname__} is a method of a {type(owner).__name__}, which is no torch.nn.Module"
        raise InputError(fact, hint="a module's method, or a module")
    return with_forward(owner, method.__func__, method.__name__)


@contextmanager
def _evaluating(module: Any) -> Generator[None]:
    """A module in evaluation; afterwards its parts have the modes that they had."""
    modes = [(one, one.training) for one in module.modules()]
    try:
        for one, _ in modes:
            one.training = False
        yield
    finally:
        for one, was in modes:
            one.training = was


# ---- Layouts ----


def _ranks(group: Any) -> tuple[int, ...]:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RuntimeError("convgen.serve needs torch.distributed.init_process_group first, as under torchrun")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        fact = f"rank {dist.get_rank()} is not in the process group that it gives"
        raise InputError(fact, ("group",), hint="its ranks alone")
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


def _axes(text: str) -> dict[str, Any]:
    return parse_grid(text, "H=2,W=2", "layouts")


def _usual(opened: Opened, ranks: int) -> list[dict[str, Any]]:
    """Each open extent over all ranks; two extents over several ranks; and one rank for everything."""
    letters = [letter for letter in LETTERS if any(letter in dims for dims in opened.values())] or ["N"]
    found: list[dict[str, Any]] = [{letter: ranks} for letter in letters]
    outer = next((p for p in range(int(ranks**0.5), 1, -1) if ranks % p == 0), 1)
    if len(letters) > 1 and ranks >= SEVERAL and outer > 1:
        found.append({letters[-2]: outer, letters[-1]: ranks // outer})
    return [*found, {letters[-1]: 1}] if ranks > 1 else found[:1]


def _check(grids: Sequence[Mapping[str, Any]], ranks: int) -> None:
    if not grids:
        raise InputError("layouts= is empty", hint='a grid, as ["H=2"]')
    names = [_text(axes) for axes in grids]
    if len({*names}) < len(names):
        raise InputError(f"layouts= names one twice: {', '.join(names)}", hint="each once")
    for axes, text in zip(grids, names, strict=True):
        if not all(isinstance(n, int) for n in axes.values()):
            raise InputError(f"layout {text} has shares", hint="numbers of ranks, as H=2")
        if ranks % prod(axes.values()):
            fact = f"layout {text} is of {prod(axes.values())} ranks, and the group has {ranks}"
            raise InputError(fact, hint="as many, or a divisor")
    if prod(grids[0].values()) != ranks:
        raise InputError(f"the first layout, {names[0]}, is not of all {ranks} ranks", hint="one that is, first")


def _text(axes: Mapping[str, Any]) -> str:
    return ",".join(f"{axis}={n}" for axis, n in axes.items())


def _where(count: int, ranks: Sequence[int], group: Any) -> dict[str, Any]:
    """Arguments for a mesh of so many ranks: the whole group, or the part of it that has this rank."""
    import torch.distributed as dist

    if count == len(ranks):
        return {} if group is None else {"process_group": group}
    first = ranks.index(dist.get_rank()) // count * count
    return {"ranks": ranks[first : first + count]}


def _sharing(first: Any, package: Any, mesh: Any, call: Call, text: str, *, whole: bool) -> Any:
    """A network on another grid, with the first network's parameters and buffers.

    Raises:
        InputError: it stores them in other blocks.
    """
    import torch

    with torch.device("meta"):
        model: Any = model_class(package, call, whole=whole)(mesh, parameters="blocks")
    other = [n for n, wanted in model.blocks_wanted.items() if wanted != first.blocks_wanted.get(n)]
    if other:
        n = other[0]
        wanted, there = model.blocks_wanted[n][0], first.blocks_wanted[n][0]
        fact = f"layout {text}: {n} would lie in the block {list(wanted)} here, and lies in {list(there)}"
        raise InputError(f"{fact}; layouts share parameters", hint="axes that split none, as N, H and W")
    model.share(first, model.blocks_wanted)
    return model
