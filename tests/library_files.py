"""Files of arrays as the libraries write them that `convgen.data.open` reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import h5py
import netCDF4
import nibabel
import numpy as np
import tifffile
import torch
import zarr
from safetensors.torch import save_file

Array = np.ndarray[Any, Any]
Written = tuple[Path, str | None]  # the file, and the array's name


def random_chunks(draw: Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 + int(draw.random() * n) for n in shape)  # draws as often for any shape


def npy(folder: Path, x: Array, draw: Random) -> Written:
    order: Any = draw.choice("CF")
    np.save(folder / "x.npy", np.asarray(x, x.dtype.newbyteorder(draw.choice("<>")), order=order))
    return folder / "x.npy", None


def pt(folder: Path, x: Array, draw: Random) -> Written:
    named, t = draw.random() < 0.5, torch.from_numpy(x)
    torch.save({"image": t, "other": torch.zeros(3), "epoch": 4} if named else t, folder / "x.pt")
    return folder / "x.pt", "image" if named else None


def safetensors(folder: Path, x: Array, draw: Random) -> Written:
    save_file({"image": torch.from_numpy(x), "other": torch.zeros(3)}, folder / "x.safetensors")
    return folder / "x.safetensors", "image"


def hdf5(folder: Path, x: Array, draw: Random) -> Written:
    how: Any = draw.choice((
        {}, {"chunks": random_chunks(draw, x.shape)},
        {"chunks": random_chunks(draw, x.shape), "compression": "gzip", "shuffle": True},
    ))  # fmt: skip
    name = draw.choice(("image", "samples/of/image"))
    with h5py.File(folder / "x.h5", "w", libver=draw.choice(("earliest", "latest"))) as file:
        file.create_dataset(name, data=x, **how)
    return folder / "x.h5", draw.choice((name, None))


def zarr_folder(folder: Path, x: Array, draw: Random) -> Written:
    chunks, version, named = random_chunks(draw, x.shape), draw.choice((2, 3)), draw.random() < 0.5
    shards = tuple(n * draw.randint(1, 2) for n in chunks) if version == 3 and draw.random() < 0.4 else None
    path = folder / "x.zarr"
    store: Any = zarr.open_group(path, mode="w", zarr_format=version) if named else path
    name = draw.choice(("image", "samples/image")) if named else None
    made = zarr.create_array(
        store.store_path if named else store,
        name=name, shape=x.shape, dtype=x.dtype, chunks=chunks, shards=shards, zarr_format=version,
        compressors=draw.choice(("auto", None)), config={"write_empty_chunks": True},
    )  # fmt: skip
    made[...] = x
    return path, name


def zarr_zip(folder: Path, x: Array, draw: Random) -> Written:
    with zarr.storage.ZipStore(folder / "x.zarr.zip", mode="w") as store:
        zarr.create_array(store, data=x, chunks=random_chunks(draw, x.shape))
    return folder / "x.zarr.zip", None


def netcdf(folder: Path, x: Array, draw: Random, kind: str = "NETCDF4") -> Written:
    names, how = tuple("abcd"[: x.ndim]), dict[str, Any]()
    if kind == "NETCDF4" and draw.random() < 0.5:
        how = {"chunksizes": random_chunks(draw, x.shape), "zlib": draw.random() < 0.5}
    with netCDF4.Dataset(folder / "x.nc", "w", format=kind) as file:
        for name, n in zip(names, x.shape, strict=True):
            file.createDimension(name, n)
            file.createVariable(name, "i4", (name,))[:] = range(n)  # coordinates, as is usual
        group = file.createGroup("samples") if kind == "NETCDF4" and draw.random() < 0.5 else file
        group.createVariable("image", x.dtype, names, **how)[...] = x
        return folder / "x.nc", "image" if group is file else "samples/image"


def netcdf_classic(folder: Path, x: Array, draw: Random) -> Written:
    return netcdf(folder, x, draw, draw.choice(("NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET")))


def nifti(folder: Path, x: Array, draw: Random) -> Written:
    path = folder / draw.choice(("x.nii", "x.nii.gz"))
    nibabel.save(nibabel.Nifti1Image(x, np.eye(4)), path)
    return path, None


def tiff(folder: Path, x: Array, draw: Random) -> Written:
    how: Any = draw.choice(({}, {"tile": (16, 16)}, {"compression": "zlib"}, {"rowsperstrip": 2}))
    tifffile.imwrite(folder / "x.ome.tif", x, photometric="minisblack", metadata=None, **how)
    return folder / "x.ome.tif", None


WRITERS: dict[str, Callable[[Path, Array, Random], Written]] = {
    one.__name__: one
    for one in (npy, pt, safetensors, hdf5, zarr_folder, zarr_zip, netcdf, netcdf_classic, nifti, tiff)
}  # fmt: skip
