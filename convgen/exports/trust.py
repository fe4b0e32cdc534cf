# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (what torch leaves untyped)
"""Code of torch and Python counts by its version alone. This file says which code does, checks that nobody has replaced
any of it, and lists the settings that torch.export reads.

Only functions that give the same for the same arguments count so: none that reads files, clocks, random numbers or
ranks.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType, WrapperDescriptorType
from typing import Any, cast

from convgen.exports.code import Unknown

# Modules that reach nothing outside of themselves: all that is in them counts by version.
PURE = frozenset(
    ("torch.nn.functional", "torch.nn", "torch.nn.init", "torch.linalg", "torch.fft", "torch.special", "math", "cmath",
     "operator", "_operator", "itertools", "functools", "typing", "collections.abc", "abc", "numbers", "copy", "enum",
     "dataclasses", "collections", "types", "warnings", "contextlib", "string", "re", "fractions", "typing_extensions")
)  # fmt: skip
PYTHON = PURE | {
    "builtins",
    "_functools",
    "_collections",
    "_collections_abc",
    "_abc",
    "__future__",
    "_warnings",
    "_weakref",
}
TORCH = (
    "torch.nn", "torch.autograd", "torch.functional", "torch.amp", "torch.cuda.amp", "torch.distributions",
    "torch.utils.checkpoint", "torch.utils._contextlib", "torch.utils._pytree", "torch.utils.hooks", "torch.overrides",
    "torch.types", "torch.return_types", "torch.compiler", "torch.linalg", "torch.fft", "torch.special",
    "torch.jit._trace.is_tracing", "torch.jit.annotate", "torch._tensor", "torch._jit_internal", "torch._VF",
    "torch._C._nn", "torch._C.TensorBase", "torch._C._linalg", "torch._C._fft", "torch._C._special",
    "torch._C._autograd", "torch._C._functions", "torch._lowrank", "torch._linalg_utils", "torch._utils",
)  # fmt: skip
NOT_TORCH = (
    "torch.nn.parallel", "torch.nn.modules._functions", "torch.autograd.profiler", "torch.autograd.graph",
    "torch.nn.modules.module.register_module",
)  # fmt: skip
# Names of torch's top level, no modules, that read or change something outside.
IMPURE = frozenset(
    ("load", "save", "from_file", "seed", "initial_seed", "manual_seed", "get_rng_state", "set_rng_state",
     "get_num_threads", "set_num_threads", "get_num_interop_threads", "set_num_interop_threads", "compile", "hub",
     "default_generator", "Generator", "cond", "while_loop", "set_default_dtype", "set_default_device", "Stream",
     "set_default_tensor_type", "set_flush_denormal", "set_warn_always", "use_deterministic_algorithms")
)  # fmt: skip
NO_BUILTINS = frozenset(
    ("open", "eval", "exec", "compile", "input", "id", "hash", "globals", "locals", "__import__", "breakpoint",
     "memoryview", "__loader__", "__spec__", "quit", "exit", "help", "copyright", "credits", "license")
)  # fmt: skip
BY_NAME = ("getattr", "hasattr", "setattr", "delattr", "vars", "dir", "attrgetter", "methodcaller")
NUMPY = (
    "array", "asarray", "arange", "linspace", "zeros", "ones", "full", "eye", "prod", "sum", "concatenate", "stack",
    "meshgrid", "cumsum", "float32", "float64", "int32", "int64", "ndarray", "dtype", "outer", "tile", "repeat",
)  # fmt: skip


@cache
def roots() -> tuple[str, str]:
    """The folders of torch and of Python's own library."""
    import torch

    return str(torch.__file__).removesuffix("__init__.py"), sysconfig.get_path("stdlib") + os.sep


def is_torchs(file: str) -> bool:
    return file.startswith(roots()[0])


def is_pythons(file: str) -> bool:
    library = roots()[1]
    rest = file.removeprefix(library)
    if rest != file and rest.partition(os.sep)[0] not in ("site-packages", "dist-packages"):
        return True
    return file.startswith("<frozen ") or file == getattr(sys.modules.get("typing_extensions"), "__file__", None)


def within(name: str, homes: tuple[str, ...]) -> bool:
    return any(name == home or name.startswith(f"{home}.") for home in homes)


def found_at(module: str, name: str) -> Any:
    """The object for which a name such as `Conv2d.forward` stands in a loaded module; None if there is none."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        held: dict[str, Any] = getattr(value, "__dict__", {})
        value = held.get(part)
        value = value.__func__ if type(value) in (staticmethod, classmethod) else value
    return value


def trusted(value: Any) -> str:
    """The name of a function or class of torch's, Python's or numpy's that counts by version; "" if it doesn't.

    Raises:
        Unknown: it reads or changes something outside.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, (BuiltinFunctionType, WrapperDescriptorType, MethodDescriptorType)):
        return _of_c(value)
    if not isinstance(module, str) or not isinstance(name, str) or found_at(module, name) is not value:
        return ""
    if isinstance(value, FunctionType):
        file = value.__code__.co_filename
        if not (is_torchs(file) or is_pythons(file)) or value.__globals__ is not vars(sys.modules[module]):
            return ""
    said = f"{module}.{name}"
    if module == "builtins" or module in PYTHON:
        return said
    if module == "torch" and name not in IMPURE:
        return said
    if within(said, TORCH) and not within(said, NOT_TORCH):
        return said
    if module == "numpy" and name in NUMPY:
        return said
    root = module.partition(".")[0]
    if root in ("torch", "numpy") or root in sys.stdlib_module_names:
        raise Unknown(f"{said} is no function of its arguments alone")
    return ""


