"""Complex values as pairs of real ones: their real parts and their imaginary parts.

Autograd's gradient of a complex value, for a real loss, is the pair of its parts' gradients, so gradients need no rule.
Each transform is along one dimension; along the others it is many independent ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from convgen.spec.exported_state import REAL, dtype_name
from convgen.spec.graph import FOURIER, Arg, Ref, Size

if TYPE_CHECKING:
    from convgen.spec.exported_walk import Walk

# Applied to both parts; if one operand is complex, all are made so.
BOTH = frozenset({
    "_unsafe_view", "alias", "broadcast_to", "cat", "clone", "constant_pad_nd", "contiguous", "copy", "detach",
    "diagonal", "empty_like", "expand", "flip", "gather", "index", "index_put", "index_select", "lift_fresh",
    "lift_fresh_copy", "masked_fill", "mean", "movedim", "narrow", "neg", "permute", "repeat", "reshape", "roll",
    "scatter_add", "select", "select_scatter", "slice", "slice_scatter", "split", "split_with_sizes", "squeeze",
    "stack", "sum", "t", "transpose", "unbind", "unfold", "unsqueeze", "view", "where", "zeros_like",
})  # fmt: skip
# Made from nothing: the imaginary part is zero.
CREATED = frozenset({"zeros", "ones", "full", "new_zeros", "new_ones", "ones_like", "new_empty", "empty"})
# Of two operands, linear in each.
PRODUCTS = frozenset({"mul", "bmm", "mm", "matmul", "mv", "dot", "einsum"})
SAME = frozenset({"alias", "clone", "contiguous", "lift_fresh", "lift_fresh_copy", "resolve_neg"})


class Pair(NamedTuple):
    """Names of a complex value's parts."""

    re: str
    im: str


class Parts(NamedTuple):
    """An argument's parts; `im` is None where it is real."""

    re: Arg
    im: Arg


def is_complex(value: Any) -> bool:
    """Whether a node's value, or one of its several values, is complex."""
    import torch

    several = cast("list[Any]", value) if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(one, torch.Tensor) and one.is_complex() for one in several)


def touches_complex(node: Any) -> bool:
    """Whether a node reads or makes complex values."""
    return is_complex(node.meta.get("val")) or any(is_complex(one.meta.get("val")) for one in node.all_input_nodes)


def unknown_operators(program: Any) -> tuple[str, ...]:
    """Operators on complex values that have no rule here."""
    calls = [n for n in program.graph.nodes if n.op == "call_function" and hasattr(n.target, "_schema")]
    found = filter(touches_complex, calls)
    names = (str(n.target).removeprefix("aten.").removesuffix(".default") for n in found)
    return tuple(dict.fromkeys(name for name in names if _rule(name.split(".")[0]) is None))


def _rule(base: str) -> Callable[[Complex], Any] | None:
    if base in BOTH:
        return Complex.both
    if base in CREATED:
        return Complex.created
    if base in PRODUCTS:
        return Complex.product
    return RULES.get(base)


def read_complex(walk: Walk, node: Any) -> Any:
    """What a node that touches complex values makes: a name, a pair, or several of them."""
    base = str(node.target).removeprefix("aten.").split(".")[0]
    rule = _rule(base)
    if rule is None:
        walk.refuse(node, f"{node.target} of complex numbers")
    assert rule is not None
    return rule(Complex(walk, node, base))


def halves(walk: Walk, node: Any, name: str) -> Pair:
    """The parts of a value whose last dimension holds both."""
    made = Complex(walk, node, "view_as_complex")
    re, im = (made.call("select.int", Ref(name), -1, k) for k in (0, 1))
    return Pair(re.name, im.name)


