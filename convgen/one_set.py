"""Several graphs of one module on one set of weights: encode and decode, the first chunk of a stream and the next.

    model = convgen.methods(vae, {"encode": (x,), "decode": (z,)}, {"H": 2, "W": 2})
    z = model.encode(x)
    y = model.decode(z)

Each method is a network with a package of its own. Parameters and buffers are one set, in one memory; a state dict has
each once, under the module's own names.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from convgen.errors import InputError
from convgen.exports.entry import question_of
from convgen.packages import IDLE, load_package
from convgen.parallel import GridLike, How, Prepared, how_of, mesh_of, on_mesh, ranks_of, together
from convgen.plan.idle import warn_of_idle_axes
from convgen.spec.exported_examples import Inputs
from convgen.spec.exported_open import Opened
from convgen.spec.names import did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def methods(
    module: torch.nn.Module,
    examples: Mapping[str, Inputs],
    mesh_or_grid: DeviceMesh | GridLike,
    algorithm: str | None = None,
    *,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    whole: bool = True,
    dtype: torch.dtype | str | None = None,
    target: str | None = None,
    process_group: ProcessGroup | None = None,
) -> Any:
    """Methods of a module on many ranks, with one set of weights, in the module's mode. Every rank calls this.

    Args:
        examples: by method, the arguments of its call, as in `from_torch`.
        mesh_or_grid, algorithm, whole, dtype, target, process_group: as in `parallelize`; by default the named
            algorithm with the grid's letters.
        functions: by name, functions that take the place of methods, with the module as first argument:
            `{"encode": lambda vae, x: vae.encode(x).latent_dist.mode()}`.
    Returns:
        An nn.Module with these methods, each a network as from `parallelize`. `load_full`, `full_state_dict` and
        `state_dict` have each parameter and buffer once, and so has an optimizer of `parameters()`, with all gradients.
    Raises:
        InputError: as in `parallelize`; there is no such method; or two methods store a parameter in different blocks.
    Example:
        >>> import torch, convgen
        >>> from convgen.verify.virtual import VirtualTransport, World
        >>> class Scale(torch.nn.Linear):
        ...     def back(self, y: torch.Tensor) -> torch.Tensor:
        ...         return (y - self.bias) @ self.weight
        >>> x = torch.zeros(2, 3)
        >>> net = convgen.from_torch(Scale(3, 3), (x,), grid="N=1")
        >>> mesh = net.init_mesh("cpu", transport=VirtualTransport(World(1), 0))
        >>> model = methods(Scale(3, 3), {"forward": (x,), "back": (x,)}, mesh)
        >>> sorted(model.state_dict()), model.back(model.forward(x)).shape
        (['bias', 'weight'], torch.Size([2, 3]))
    """
    how = how_of(mesh_or_grid, algorithm, target, dtype, process_group)
    forwards = {name: (functions or {}).get(name) or _method(module, name) for name in examples}
    asked = {n: Asked(with_forward(module, f, n), examples[n], how) for n, f in forwards.items()}
    packages = prepared(asked, mesh_or_grid, process_group)
    mesh = mesh_of(next(iter(packages.values())), mesh_or_grid, process_group)
    return one_set(module, on_one_set(asked, packages, mesh, whole=whole))


@dataclass(frozen=True)
class Asked:
    """A graph of a module, and what to compile it for.

    Attributes:
        opened: inputs' extents that are known at run time only.
    """

    module: torch.nn.Module
    examples: Inputs
    how: How
    opened: Opened | None = None


def prepared(asked: Mapping[str, Asked], mesh_or_grid: Any, process_group: Any = None) -> dict[str, Prepared]:
    """The packages, loaded; one rank makes those that the cache lacks."""
    found: dict[str, Prepared] = {}
    for name, one in asked.items():
        ranks = ranks_of(mesh_or_grid, one.how.axes, process_group)
        found[name] = together(question_of(one.module, one.examples, None, one.opened), one.how, ranks)
        warn_of_idle_axes(found[name][2][IDLE].decode())
        load_package(found[name][1], files=found[name][2])
    return found


def on_one_set(
    asked: Mapping[str, Asked], packages: Mapping[str, Prepared], mesh: Any, *, whole: bool = False
) -> dict[str, Any]:
    """Networks of one module's graphs on a mesh; later networks use the weights of earlier ones."""
    found: dict[str, Any] = {}
    for name, one in asked.items():
        network = on_mesh(one.module, packages[name], one.how, mesh, whole=whole)
        for other in found.values():
            _shared(network, other)
        found[name] = network
    return found


