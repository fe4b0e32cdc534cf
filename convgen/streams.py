"""A video, chunk after chunk, on many ranks: two graphs with one set of weights, and caches that stay where they are.

    first, steady = convgen.stream(model, (x[:, :, :1],), (x[:, :, 1:5],), {"H": 2, "W": 2})
    y, state = first(x[:, :, :1])
    y, state = steady(x[:, :, 1:5], state)
    y, state = steady(x[:, :, 5:9], state)

A state holds this rank's block of each cache, with the rows around it that the next chunk's convolutions read: these
rows came when the frames were new, and are not sent again. A state is never gathered. It may be used again: what is
made from it is another state.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakKeyDictionary

from convgen.causal_vaes import adapter
from convgen.errors import InputError
from convgen.one_set import Asked, on_one_set, one_set, prepared, with_forward
from convgen.packages import runtime_of
from convgen.parallel import GridLike, How, Prepared, how_of, mesh_of
from convgen.spec.containers import Node, Slot, filled, slots, tree_of
from convgen.spec.exported_open import FOLLOWS, Opened
from convgen.whole import sizes_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

CACHES = "caches"  # the argument of a stream's forward
KEPT = 16  # sizes whose boxes are remembered
Sizes = tuple[int, ...]  # the number of samples, and other open extents


def stream(
    module: torch.nn.Module,
    first: Sequence[Any],
    steady: Sequence[Any],
    mesh_or_grid: DeviceMesh | GridLike,
    algorithm: str | None = None,
    *,
    forward: str | Callable[..., Any] | None = None,
    whole: bool = True,
    dtype: torch.dtype | str | None = None,
    target: str | None = None,
    process_group: ProcessGroup | None = None,
    open: Opened | None = None,
) -> tuple[Chunk, Chunk]:
    """A module that takes and gives caches, for the first chunk and for later ones. Every rank calls this.

    Args:
        module: its mode and values stay as they are.
        first, steady: example arguments of the first chunk and of a later one, without caches; as in `from_torch`.
        mesh_or_grid, algorithm, whole, dtype, target, process_group: as in `methods`.
        forward: a function of the module, the chunk's arguments and `caches=None`. It gives what it makes of the chunk,
            and caches for the next one: tensors in tuples, lists or dicts, of the same shapes after every chunk; None
            stands for a cache that is still zeros. By default the module's own forward; "decode" or "encode" for a VAE
            of diffusers (docs/streaming.md).
        open: extents of a chunk's arguments that are known at run time only, by letter the dimension's number, as
            {"z": {"H": 3, "W": 4}}; the caches' follow. A state has the sizes of its chunks.
    Returns:
        Two callables, for chunks: `y, state = first(x)`, `y, state = steady(x, state)`; without gradients. Their
        `weights` is an nn.Module with the parameters and buffers of both, as from `methods`.
    Raises:
        InputError: as in `methods`; forward takes no caches, or gives other ones after another chunk; a VAE has none.
    """
    how = how_of(mesh_or_grid, algorithm, target, dtype, process_group)
    asked = graphs(module, first, steady, how, forward, open)
    packages = prepared(asked, mesh_or_grid, process_group)
    mesh = mesh_of(packages["first"], mesh_or_grid, process_group)
    return chunks(module, asked, packages, mesh, whole=whole)


def graphs(
    module: torch.nn.Module,
    first: Sequence[Any],
    steady: Sequence[Any],
    how: How,
    forward: str | Callable[..., Any] | None = None,
    opened: Opened | None = None,
) -> dict[str, Asked]:
    """What to export of a stream, by "first" and "steady"; arguments are those of `stream`."""
    function = adapter(module, forward) if isinstance(forward, str) else forward or type(module).forward
    if CACHES not in inspect.signature(function).parameters:
        fact = f"{type(module).__name__}: its forward takes no caches: {inspect.signature(function)}"
        raise InputError(
            fact, hint="forward=: a function of the module, a chunk and caches=None; or 'decode', 'encode'"
        )
    zeros = _caches(module, function, first, steady)
    inputs = tuple(f"{CACHES}_{path.replace('.', '_')}" if path else CACHES for path, _ in slots(zeros.tree))
    moving = _following(module, function, first, steady, zeros, opened) if opened else None
    before = Asked(with_forward(module, function, "first"), tuple(first), replace(how, caches=("",)), opened)
    given = tuple(steady), {CACHES: filled(zeros.tree, zeros.examples)}
    after = Asked(with_forward(module, function, "steady"), given, replace(how, caches=inputs), moving)
    return {"first": before, "steady": after}


def chunks(
    module: torch.nn.Module, asked: Mapping[str, Asked], packages: Mapping[str, Prepared], mesh: Any, *, whole: bool
) -> tuple[Chunk, Chunk]:
    """A stream on a mesh, as the two callables of `stream`."""
    networks = on_one_set(asked, packages, mesh)
    weights = one_set(module, networks)
    both = Both(type(module).__name__, networks["first"], networks["steady"], whole)
    return Chunk(both, networks["first"], weights), Chunk(both, networks["steady"], weights)


class Zeros(NamedTuple):
    """Caches as a later chunk takes them: their containers, and tensors of their shapes."""

    tree: Any
    examples: dict[str, Tensor]


def _following(
    module: Any, function: Callable[..., Any], first: Sequence[Any], steady: Sequence[Any], zeros: Zeros, opened: Opened
) -> Opened:
    """The open extents of a later chunk: its arguments', and those of caches, which follow from them.

    Raises:
        InputError: as in `_caches`; or no chunk of twice the example's extents can be made.
    """
    names = [n for n in inspect.signature(function).parameters if n != CACHES][1:]
    if unknown := [n for n in opened if n not in names]:
        raise InputError(f"open: a chunk has no {unknown[0]}", hint=f"one of {', '.join(names)}")

    def larger(args: Sequence[Any]) -> list[Any]:
        found = list(args)
        for k, (name, x) in enumerate(zip(names, args, strict=False)):
            dims = [d for letter, d in opened.get(name, {}).items() if letter != "N"]
            found[k] = x.repeat([2 if d in dims else 1 for d in range(x.dim())]) if dims else x
        return found

    others = _caches(module, function, larger(first), larger(steady)).examples
    moving: dict[str, Mapping[str, int]] = dict(opened)
    for path, here in zeros.examples.items():
        dims = [d for d, (a, b) in enumerate(zip(here.shape, others[path].shape, strict=True)) if a != b]
        name = f"{CACHES}_{path.replace('.', '_')}" if path else CACHES
        if dims:
            moving[name] = {f"{FOLLOWS}{d}": d for d in dims}
    return moving


def _caches(module: Any, function: Callable[..., Any], first: Sequence[Any], steady: Sequence[Any]) -> Zeros:
    """Caches of the first chunk. Raises InputError: those of a later chunk differ from them."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map

    name = type(module).__name__
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def faked(args: Any) -> Any:
            def one(v: Any) -> Any:
                return mode.from_tensor(v) if isinstance(v, torch.Tensor) else v

            return tree_map(one, tuple(args))

        made = [_two(name, function(module, *faked(first)))]
        made.append(_two(name, function(module, *faked(steady), **{CACHES: made[0]})))

    def tensors(value: Any) -> tuple[Any, dict[str, Tensor]]:
        found: dict[str, Tensor] = {}

        def leaf(path: str, v: Any) -> Any:
            if isinstance(v, torch.Tensor):
                found[path] = v
                return Slot(path)
            return v

        return tree_of(value, leaf, "", "."), found

    (_, begun), (tree, then) = map(tensors, made)
    for path in dict.fromkeys((*begun, *then)):
        shapes = [f"{list(c[path].shape)} {c[path].dtype}" if path in c else "none" for c in (begun, then)]
        if path not in then or (path in begun and shapes[0] != shapes[1]):
            fact = f"{name}: the cache {path} is {shapes[0]} after the first chunk, and {shapes[1]} after the next"
            raise InputError(fact, hint="the same after every chunk: frames of zeros in front where there are none yet")
    if not then:
        raise InputError(f"{name}: its forward gives no caches", hint="what it gives is (y, caches)")
    return Zeros(tree, {p: torch.zeros(tuple(t.shape), dtype=t.dtype) for p, t in then.items()})


