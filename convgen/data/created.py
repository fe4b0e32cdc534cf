# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Files for outputs, which ranks write by region: made by one rank, with chunks that no two ranks share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convgen.data.chunks import Chunk, Where, borders, serving
from convgen.data.formats import Asked, format_of
from convgen.data.opened import FileArray, open
from convgen.errors import InputError
from convgen.late import np

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LEAST_BYTES, MOST_BYTES = 2**16, 2**26  # of a chunk: a file, or a read, costs more than fewer; a codec takes no more


def create(
    path: str | os.PathLike[str],
    net: Any,
    value: str,
    mesh: DeviceMesh,
    *,
    samples: int | None = None,
    batch: int | None = None,
    name: str | None = None,
    dtype: str | None = None,
    chunks: Sequence[int] | None = None,
) -> FileArray:
    """A new array for a network's output, open for `write`; one rank makes it, and every rank calls it.

    Args:
        path: of a file of Zarr or HDF5, which may have other arrays, or of a new one of numpy (.npy).
        value: the output's name in the network.
        samples: how many the array has; as many as a batch by default.
        batch: the number of samples of a batch, where it is not the compiled one.
        name: the array's in the file; of HDF5 the output's by default, of Zarr the file is the array.
        dtype: as numpy names it; the output's by default, float32 for bfloat16, which numpy lacks.
        chunks: extents of one. By default none lies in two ranks' blocks, so that all write at once, and one has at
            most 64 MiB, of one sample, or of as many as a rank has, where a sample's has less than 64 KiB. Where even
            those would have less, as of odd blocks, one is as large as a block, and ranks write in turn.

    Raises:
        InputError: such an array can't be made; on the other ranks a ValueError with its words.
    """
    of, fault = Asked(os.fspath(path), name, "r+", fill=False), None
    shape, kind, extents = (), "", ()
    try:
        which = format_of(of.path, None)
        if which not in MAKERS:
            raise InputError(f"{of.path}: {which} is not made here", hint=f"a file of {', '.join(MAKERS)}")
        if name is None and which == "hdf5":
            of = replace(of, name=value)
        shape = tuple(net.NET.extents(value, batch or net.NET.batch))
        regions: list[Where] = net.NET.regions(value, mesh, batch=batch)
        own = str(net.Network._made.get(value, net.NET.dtype)).removeprefix("torch.")  # as int64, of classes
        kind = dtype or ("float32" if own == "bfloat16" else own)
        extents = tuple(chunks) if chunks else fitting(regions, shape, np.dtype(kind).itemsize)
        shape = (samples or shape[0], *shape[1:])
        if len(extents) != len(shape):
            raise InputError(f"{of.path}: chunks={extents}, of an array of shape {shape}", hint="an extent a dimension")
        if net.NET.place(mesh).me == 0:
            MAKERS[which](of, shape, kind, extents)
    except Exception as error:
        fault = error if isinstance(error, InputError) else InputError(f"{of.path}: {type(error).__name__}: {error}")
    net.NET.agree(f"making a file of {value}", mesh, {"shape": shape, "type": kind, "chunks": extents}, fault)
    return open(of.path, of.name, "r+")


def fitting(regions: Sequence[Where], shape: Sequence[int], element_bytes: int) -> Chunk:
    """Extents of chunks for blocks of these regions of a batch: see `create`."""
    samples, *found = serving(regions, shape)
    samples = gcd(samples, shape[0])  # the next batch begins behind this one
    block = [max(s.stop - s.start for s in along) for along in list(zip(*regions, strict=True))[1:]]
    if prod(found) < prod(block) and samples * prod(found) * element_bytes < LEAST_BYTES:
        found = block
    found = [samples if prod(found) * element_bytes < LEAST_BYTES else 1, *found]
    inside = borders(regions, shape)
    while prod(found) * element_bytes > MOST_BYTES:
        d = max(range(len(found)), key=found.__getitem__)
        n = found[d]
        found[d] = n // next(k for k in range(2, n + 1) if n % k == 0) if inside[d] else -(-n // 2)
    return tuple(found)


def _npy(of: Asked, shape: Chunk, kind: str, chunks: Chunk) -> None:
    of.alone(None)
    Path(of.path).touch(exist_ok=False)
    np.lib.format.open_memmap(of.path, "w+", dtype=kind, shape=shape).flush()


def _zarr(of: Asked, shape: Chunk, kind: str, chunks: Chunk) -> None:
    zarr = of.library("zarr")
    store = zarr.open_group(of.path, mode="a").store_path if of.name is not None else of.path
    zarr.create_array(store, name=of.name, shape=shape, dtype=kind, chunks=chunks, overwrite=False)


def _hdf5(of: Asked, shape: Chunk, kind: str, chunks: Chunk) -> None:
    with of.library("h5py").File(of.path, "a") as file:
        file.create_dataset(of.name, shape, kind, chunks=tuple(map(min, chunks, shape)))


MAKERS: dict[str, Callable[[Asked, Chunk, str, Chunk], None]] = {"npy": _npy, "zarr": _zarr, "hdf5": _hdf5}