def _shared(network: Any, other: Any) -> None:
    try:
        network.take_from(other)
    except ValueError as error:
        raise InputError(str(error), hint="algorithm=None, whose layouts follow the grid's letters") from None


def with_forward(module: torch.nn.Module, forward: Callable[..., Any], name: str) -> torch.nn.Module:
    """The module with the same parts and this function as its forward; within it the module's forward is its own."""
    kind = cast("Any", type(module))

    @functools.wraps(forward)
    def of_module(self: Any, *args: Any, **keywords: Any) -> Any:
        plain = kind.__new__(kind)
        plain.__dict__ = self.__dict__
        return forward(plain, *args, **keywords)

    own = type(f"{kind.__name__}_{name}", (kind,), {"forward": of_module, "__module__": kind.__module__})
    made = own.__new__(own)
    made.__dict__ = dict(module.__dict__)
    return made


def _method(module: torch.nn.Module, name: str) -> Callable[..., Any]:
    found = getattr(type(module), name, None)
    if not callable(found) or name in vars(module):
        known = [n for n in dir(type(module)) if not n.startswith("_") and callable(getattr(type(module), n, None))]
        fact = f"{type(module).__name__} has no method {name} of its class"
        raise InputError(fact, hint=did_you_mean(name, known, f"functions={{{name!r}: ...}}, a function of the module"))
    return cast("Callable[..., Any]", found)


def one_set(module: torch.nn.Module, networks: Mapping[str, Any]) -> Any:
    """An nn.Module with networks as attributes, and with the weights of all of them, each once."""
    import torch

    class Held(torch.nn.Module):
        """Parameters and buffers that networks have, too."""

        def __setattr__(self, name: str, value: Any) -> None:
            if name in vars(self).get("_parameters", ()) or name in vars(self).get("_buffers", ()):
                fact = f"{name} can't be set: networks of {type(module).__name__} have this tensor, and keep it"
                raise RuntimeError(f"{fact}; copy_ into it, load_full, or load_state_dict without assign")
            super().__setattr__(name, value)

    class OneSet(Held):
        """Networks of one module's graphs, with one set of weights."""

        def __init__(self) -> None:
            super().__init__()
            self.networks = dict(networks)
            for name, network in networks.items():
                vars(self)[name] = network  # not torch's child: its parameters would get other names
                for path, value in network.state_dict(keep_vars=True).items():
                    _put(self, path, value, Held)
            self.train(module.training)

        def train(self, mode: bool = True) -> Any:
            for network in self.networks.values():
                network.train(mode)
            return super().train(mode)

        def _apply(self, *args: Any, **how: Any) -> Any:
            made = cast("Any", super())._apply(*args, **how)
            now = SimpleNamespace(_known=self.state_dict(keep_vars=True))  # buffers are other tensors by now
            for one in self.networks.values():
                one.share(now, [n for n in one._known if n in now._known and n not in one._seeds])
            return made

        def load_full(self, state: Mapping[str, Tensor]) -> None:
            """Fill this rank's blocks from the whole state dict. Raises KeyError: a name is missing or unknown."""
            known = {n for one in self.networks.values() for n in one.state_dict()}
            if unknown := [n for n in state if n not in known]:
                raise KeyError(f"{type(module).__name__}: unknown {', '.join(unknown)}")
            for one in self.networks.values():
                one.load_full({n: state[n] for n in one.state_dict() if n in state})

        def full_state_dict(self) -> dict[str, Tensor]:
            """The module's whole state dict on every rank; every rank calls this."""
            found: dict[str, Tensor] = OrderedDict()
            for one in self.networks.values():
                found |= {n: t for n, t in one.full_state_dict().items() if n not in found}
            return found

    OneSet.__name__ = OneSet.__qualname__ = type(module).__name__
    return OneSet()


def _put(root: torch.nn.Module, path: str, value: Tensor, kind: Callable[[], torch.nn.Module]) -> None:
    """Put a tensor at a dotted path, below modules of a kind that are made for it."""
    import torch

    *parts, leaf = path.split(".")
    for part in parts:
        if not hasattr(root, part):
            root.add_module(part, kind())
        root = getattr(root, part)
    if isinstance(value, torch.nn.Parameter):
        root.register_parameter(leaf, value)
    else:
        root.register_buffer(leaf, value)