def _two(name: str, made: Any) -> Any:
    if not isinstance(made, tuple) or len(cast("tuple[Any, ...]", made)) != 2:
        kind = "tensor" if hasattr(cast("object", made), "shape") else type(cast("object", made)).__name__
        raise InputError(f"{name}: its forward gives a {kind}", hint="a tuple of two: what it makes, and caches")
    return cast("tuple[Any, Any]", made)[1]


class State:
    """A stream's caches after a chunk, as this rank has them. Copies, and what this process has pickled, are of the
    same stream.

    Attributes:
        sizes: the chunk's number of samples, and other open extents.
        number: the state's number, in the order in which the stream's states were made.
        blocks: by cache, this rank's block; with the rows around it, where the cache is in `halos`.
    """

    def __init__(self, of: Both, sizes: Sizes, number: int, blocks: dict[str, Tensor], halos: tuple[str, ...]) -> None:
        self.of, self.sizes, self.number, self.blocks, self.halos = of, sizes, number, blocks, halos

    @property
    def bytes(self) -> int:
        """Bytes of this rank's memory that it takes."""
        return sum(t.numel() * t.element_size() for t in self.blocks.values())

    def __reduce__(self) -> Any:
        key = _KEYS.setdefault(self.of, uuid.uuid4().hex)
        return _state_again, (key, self.of.name, self.sizes, self.number, self.blocks, self.halos)

    def __repr__(self) -> str:
        return f"State {self.number} of {self.of.name}: {len(self.blocks)} caches, {self.bytes} bytes"


