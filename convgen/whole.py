"""What `parallelize` gives: a package's Network, called as the module's forward, or with blocks; and its copies."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from convgen.errors import InputError
from convgen.knobs import cache_folder
from convgen.package_cache import kept
from convgen.packages import CHECKED, load_package
from convgen.spec.containers import filled
from convgen.spec.exported_examples import Arguments

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Call:
    """How to call a module that takes and gives whole tensors.

    Args:
        name: that of the module's class.
        inputs, outputs: names in the package, in its order.
        results: the containers of its results; slots have the outputs' numbers.
    """

    name: str
    arguments: Arguments
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    results: Any


def model_class(package: Any, call: Call, *, whole: bool) -> type[Any]:
    """The package's Network as a class that can be pickled; it takes and gives whole tensors, or blocks."""
    import torch

    base: Any = package.Network
    disabled: Any = cast("Any", torch)._disable_dynamo  # as of a Network's own forward

    class Model(base):
        """A network on many ranks; parameters are blocks."""

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _again, (_folders(package), call, whole), self.__getstate__()

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            copied = memo[id(self)] = self.__new__(type(self))
            copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
            return copied

    class Whole(Model):
        """A network that takes whole tensors on every rank and gives whole tensors; parameters are blocks."""

        @disabled
        def forward(self, *args: Any, **keywords: Any) -> Any:
            try:
                inputs = call.arguments.tensors(args, keywords)
                batch, sizes = sizes_of(package, inputs)
                blocks = [package.scatter(name, inputs[name], self._mesh) for name in call.inputs]
            except Exception as error:  # perhaps of this rank's arguments alone
                self._refuse(error)
                raise
            self._looks_at(inputs)
            made: Any = base.forward(self, *blocks, batch=batch, sizes=sizes)
            if call.outputs == ("output",):
                made = [made]
            several: list[Tensor] = [*made] if isinstance(made, (list, tuple)) else [*made.values()]
            found = {
                str(k): package.gather(name, y, self._mesh, batch=batch, sizes=sizes)
                for k, (name, y) in enumerate(zip(call.outputs, several, strict=True))
            }
            return filled(call.results, found)

        def compile_kernels(self, *args: Any, processes: int = 0, **keywords: Any) -> Any:
            """As of a package's Network; arguments are those of a call, or none."""
            if not (args or keywords):
                return base.compile_kernels(self, processes=processes)
            inputs = call.arguments.tensors(args, keywords)
            batch, sizes = sizes_of(package, inputs)
            blocks = [package.scatter(name, inputs[name], self._mesh) for name in call.inputs]
            return base.compile_kernels(self, *blocks, batch=batch, sizes=sizes, processes=processes)

    kind = Whole if whole else Model
    kind.__name__ = kind.__qualname__ = call.name if whole else base.__name__
    kind.call = call
    kind.package, kind.gives_whole = package, whole
    return kind


def sizes_of(package: Any, inputs: Mapping[str, Tensor]) -> tuple[int | None, dict[str, int]]:
    """The number of samples, where it is open, and other open extents by letter, as inputs have them.

    Raises:
        InputError: inputs disagree.
    """
    found: dict[str, dict[str, int]] = {}
    for name, x in inputs.items():
        if x.dim() == len(package.NET.values[name][0]):
            for letter, n in package.NET.seen(name, x.shape).items():
                found.setdefault(letter, {})[name] = n
    for letter, each in found.items():
        if len(set(each.values())) > 1:
            text = ", ".join(f"{name} has {n}" for name, n in each.items())
            what = "the number of samples" if letter == "N" else letter
            raise InputError(f"{package.NAME}: inputs differ in {what}: {text}", hint="one number")
    sizes = {letter: next(iter(each.values())) for letter, each in found.items()}
    return sizes.pop("N", None), sizes


# ---- Pickled ----


def _folders(package: Any) -> dict[str, tuple[str, bool]]:
    """The packages that a pickled model needs, by name: its own, and the one that makes its Blocks again.

    Returns:
        By name, the package's folder, and whether its files were checked when it was loaded.
    """
    shared = sys.modules.get("_convgen_shared")
    homes: list[str] = [*getattr(shared, "homes", ())]
    first = next((n for n in homes if n in sys.modules and hasattr(sys.modules[n], "rebuild_block")), "")
    names = [n for n in (package.__name__, first.rpartition(".")[0]) if n.startswith("_convgen_")]
    return {n: (str(Path(str(sys.modules[n].__file__)).parent), n in CHECKED.packages) for n in names}


def _again(folders: Mapping[str, tuple[str, bool]], call: Call, whole: bool) -> Any:
    """An empty model of a package; one that isn't loaded is loaded from its folder, or from this cache."""
    packages = [_loaded_again(name, Path(folder), checked) for name, (folder, checked) in folders.items()]
    kind: Any = model_class(packages[0], call, whole=whole)
    return kind.__new__(kind)


def _loaded_again(name: str, folder: Path, checked: bool) -> Any:
    if name in sys.modules:
        return load_package(folder, name)
    places = [folder, cache_folder() / "networks" / folder.name]
    for place in places:
        if not checked and place.is_dir():
            return load_package(place, name)
        files = kept(place) if checked else None
        if files is not None:
            return load_package(place, name, files)
    fact = f"the pickled model's package is not there: neither {places[0]} nor {places[1]}"
    hint = "parallelize the module in this process, and load the pickled model's state dict; or CONVGEN_CACHE"
    raise InputError(fact, hint=hint)
