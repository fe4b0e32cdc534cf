"""What a PyTorch module computes: calls of ATen's operators on named values. Pure data, without torch.

    Graph   = name source modes batch inputs parameters buffers constants Call* updates outputs aliases
    Call    = op, every argument of its schema, results, the module that it stems from
    Arg     = Ref(name) | Extent | ByAutocast | None | bool | int | float | str | tuple of them
    Size    = int | Extent                      # an expression of what is known at run time (spec/extents.py)

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
LOW = ("bfloat16", "float16")  # that torch.autocast may be of
TFLOAT32 = "tfloat32"  # of a graph: values are float32, and products TF32 where the device has them


Size: TypeAlias = int | Extent
FOURIER = "fourier"
LISTS = ("Sequential", "ModuleList", "ModuleDict")  # of modules


@dataclass(frozen=True, slots=True)
class Ref:
    """A value, in a call's arguments."""

    name: str


Arg: TypeAlias = "Ref | Extent | ByAutocast | None | bool | int | float | str | tuple[Arg, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor.

    Args:
        name: inputs: the source's argument; parameters, buffers, constants: the source's dotted name; results: an
            identifier. Unique in a graph.
        dtype: as torch prints it: float32, int64, ...
        init: of parameters and buffers: torch's default of the kind of module that owns it. `kaiming_uniform:FAN_IN`
            (a = sqrt(5)), `uniform:FAN_IN` (bound 1 / sqrt(FAN_IN)), `zeros`, `ones`, `normal`, `fill:NUMBER`; `given`:
            its values stand in the file of constants.
        frozen: of parameters: training leaves it as it is.
        owner: of parameters and buffers: the class of torch.nn that the module is that holds it, if any.
        pairs: of parameters and buffers: the source's is complex; here its last dimension is real and imaginary part.
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
            running_mean, running_var, training, momentum, eps) to (y, new mean, new variance), and behind eps the parts
            of the batch that have statistics of their own, if any (spec/graph_parts.py); `dropout` (x, p, train);
            `view` is any reshape: what made values contiguous for it is gone. `fourier` is
            (real, complex or back; real and imaginary part; dimension, forward, scale, length): operations/fourier.py.
        args: every argument of the operator's schema, in its order, keyword-only ones too, defaults filled in.
        results: None where nobody reads one.
        module: dotted path of the module that it stems from; "" is the whole.
        kind: that module's class.
        autocast: "off" where the source says itself what autocast does; "" where that of the call around it holds.
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
        kind: the class of torch.nn that it is of, containers too; "" for others.
        has: plain attributes of such a class: numbers, texts, None and tuples of them.
        same: the path, before, of the very same module.
    """

    path: str
    kind: str = ""
    has: tuple[tuple[str, Arg], ...] = ()
    same: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRow:
    """How a convolution of a network is laid out, in the words of a layer's file (spec/layer.py).

    Args:
        module: that its calls are of, or are children of.
        stored: of x, w and y the axes that split each dimension, outermost first; of w two.
        roles: of the phases that say them (axis, role), an outer axis of a role before an inner one.
        rows: of backward-filter: whether rows of y or of x are its blocks; None: whichever sends less.
        hold_x: what backward-filter reads of x that forward has moved.
        sizes: of axes of which it says the sizes of blocks, as the grid has to have them.
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
        """Of the grid, those that it names."""
        stored = (a for _, dims in self.stored for some in dims for a in some)
        return frozenset((*stored, *(a for _, pairs in self.roles for a, _ in pairs)))


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A module's forward pass.

    Args:
        source: where it was imported from.
        modes: ("train", "eval"): the graph of training, of which `graph_edit.eval_graph` is that of evaluation;
            ("train",) or ("eval",): of this one only.
        batch: samples that it was exported with.
        open: of other extents that are known at run time the letter, and the size that it was exported with.
        conditions: what sizes have to fulfil, as otherwise the module computes something else.
        tf32: convolutions and products of float32 take TF32 on a GPU.
        updates: (buffer, value that it becomes after a forward pass in training).
        outputs: (name, value): "output" where the module gives one tensor; the keys of a mapping; "0", "1", ... of a
            tuple, without those that are None; nested ones with points between.
        aliases: (another name in the state dict, name of the parameter or buffer that it is too).
        modules: of the source, each before its children; none in files that were made before these were kept.
        given: rows whose layout is given; a graph's file has none.
        asks: of a source that asks values for their types, by autocast's type why it can't be said what comes of that
            under it; "" where it can. () of a source that asks nothing.
        stored: (value, of each dimension the axes that split it), of inputs and parameters of which it is given; a file
            has none.
        caches: of a chunk of a stream, inputs that are frames of chunks before, which may come with their halos
            (graph_caches.py); ("",) of a first one, which has none. A file has none.
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
        """Is the number of samples known at run time only?"""
        return any(isinstance(size, Extent) and "N" in size.letters for value in self.inputs for size in value.shape)

    @property
    def letters(self) -> tuple[str, ...]:
        """Of extents that are known at run time."""
        known = {*dict(self.open), *("N" * self.is_dynamic)}
        return tuple(a for a in LETTERS if a in known)

    @property
    def sizes(self) -> dict[str, int]:
        """Those that it was exported with, by letter."""
        return {"N": self.batch, **dict(self.open)}

    def at(self, sizes: int | Mapping[str, int] | None = None) -> Graph:
        """The graph for these sizes, or this number of samples, and otherwise those that it was exported with: every
        extent is an integer."""
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
