"""What a PyTorch module computes: calls of ATen's operators on named values. Pure data, without torch.

    Graph   = name source modes batch inputs parameters buffers constants Call* updates outputs aliases
    Call    = op, every argument of its schema, results, the module that it stems from
    Arg     = Ref(name) | Extent | ByAutocast | None | bool | int | float | str | tuple of them
    Size    = int | Extent                      # an expression of extents known at run time (spec/extents.py)

Dtypes, layouts, memory formats and devices are text, as torch prints them without `torch.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from convgen.operations.typed import ByAutocast
from convgen.spec.extents import LETTERS, Condition, Extent, value_at
from convgen.spec.source import KeyPath, Source

DTYPES = ("float64", "float32", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64")
FLOATS = tuple(name for name in DTYPES if "float" in name)
LOW = ("bfloat16", "float16")  # types of torch.autocast
TFLOAT32 = "tfloat32"  # a graph's type: values are float32, and products TF32 where the device has them


Size: TypeAlias = int | Extent
FOURIER = "fourier"
LISTS = ("Sequential", "ModuleList", "ModuleDict")  # containers of modules


@dataclass(frozen=True, slots=True)
class Ref:
    """A value, as an argument of a call names it."""

    name: str


Arg: TypeAlias = "Ref | Extent | ByAutocast | None | bool | int | float | str | tuple[Arg, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor.

    Args:
        name: inputs: the source's argument; parameters, buffers, constants: the source's dotted name; results: an
            identifier. Unique in a graph.
        dtype: as torch prints it: float32, int64, ...
        init: for parameters and buffers, torch's default for the kind of module that owns them.
            `kaiming_uniform:FAN_IN` (a = sqrt(5)), `uniform:FAN_IN` (bound 1 / sqrt(FAN_IN)), `zeros`, `ones`,
            `normal`, `fill:NUMBER`; `given`: the file of constants has the values.
        frozen: for a parameter, whether training leaves it as it is.
        owner: for parameters and buffers, the class of torch.nn of the module that holds them, if it is one.
        pairs: for parameters and buffers, whether the source's is complex; the last dimension is real and imaginary
            part.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str
    init: str = ""
    frozen: bool = False
    pairs: bool = False
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operator's call.

    Args:
        op: ATen's overload without namespace and `.default`: conv2d, add.Tensor. `batch_norm` is (x, weight, bias,
            running_mean, running_var, training, momentum, eps) to (y, new mean, new variance), with the parts of the
            batch that have statistics of their own behind eps, if any (spec/graph_parts.py); `dropout` is (x, p,
            train); `view` is any reshape, without the calls that made its operand contiguous; `fourier` is (real,
            complex or back; real and imaginary part; dimension, forward, scale, length): operations/fourier.py.
        args: every argument of the operator's schema, in its order, keyword-only ones too, defaults filled in.
        results: None for a result that nobody reads.
        module: dotted path of the module that makes the call; "" is the whole.
        kind: that module's class.
        autocast: "off" where the source sets autocast itself; "" where autocast around the call holds.
    """

    op: str
    args: tuple[Arg, ...]
    results: tuple[Value | None, ...]
    module: str
    kind: str = ""
    autocast: str = ""


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the source, as people read it: a child of another, with attributes.

    Args:
        path: dotted; "" is the whole.
        kind: its class of torch.nn, containers too; "" for other classes.
        has: plain attributes of such a class: numbers, texts, None and tuples of them.
        same: an earlier path of the very same module.
    """

    path: str
    kind: str = ""
    has: tuple[tuple[str, Arg], ...] = ()
    same: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRow:
    """How a convolution of a network is laid out, in the words of a layer's file (spec/layer.py).

    Args:
        module: the module of its calls, or their parent.
        stored: for x, w and y, the axes that split each dimension, outermost first; for w two dimensions.
        roles: for phases that say them, (axis, role), an outer axis of a role before an inner one.
        rows: whether backward-filter's blocks are rows of y or of x; None: whichever sends less.
        hold_x: which x backward-filter reads, where forward has moved x.
        sizes: by axis for which it says the sizes of blocks, the size that the grid's axis must have.
        path: where the file says it.
    """

    module: str
    stored: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
    roles: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    rows: Literal["output", "input"] | None = None
    hold_x: Literal["gathered", "stored"] = "gathered"
    sizes: tuple[tuple[str, int], ...] = ()
    path: KeyPath = field(default=(), compare=False)

    @property
    def axes(self) -> frozenset[str]:
        """Names of the grid's axes that it uses."""
        stored = (a for _, dims in self.stored for some in dims for a in some)
        return frozenset((*stored, *(a for _, pairs in self.roles for a, _ in pairs)))


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A module's forward pass.

    Args:
        source: where it was imported from.
        modes: ("train", "eval"): it is the graph of training, and `graph_edit.eval_graph` of it that of evaluation;
            ("train",) or ("eval",): it is the graph of this mode only.
        batch: the number of samples that it was exported with.
        open: (letter, size that it was exported with) of other extents that are known at run time.
        conditions: what sizes have to fulfil: at others the module computes something else.
        tf32: whether convolutions and products of float32 take TF32 on a GPU.
        updates: (buffer, value that it becomes after a forward pass in training).
        outputs: (name, value): "output" where the module gives one tensor; the keys of a mapping; "0", "1", ... for a
            tuple, without places that are None; nested names with points between.
        aliases: (another name in the state dict, name of the same parameter or buffer).
        modules: the source's, each before its children; none in files that were made before these were kept.
        given: rows whose layout is given; a graph's file has none.
        asks: if the source asks values for their types: (autocast's type, why its effect on that can't be said, or ""
            where it can); () if the source asks nothing.
        stored: (value, axes that split each dimension) of inputs and parameters whose storage is given; a file has
            none.
        caches: for a later chunk of a stream, inputs that are frames of earlier chunks, which may come with their halos
            (graph_caches.py); ("",) for a first chunk, which has none. A file has none.
    """

    name: str
    source: str
    modes: tuple[str, ...]
    batch: int
    inputs: tuple[Value, ...]
    parameters: tuple[Value, ...]
    buffers: tuple[Value, ...]
    constants: tuple[Value, ...]
    calls: tuple[Call, ...]
    updates: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    aliases: tuple[tuple[str, str], ...]
    modules: tuple[Module, ...] = ()
    given: tuple[GivenRow, ...] = ()
    tf32: bool = False
    asks: tuple[tuple[str, str], ...] = ()
    stored: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = ()
    open: tuple[tuple[str, int], ...] = ()
    conditions: tuple[Condition, ...] = ()
    caches: tuple[str, ...] = ()
    source_file: Source = field(default_factory=Source, compare=False)

    @property
    def is_dynamic(self) -> bool:
        """Whether the number of samples is known at run time only."""
        return any(isinstance(size, Extent) and "N" in size.letters for value in self.inputs for size in value.shape)

    @property
    def letters(self) -> tuple[str, ...]:
        """Letters of extents that are known at run time."""
        known = {*dict(self.open), *("N" * self.is_dynamic)}
        return tuple(a for a in LETTERS if a in known)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that it was exported with, by letter."""
        return {"N": self.batch, **dict(self.open)}

    def at(self, sizes: int | Mapping[str, int] | None = None) -> Graph:
        """The graph with integers for all extents: at these sizes by letter, or this number of samples, and otherwise
        at the sizes that it was exported with."""
        known = self.sizes | ({"N": sizes} if isinstance(sizes, int) else dict(sizes or {}))
        inputs = tuple(_value_at(value, known) for value in self.inputs)
        calls = tuple(
            replace(
                call,
                args=value_at(call.args, known),
                results=tuple(value and _value_at(value, known) for value in call.results),
            )
            for call in self.calls
        )
        return replace(self, batch=known["N"], inputs=inputs, calls=calls, open=(), conditions=())


def refs(arg: Arg) -> tuple[str, ...]:
    """Names of the values that an argument reads.

    Example:
        >>> refs((Ref("x"), 3, (Ref("y"), None)))
        ('x', 'y')
    """
    if isinstance(arg, Ref):
        return (arg.name,)
    return tuple(name for one in arg for name in refs(one)) if isinstance(arg, tuple) else ()


def _value_at(value: Value, sizes: Mapping[str, int]) -> Value:
    return replace(value, shape=value_at(value.shape, sizes))