@dataclass
class Complex:
    """The calls that one node becomes."""

    walk: Walk
    node: Any
    base: str
    count: int = 0

    @property
    def value(self) -> Any:
        return self.node.meta["val"]

    @property
    def args(self) -> list[Any]:
        """All arguments of the schema, as nodes and numbers."""
        node = self.node
        schema = node.target._schema.arguments
        return [
            node.args[k] if k < len(node.args) else node.kwargs.get(a.name, a.default_value)
            for k, a in enumerate(schema)
        ]

    def call(self, op: str, *args: Arg, like: Any = None, shape: tuple[Size, ...] | None = None) -> Ref:
        """Add a call; its result is real, and like the node's, or `like` another value."""
        like = self.value if like is None else like
        shape = tuple(self.walk.size(n) for n in like.shape) if shape is None else shape
        return self.calls(op, args, (shape,), dtype_name(like))[0]

    def calls(self, op: str, args: tuple[Arg, ...], shapes: tuple[tuple[Size, ...], ...], dtype: str) -> list[Ref]:
        names: list[str] = []
        for _ in shapes:
            self.count += 1
            names.append(f"%{self.node.name}.{self.count}")
        self.walk.add(self.node, op, args, tuple(zip(names, shapes, strict=True)), REAL.get(dtype, dtype))
        return [Ref(name) for name in names]

    def parts(self, given: Any) -> Parts:
        """The parts of a number, a node, or a list of these."""
        import torch

        if isinstance(given, complex):
            return Parts(given.real, given.imag)
        if isinstance(given, torch.fx.Node) and is_complex(given.meta.get("val")):
            pair: Pair = self.walk.known[given.name]
            return Parts(Ref(pair.re), Ref(pair.im))
        return Parts(self.walk.arg(given), None)

    def pair(self, given: Any) -> tuple[Ref, Ref]:
        """Both parts of a node; a real node's imaginary part is zero."""
        re, im = self.parts(given)
        return cast("Ref", re), cast("Ref", im) if im is not None else self.zeros(given)

    def zeros(self, node: Any) -> Ref:
        return self.call("zeros_like", self.walk.arg(node), *[None] * 5, like=node.meta["val"])

    def side(self, given: Any, k: int) -> Arg:
        """Part k of an argument, for a call on one kind of parts."""
        import torch

        match given:
            case list() | tuple():
                several = cast("list[Any]", given)  # numbers in a list are extents, equal for both parts
                return tuple(one if isinstance(one, int) else self.side(one, k) for one in several)
            case bool():
                return given
            case torch.fx.Node() if is_complex(given.meta.get("val")):
                return self.parts(given)[k]
            case torch.fx.Node() if isinstance(value := given.meta["val"], torch.Tensor) and value.is_floating_point():
                return self.pair(given)[k]
            case torch.dtype():
                return REAL.get(str(given)[6:], str(given)[6:])
            case complex() | float() | int() if self.base in CREATED or self.base == "masked_fill":
                return complex(given).real if k == 0 else complex(given).imag
            case _:
                return self.walk.arg(given)

    def both(self) -> Any:
        """Apply the same operator to both parts."""
        op = str(self.node.target).removeprefix("aten.").removesuffix(".default")
        args, value = self.args, self.value
        if self.base in SAME:
            return self.walk.known[args[0].name]
        if self.base == "constant_pad_nd" and args[2]:
            self.walk.refuse(self.node, f"padding of complex numbers with {args[2]}")
        op = "view" if self.base in ("reshape", "_unsafe_view") else op
        several = cast("list[Any]", value) if isinstance(value, (list, tuple)) else [value]
        shapes = tuple(tuple(self.walk.size(n) for n in one.shape) for one in several)
        sides = [self.calls(op, tuple(self.side(a, k) for a in args), shapes, dtype_name(several[0])) for k in (0, 1)]
        found = tuple(Pair(a.name, b.name) for a, b in zip(*sides, strict=True))
        return found if isinstance(value, (list, tuple)) else found[0]

    def created(self) -> Pair:
        op = str(self.node.target).removeprefix("aten.").removesuffix(".default")
        re = self.call(op, *(self.side(a, 0) for a in self.args))
        im = self.call("zeros_like", re, *[None] * 5)
        if self.base == "full" and isinstance(value := self.args[1], complex):
            im = self.call("full_like", re, value.imag, *[None] * 5)
        return Pair(re.name, im.name)

    def product(self) -> Pair:
        """(a + ib)(c + id) = (ac - bd) + i(ad + bc)."""
        args = self.args
        op = str(self.node.target).removeprefix("aten.").removesuffix(".default")
        einsum = self.base == "einsum"
        given = args[1] if einsum else args[:2]
        if len(given) != 2:
            self.walk.refuse(self.node, f"einsum of {len(given)} complex operands")
        x, y = (self.parts(one) for one in given)

        def times(a: Arg, b: Arg) -> Ref | None:
            if a is None or b is None:
                return None
            if not isinstance(a, Ref):
                a, b = b, a
            return self.call(op, args[0], (a, b), None) if einsum else self.call(op, a, b)

        return self.sum(times(x.re, y.re), times(x.im, y.im), times(x.re, y.im), times(x.im, y.re))

    def sum(self, rr: Ref | None, ii: Ref | None, ri: Ref | None, ir: Ref | None) -> Pair:
        assert rr is not None
        re = rr if ii is None else self.call("sub.Tensor", rr, ii, 1)
        im = [one for one in (ri, ir) if one is not None]
        return Pair(re.name, (im[0] if len(im) == 1 else self.call("add.Tensor", *im, 1)).name)

    def added(self) -> Pair:
        """Add or subtract the parts that both operands have."""
        given: list[Any] = [*self.args, 1]
        x, y, times = given[:3]
        if isinstance(times, complex):
            self.walk.refuse(self.node, "a complex alpha")
        times = self.walk.arg(times)
        (a, b), (c, d) = self.parts(x), self.parts(y)
        op = f"{self.base}.Tensor"
        if not isinstance(a, Ref):  # a number first
            self.walk.refuse(self.node, f"{self.base} of a number and a tensor")
        re = self.call(op, a, c, times)
        b = self.zeros(x) if b is None else b
        if d is None:
            shape = tuple(self.walk.size(n) for n in self.value.shape)
            same = x.meta["val"].shape == self.value.shape
            im = b if same else self.call("expand", b, shape, False)
        else:
            im = self.call(op, b, d, times)
        return Pair(re.name, cast("Ref", im).name)

    def divided(self) -> Pair:
        x, y = self.args[:2]
        (a, b), (c, d) = self.parts(x), self.parts(y)
        op = "div.Tensor"
        if d is None:
            return Pair(self.call(op, a, c).name, self.call(op, self.zeros(x) if b is None else b, c).name)
        if not isinstance(d, Ref):  # a number
            factor = 1 / complex(cast("float", c), cast("float", d))
            c, d = factor.real, factor.imag
        else:
            like = y.meta["val"]
            size = self.call("add.Tensor", self.square(c, like), self.square(d, like), 1, like=like)
            c = self.call(op, c, size, like=like)
            d = self.call("neg", self.call(op, d, size, like=like), like=like)
        ad, bc = self.call("mul.Tensor", a, d), None if b is None else self.call("mul.Tensor", b, c)
        bd = None if b is None else self.call("mul.Tensor", b, d)
        return self.sum(self.call("mul.Tensor", a, c), bd, ad, bc)

    def square(self, a: Arg, like: Any) -> Ref:
        return self.call("mul.Tensor", a, a, like=like)

    def conjugate(self) -> Pair:
        re, im = self.pair(self.args[0])
        return Pair(re.name, self.call("neg", im).name)

    def part(self, k: int) -> str:
        return self.pair(self.args[0])[k].name

    def as_real(self) -> str:
        return self.call("stack", self.pair(self.args[0]), -1).name

    def as_complex(self) -> Pair:
        return halves(self.walk, self.node, self.walk.known[self.args[0].name])

    def of_parts(self) -> Pair:
        re, im = (self.walk.known[a.name] for a in self.args)
        wide = tuple(self.walk.size(n) for n in self.value.shape)
        sides = [
            name if a.meta["val"].shape == self.value.shape else self.call("expand", Ref(name), wide, False).name
            for a, name in zip(self.args, (re, im), strict=True)
        ]
        return Pair(*sides)

    def polar(self) -> Pair:
        size, angle = (self.walk.arg(a) for a in self.args)
        like = self.args[1].meta["val"]
        sides = (self.call(f, angle, like=like) for f in ("cos", "sin"))
        return Pair(*(self.call("mul.Tensor", size, one).name for one in sides))

    def size(self) -> str:
        """The absolute value, with gradient 0 where it is 0."""
        wide = (*(self.walk.size(n) for n in self.value.shape), 2)
        both = self.call("stack", self.pair(self.args[0]), -1, shape=wide)
        return self.call("linalg_vector_norm", both, 2.0, (-1,), False, None).name

    def angle(self) -> str:
        re, im = self.pair(self.args[0])
        return self.call("atan2", im, re).name

    def exponential(self) -> Pair:
        re, im = self.pair(self.args[0])
        size = self.call("exp", re)
        return Pair(*(self.call("mul.Tensor", size, self.call(f, im)).name for f in ("cos", "sin")))

    def power(self) -> Pair:
        if self.args[1] != 2:
            self.walk.refuse(self.node, f"the power {self.args[1]} of complex numbers")
        re, im = self.pair(self.args[0])
        twice = self.call("mul.Tensor", self.call("mul.Tensor", re, im), 2)
        squares = (self.square(one, self.value) for one in (re, im))
        return Pair(self.call("sub.Tensor", *squares, 1).name, twice.name)

    def other_type(self) -> Any:
        x = self.args[0]
        re, im = self.pair(x)
        if not self.value.is_complex():
            im = None
        want = REAL.get(dtype_name(self.value), dtype_name(self.value))
        have = REAL.get(dtype_name(x.meta["val"]), dtype_name(x.meta["val"]))
        if want != have:
            re, im = (None if a is None else self.call("_to_copy", a, want, *[None] * 3, False, None) for a in (re, im))
        return re.name if im is None else Pair(re.name, im.name)  # type: ignore[union-attr]

    def transformed(self) -> Any:
        """Transform the last dimension first, if it begins with real numbers; last, if it ends with them."""
        x, dims, scale, *rest = self.args
        (re, im), shape = self.parts(x), [self.walk.size(n) for n in x.meta["val"].shape]
        dims = [d % len(shape) for d in dims]
        if self.base == "_fft_c2r":
            back, length = dims.pop(), self.walk.size(rest[0])
            if im is None:
                im = self.zeros(x)
            for d in dims:
                re, im = self.along(re, im, shape, d, scale, False)
            shape[back] = length
            args = ("back", re, im, back, False, scale, length)
            return self.calls(FOURIER, args, (tuple(shape),), dtype_name(self.value))[0].name
        forward = True if self.base == "_fft_r2c" else bool(rest[0])
        if im is None and self.base == "_fft_r2c" and rest[0]:  # half of it
            d = dims.pop()
            length = self.fixed(shape[d])
            shape[d] = length // 2 + 1
            args = ("real", re, None, d, True, scale, length)
            re, im = self.calls(FOURIER, args, (tuple(shape),) * 2, dtype_name(self.value))
        elif im is None:
            im = self.zeros(x)
        for d in reversed(dims):
            re, im = self.along(re, im, shape, d, scale, forward)
        return Pair(cast("Ref", re).name, cast("Ref", im).name)

    def along(self, re: Arg, im: Arg, shape: list[Size], d: int, scale: int, forward: bool) -> list[Ref]:
        args = ("complex", re, im, d, forward, scale, self.fixed(shape[d]))
        return self.calls(FOURIER, args, (tuple(shape),) * 2, dtype_name(self.value))

    def fixed(self, size: Any) -> int:
        if not isinstance(size, int):
            self.walk.fixed("a Fourier transform is over samples")
        return size


RULES: dict[str, Callable[[Complex], Any]] = {
    "add": Complex.added,
    "sub": Complex.added,
    "div": Complex.divided,
    "_conj": Complex.conjugate,
    "conj": Complex.conjugate,
    "_conj_physical": Complex.conjugate,
    "conj_physical": Complex.conjugate,
    "resolve_conj": lambda c: c.walk.known[c.args[0].name],
    "resolve_neg": lambda c: c.walk.known[c.args[0].name],
    "real": lambda c: c.part(0),
    "imag": lambda c: c.part(1),
    "view_as_real": Complex.as_real,
    "view_as_complex": Complex.as_complex,
    "complex": Complex.of_parts,
    "polar": Complex.polar,
    "abs": Complex.size,
    "angle": Complex.angle,
    "exp": Complex.exponential,
    "pow": Complex.power,
    "_to_copy": Complex.other_type,
    "_fft_r2c": Complex.transformed,
    "_fft_c2c": Complex.transformed,
    "_fft_c2r": Complex.transformed,
}