class Both:
    """What the two graphs of a stream have in common.

    Attributes:
        inputs: by a cache's place, the name of the second graph's input for it.
        states: how many states have been made.
        chunks: the stream's, as they have been made.
    """

    def __init__(self, name: str, first: Any, steady: Any, whole: bool) -> None:
        self.name, self.first, self.steady, self.whole, self.states = name, first, steady, whole, 0
        self.inputs = {path: slot.name for path, slot in slots(steady.call.arguments.trees[CACHES])}
        self._boxes: dict[Sizes, Mapping[str, Any]] = {}
        self.chunks: list[Chunk] = []

    def boxes(self, sizes: Sizes) -> Mapping[str, Any]:
        """By cache of which a later chunk fetches rows, where it lies with these rows, by rank."""
        if sizes not in self._boxes:
            if len(self._boxes) == KEPT:
                del self._boxes[next(iter(self._boxes))]
            of = self.steady
            self._boxes[sizes] = of._net.halos([*self.inputs.values()], of._mesh, sizes)
        return self._boxes[sizes]


_KEYS: WeakKeyDictionary[Both, str] = WeakKeyDictionary()  # of streams whose states have been copied or pickled


def _state_again(key: str, name: str, *others: Any) -> State:
    """The state of a stream of this process. Raises InputError: it has no such stream, or no more."""
    of = next((one for one, known in _KEYS.items() if known == key), None)
    if of is None:
        fact = f"a state of {name} is of a stream that this process doesn't have"
        raise InputError(fact, hint="the process that pickled it, while its stream is there; or first(x), which begins")
    return State(of, *others)


