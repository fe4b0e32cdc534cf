"""What a module does by words of which torch.export records nothing.

y.data, b.data = new                             written as y.detach(), and as a change of what b.detach() gives
y.register_hook(...), y.detach_(),
p.requires_grad_(False) in forward,
module.register_full_backward_hook(...)          refused: gradients would be others, without a word
random.random(), self.calls += 1                 refused: the graph would have the numbers of the import
"""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from convgen.errors import InputError
from convgen.spec.exported_forward import inside_forward

SCALED = "y * s + (y * (1 - s)).detach(), which multiplies y's gradient by s"
BEHIND = "hooks on parameters of what parallelize gives, which have the same names"


class LostError(Exception):
    """torch.export would lose what a line does; `hint` says what would work."""

    def __init__(self, fact: str, hint: str) -> None:
        super().__init__(fact)
        self.hint = hint


def refuse_hooks(module: Any, name: str) -> None:
    """Raises InputError: a module, or a parameter, has hooks on its gradients."""
    for path, one in module.named_modules():
        if one._backward_hooks or one._backward_pre_hooks:
            fact = f"{name}: {path or 'the module'} ({type(one).__name__}) has hooks on its gradients"
            raise InputError(f"{fact}, which torch.export loses", hint=SCALED)
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InputError(f"{name}: {path} has hooks on its gradient, which torch.export loses", hint=BEHIND)


Numbers = dict[tuple[str, str], float]  # by a module's path and an attribute of it


def _numbers(module: Any) -> Numbers:
    """Numbers of Python's that modules have as attributes."""
    own: list[tuple[str, dict[str, Any]]] = [(path, vars(one)) for path, one in module.named_modules()]
    return {(path, k): v for path, has in own for k, v in has.items() if type(v) in (int, float)}


@contextmanager
def with_numbers(module: Any, numbers: Numbers) -> Generator[None]:
    """While this lasts, attributes of modules are these numbers."""
    before = _numbers(module)
    try:
        _put(module, numbers)
        yield
    finally:
        _put(module, {key: before.get(key) for key in numbers})


def _put(module: Any, numbers: Mapping[tuple[str, str], float | None]) -> None:
    for (path, name), number in numbers.items():
        if number is None:
            delattr(module.get_submodule(path), name)
        else:
            setattr(module.get_submodule(path), name, number)


def refuse_counts(numbers: Numbers) -> None:
    """Raises LostError: forward has changed these numbers again, where it had begun with what it had made of them."""
    for path, name in numbers:
        fact = f"forward changes {path}{'.' * bool(path)}{name} in each call, which torch.export takes for a constant"
        raise LostError(fact, f"a buffer: self.register_buffer({name!r}, torch.zeros(())), changed in place")


@contextmanager
def nothing_lost(module: Any) -> Generator[Numbers]:
    """While a module is traced: `.data` is what `detach` gives, and a line of which nothing would be recorded raises a
    LostError. Gives numbers that forward has changed, as it left them."""
    import torch
    from torch.overrides import TorchFunctionMode

    tensor: Any = torch.Tensor
    changed: Numbers = {}
    hooks = (tensor.register_hook, tensor.register_post_accumulate_grad_hook)

    def put(x: Any, new: Any) -> None:
        if x.shape != new.shape or x.dtype != new.dtype:
            raise LostError("a .data of another shape or type is lost by torch.export", "a tensor of its own")
        x.detach().copy_(new.detach())

    def drawn() -> tuple[Any, ...]:
        """The states of generators whose numbers would be part of the graph."""
        numpy: Any = sys.modules.get("numpy")
        return random.getstate(), None if numpy is None else numpy.random.get_state()[1:3]

    class Refusing(TorchFunctionMode):
        def __enter__(self) -> Any:
            self.before, self.numbers = repr(drawn()), _numbers(module)
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            cast("Any", super()).__exit__(*error)
            now = _numbers(module)
            changed.update({key: v for key, v in now.items() if self.numbers.get(key) != v})
            if error[0] is None and repr(drawn()) != self.before:
                fact = "forward draws random numbers of Python's or numpy's, which torch.export takes for constants"
                raise LostError(fact, "torch.rand, whose numbers are drawn in each step")

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func == tensor.data.__get__:
                return args[0].detach()
            if func == tensor.data.__set__:
                return put(*args)
            if func in hooks:
                raise LostError("a hook on a gradient is lost by torch.export", SCALED)
            if func == tensor.detach_:
                raise LostError("detach_() is lost by torch.export", "y = y.detach()")
            if func in (tensor.requires_grad_, tensor.requires_grad.__set__) and is_other(*args, **(kwargs or {})):
                fact = "what a parameter's requires_grad is made in forward is lost by torch.export"
                raise LostError(fact, "torch.func.functional_call with detached parameters; or frozen ones")
            return func(*args, **(kwargs or {}))

    def is_other(x: Any, requires_grad: bool = True) -> bool:
        return isinstance(x, torch.nn.Parameter) and x.requires_grad != requires_grad

    with inside_forward(module, Refusing()):
        yield changed
