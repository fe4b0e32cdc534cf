"""Where a network's value lies on each rank, as its package says; no rank runs for this."""

from __future__ import annotations

import tempfile
from pathlib import Path

from convgen.errors import InputError
from convgen.network_compiler import CompiledNetwork
from convgen.packages import files_of, forget_package, load_package
from convgen.verify.virtual import VirtualTransport, World

Where = tuple[slice, ...]


def regions_of(
    compiled: CompiledNetwork, value: str, batch: int | None = None, *, halo: bool = False
) -> tuple[tuple[int | str, ...], int, list[Where]]:
    """A value's shape as the package has it, the number of samples, and by rank the region that the rank holds.

    Args:
        value: an input, an output, a parameter or a buffer.
        batch: the number of samples, where it is not the compiled one.
        halo: whether to add to an input the rows around it that its readers want.

    Raises:
        InputError: there is no such value, or it has no halo.
    """
    with tempfile.TemporaryDirectory(prefix="convgen-regions-") as folder:
        for name, data in files_of(compiled, {}).items():
            (Path(folder) / name).write_bytes(data)
        package = load_package(Path(folder))
        try:
            net, world = package.NET, World(compiled.program.grid.ranks)
            meshes = [package.init_mesh("cpu", transport=VirtualTransport(world, k)) for k in range(world.ranks)]
            count = batch or net.batch
            found = [net.region(value, mesh, batch=count, halo=halo) for mesh in meshes]
            return tuple(net.values[value][0]), count, found
        except ValueError as error:
            raise InputError(str(error)) from error
        finally:
            forget_package(package)
