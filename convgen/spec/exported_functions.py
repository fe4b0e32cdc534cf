"""Functions with gradients of their own (torch.autograd.Function), while a module is traced. torch.export records what
they compute forward; the derivative of that is not always the gradient that they define.

Each function's gradient is compared with the derivative, on random numbers. Where they differ, and gradients are made
element by element, as those of rounding that passes straight through, the trace has

    y + (x - x') d

where d is the gradient that the function gives for ones (its conjugate, of complex numbers), and x', d and y are
detached: the same numbers, with that gradient. Others are refused. Checkpoints, which enter autograd again, are traced
as what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import Tensor

SCALES = ((1.0, 1.0), (0.1, 1e3), (10.0, 1e-3))  # of the numbers that a function is tried on, and of gradients


class OwnGradient(Exception):
    """A function has gradients that can't be traced."""


@contextmanager
def written_gradients() -> Generator[None]:
    """While this lasts, functions with gradients of their own are traced with these gradients."""
    import torch

    kind: Any = torch.autograd.function.FunctionMeta

    # `apply` is compiled, and modules may hold it already; each call of it asks the class for `forward`.
    def asked(cls: Any, name: str) -> Any:
        found = type.__getattribute__(cls, name)
        return partial(_traced_forward, cls, found) if name == "forward" else found

    kind.__getattribute__ = asked
    try:
        yield
    finally:
        del kind.__getattribute__


def _traced_forward(cls: Any, forward: Callable[..., Any], *given: Any) -> Any:
    """What a function computes, traced so that its gradients are right too."""
    from torch.utils.checkpoint import CheckpointFunction

    args = given[1:] if _has_context(cls) else given
    if not _traced(args):
        return forward(*given)
    if issubclass(cls, CheckpointFunction):
        return args[0](*args[2:])
    kind = _kind(cls, args)
    if kind == "neither":
        raise OwnGradient(f"{cls.__name__}, a torch.autograd.Function, has gradients that can't be traced")
    return forward(*given) if kind == "derivative" else _written(cls, forward, args)


def _has_context(cls: Any) -> bool:
    """Whether forward takes the context first; otherwise setup_context fills it."""
    import torch

    plain: Any = torch.autograd.function._SingleLevelFunction  # pyright: ignore[reportPrivateUsage]
    return cls.setup_context is plain.setup_context


class _Context:
    """The context that a function's forward and backward get, without autograd."""

    def __init__(self, wanted: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(wanted)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *_: Any) -> None: ...
    def mark_dirty(self, *_: Any) -> None: ...
    def mark_non_differentiable(self, *_: Any) -> None: ...
    def set_materialize_grads(self, _: bool) -> None: ...


def _traced(args: Sequence[Any]) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return any(isinstance(x, FakeTensor) and _smooth(x) for x in args)


def _smooth(x: Any) -> bool:
    import torch

    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _forward(cls: Any, forward: Callable[..., Any], args: Sequence[Any]) -> tuple[_Context, Any]:
    context = _Context([_smooth(x) for x in args])
    if _has_context(cls):
        return context, forward(context, *args)
    made = forward(*args)
    cls.setup_context(context, tuple(args), made)
    return context, made


def _written(cls: Any, forward: Callable[..., Any], args: Sequence[Any]) -> Any:
    import torch

    context, y = _forward(cls, forward, [x.detach() if _smooth(x) else x for x in args])
    found = _several(cls.backward(context, torch.ones_like(y)))
    y = y.detach()
    for x, d in zip(args, found, strict=False):
        if d is not None and _smooth(x):
            y = y + _nothing(x) * d.detach().conj()
    return y


def _nothing(x: Any) -> Any:
    """Zeros of which x has the gradient; none where a real x isn't finite, as inf - inf is no number."""
    off = x - x.detach()
    return off if off.is_complex() else off.masked_fill(off != 0, 0)


def _kind(cls: Any, args: Sequence[Any]) -> str:
    """Whether a function's gradients are its derivative, the given gradient times a factor, or neither."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

    generator = torch.Generator().manual_seed(0)
    kinds: set[str] = set()
    functions: Any = torch._C.DisableTorchFunction  # pyright: ignore[reportPrivateUsage]
    # Nothing that runs here is traced, not even the mode of gradients.
    with _disable_current_modes(), functions(), cast("Any", torch.random).fork_rng(devices=()), torch.enable_grad():
        for scale, of_gradients in SCALES:
            given = [_numbers(x, scale, generator) for x in args]
            try:
                kinds.add(_try(cls, given, of_gradients, generator))
            except Exception:  # whatever the function does with such numbers
                return "neither"
    return next((k for k in ("neither", "elements") if k in kinds), "derivative")


def _numbers(x: Any, scale: float, generator: Any) -> Any:
    """Random numbers in place of a traced tensor."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(x, (torch.SymInt, torch.SymFloat)):
        return cast("Any", x).node.hint
    if not isinstance(x, FakeTensor):
        return x.detach() if isinstance(x, torch.Tensor) else x
    sizes: Any = x.shape
    shape = [n if isinstance(n, int) else n.node.hint for n in sizes]
    if _smooth(x):
        dtype = torch.complex128 if x.is_complex() else torch.float64
        return torch.randn(shape, generator=generator, dtype=dtype) * scale
    return torch.randint(0, 2, shape, generator=generator).to(x.dtype)


def _try(cls: Any, given: Sequence[Any], scale: float, generator: Any) -> str:
    import torch

    def leaves() -> tuple[list[Any], list[Tensor]]:
        args = [x.clone().requires_grad_() if _smooth(x) else x for x in given]
        return args, [x for x in args if _smooth(x)]

    def gradients(y: Any, xs: Sequence[Tensor], dys: Sequence[Tensor]) -> list[Tensor]:
        ys = [t for t in _several(y) if _smooth(t) and t.requires_grad]
        if not ys:
            return [torch.zeros_like(x) for x in xs]
        found: Any = torch.autograd.grad(ys, xs, list(dys)[: len(ys)], allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, xs, strict=True)]

    args, xs = leaves()
    made = cls.apply(*[x.view_as(x) if _smooth(x) else x for x in args])
    dys = [scale * torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in _several(made) if _smooth(t)]
    own = gradients(made, xs, dys)
    others, leaf = leaves()
    _, alike = _forward(cls, cls.forward, [x.view_as(x) if _smooth(x) else x for x in others])
    if _close(own, gradients(alike, leaf, dys), scale):
        return "derivative"
    if not isinstance(made, torch.Tensor) or any(
        x.shape != made.shape for x, g in zip(xs, own, strict=True) if g.any()
    ):
        return "neither"
    args, xs = leaves()
    ones = gradients(cls.apply(*[x.view_as(x) if _smooth(x) else x for x in args]), xs, [torch.ones_like(dys[0])])
    each = [d * dys[0] if x.shape == made.shape else d for d, x in zip(ones, xs, strict=True)]
    return "elements" if _close(own, each, scale) and all(bool(d.isfinite().all()) for d in ones) else "neither"


def _several(y: Any) -> Sequence[Any]:
    return cast("Sequence[Any]", y) if isinstance(y, (tuple, list)) else (y,)


def _close(a: Sequence[Tensor], b: Sequence[Tensor], scale: float) -> bool:
    import torch

    near: Any = {"rtol": 1e-6, "atol": 1e-9 * scale, "equal_nan": True}
    return all(torch.allclose(x, y, **near) for x, y in zip(a, b, strict=True))
