"""What torch.autocast does with a call's operands, as torch's own dispatcher does it.

| kind | operands of float32, bfloat16 and float16 are taken |
|---|---|
| low | in autocast's type: products, convolutions |
| float32 | in float32: losses, sums, on GPUs also norms and softmax |
| widest | in the widest type among them |
| "" | as they are |

To find an operator's kind, it is run below autocast on tensors without memory, on the device in question, which need
not be there; the casts that happen tell the kind. So the lists are those of the torch that is installed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from convgen.late import torch
from convgen.operations.calls import Call as Operator
from convgen.operations.calls import Slot
from convgen.spec.graph import FOURIER, Call
from convgen.spec.graph_edit import BATCH_NORM, DROPOUT

KINDS = ("low", "float32", "widest")
_TYPES = ("float32", "bfloat16")
# Calls of the graph's own form, which are no operators; Fourier transforms have no type below float32.
_OWN = {BATCH_NORM: "", DROPOUT: "", "view": "", FOURIER: "float32"}
# What every torch does on every device, so that no tensors need be made: that takes as long as importing torch.
SURE = {
    **dict.fromkeys((f"conv{d}d" for d in (1, 2, 3)), "low"), "conv_transpose1d": "low", "linear": "low",
    **dict.fromkeys((f"conv_transpose{d}d.input" for d in (2, 3)), "low"), "cross_entropy_loss": "float32",
    **dict.fromkeys(("matmul", "mm", "bmm", "addmm", "baddbmm"), "low"), "max_pool2d": "", "adaptive_avg_pool2d": "",
}  # fmt: skip
_known: dict[Any, str] = {}


def kind_of(
    call: Call, args: tuple[Any, ...], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], device: str
) -> str:
    """How autocast takes the operands of a call on a device, cpu or cuda.

    Args:
        args: the call's arguments, with a Slot for every operand.
        shapes, dtypes: those of its operands.
    """
    if call.op in _OWN:
        return _OWN[call.op]
    floats = _floats(dtypes)
    if not any(floats):
        return ""
    if call.op in SURE:
        return SURE[call.op]
    key = device, call.op, _pattern(args), tuple(floats)
    if key not in _known:
        _known[key] = asked(call.op, args, shapes, dtypes, device) if _may_cast(call.op, device) else ""
    return _known[key]


def _may_cast(op: str, device: str) -> bool:
    """Whether an operator has a rule of autocast, or is made of operators that may have one."""
    name, _, overload = op.partition(".")
    full = f"aten::{name}.{overload}" if overload else f"aten::{name}"
    keys = f"Autocast{device.upper()}", "CompositeImplicitAutograd"
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(full, key) for key in keys)


def _floats(dtypes: Sequence[str]) -> list[bool]:
    return [d in ("float32", "bfloat16", "float16") for d in dtypes]


def _pattern(arg: Any) -> Any:
    """Arguments without the values of their numbers, on which the kind doesn't depend."""
    if isinstance(arg, tuple):
        items: tuple[Any, ...] = arg  # pyright: ignore[reportUnknownVariableType]
        return tuple(_pattern(one) for one in items) if any(isinstance(one, Slot) for one in items) else ()
    return type(arg) if isinstance(arg, (int, float)) and not isinstance(arg, bool) else arg


def asked(op: str, args: tuple[Any, ...], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], device: str) -> str:
    """The same for an operator by name, always by running it. Arguments are those of `kind_of`."""
    operator, floats = Operator(op, args), _floats(dtypes)

    def seen(*kinds: str) -> tuple[set[str], set[str]]:
        """The types that operands are cast to, and results' types, when floating-point operands have these, in turn."""
        each = iter(kinds * len(shapes))
        own = [next(each) if f else d for f, d in zip(floats, dtypes, strict=True)]
        return _run(operator, shapes, own, device)

    casts, _ = seen("float32")
    if "bfloat16" in casts:
        return "low"
    casts, made = seen("bfloat16")
    if "float32" in casts or "float32" in made - _plainly(operator, shapes, dtypes, floats, device):
        return "float32"
    casts, _ = seen("float32", "bfloat16") if sum(floats) > 1 else (set[str](), set[str]())
    return "widest" if "float32" in casts else ""


def _plainly(
    operator: Operator, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], floats: Sequence[bool], device: str
) -> set[str]:
    """Types of an operator's results for bfloat16 without autocast."""
    own = ["bfloat16" if f else d for f, d in zip(floats, dtypes, strict=True)]
    return _run(operator, shapes, own, device, enabled=False)[1]


def _run(
    operator: Operator, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], device: str, *, enabled: bool = True
) -> tuple[set[str], set[str]]:
    fakes: Any = import_module("torch._subclasses.fake_tensor")
    watch = _watch()
    made: set[str] = set()
    with fakes.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        operands = tuple(
            torch.empty(s, dtype=getattr(torch, d), device=device) for s, d in zip(shapes, dtypes, strict=True)
        )
        with _autocast(device, enabled), watch:
            try:
                found = operator(operands)
            except Exception:  # the device's library is missing: the casts came before
                found = ()
    several: list[Any] = [*found] if isinstance(found, (tuple, list)) else [found]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    made |= {str(one.dtype).removeprefix("torch.") for one in several if hasattr(one, "dtype")}
    return watch.casts, made


@contextmanager
def _autocast(device: str, enabled: bool) -> Generator[None]:
    """Sets torch.autocast's switches, which its own context manager leaves off where the device is missing."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def _watch() -> Any:
    """A mode that notes the types to which floating-point tensors are cast."""
    modes: Any = import_module("torch.utils._python_dispatch")

    class Watch(modes.TorchDispatchMode):
        casts: set[str]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given: dict[str, Any] = kwargs or {}
            if func is torch.ops.aten._to_copy.default and given.get("dtype") is not None:
                self.casts.add(str(given["dtype"]).removeprefix("torch."))
            return func(*args, **given)

    made = Watch()
    made.casts = set()
    return made
