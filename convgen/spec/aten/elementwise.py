"""Elementwise operators that torch doesn't tag as such; losses that are means or sums of elements."""

from __future__ import annotations

from convgen.operations.calls import Whole
from convgen.operations.pointwise import Pointwise, prelu
from convgen.operations.reductions import Reduce
from convgen.operations.rows import sliced
from convgen.operations.views import Expand
from convgen.spec.aten.reader import Reader, knows
from convgen.spec.graph import Call, Ref


@knows(
    "hardswish", "log_sigmoid", "celu", "selu", "hardshrink", "softshrink", "logit", "_to_copy", "to", "where", "rsub",
    "fill", "masked_fill", "clamp_min", "clamp_max", "threshold", "mish", "relu6", "square", "isnan", "nan_to_num",
    "clone",
)  # fmt: skip
def untagged(reader: Reader, call: Call) -> bool:
    (result,) = call.results
    return result is not None and reader.elementwise(call.op, call.args, reader.tensors[result.name])


@knows("type_as")
def type_as(reader: Reader, call: Call) -> bool:
    """The second operand counts by its type only."""
    (result,) = call.results
    assert result is not None
    y = reader.tensors[result.name]
    return reader.elementwise("_to_copy", (call.args[0], y.dtype, None, None, None, False, None), y)


@knows("detach")
def detach(reader: Reader, call: Call) -> bool:
    (result,) = call.results
    return result is not None and reader.elementwise(call.op, call.args, reader.tensors[result.name], smooth=False)


@knows("rrelu")
def rrelu(reader: Reader, call: Call) -> bool:
    """rrelu(x, lower, upper, training): in evaluation a rectifier with the mean slope; in training it draws slopes."""
    x, lower, upper, training, *_ = call.args
    (result,) = call.results
    if training or result is None:
        return False
    slope = (float(lower) + float(upper)) / 2  # type: ignore[arg-type]
    return reader.elementwise("leaky_relu", (x, slope), reader.tensors[result.name])


@knows("floor_divide")
def of_integers(reader: Reader, call: Call) -> bool:
    (result,) = call.results
    assert result is not None
    y = reader.tensors[result.name]
    return not y.floats and reader.elementwise(call.op, call.args, y, smooth=False)


@knows("copy")
def copy(reader: Reader, call: Call) -> bool:
    """The second operand takes the place of the first."""
    (result,) = call.results
    assert result is not None
    y = reader.tensors[result.name]
    x = reader.cast(reader.of(call.args[1]), y.dtype, y.name)
    reader.add(Expand(x.shape, y.shape), [x], [y.name])
    return True


@knows("prelu")
def a_prelu(reader: Reader, call: Call) -> bool:
    x, w = (reader.of(v) for v in call.args)
    (result,) = call.results
    assert result is not None
    if len(x.shape) < 2:
        operation = Pointwise("prelu", x.shape, (x.shape, w.shape), ((), (0,)))
        if not x.shape:
            return False
    else:
        operation = prelu(x.shape, w.shape[0] if w.shape else 1)
    if w.shape in ((), (1,)) and len(x.shape) > 1:
        operation = Pointwise("prelu", x.shape, (x.shape, w.shape), ((), ((1,) if w.shape else ())))
    reader.add(operation, [x, w], [result.name])
    return True


@knows("glu")
def glu(reader: Reader, call: Call) -> bool:
    """The first half times the sigmoid of the second."""
    x, (result,) = reader.of(call.args[0]), call.results
    assert result is not None
    d, y = int(call.args[1]) % len(x.shape), reader.tensors[result.name]  # type: ignore[arg-type]
    half = y.shape[d]
    first, second, gate = (reader.made(f"{y.name}_{part}", y.shape, y.dtype) for part in ("first", "second", "gate"))
    reader.add(sliced(x.shape, d, 0, half), [x], [first.name])
    reader.add(sliced(x.shape, d, half, 2 * half), [x], [second.name])
    reader.elementwise("sigmoid", (Ref(second.name),), gate)
    return reader.elementwise("mul.Tensor", (Ref(first.name), Ref(gate.name)), y)


@knows("broadcast_tensors")
def broadcast_tensors(reader: Reader, call: Call) -> bool:
    (given,) = call.args
    assert isinstance(given, tuple)
    for part, result in zip(given, call.results, strict=True):
        if result is not None:
            x = reader.of(part)
            reader.add(Expand(x.shape, reader.tensors[result.name].shape), [x], [result.name])
    return True


# By operator: the place of `reduction` among the arguments.
BY_ELEMENT = {
    "mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "binary_cross_entropy": 3, "soft_margin_loss": 2,
    "binary_cross_entropy_with_logits": 4, "kl_div": 2, "poisson_nll_loss": 5, "hinge_embedding_loss": 3,
}  # fmt: skip
HOW = {1: "mean", 2: "sum"}


@knows(*BY_ELEMENT)
def loss_by_element(reader: Reader, call: Call) -> bool:
    """The loss of each element, then its sum or mean."""
    (result,) = call.results
    assert result is not None
    place, y = BY_ELEMENT[call.op], reader.tensors[result.name]
    reduction = call.args[place]
    args = (*call.args[:place], 0, *call.args[place + 1 :])
    shape = reader.of(call.args[0]).shape
    if not reader.floats(args) or any(s not in (shape, shape[-len(s) :]) for s in reader.shapes(args)):
        return False
    if reduction == 0:
        return reader.elementwise(call.op, args, y)
    if 0 in shape:
        return False
    each = reader.made(f"{y.name}_each", shape, y.dtype)
    reader.elementwise(call.op, args, each)
    reader.add(Reduce(HOW[int(reduction)], shape, tuple(range(len(shape)))), [each], [y.name])  # type: ignore[arg-type]
    return True


# Constants: what they stand for, and where their value and shape are.
@knows(
    "zero",
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "zeros",
    "ones",
    "full", "empty.memory_format", "arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace",
    "scalar_tensor",
)  # fmt: skip
def constant(reader: Reader, call: Call) -> bool:
    """Every rank makes all of it. An empty tensor has zeros: nobody may read it."""
    (result,) = call.results
    assert result is not None
    y, base = reader.tensors[result.name], call.op.partition(".")[0]
    op, args = call.op, call.args
    kind = "zeros" if base == "zero" else base.removeprefix("new_").removesuffix("_like")
    if kind in ("zeros", "ones", "full", "empty"):
        value = {"zeros": 0, "ones": 1, "empty": 0}.get(kind)
        value = call.args[2 if base == "new_full" else 1] if value is None else value
        if isinstance(value, Ref):
            return False
        op, args = "full", (y.shape, value, y.dtype, None, "cpu", False)
    reader.add(Whole(op, args, (), (y.shape,), (), () if y.floats else (0,)), [], [y.name])
    return True
