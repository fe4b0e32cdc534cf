# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false, reportUnknownParameterType=false
# (triton has no types)
"""Triton kernels on CPU tensors, by Triton's interpreter, in a process that can also compile them.

TRITON_INTERPRET stays unset: `interpreted(kernel)[grid](...)` runs a @triton.jit function that can also be compiled.
What is mended, in versions 3.6 to 3.9: products of bfloat16 (upstream multiplies the bit patterns) and rounding to it
(upstream truncates); boxes that are rounded to TF32 while they are copied (upstream copies them as they are); loop
bounds that are arrays of one element (3.6 with numpy >= 2.4). After a launch triton.language is restored, so that later
compilations work. Integers aren't checked for overflow, which took a third of the time. Launches wait for each other,
since ranks may be threads. Other arithmetic in bfloat16 stays wrong upstream: kernels widen what they load first, as
they do for precision.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as upstream
from triton.runtime.jit import JITFunction

from convgen.packages import kernel_modules

_functions: dict[int, tuple[Any, Any]] = {}  # by id: hashing a JITFunction walks its source
_lock = threading.RLock()


def interpreted(kernel: Any) -> Any:
    """A kernel as the interpreter runs it: `interpreted(kernel)[grid](*args, **constants)`."""
    _mend()
    if isinstance(kernel, upstream.InterpretedFunction):
        return kernel
    if id(kernel) not in _functions:
        _functions[id(kernel)] = kernel, upstream.InterpretedFunction(kernel.fn)
    return _functions[id(kernel)][1]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a kernel on CPU tensors; stands in the place of a generated module's `launch`."""
    if all(grid):
        # Masked lanes and unused rows may overflow on the way; their results are thrown away.
        with np.errstate(all="ignore"), torch.no_grad():
            interpreted(kernel)[grid](*args, **constants)


def in_interpreter(package: Any, launch: Callable[..., None] = launch) -> None:
    """Make a network's package for a GPU run here: its kernels in the interpreter, all else on the CPU.

    Args:
        launch: what takes the place of `launch` in files with kernels.
    """
    package.NET.device = "cpu"
    for kernels in kernel_modules(package):
        kernels.launch = launch


def _as_float(handle: Any) -> Any:
    data = handle.data
    return (data.astype(np.uint32) << 16).view(np.float32) if handle.dtype.scalar == tl.bfloat16 else data


def _round_to_bfloat16(data: Any) -> Any:
    """float32 to the nearest bfloat16, ties to even, as its bits."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    near = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), near)


def _round_to_tf32(data: Any) -> Any:
    """float32 to the nearest TF32, ties to even, infinities and NaN as they are: as the copy engine of sm_90 does."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    near = (bits + np.uint32(0xFFF) + ((bits >> 13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(data), near.view(np.float32), data)


@functools.cache
def _mend() -> None:
    """Replace what is wrong in Triton's interpreter, once."""
    builder: Any = upstream.InterpreterBuilder
    module: Any = upstream
    multiply, convert, patch = builder.create_dot, module._convert_float, module._patch_lang_tensor
    describe, copy_box = module._implicit_cvt, builder.create_descriptor_load
    numpy_type_of = module._get_np_dtype  # makes a table of all types each time
    run: Any = upstream.GridExecutor.__call__
    rewrite: Any = upstream.InterpretedFunction.rewrite

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if tl.bfloat16 in (a.dtype.scalar, b.dtype.scalar):
            product = np.matmul(_as_float(a), _as_float(b), dtype=d.data.dtype)
            return upstream.TensorHandle(product + d.data, d.dtype.scalar)
        return multiply(self, a, b, d, *rest)

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return _round_to_bfloat16(data)
        return convert(data, source, target, rounding)

    def described(arg: Any) -> Any:
        made = describe(arg)
        if getattr(arg, "round_f32_to_tf32", False):
            made.handle.rounds_tf32 = True
        return made

    def load_box(self: Any, box: Any, *rest: Any) -> Any:
        loaded = copy_box(self, box, *rest)
        return (
            upstream.TensorHandle(_round_to_tf32(loaded.data), loaded.dtype) if hasattr(box, "rounds_tf32") else loaded
        )

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).squeeze()))

    def rewrite_locked(self: Any) -> Any:
        # Before 3.11.8, threads that parse at once mix up their depths: a SystemError (cpython gh-106905).
        with _lock:
            return rewrite(self)

    def launch_locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Functions called inside a kernel would each patch triton.language and leave it so: it is done here, once.
        with _lock:
            scope = module._patch_lang(getattr(tl.standard.cdiv, "fn"))  # noqa: B009
            try:
                return run(self, *args, **kwargs)
            finally:
                scope.restore()

    numpy_types: dict[str, Any] = {}

    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type_of(kind)
        return numpy_types[name]

    # Compiled kernels have no such checks either: tests/test_kernels_offsets.py looks at large tensors.
    options: Any = upstream.interpreter_builder.options
    upstream.interpreter_builder.options = replace(options, sanitize_overflow=False)
    builder.create_dot, builder.create_descriptor_load = create_dot, load_box
    module._implicit_cvt, module._get_np_dtype = described, numpy_type
    module._convert_float = convert_float
    if tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 7):
        module._patch_lang_tensor = patch_tensor
    nested: Any = JITFunction
    nested.__call__ = lambda self, *args, **kwargs: interpreted(self)(*args, **kwargs)
    upstream.InterpretedFunction.rewrite = rewrite_locked
    upstream.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)
    upstream.GridExecutor.__call__ = launch_locked