def _of_c(value: Any) -> str:
    """The name of a function written in C that counts by version. Raises Unknown: it is not known."""
    import torch

    owner: Any = getattr(value, "__objclass__", getattr(value, "__self__", None))
    home, name = str(getattr(value, "__module__", "")), str(value.__name__)
    private: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    if isinstance(owner, ModuleType):
        home = owner.__name__
        pure = (home == "builtins" and name not in NO_BUILTINS) or (home != "builtins" and home in PYTHON)
        if pure or within(home, TORCH) or (home == "torch._C" and name in QUERIES):
            return f"{home}.{name}"
    elif isinstance(owner, type):
        kind = f"builtins.{owner.__qualname__}" if owner.__module__ == "builtins" else trusted(owner)
        if kind:
            return f"{kind}.{name}"
    elif owner is None and home == "torch" and name not in IMPURE and hasattr(private._VariableFunctions, name):
        return f"torch.{name}"
    raise Unknown(f"{home}.{name} is written in C, and not known")


# The settings that are part of the fingerprint.
QUERIES = frozenset(
    ("_get_tracing_state", "_log_api_usage_once", "is_grad_enabled", "is_autocast_enabled", "get_autocast_dtype",
     "get_default_dtype", "is_inference_mode_enabled", "is_autocast_cpu_enabled", "get_autocast_cpu_dtype",
     "get_autocast_gpu_dtype", "_has_torch_function", "_has_torch_function_unary", "_has_torch_function_variadic",
     "is_autocast_cache_enabled")
)  # fmt: skip


# ---- Nobody has put something else there ----


NEAR = (
    "torch.nn.functional", "torch.nn.init", "torch.nn.modules", "torch.nn.parameter", "torch.functional", "torch._VF",
    "torch._tensor", "torch.overrides", "torch.nn.utils.parametrize", "torch.nn.utils.parametrizations",
    "torch.nn.utils.rnn", "torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm",
)  # fmt: skip


def replaced() -> Iterator[tuple[str, Any]]:
    """Functions in torch's modules and classes that aren't torch's, with their places; and, as texts, what names in the
    modules that forwards read stand for, where they stand for something else than their own."""
    import torch

    loaded = [*sys.modules.items()]
    homes: dict[str, Any] = {n: m for n, m in loaded if within(n, ("torch",)) and hasattr(m, "__dict__")}
    near = {name for name in homes if within(name, NEAR) or name in ("torch", "torch.nn")}
    seen: set[int] = set()
    yield from _held("TensorBase", vars(cast("Any", torch._C).TensorBase), True, seen)  # pyright: ignore[reportPrivateUsage]
    for name in sorted(homes, key=lambda name: (name not in near, name)):
        yield from _held(name, vars(homes[name]), name in near, seen)


def _held(where: str, names: Any, near: bool, seen: set[int]) -> Iterator[tuple[str, Any]]:
    for name, held in [*names.items()]:
        kind: Any = type(held)
        value = held.__func__ if kind is staticmethod or kind is classmethod else held
        value = held.fget if kind is property else held.__wrapped__ if kind is CACHE else value
        if type(value) is FunctionType:
            if _foreign(value, near):
                yield f"{where}.{name}", value
            elif near and name not in IMPURE and f"{value.__module__}.{value.__qualname__}" != f"{where}.{name}":
                yield f"{where}.{name}", f"{value.__module__}.{value.__qualname__} {value.__code__.co_firstlineno}"
        elif issubclass(type(value), type):  # not isinstance, which asks objects that answer with a warning
            home = getattr(value, "__module__", "")
            if type(home) is str and home.startswith("torch") and id(value) not in seen:
                seen.add(id(value))
                inside = near and (home == "torch" or within(home, NEAR))
                yield from _held(f"{home}.{value.__qualname__}", vars(value), inside, seen)
            if near and type(home) is str and home.partition(".")[0] not in LIBRARY:
                yield f"{where}.{name}", value
            elif near and value.__name__ != name:
                yield f"{where}.{name}", f"{home}.{value.__qualname__}"
        elif near and kind is BuiltinFunctionType:
            if value.__name__ != name:
                yield f"{where}.{name}", f"{value.__module__}.{value.__name__}"
        elif near and issubclass(kind, ModuleType):
            if value.__name__.partition(".")[0] not in (*LIBRARY, "numpy"):
                yield f"{where}.{name}", value
        elif near and (kind is partial or kind is MethodType or kind.__module__.partition(".")[0] not in LIBRARY):
            yield f"{where}.{name}", value