class Chunk:
    """One of the two graphs of a stream.

    Attributes:
        network: the network as from `parallelize(..., whole=False)`; `package`: its package.
        weights: the weights of both graphs.
    """

    def __init__(self, both: Both, network: Any, weights: Any) -> None:
        self.both, self.network, self.weights, self.package = both, network, weights, network.package
        self.is_first = network is both.first
        call = network.call
        made, caches = cast("Node", call.results).parts
        self.made = made
        self.caches = {path: call.outputs[int(slot.name)] for path, slot in slots(caches)}
        self.chunk = [n for n in call.inputs if n not in {*both.inputs.values()} or self.is_first]
        self._refuse_other_layouts()
        both.chunks.append(self)

    def _refuse_other_layouts(self) -> None:
        """Raises InputError: a later chunk begins with blocks of a cache that no block at a chunk's end contains."""
        for path, name in self.both.inputs.items():
            if path in self.caches:
                made, taken = self.package.NET.values[self.caches[path]][1], self.both.steady._net.values[name][1]
                if any(b[: len(a)] != a for a, b in zip(made.axes, taken.axes, strict=True)):
                    fact = (
                        f"{self.both.name}: a chunk ends with the cache {path} stored {made}, and begins with {taken}"
                    )
                    raise InputError(fact, hint="a grid whose axes split what the module takes and what it keeps alike")

    def __call__(
        self, *args: Any, batch: int | None = None, sizes: Mapping[str, int] | None = None
    ) -> tuple[Any, State]:
        """What the module makes of a chunk, and the state after it. Every rank of the mesh calls this.

        Args:
            args: the chunk's arguments; for a later chunk the state before it, as the last. Whole tensors on every
                rank, or with whole=False this rank's blocks.
            batch: with whole=False, the number of samples, where it is not the compiled one, or the state's; `sizes`:
                other open extents of a first chunk, by letter.
        Raises:
            InputError: such arguments don't fit; or the state is another stream's, or of another number of samples.
            RuntimeError: ranks give different states.
        """
        network, both = self.network, self.both
        try:
            state = None if self.is_first else self._state(args)
            inputs = self._inputs(args if state is None else args[:-1], state)
            known = self._sizes(inputs, state, batch, sizes or {})
            scatter: Any = self.package.scatter
            if both.whole:
                inputs |= {n: scatter(n, inputs[n], network._mesh) for n in self.chunk}
        except Exception as error:  # perhaps of this rank's arguments alone
            network._refuse(error)
            raise
        network._taken = {"states": "none" if state is None else f"state {state.number}"}
        halos = () if state is None else tuple(both.inputs[path] for path in state.halos)
        given = [inputs[n] for n in network.call.inputs]
        made, handed = network.handing_on(given, known, halos, self._around(known))
        return self._given(made, handed, known, () if self.both.whole else [inputs[n] for n in self.chunk])

    def peak_bytes(self, *, batch: int | None = None, **sizes: int) -> int:
        """The most bytes of tensors that a call has at a time on this rank, beside parameters, buffers and what it is
        given: of a later chunk, after whichever state takes most. Nothing of it is allocated, and nothing sent.

        Args:
            batch, sizes: the number of samples and other open extents by letter; the compiled ones by default.
        Raises:
            ValueError: there is no such letter, or the module computes something else for such sizes.
        """
        import torch

        known = self._known(batch, sizes)
        results = [self.network.call.outputs[int(s.name)] for _, s in slots(self.made)]
        whole = frozenset((*self.chunk, *results) if self.both.whole else ())

        def foreseen(halos: Sequence[str]) -> int:
            kept = partial(self._blocks, sizes=known, device="meta")
            manner = runtime_of(self.package).Manner(whole, self._wide(halos), self._around(known), kept)
            return self.network.foreseen(known, None, manner).peak_bytes

        with torch.no_grad():
            return max(map(foreseen, self._befores(known)))

    def warm_up(self, shapes: Iterable[Mapping[str, int]]) -> None:
        """Make ready what chunks of these sizes, by letter, need; as many sizes stay ready.

        Raises:
            ValueError: as of `peak_bytes`.
        """
        import torch

        every = [self._known(None, sizes) for sizes in shapes]
        network = self.network
        network.keeps_shapes = max(network.keeps_shapes, 2 * len({*every}))  # after a first chunk, and a later one
        with torch.no_grad():
            for known in every:
                for halos in self._befores(known):
                    self._ready(known, halos)

    def _known(self, batch: int | None, sizes: Mapping[str, int]) -> Sizes:
        net = self.network._net
        known: Sizes = net.opened(batch, sizes)
        if unmet := net.unmet(known):
            raise ValueError(unmet)
        return known

    def _around(self, sizes: Sizes) -> dict[str, Any]:
        """By output that is a cache, the boxes in which a later chunk takes it."""
        boxes = self.both.boxes(sizes)
        return {out: boxes[n] for path, out in self.caches.items() if (n := self.both.inputs[path]) in boxes}

    def _wide(self, halos: Sequence[str]) -> tuple[str, ...]:
        """The inputs by which these caches are given with their halos."""
        return tuple(sorted(self.both.inputs[path] for path in halos))

    def _ready(self, sizes: Sizes, halos: Sequence[str]) -> Any:
        """The steps of a call after a state in which these caches have their halos."""
        return self.network.ready(sizes, self._wide(halos), self._around(sizes))

    def _befores(self, sizes: Sizes) -> list[tuple[str, ...]]:
        """Of each kind of state that a call may take, the caches that have their halos."""
        if self.is_first:
            return [()]
        begins, *_ = self.both.chunks
        found = [begins._halos(begins._ready(sizes, ()).handed_on, sizes)]
        while (later := self._halos(self._ready(sizes, found[-1]).handed_on, sizes)) not in found:
            found.append(later)
        return found

    def _halos(self, handed: Sequence[str], sizes: Sizes) -> tuple[str, ...]:
        """The caches that have their halos in the state after a call."""
        boxes = self.both.boxes(sizes)
        return tuple(
            path
            for path, name in self.both.inputs.items()
            if (self.caches[path] in handed if path in self.caches else name in boxes)
        )

    def _given(self, made: Any, handed: Sequence[str], sizes: Sizes, chunk: Sequence[Tensor]) -> tuple[Any, State]:
        """What the module makes, and the state.

        Args:
            chunk: the caller's own blocks.
        """
        network, both = self.network, self.both
        each: Any = [*made.values()] if isinstance(made, dict) else made
        outputs: dict[str, Any] = dict(zip(network.call.outputs, each, strict=True))
        values: dict[str, Any] = {}
        for _, slot in slots(self.made):
            name = network.call.outputs[int(slot.name)]
            y = outputs[name]
            values[slot.name] = self.package.gather(name, y, network._mesh, batch=sizes) if both.whole else y
        blocks = self._blocks(outputs, handed, sizes, network._net.device)
        both.states += 1
        # What the caller has may be written over before the next chunk.
        theirs = {t.untyped_storage().data_ptr() for t in (*chunk, *(() if both.whole else values.values()))}
        blocks = {n: t.clone() if t.untyped_storage().data_ptr() in theirs else t for n, t in blocks.items()}
        return filled(self.made, values), State(both, sizes, both.states, blocks, self._halos(handed, sizes))

    def _blocks(
        self, outputs: Mapping[str, Tensor], handed: Sequence[str], sizes: Sizes, device: str
    ) -> dict[str, Tensor]:
        """The caches after a call, of its outputs and of which of these have their halos."""
        found: dict[str, Tensor] = {}
        for path, name in self.both.inputs.items():
            out = self.caches.get(path)
            if out is None:
                found[path] = self._zeros(name, sizes, device)
            else:
                found[path] = outputs[out].contiguous() if out in handed else self._own(out, outputs[out], name, sizes)
        return found

    def _own(self, out: str, value: Tensor, name: str, sizes: Sizes) -> Tensor:
        """The block of an output that a later chunk takes."""
        mesh = self.network._mesh
        made, taken = (
            net.region(n, mesh, batch=sizes) for net, n in ((self.network._net, out), (self.both.steady._net, name))
        )
        there = tuple(slice(b.start - a.start, b.stop - a.start) for a, b in zip(made, taken, strict=True))
        return value[there].contiguous()

    def _zeros(self, name: str, sizes: Sizes, device: str) -> Tensor:
        """A cache that is still zeros, with the rows around it."""
        import torch

        of, boxes = self.both.steady, self.both.boxes(sizes)
        here = of._net.here(of._mesh)
        shape = here.shape(of._net.split(name, sizes))
        if name in boxes:
            shape = [hi - lo for lo, hi in boxes[name][here.place.me]]
        return torch.zeros(shape, dtype=of._net.types[name], device=device)

    def _state(self, args: Sequence[Any]) -> State:
        *_, state = (None, *args)
        name = self.both.name
        if not isinstance(state, State):
            fact = f"{name}: the last argument of a later chunk is the state before it, got a {type(state).__name__}"
            raise InputError(fact, hint="y, state = steady(x, state)")
        if state.of is not self.both:
            what = "another stream" if state.of.name == name else f"a stream of {state.of.name}"
            raise InputError(f"{name}: {state!r} is of {what}", hint="the state that these two gave")
        return state

    def _inputs(self, args: Sequence[Any], state: State | None) -> dict[str, Tensor]:
        call = self.network.call
        caches = {} if state is None else {CACHES: self._filled(state)}
        return dict(call.arguments.tensors(args, caches))

    def _filled(self, state: State) -> Any:
        tree = self.network.call.arguments.trees[CACHES]
        return filled(tree, {name: state.blocks[path] for path, name in self.both.inputs.items()})

    def _sizes(
        self, inputs: Mapping[str, Tensor], state: State | None, batch: int | None, sizes: Mapping[str, int]
    ) -> Sizes:
        net = self.network._net
        known: Sizes = state.sizes if state is not None else net.open
        if self.both.whole:
            count, others = sizes_of(self.package, {n: inputs[n] for n in self.chunk})
            found: Sizes = net.opened(count, {**dict(zip(net.letters, known, strict=True)), **others})
        else:
            others = dict(zip(net.letters, known, strict=True)) | dict(sizes)
            found = net.opened(None, others if batch is None else others | {"N": batch})
        if state is not None and found != state.sizes:
            before, now = ([f"{a}={n}" for a, n in zip(net.letters, one, strict=True)] for one in (state.sizes, found))
            fact = f"{self.both.name}: the state before is of {', '.join(before)}, the chunk of {', '.join(now)}"
            raise InputError(fact, hint="chunks of one video are of one size; first(x) begins another one")
        return found

    def bytes_sent(self, state: State | None = None) -> int:
        """Bytes that all ranks send for a chunk after this state, at the compiled number of samples. Without a state,
        caches come without halos: what it would be if rows of cached frames were sent again."""
        halos = {self.both.inputs[path] for path in (() if state is None else state.halos)}
        steps = [*self.network._steps.forward, *self.network._steps.backward]
        kept = {line.key for line in steps if line.kind in ("fetch", "start", "wait") and halos & {*line.reads}}
        steps = [one for one in self.package.VOLUME["forward"] if one["step"] not in kept]
        return sum(sum(one["bytes_sent_per_rank"]) for one in steps)
