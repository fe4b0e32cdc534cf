"""The nn.Module that a person's own function or class gives, named by MODULE:FACTORY or FILE.py:FACTORY."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from convgen.errors import InputError, Note
from convgen.spec.names import did_you_mean
from convgen.spec.places import last_line, place_of
from convgen.spec.text import one_line, shown

if TYPE_CHECKING:
    from torch import nn


def made_by(text: str, positional: Sequence[Any], named: dict[str, Any]) -> nn.Module:
    """The module that a factory gives, with the default generator's seed 0.

    Args:
        text: MODULE:FACTORY as `python -m` finds it here, or FILE.py:FACTORY.
    Raises:
        InputError: the factory isn't there, raises, wants other arguments, or gives no nn.Module.
    """
    import torch

    where, _, name = text.rpartition(":")
    if not where or not name:
        hint = "MODULE:FACTORY or FILE.py:FACTORY, e.g. torchvision.models:resnet18"
        raise InputError(f"{shown(text)} names no factory", hint=hint)
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    found = _named(_imported(where), where, name)
    if isinstance(found, torch.nn.Module):
        raise InputError(f"{text} is a module, not what makes one", hint="a function that gives it, or its class")
    if not callable(found):
        raise InputError(f"{text} is {_a(found)}, and can't be called", hint="a function or a class")
    _check_arguments(found, text, positional, named)
    cast("Any", torch).manual_seed(0)
    try:
        module = found(*positional, **named)
    except Exception as error:  # whatever the factory raises
        raise _raised(f"{text} failed", error, "--args '{...}' with what it takes") from error
    if not isinstance(module, torch.nn.Module):
        fact = f"{text} gives {_a(module)}, no torch.nn.Module"
        raise InputError(fact, hint="a function that returns one, or a class of them")
    return module


def _a(value: object) -> str:
    return "None" if value is None else f"one of {type(value).__name__}"


def _raised(fact: str, error: Exception, hint: str) -> InputError:
    """An InputError for an error in a person's own code, with its line."""
    place = place_of(error, own=True)
    return InputError(f"{fact}: {last_line(error)}", notes=place.notes if place is not None else (), hint=hint)


def _imported(where: str) -> ModuleType:
    if where.endswith(".py"):
        return _from_file(Path(where))
    from convgen.spec.torchvision_ops import SYMPTOM, declare_operators

    try:
        try:
            return import_module(where)
        except RuntimeError as error:
            if SYMPTOM not in str(error):
                raise
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]  # half imported
            declare_operators()
            return import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            hint = f"pip install {(error.name or 'it').partition('.')[0]}, if it is a package"
            raise _raised(f"can't import {where}", error, hint) from error
        raise InputError(f"can't import {where}: {last_line(error)}", hint=_nearest(where, error.name)) from error
    except Exception as error:  # whatever the module raises
        raise _raised(f"can't import {where}", error, "a module that python -m finds here") from error


def _nearest(where: str, missing: str) -> str:
    """A hint on what would work for a module that isn't there."""
    if Path(f"{where}.py").is_file() or where.endswith("/"):
        return f"{where}.py:FACTORY"
    here = [path.stem for path in Path.cwd().glob("*.py")]
    other = f"pip install {missing}, or a file of yours: FILE.py:FACTORY"
    return did_you_mean(where, here, other) if missing == where else other


def _from_file(path: Path) -> ModuleType:
    """A file imported as a module of its name, which can import the files beside it, as under `python FILE.py`."""
    if not path.is_file():
        beside = [str(one) for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
        hint = did_you_mean(str(path), beside, "a file of Python's, and a function or class in it")
        raise InputError(f"there is no file {one_line(str(path), 300)}", hint=hint)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that the classes that it defines are found by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file raises
        raise _raised(f"can't import {path}", error, "a file that python runs") from error
    return module


def _named(module: ModuleType, where: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n in dir(found) if not n.startswith("_") and callable(getattr(found, n))]
            hint = did_you_mean(part, names, ", ".join(names[:12]) or f"a name in {where}")
            raise InputError(f"{where} has no {name}", hint=hint)
        found = getattr(found, part)
    return found


def _check_arguments(found: Any, text: str, positional: Sequence[Any], named: dict[str, Any]) -> None:
    """Check a factory's arguments. Raises InputError: it takes others."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # a callable that isn't written in Python has no signature
        return
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        needed = [
            one.name for one in signature.parameters.values()
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]  # fmt: skip
        hint = "--args '{" + ", ".join(f'"{name}": ...' for name in needed) + "}'" if needed else "without --args"
        notes = (Note("takes", one_line(str(signature), 160)),)
        raise InputError(f"{text}: {error}", notes=notes, hint=hint) from None