LIBRARY = frozenset((*sys.stdlib_module_names, "typing_extensions", "torch", "pybind11_builtins"))
CACHE = type(cache(len))


def _foreign(value: FunctionType, near: bool) -> bool:
    file, module = value.__code__.co_filename, cast("Any", value.__module__)
    made = not isinstance(module, str) or module == "builtins"  # by exec, as dataclasses and inductor make theirs
    if file[:1] == "<" and (not near if made else module.startswith(("torch", "namedtuple_"))):
        return False
    home = str(value.__globals__.get("__name__"))
    return not is_torchs(file) and not is_pythons(file) and home.partition(".")[0] not in OTHERS


# Packages of other distributions from which torch itself takes code.
OTHERS = ("torchgen", "sympy", "numpy", "networkx", "jinja2", "mpmath", "triton")


# ---- Settings ----


def settings() -> list[tuple[str, object]]:
    """The settings that torch.export, and convgen's part of exporting, read beside the module.

    Raises:
        Unknown: a setting is on that can't be judged.
    """
    import torch

    cuda: Any = torch.cuda
    private: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    found: list[tuple[str, object]] = [("python", sys.version), ("torch", torch.__version__)]
    found.append(("torch's source", torch.version.git_version))
    found += [("flags", (sys.flags.optimize, sys.byteorder, sys.platform, torch.version.cuda, torch.version.hip))]
    if (numpy := sys.modules.get("numpy")) is not None:
        found.append(("numpy", numpy.__version__))
    if private._len_torch_dispatch_stack() or private._len_torch_function_stack():
        raise Unknown("a mode of torch's is on")
    for name in _FLAGS:
        value: Any = torch
        for part in name.split("."):
            value = getattr(value, part, None)
        found.append((name, repr(value() if callable(value) else value)))
    for kind in ("cpu", "cuda"):
        found.append((kind, (torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind)))))
    found.append(("cuda is there", cuda.is_available()))
    read = ("TORCHDYNAMO_", "TORCH_EXPORT", "TORCH_COMPILE", "PYTORCH_", "TORCH_FX", "TORCH_SHAPE")
    found += [(name, os.environ[name]) for name in sorted(os.environ) if name.startswith(read)]
    for name in (
        "torch._dynamo.config",
        "torch._functorch.config",
        "torch.fx.experimental._config",
        "torch._export.config",
    ):
        config: Any = sys.modules.get(name)
        if config is not None:
            found += [(f"{name}.{key}", repr(value)) for key, value in _changed(config)]
    written: set[str] = torch.library._impls  # pyright: ignore[reportPrivateUsage]  those of operators written in Python
    found.append(("kernels", sorted(k for k in written if k.startswith("aten/") and not k.endswith("/Meta"))))
    _check_decompositions()
    return found


_FLAGS = (
    "get_default_dtype", "get_default_device", "is_grad_enabled", "is_inference_mode_enabled",
    "is_autocast_cache_enabled", "are_deterministic_algorithms_enabled", "get_float32_matmul_precision",
    "is_deterministic_algorithms_warn_only_enabled", "backends.cudnn.enabled", "backends.cudnn.benchmark",
    "backends.cudnn.deterministic", "backends.mkldnn.enabled", "backends.mha.get_fastpath_enabled",
    "backends.cuda.flash_sdp_enabled", "backends.cuda.mem_efficient_sdp_enabled", "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled", "backends.cpu.get_cpu_capability",
    "utils.deterministic.fill_uninitialized_memory",
    "distributions.Distribution._validate_args", "jit.is_tracing",
)  # fmt: skip


def _changed(config: Any) -> list[tuple[str, object]]:
    """The settings of one of torch's config modules that somebody has changed."""
    entries: Any = getattr(config, "_config", None)
    default: Callable[[str], bool] | None = getattr(config, "_is_default", None)
    if entries is None or default is None:
        raise Unknown(f"{config.__name__} can't be read")
    changed = [name for name in sorted(entries) if not default(name)]  # torch itself sets some back
    return [(n, getattr(config, n)) for n in changed if repr(getattr(config, n)) != repr(entries[n].default)]


def _check_decompositions() -> None:
    """Raises Unknown: somebody has given operators of torch's other decompositions, or kernels of Python's."""
    import torch

    known: Any = sys.modules.get("torch._decomp")
    tables: list[Mapping[Any, Any]] = [*known.global_decomposition_table.values()] if known is not None else []
    for packet in [*vars(torch.ops.aten).values()]:
        held: dict[str, Any] = vars(packet) if hasattr(packet, "_qualified_op_name") else {}
        tables += [held[one].py_kernels for one in held.get("_overload_names", ()) if one in held]
    for table in tables:
        for op, kernel in table.items():
            code = getattr(kernel, "__code__", None)
            if code is not None and not is_torchs(code.co_filename) and not is_pythons(code.co_filename):
                raise Unknown(f"{op} has a kernel from {code.co_filename}")
